"""The registry of rewards. Edit this file, or a copy of it, to add rewards.

The processes of a run use the run's own copy of this file. So it may import any installed package, but no other file
from its folder. Choose rewards with `--reward-fns mathd,sympy`. Of several rewards, the highest counts, unless
`--reward-combine` is set.

A reward of your own takes ten lines, here or in a copy of this file:

    class RewardType(str, Enum):
        SHORT = "short"

    def short(sample: dict, max_tokens: int = 100) -> dict:
        num_tokens = len(sample["completion_token_ids"])
        return {"reward": float(num_tokens <= max_tokens), "num_tokens": num_tokens}

    REWARD_ADAPTERS = {RewardType.SHORT: short}

`sample` has every column of the data row, and `completion`, `sample_text` (input + completion),
`completion_token_ids`, `truncated` and `group_id`. Return `reward` and any other numbers, which are logged.
Raise an exception if a sample cannot be scored. It is then left out of training, whereas a reward of 0 means that the
completion is bad. Return {"abstain": "why"} to leave the judgement to the other rewards. The run's reward options are
passed as the keyword arguments that your function names.

A process reward rewards single steps of a completion. Decorate it with `@process_reward`, and return `step_rewards`
or `token_rewards` (see `async_grpo.rewards.adapter.result`). Use `@post_process` for a reward that needs the whole
group, and `@batch` for a function that scores many samples at a time.
"""

from enum import Enum
from typing import Any

from async_grpo.rewards.adapter.decorators import (
    best_reward,
    cacheable,
    post_process,
    process_reward,
    rows_checked_by,
    warmed_by,
)
from async_grpo.rewards.builtin import countdown as countdown_rules
from async_grpo.rewards.builtin import environment as played
from async_grpo.rewards.builtin import mathd as mathd_rules
from async_grpo.rewards.builtin import row_checks, text, unscored
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
    UNSCORED = "unscored"
    LLM_JUDGE = "llm_judge"
    GENERATIVE_RM = "generative_rm"
    REWARD_MODEL = "reward_model"
    HTTP_SCORER = "http_scorer"


@rows_checked_by(row_checks.check_math_verify_row)
@cacheable
@warmed_by({"completion": r"\boxed{1}", "answer": "1"})
def math_verify(sample: dict) -> dict:
    """Check with math-verify that the answer equals `answer`. This is more lenient than `mathd` and `sympy`."""
    from async_grpo.rewards.builtin.math_verify import score

    return score(sample)


@rows_checked_by(row_checks.check_mathd_row)
def mathd(sample: dict) -> dict:
    r"""Check that the last \boxed{} equals `answer` after the text normalization of the MATH data set."""
    return mathd_rules.score(sample)


@rows_checked_by(row_checks.check_sympy_row)
@cacheable
@warmed_by({"completion": r"\boxed{2x}", "answer": "x+x"})
def sympy(sample: dict) -> dict:
    r"""Check that the last \boxed{} has the value of `answer`, by symbolic computation."""
    from async_grpo.rewards.builtin.sympy import score

    return score(sample)


@rows_checked_by(row_checks.check_countdown_row)
@process_reward
def countdown_steps(sample: dict) -> dict:
    """Reward `countdown` step by step: little for each allowed number in <answer>, and 1 for a correct answer."""
    return countdown_rules.score_steps(sample)


@rows_checked_by(row_checks.check_code_row)
@cacheable
def code(
    sample: dict,
    test_seconds: float = 4.0,
    total_seconds: float = 20.0,
    memory_mb: float = 1024,
    all_or_nothing: bool = False,
    relative_tolerance: float = 0.0,
    absolute_tolerance: float = 0.0,
    allow_unsandboxed: bool = False,
) -> dict:
    """Run the Python code in a sandbox, and return the share of the row's `tests` that it passes."""
    from async_grpo.rewards.builtin.code import score

    return score(
        sample,
        test_seconds=test_seconds,
        total_seconds=total_seconds,
        memory_mb=memory_mb,
        all_or_nothing=all_or_nothing,
        relative_tolerance=relative_tolerance,
        absolute_tolerance=absolute_tolerance,
        allow_unsandboxed=allow_unsandboxed,
    )


@rows_checked_by(row_checks.check_regex_row)
def regex(sample: dict, pattern: str | None = None, search: bool = False) -> dict:
    """Return 1 if the completion matches `pattern`, which is a column of the row or an option."""
    return text.regex(sample, pattern, search)


@rows_checked_by(row_checks.check_exact_row)
def exact(sample: dict, strip: bool = True, case: bool = False) -> dict:
    """Return 1 if the answer equals the text in `answer`, or one of the texts in the list `answers`."""
    return text.exact(sample, strip, case)


@rows_checked_by(row_checks.check_length_row)
@best_reward(lambda schedule="overlong": 0.0 if schedule == "overlong" else 2.0)
def length(
    sample: dict,
    schedule: str = "overlong",
    max_tokens: int = 4096,
    cache_tokens: int = 1024,
    judge: str = "math_verify",
) -> dict:
    """Reward by length: DAPO's penalty before `max_tokens`, for `--reward-combine sum`, or the cosine reward."""
    return text.length(sample, schedule, max_tokens, cache_tokens, judge)


@rows_checked_by(row_checks.check_majority_row)
@post_process(mathd_rules.post_process_scores)
def majority(sample: dict) -> dict:
    """Return 1 if most completions of the prompt give the same answer. This allows training without known answers."""
    return mathd_rules.score_vote(sample)


@rows_checked_by(row_checks.check_json_schema_row)
@warmed_by({"completion": "1", "schema": {"type": "integer"}})
def json_schema(sample: dict, schema: str | None = None) -> dict:
    """Return 1 if the completion is JSON that fits `schema`, which is a column of the row or an option."""
    from async_grpo.rewards.builtin.json_schema import score

    return score(sample, schema)


REWARD_ADAPTERS: dict[RewardType, Any] = {
    RewardType.MATH_VERIFY: math_verify,
    RewardType.MATHD: mathd,
    RewardType.SYMPY: sympy,
    # Used directly and not wrapped, because the library then knows that its time is bounded and that it needs no
    # process
    RewardType.COUNTDOWN: countdown_rules.score,
    RewardType.COUNTDOWN_STEPS: countdown_steps,
    RewardType.FORMAT: text.format,
    RewardType.CODE: code,
    RewardType.REGEX: regex,
    RewardType.EXACT: exact,
    RewardType.LENGTH: length,
    RewardType.MAJORITY: majority,
    RewardType.JSON_SCHEMA: json_schema,
    RewardType.ENVIRONMENT: played.environment,  # the reward that the run's environment itself gives
    RewardType.ENVIRONMENT_TURNS: played.environment_turns,
    RewardType.UNSCORED: unscored.unscored,
    # Remote judges are settings and not functions. A judge without a `url` uses the servers of the run's options. The
    # first three judges use --judge-urls, or the servers of --judge-model. HTTP_SCORER has another protocol, and uses
    # --http-scorer-urls.
    RewardType.LLM_JUDGE: LLMJudge(model="judge"),
    RewardType.GENERATIVE_RM: GenerativeRM(model="judge", yes_no=True),
    RewardType.REWARD_MODEL: RewardModelJudge(model="judge"),
    RewardType.HTTP_SCORER: HTTPScorer(),
}
