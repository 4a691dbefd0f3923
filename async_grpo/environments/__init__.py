"""Rollouts of several turns, in which the policy plays with an environment. `docs/environments.md` is the user's guide.

Terms used in all files of this folder:

    environment   what the policy plays with: a class with `reset` and `step` (a game), a list of functions (tools), an
                  `async def` that asks the policy itself (a program), or an agent
    trajectory    one rollout from beginning to end. The trajectories of a group begin with the same prompt
    turn          one request to the engine within a trajectory: the tokens that the engine reads, and those it samples
    sequence      tokens of several turns, each of which continues the text before it. While the history only grows, a
                  trajectory is one sequence. A turn whose history was rewritten begins another sequence
    agent         a program of any kind that plays by sending HTTP requests in the form of OpenAI's API
    endpoint      the run's HTTP server for agents. Each open trajectory has its own key
    foreign text  text that comes neither from the policy nor from the user's data, such as a tool's output

The files, in the order in which a turn passes through them:

    played.py              runs one rollout program for each trajectory, and enforces its time limit
    programs.py, agents.py the rollout programs for environments, for tools and for agents
    trajectory_client.py   receives the program's request for a turn, checks the limits and asks an engine
    chat.py                renders messages with the chat template and tokenizes the text
    control_tokens.py      ensures that control tokens spelled in foreign text stay plain text
    trajectory.py          records what the engine read and sampled, token by token (in the sequences of sequence.py)
    openai_server/         receives the turns of agents, in the form of OpenAI's API
    processes.py, host.py  the parent's and the child's side of a process that runs environments or tools
    abandoned.py           finds the turns that an agent threw away
    joined.py              joins the recorded sequences to the completion that is trained on
    make.py, adapters.py   find what `--environment` names (its options: constructor.py)
"""
