"""Rollouts of several turns, in which the policy plays with an environment. `docs/environments.md` is the user's guide.

Words that mean the same thing in all files of this folder:

    environment   what the policy plays with: a class with `reset` and `step` (a game), a list of functions (tools), an
                  `async def` that asks the policy itself (a program), or an agent
    trajectory    one rollout from beginning to end; the members of a group are trajectories that begin with the same prompt
    turn          one request to the engine within a trajectory: the tokens that the engine read, then those it sampled
    sequence      tokens that stand end to end, in which each turn continues the text before it. A trajectory is one
                  sequence as long as its history only grows. A turn whose history was rewritten begins another sequence
    agent         a program of any kind that plays by HTTP requests in the form of OpenAI's API
    endpoint      the HTTP server of the run that answers agents; each open trajectory has a key of its own

How a turn passes through the files:

    played.py              runs one rollout program for each trajectory, and keeps its time limit
    programs.py, agents.py the rollout programs: of an environment, of tools, of an agent
    trajectory_client.py   takes the program's request for a turn, checks the limits and asks an engine
    chat.py                renders messages by the chat template and tokenizes the text
    control_tokens.py      keeps control tokens that foreign texts spell from becoming control tokens
    trajectory.py          records what the engine read and sampled, token by token (in the sequences of sequence.py)
    endpoint.py            receives the turns of agents (requests and answers: openai_api.py, request_body.py)
    processes.py, host.py  the two ends of a process in which environments or tools run
    make.py, adapters.py   find what `--environment` names
"""
