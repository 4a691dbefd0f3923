"""The registry file of rewards: this is the file to edit.

Every worker of a run imports the run's own copy of it, so it may import any installed package but no file
beside it. Choose with `--reward_fns mathd,sympy`; with several, the best reward wins, unless the run says otherwise.

A reward of your own takes ten lines, here or in a copy of this file:

    class RewardType(str, Enum):
        SHORT = "short"

    def short(sample: dict, max_tokens: int = 100) -> dict:
        num_tokens = len(sample["completion_token_ids"])
        return {"reward": float(num_tokens <= max_tokens), "num_tokens": num_tokens}

    REWARD_ADAPTERS = {RewardType.SHORT: short}

`sample` holds every column of the data row, and `completion`, `sample_text` (input + completion),
`completion_token_ids`, `truncated` and `group_id`. Return `reward` and any further numbers, which are logged.
Raise when a sample cannot be scored: it is then left out of training, while a reward of 0 says that the
completion is bad. Return {"abstain": "why"} to leave the judgement to the other rewards. Options arrive as
the keywords that you name.

A process reward pays for single steps: decorate it with `@process_reward`, and return `step_rewards`
or `token_rewards` (`async_grpo.rewards.adapter.result`). One that needs the whole group takes `@post_process`, one
that takes many samples at a time `@batch`.
"""

from enum import Enum
from typing import Any

from async_grpo.rewards.adapter.decorators import (
    best_reward,
    cacheable,
    post_process,
    process_reward,
    warmed_by,
)
from async_grpo.rewards.builtin import countdown as countdown_rules
from async_grpo.rewards.builtin import environment as played
from async_grpo.rewards.builtin import mathd as mathd_rules
from async_grpo.rewards.builtin import text
from async_grpo.rewards.judges import GenerativeRM, HTTPScorer, LLMJudge, RewardModelJudge


class RewardType(str, Enum):
    """The names of the rewards, as `--reward-fns` takes them."""

    MATH_VERIFY = "math_verify"
    MATHD = "mathd"
    SYMPY = "sympy"
    COUNTDOWN = "countdown"
    COUNTDOWN_STEPS = "countdown_steps"
    FORMAT = "format"
    CODE = "code"
    REGEX = "regex"
    EXACT = "exact"
    LENGTH = "length"
    MAJORITY = "majority"
    JSON_SCHEMA = "json_schema"
    ENVIRONMENT = "environment"
    ENVIRONMENT_TURNS = "environment_turns"
    LLM_JUDGE = "llm_judge"
    GENERATIVE_RM = "generative_rm"
    REWARD_MODEL = "reward_model"
    HTTP_SCORER = "http_scorer"


@cacheable
@warmed_by({"completion": r"\boxed{1}", "answer": "1"})
def math_verify(sample: dict) -> dict:
    """Check that the answer equals `answer` for the library math-verify: the most lenient of the three."""
    from async_grpo.rewards.builtin.math_verify import score

    return score(sample)


def mathd(sample: dict) -> dict:
    r"""Check that the last \boxed{} equals `answer` after the text normalisation of the MATH data set."""
    return mathd_rules.score(sample)


@cacheable
@warmed_by({"completion": r"\boxed{2x}", "answer": "x+x"})
def sympy(sample: dict) -> dict:
    r"""Check that the last \boxed{} has the value of `answer`, by symbolic computation."""
    from async_grpo.rewards.builtin.sympy import score

    return score(sample)


@process_reward
def countdown_steps(sample: dict) -> dict:
    """`countdown` step by step: fitting numbers in the <answer> pay a little, the right answer at its end 1."""
    return countdown_rules.score_steps(sample)


@cacheable
def code(
    sample: dict,
    test_seconds: float = 4.0,
    total_seconds: float = 20.0,
    memory_mb: float = 1024,
    all_or_nothing: bool = False,
    allow_unsandboxed: bool = False,
) -> dict:
    """Return the share of the row's `tests` that the Python code passes, in a sandbox."""
    from async_grpo.rewards.builtin.code import score

    return score(
        sample,
        test_seconds=test_seconds,
        total_seconds=total_seconds,
        memory_mb=memory_mb,
        all_or_nothing=all_or_nothing,
        allow_unsandboxed=allow_unsandboxed,
    )


def regex(sample: dict, pattern: str | None = None, search: bool = False) -> dict:
    """1 if the completion matches `pattern`, of the row or the option."""
    return text.regex(sample, pattern, search)


def exact(sample: dict, strip: bool = True, case: bool = False) -> dict:
    """1 if the answer is literally `answer`, or one of the list `answers`."""
    return text.exact(sample, strip, case)


@best_reward(lambda schedule="overlong": 0.0 if schedule == "overlong" else 2.0)
def length(
    sample: dict,
    schedule: str = "overlong",
    max_tokens: int = 4096,
    cache_tokens: int = 1024,
    judge: str = "math_verify",
) -> dict:
    """By the number of tokens: DAPO's slope before `max_tokens` (with `--reward-combine sum`), or the cosine reward."""
    return text.length(sample, schedule, max_tokens, cache_tokens, judge)


@post_process(mathd_rules.post_process_scores)
def majority(sample: dict) -> dict:
    """1 if the answer is the one that most completions of the prompt give: training without answers."""
    return mathd_rules.score_vote(sample)


@warmed_by({"completion": "1", "schema": {"type": "integer"}})
def json_schema(sample: dict, schema: str | None = None) -> dict:
    """1 if the completion is JSON that fits `schema`, of the row or the option."""
    from async_grpo.rewards.builtin.json_schema import score

    return score(sample, schema)


REWARD_ADAPTERS: dict[RewardType, Any] = {
    RewardType.MATH_VERIFY: math_verify,
    RewardType.MATHD: mathd,
    RewardType.SYMPY: sympy,
    RewardType.COUNTDOWN: countdown_rules.score,  # as it is: known to be bounded in time, it needs no process
    RewardType.COUNTDOWN_STEPS: countdown_steps,
    RewardType.FORMAT: text.format,
    RewardType.CODE: code,
    RewardType.REGEX: regex,
    RewardType.EXACT: exact,
    RewardType.LENGTH: length,
    RewardType.MAJORITY: majority,
    RewardType.JSON_SCHEMA: json_schema,
    RewardType.ENVIRONMENT: played.environment,  # what an --environment gives itself
    RewardType.ENVIRONMENT_TURNS: played.environment_turns,
    # Remote judges: settings, not functions. Without a `url` they are asked where the run says: the first three by
    # --judge-urls or at the servers of --judge-model, the last one, which speaks another protocol, by --http-scorer-urls.
    RewardType.LLM_JUDGE: LLMJudge(model="judge"),
    RewardType.GENERATIVE_RM: GenerativeRM(model="judge", yes_no=True),
    RewardType.REWARD_MODEL: RewardModelJudge(model="judge"),
    RewardType.HTTP_SCORER: HTTPScorer(),
}
