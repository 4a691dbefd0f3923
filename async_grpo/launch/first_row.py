"""Compute the rewards of the first row once, before a run starts, so that a reward that always fails is refused."""

import asyncio
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from async_grpo.errors import ConfigurationError
from async_grpo.launch.drawing_plan import gray_picture
from async_grpo.launch.local_config import LocalConfig
from async_grpo.launch.reward_trial import ANSWERS
from async_grpo.rewards.adapter.decorators import accepted_by_any
from async_grpo.rewards.adapter.pictures import PICTURES_KEY
from async_grpo.rewards.adapter.registry_source import display_name, parse_names
from async_grpo.rewards.bench.completions import sample_of
from async_grpo.rewards.builtin.answers import gold_answer
from async_grpo.rewards.inline import BOUNDED
from async_grpo.rewards.pool import VerifierPool
from async_grpo.types import AdapterResult, RewardStatus

if TYPE_CHECKING:
    from async_grpo.config.preflight import Prepared

# Seconds for all rewards together. If they need longer, for example to load a model, the check refuses nothing
TRIAL_S = 6.0
# Completions with the answer in several forms. A reward may raise an exception for a completion without the form that
# it expects, which is no fault
COMPLETIONS = (*ANSWERS, "#### {}", "The answer is {}.")
# Names of errors that are more likely caused by the completion than by the row or the reward
OF_COMPLETION = ("AttributeError", "IndexError", "JSONDecodeError")
log = logging.getLogger(__name__)


def try_first_row(config: LocalConfig, prepared: "Prepared") -> None:
    """Score completions of the first row with the user's reward functions, except those that check rows themselves.

    Try nothing if the rewards run on other machines (`--ray-address`), if they need an environment, or if this thread
    already runs an event loop.

    Raises:
        ConfigurationError: A reward fails for the same reason on every completion. The message names file, line, reward
            and reason.
    """
    names = _names_to_try(config, prepared)
    if not names or config.ray_address or config.environment or _is_in_event_loop():
        return
    results = asyncio.run(_results_in_time(config, names, prepared))
    question = prepared.questions[0]
    for name in map(display_name, names):
        reasons = [result.reason for result in results if result.adapter == name]
        if not reasons:
            continue
        problem = (
            f"{question.where}: the reward {name} fails on this row, whatever the completion: {reasons[-1]}"
        )
        if len(set(reasons)) == 1 and not reasons[0].startswith(OF_COMPLETION):
            raise ConfigurationError(f"{problem}. Correct the reward or the row, or name another reward")
        log.warning("%s", problem)


def _names_to_try(config: LocalConfig, prepared: "Prepared") -> list[str]:
    """Return the names of the rewards to try, as in `--reward-fns`."""
    if prepared.rewards is None or not prepared.questions:
        return []
    names_of_row = config.combination.chosen(prepared.questions[0].row)
    names = []
    for name in parse_names(config.reward_fns):
        shown_name = display_name(name)
        adapter = prepared.rewards.adapters[shown_name]
        is_checked = hasattr(adapter, "check_row") or adapter in BOUNDED
        # Do not try these: a reward with a fallback may fail, and a call of a judge costs money
        may_fail = shown_name in config.fallbacks or shown_name in prepared.rewards.judges
        if shown_name in names_of_row and not is_checked and not may_fail:
            names.append(name)
    return names


def _is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def _results_in_time(
    config: LocalConfig, names: list[str], prepared: "Prepared"
) -> list[AdapterResult]:
    """Return the results of the rewards that failed on all completions, or [] if that takes longer than `TRIAL_S`."""
    try:
        async with asyncio.timeout(TRIAL_S):
            return await _failures(config, names, prepared)
    except TimeoutError:
        log.info("the first row was not scored within %.0f s, so its rewards are not known to work", TRIAL_S)
        return []


async def _failures(config: LocalConfig, names: list[str], prepared: "Prepared") -> list[AdapterResult]:
    """Score completions of the row until every reward has scored one. Return the results of rewards that scored none."""
    assert prepared.rewards is not None
    failures: list[AdapterResult] = []
    failing = set(map(display_name, names))
    adapters = {name: prepared.rewards.adapters[name] for name in failing}
    options = accepted_by_any(adapters, config.options_by_name)
    async with VerifierPool.from_registry(
        names,
        config.reward_registry,
        timeout_s=min(config.reward_timeout_s, TRIAL_S),
        reward_options=options,
        reward_env=config.reward_env,
    ) as pool:
        for sample in _samples_of(config, prepared.questions[0].row):
            verdict = await pool.verify(sample)
            for result in verdict.results:
                if result.status is not RewardStatus.FAILED:
                    failing.discard(result.adapter)
            failures += verdict.results
            if not failing:
                break
    return [result for result in failures if result.adapter in failing]


def _samples_of(config: LocalConfig, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield samples of the row with different completions.

    If the policy draws, there is one: a gray picture. Otherwise they are an empty text, and the answer in several
    forms.
    """
    if config.draws:
        yield sample_of(row, "") | {PICTURES_KEY: [gray_picture(config)]}
        return
    yield sample_of(row, "")
    try:
        answer = gold_answer(row)
    except ValueError:
        answer = "1"
    for form in COMPLETIONS:
        yield sample_of(row, form.format(answer))
