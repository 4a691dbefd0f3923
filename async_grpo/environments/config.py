"""Options of the environment that plays with the policy, and limits of a trajectory."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from async_grpo.experience.prompt_options import PromptOptions
from async_grpo.options.fields import NOT_NEGATIVE, POSITIVE, TABLE, option, parse_assignments

ROWS = "environment"  # value of --data-path that makes the environment provide the rows

# Values of --typed-output
ENFORCE = "enforce"
HINT = "hint"

# Values of --abandoned-turns
DROP = "drop"
TRAIN = "train"

_environment = partial(option, panel="Environment")


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig(PromptOptions):
    """Options of the environment that plays with the policy. Without an environment, a rollout is one completion.

    They include the options of the chat template, because the endpoint and environments render messages, too.
    """

    environment: str | None = _environment(
        None,
        "Environment in which the policy acts: guess; countdown_tools; FILE.py:NAME of an Environment, of tools, or "
        "of a program; agent:COMMAND; endpoint (for agents started elsewhere); "
        "{reasoning_gym,textarena,openenv,verifiers}:NAME. By default a rollout is one completion.",
        everyday=True,
        portable="async_grpo.environments.make:ENVIRONMENTS",
    )
    environment_options: str = _environment(
        "",
        "Keyword arguments of the environment, such as low=1,high=32.",
        portable=True,
        form=TABLE,
    )
    environment_processes: int | None = _environment(
        None,
        "Number of processes that run environments, each for many trajectories (default: 4). With agents, the number "
        "of agents that run at the same time (default: 64).",
        range=POSITIVE,
    )
    environment_timeout_s: float = _environment(
        30.0,
        "Maximum seconds for one step of an environment or one call of a tool. After that, the process that runs it is "
        "ended.",
        range=POSITIVE,
        portable=True,
    )
    max_turns: int = _environment(
        16, "Maximum number of the policy's turns in a trajectory.", range=POSITIVE, portable=True
    )
    max_turn_tokens: int | None = _environment(
        None,
        "Maximum tokens of one turn of the policy. By default what is left of --max-generation-tokens, which limits "
        "all tokens of a sequence after its prompt, including the environment's.",
        range=POSITIVE,
        portable=True,
    )
    max_tool_tokens: int | None = _environment(
        None,
        "Maximum number of tokens of a tool's answer. A longer answer is cut, and a note at its end says so. By default, "
        "answers are cut after 65,536 characters.",
        range=POSITIVE,
        portable=True,
    )
    tool_parser: str | None = _environment(
        None,
        "Parser that reads the policy's calls of tools: hermes, openai, cohere_command3, or the name of one of vLLM's tool "
        "parsers. By default, a parser is chosen that reads the calls that the chat template writes. With none, calls stay "
        "text.",
        portable=True,
    )
    reasoning_parser: str | None = _environment(
        None,
        "Name of the vLLM reasoning parser that separates the policy's thoughts from its answers to agents. By default "
        "tags such as <think> separate them. With none, thoughts stay in the text.",
        portable=True,
    )
    typed_output: str = _environment(
        ENFORCE,
        "What happens if a request requires JSON of a schema, or calls of tools: enforce lets the engine sample only "
        "tokens that fit; hint states the requirement in the prompt, and the policy samples freely.",
        choices=(ENFORCE, HINT),
        portable=True,
    )
    abandoned_turns: str = _environment(
        DROP,
        "What happens to turns that an agent threw away, because it went on with another turn of the same history "
        "(retries, unused choices of n): drop does not train on them, train gives them the trajectory's reward.",
        choices=(DROP, TRAIN),
        portable=True,
    )
    endpoint_host: str = _environment(
        "127.0.0.1", "Address of the endpoint to which agents send their requests."
    )
    endpoint_port: int = _environment(0, "Port of the endpoint. 0 chooses a free port.", range=NOT_NEGATIVE)
    max_trajectory_s: float = _environment(
        600.0,
        "Maximum seconds of a trajectory. After that, the trajectory ends and counts as truncated.",
        range=POSITIVE,
        portable=True,
    )

    split_control_tokens: bool = _environment(
        True,
        "Treat control tokens such as <|im_end|> in messages of environments, tools and agents as plain text. Without "
        "this option, a message can forge a turn of the policy.",
    )

    @property
    def environment_settings(self) -> dict[str, Any]:
        """Return `environment_options` as keyword arguments."""
        return parse_assignments(self.environment_options, "environment-options")


@dataclass(frozen=True)
class TrajectoryLimits:
    """Limits of one trajectory, and of each of its sequences."""

    turns: int
    tokens: int  # maximum tokens of one sequence, including its prompt
    turn_tokens: int | None  # maximum tokens sampled in one turn; None if only the other limits apply
    seconds: float
    vocabulary: int = 1 << 31  # number of token ids that the model knows
    new_tokens: int = 1 << 31  # maximum tokens of one sequence after its prompt
    drops_abandoned: bool = False  # whether turns that the agent threw away are not trained on
