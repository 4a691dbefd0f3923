"""What every reward must keep to, tried out on samples with right completions, in processes as a run uses them."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from async_grpo.errors import ConfigurationError, WorkerLost
from async_grpo.rewards.adapter_queue import AdapterQueue
from async_grpo.rewards.bench.completions import sample_of
from async_grpo.rewards.isolation.adapter_process import AdapterProcess
from async_grpo.rewards.verifier_worker import Timeouts
from async_grpo.types import AdapterResult, RewardStatus

POOR_COMPLETIONS = {
    "an empty completion": "",
    "a completion of blanks": " \n\t\r\n ",
    "an end token alone": "<|im_end|>",
    "a thought without an end": "<think> so " * 50,
    "tags in disorder": "</answer></think><answer><answer></think>",
    "an answer without an end": "</think>\n<answer>((((",
    "a box without an end": r"The answer is \boxed{\frac{1}{\sqrt{",
    "an empty box": r"\boxed{}",
    "boxes in boxes": r"\boxed{" * 200 + "}" * 200,
    "a tower of powers": r"\boxed{9^{9^{9^{9^{9}}}}}",
    "a number without end": r"\boxed{" + "9" * 5_000 + "}",
    "brackets without end": "(" * 10_000,
    "characters that are none": "\x00\ud800\ufffe\u202e",
    "letters of many kinds": "ß漢字🙂é\u0301 ١٢٣ ½ ²",
    "code": '```python\nimport os; os._exit(1)\n```\n{"reward": 1.0}',
    "babble": "aha " * 20_000,
}
_UNSCORED = (RewardStatus.FAILED, RewardStatus.TIMED_OUT)
_COMPARED = ("status", "reward", "extra", "steps")


async def check_adapter(
    adapter: str,
    make_process: Callable[[str], Awaitable[AdapterProcess]],
    rows: Sequence[Mapping[str, Any]],
    timeout_s: float = 20.0,
) -> list[str]:
    """What is wrong with a reward, in words; empty if nothing is.

    It must score the right completion of each row higher than poor ones (unless it looks at whole groups, which may decide
    that); answer those without failing; and alike when asked again, after a cancelled call, and in another process.
    """
    samples, timeouts = [sample_of(row) for row in rows], Timeouts(timeout_s, backoff_s=(0.0,))
    one, other = (AdapterQueue(adapter, make_process, 1, timeouts) for _ in range(2))
    try:
        await one.start()
        await other.start()
        right = [await one.score(sample) for sample in samples]
        problems = []
        for number, (sample, first) in enumerate(zip(samples, right, strict=True)):
            found = await _poor(one, sample, first)
            if first.status is not RewardStatus.OK:
                found.insert(0, f"the right completion {_said(first)}")
            elif not found:
                found = await _again(one, other, sample, first)
            problems += [f"sample {number}: {problem}" for problem in found]
        # Whether its `post_process_scores` works at all: what is right there, only its author knows
        for before, now in zip(right, await one.post_process(samples, right), strict=True):
            if now.status in _UNSCORED and before.status is RewardStatus.OK:
                return [*problems, f"the whole group {_said(now)}"]
        return problems
    except (ConfigurationError, WorkerLost) as error:  # it cannot be started
        return [str(error)]
    finally:
        await asyncio.gather(one.close(), other.close())


async def _poor(worker: AdapterQueue, sample: dict[str, Any], right: AdapterResult) -> list[str]:
    problems = []
    for what, text in POOR_COMPLETIONS.items():
        poor = await worker.score(sample_of(sample, text))
        if poor.status in _UNSCORED:
            problems.append(f"{what} {_said(poor)}")
        elif worker.stats.has_hook or poor.reward is None or right.reward is None:
            continue  # with a hook, it may say who is right only once it sees the group
        elif poor.reward >= right.reward:
            problems.append(f"{what} {_said(poor)}, and the right one no more than that")
    return problems


async def _again(
    one: AdapterQueue, other: AdapterQueue, sample: dict[str, Any], first: AdapterResult
) -> list[str]:
    answers = {"asked again": await one.score(sample), "in another process": await other.score(sample)}
    abandoned = asyncio.create_task(one.score(sample_of(sample, "abandoned")))
    await asyncio.sleep(0.002)  # so that it is under way
    abandoned.cancel()
    await asyncio.gather(abandoned, return_exceptions=True)
    answers["after a cancelled call"] = await one.score(sample)
    return [
        f"{where}, it {_said(answer)}, while at first it {_said(first)}"
        for where, answer in answers.items()
        if any(getattr(answer, name) != getattr(first, name) for name in _COMPARED)
    ]


def _said(result: AdapterResult) -> str:
    if result.status is RewardStatus.OK:
        parts = "".join(f", {name} {value:g}" for name, value in result.extra.items())
        return f"is worth {result.reward:g}{parts}"
    return f"{'was' if result.status is RewardStatus.ABSTAINED else 'has'} {result.status.value}: {result.reason}"
