"""A file of completions, on which rewards are tried: the scoring of its rows, and the check of a reward by right ones.

`VerifyConfig.file` names the columns of a row. Missing ones are made up: `input` is "", `group_id` the same for the same
`input` (without one, of no other row), and each character counts as one of the `completion_token_ids`.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_grpo.errors import ConfigurationError, WorkerLost
from async_grpo.processes.untrusted_files import MAX_ROW_BYTES, bounded_lines, open_regular, parse_json
from async_grpo.rewards.adapter.result import is_finite_number
from async_grpo.rewards.adapter_queue import AdapterQueue
from async_grpo.rewards.pool import VerifierPool
from async_grpo.rewards.verifier_worker import MakeWorker, Timeouts
from async_grpo.types import AdapterResult, RewardStatus, Verdict

LABEL = "label"
IN_FLIGHT = 256  # rows
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


@dataclass(frozen=True)
class CompletionRow:
    """A line of the file. `label`: the reward that is right, None if the file has none."""

    line: int
    columns: dict[str, Any]
    label: float | None = None


def read_completion_rows(path: str | Path) -> list[CompletionRow]:
    """All rows of the file. Raises ConfigurationError: it cannot be read or holds no rows, or a bad one at a named line."""
    rows, number, groups = [], 0, dict[str | int, int]()
    try:
        with open_regular(Path(path), follow_links=True) as file:
            for number, line in enumerate(bounded_lines(file, MAX_ROW_BYTES), start=1):
                if line is None:
                    raise ValueError(f"longer than {MAX_ROW_BYTES >> 20} MB, the most that is read of a row")
                if line.strip():
                    row = _row(line)
                    if row.get("group_id") is None:  # without a prompt, a number that no other row has
                        row["group_id"] = groups.setdefault(row.get("input") or number, -number)
                    label = row.pop(LABEL, None)
                    rows.append(CompletionRow(number, row, None if label is None else float(label)))
    except OSError as error:
        raise ConfigurationError(f"cannot read the completions {str(path)!r}: {error}") from error
    except ValueError as error:
        raise ConfigurationError(f"{path}, line {number}: {error}") from error
    if not rows:
        raise ConfigurationError(f"{path} holds no completions")
    return rows


def sample_of(row: Mapping[str, Any], completion: str | None = None) -> dict[str, Any]:
    """Return a full sample of a row, with another completion if one is given; each character counts as a token."""
    text = str(row["completion"]) if completion is None else completion
    sample = {"truncated": False, "group_id": 0, "input": "", **row, "completion": text}
    if completion is not None or row.get("completion_token_ids") is None:
        sample["completion_token_ids"] = [ord(character) for character in text]
        sample["completion_char_ends"] = list(range(1, len(text) + 1))
    return sample | {"sample_text": f"{sample['input']}{text}"}


def _row(line: bytes) -> dict[str, Any]:
    try:
        row = parse_json(line)
    except ValueError as error:  # not UTF-8, not JSON, or brackets without end
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"a row must be an object, not {type(row).__name__}")
    tokens, label = row.get("completion_token_ids"), row.get(LABEL)
    are_tokens = tokens is None or (isinstance(tokens, list) and all(type(token) is int for token in tokens))
    for name, wanted, is_right in (
        ("completion", "text", isinstance(row.get("completion"), str)),
        ("input", "text", isinstance(row.get("input", ""), str)),
        ("completion_token_ids", "a list of integers", are_tokens),
        ("group_id", "a whole number or text", isinstance(row.get("group_id"), int | str | None)),
        (LABEL, "true, false or a number", label is None or is_finite_number(label)),
    ):
        if not is_right:
            raise ValueError(f"the column {name} must be {wanted}, not {row.get(name)!r:.80}")
    return row


async def score_rows(
    pool: VerifierPool,
    rows: Sequence[CompletionRow],
    on_row: Callable[[CompletionRow, Sequence[Verdict]], None],
    repeat: int,
) -> None:
    """Score every row `repeat` times, one run after the other, and let the rewards look at whole groups.

    `on_row` is called in the order of the rows, with the verdicts of all runs.
    Raises Exception: what the pool or `on_row` raised first.
    """
    slots = asyncio.Semaphore(IN_FLIGHT)
    groups: defaultdict[int | str, list[CompletionRow]] = defaultdict(list)
    for row in rows:
        groups[row.columns["group_id"]].append(row)

    async def verify(row: CompletionRow) -> list[Verdict]:
        async with slots:
            sample = sample_of(row.columns)
            return [await pool.verify(sample) for _ in range(repeat)]

    async def score(group: Sequence[CompletionRow]) -> Iterator[Sequence[Verdict]]:
        runs = zip(*await asyncio.gather(*map(verify, group)), strict=True)
        samples = [sample_of(row.columns) for row in group]
        return zip(*[await pool.post_process(samples, run) for run in runs], strict=True)

    try:
        async with asyncio.TaskGroup() as tasks:
            scored = {name: tasks.create_task(score(group)) for name, group in groups.items()}
            for row in rows:
                on_row(row, next(await scored[row.columns["group_id"]]))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def check_adapter(
    adapter: str,
    make_worker: MakeWorker,
    rows: Sequence[Mapping[str, Any]],
    timeout_s: float = 20.0,
) -> list[str]:
    """Return what is wrong with a reward, in words; empty if nothing is.

    It must score the right completion of each row higher than poor ones (unless it looks at whole groups, which may decide
    that); answer those without failing; and alike when asked again, after a cancelled call, and in another process.
    """
    samples, timeouts = [sample_of(row) for row in rows], Timeouts(timeout_s, backoff_s=(0.0,))
    one, other = (AdapterQueue(adapter, make_worker, 1, timeouts) for _ in range(2))
    try:
        await one.start()
        await other.start()
        right = [await one.score(sample) for sample in samples]
        problems = []
        for number, (sample, first) in enumerate(zip(samples, right, strict=True)):
            found = await _check_sample(one, other, sample, first)
            problems += [f"sample {number}: {problem}" for problem in found]
        # Whether its `post_process_scores` works at all: what is right there, only its author knows
        for before, now in zip(right, await one.post_process(samples, right), strict=True):
            if now.status.is_lost and before.status is RewardStatus.OK:
                return [*problems, f"the whole group {_said(now)}"]
        return problems
    except (ConfigurationError, WorkerLost) as error:  # it cannot be started
        return [str(error)]
    finally:
        await asyncio.gather(one.close(), other.close())


async def _check_sample(
    one: AdapterQueue, other: AdapterQueue, sample: dict[str, Any], first: AdapterResult
) -> list[str]:
    problems = [] if first.status is RewardStatus.OK else [f"the right completion {_said(first)}"]
    for what, text in POOR_COMPLETIONS.items():
        poor = await one.score(sample_of(sample, text))
        if poor.status.is_lost:
            problems.append(f"{what} {_said(poor)}")
        elif one.stats.has_hook or poor.reward is None or first.reward is None:
            continue  # with a hook, it may say who is right only once it sees the group
        elif poor.reward >= first.reward:
            problems.append(f"{what} {_said(poor)}, and the right one no more than that")
    if problems:
        return problems
    answers = {"asked again": await one.score(sample), "in another process": await other.score(sample)}
    abandoned = asyncio.create_task(one.score(sample_of(sample, "abandoned")))
    await asyncio.sleep(0.002)  # so that it is under way
    abandoned.cancel()
    await asyncio.gather(abandoned, return_exceptions=True)
    answers["after a cancelled call"] = await one.score(sample)
    return [
        f"{where}, it {_said(answer)}, while at first it {_said(first)}"
        for where, answer in answers.items()
        if (answer.status, answer.reward, answer.extra, answer.steps)
        != (first.status, first.reward, first.extra, first.steps)
    ]


def _said(result: AdapterResult) -> str:
    if result.status is RewardStatus.OK:
        parts = "".join(f", {name} {value:g}" for name, value in result.extra.items())
        return f"is worth {result.reward:g}{parts}"
    return f"{'was' if result.status is RewardStatus.ABSTAINED else 'has'} {result.status.value}: {result.reason}"
