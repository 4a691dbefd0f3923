"""Reads and scores files of completions, and checks a reward on completions that are right.

The help of `VerifyConfig.file` lists the columns of a row. Missing columns get defaults: `input` is "". Rows with the
same `input` form a group with one `group_id`, and each row without an `input` is a separate group. Without
`completion_token_ids`, each character of the completion counts as one token.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from async_grpo.errors import ConfigurationError, WorkerLost
from async_grpo.rewards.adapter.result import is_finite_number
from async_grpo.rewards.adapter_queue import AdapterQueue
from async_grpo.rewards.pool import VerifierPool
from async_grpo.rewards.verifier_worker import MakeWorker, Timeouts
from async_grpo.types import AdapterResult, RewardStatus, Verdict

LABEL = "label"
IN_FLIGHT = 256  # maximum number of rows that are scored at the same time
CANCEL_AFTER_S = 0.002  # time after which `check_adapter` cancels a call that is in progress
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
    """A row of the file."""

    line: int  # number of the line, or of the row if the file does not consist of lines, from 1
    columns: dict[str, Any]
    label: float | None = None  # the correct reward, or None if the file has no label for the row


def read_completion_rows(
    placed_rows: Iterable[tuple[str, Any]],
    name: str,
    with_columns: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    add_input: Callable[[dict[str, Any], str], None] | None = None,
) -> list[CompletionRow]:
    """Check and return all rows of a file.

    Args:
        placed_rows: (file and line or row number as text, row) for each row of the file.
        name: The file, for messages.
        with_columns: Renames the columns of the prompt and the answer in a row, if the file uses other names for them.
        add_input: Called with each row and its place (file and line), to add a missing `input`.

    Raises:
        ConfigurationError: The file contains no rows, or has an invalid row. The message names its line.
    """
    rows = []
    groups: dict[str | int, int] = {}
    for place, columns in placed_rows:
        number = int(place.rpartition(" ")[2])
        try:
            row = _checked_row(columns, with_columns)
            if add_input is not None:
                add_input(row, place)
        except ValueError as error:
            raise ConfigurationError(f"{place}: {error}") from error
        if row.get("group_id") is None:
            # Rows with the same input form a group, and each row without an input is a group. The id is minus the
            # line number of the group's first row.
            row["group_id"] = groups.setdefault(row.get("input") or number, -number)
        label = row.pop(LABEL, None)
        rows.append(CompletionRow(number, row, None if label is None else float(label)))
    if not rows:
        raise ConfigurationError(f"{name} holds no completions")
    return rows


def sample_of(row: Mapping[str, Any], completion: str | None = None) -> dict[str, Any]:
    """Return the sample of a row, with every column that a reward may read.

    Args:
        row: The columns of the row.
        completion: A completion that replaces the row's. Each of its characters counts as a token.
    """
    text = str(row["completion"]) if completion is None else completion
    sample = {"truncated": False, "group_id": 0, "input": "", **row, "completion": text}
    if completion is not None or row.get("completion_token_ids") is None:
        sample["completion_token_ids"] = [ord(character) for character in text]
        sample["completion_char_ends"] = list(range(1, len(text) + 1))
    return sample | {"sample_text": f"{sample['input']}{text}"}


def _checked_row(row: Any, with_columns: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"a row must be an object, not {type(row).__name__}")
    row = with_columns(row)
    token_ids = row.get("completion_token_ids")
    are_token_ids = token_ids is None
    if isinstance(token_ids, list):
        are_token_ids = all(type(token) is int for token in token_ids)  # `isinstance` would also accept bools
    label = row.get(LABEL)
    for name, form, is_right in (
        ("completion", "text", isinstance(row.get("completion"), str)),
        ("input", "text", isinstance(row.get("input", ""), str)),
        ("completion_token_ids", "a list of integers", are_token_ids),
        ("group_id", "a whole number or text", isinstance(row.get("group_id"), int | str | None)),
        (LABEL, "true, false or a number", label is None or is_finite_number(label)),
    ):
        if name not in row and not is_right:
            raise ValueError(f"the row has no {name}, which must be {form}; its columns are {', '.join(row)}")
        if not is_right:
            raise ValueError(f"the column {name} must be {form}, not {row.get(name)!r:.80}")
    return row


async def score_rows(
    pool: VerifierPool,
    rows: Sequence[CompletionRow],
    on_row: Callable[[CompletionRow, Sequence[Verdict]], None],
    repeat: int,
) -> None:
    """Score every row `repeat` times in sequence, and apply the rewards' group hooks (`post_process_scores`) to groups.

    Args:
        pool: The rewards.
        rows: The rows.
        on_row: Called for each row, in order, with one verdict for each time that the row was scored.
        repeat: How often each row is scored.

    Raises:
        Exception: The first error of the pool or of `on_row`.
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
        """Return an iterator that yields the verdicts on each row of the group."""
        verdicts_by_row = await asyncio.gather(*map(verify, group))
        samples = [sample_of(row.columns) for row in group]
        final_verdicts_by_run = []
        for verdicts in zip(*verdicts_by_row, strict=True):
            final_verdicts_by_run.append(await pool.post_process(samples, verdicts))
        return zip(*final_verdicts_by_run, strict=True)

    try:
        async with asyncio.TaskGroup() as tasks:
            scorings = {name: tasks.create_task(score(group)) for name, group in groups.items()}
            for row in rows:
                verdicts_of_group = await scorings[row.columns["group_id"]]
                on_row(row, next(verdicts_of_group))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def check_adapter(
    adapter: str,
    make_worker: MakeWorker,
    rows: Sequence[Mapping[str, Any]],
    timeout_s: float = 20.0,
) -> list[str]:
    """Return the problems of a reward as sentences, or an empty list if it has none.

    The reward must score each right completion higher than the poor completions. This is not checked if the reward has a
    function `post_process_scores`, which may change the scores later. The reward must score poor completions without
    failing. It must return the same result for the same sample when it is called again, after a cancelled call, and in
    another process.

    Args:
        adapter: Name of the reward.
        make_worker: Makes a worker of the reward.
        rows: Columns of rows whose completions are right.
        timeout_s: Seconds that a call may take.
    """
    samples = [sample_of(row) for row in rows]
    timeouts = Timeouts(timeout_s, backoff_s=(0.0,))
    queue = AdapterQueue(adapter, make_worker, 1, timeouts)
    second_queue = AdapterQueue(adapter, make_worker, 1, timeouts)  # its worker is another process
    try:
        await queue.start()
        await second_queue.start()
        first_results = [await queue.score(sample) for sample in samples]
        problems = []
        for number, (sample, first_result) in enumerate(zip(samples, first_results, strict=True)):
            sample_problems = await _check_sample(queue, second_queue, sample, first_result)
            problems += [f"sample {number}: {problem}" for problem in sample_problems]
        # Check only that `post_process_scores` does not fail, because the right rewards of a group are not known here
        group_results = await queue.post_process(samples, first_results)
        for first_result, group_result in zip(first_results, group_results, strict=True):
            if group_result.status.is_lost and first_result.status is RewardStatus.OK:
                return [*problems, f"the whole group {_as_words(group_result)}"]
        return problems
    except (ConfigurationError, WorkerLost) as error:  # the reward cannot be started
        return [str(error)]
    finally:
        await asyncio.gather(queue.close(), second_queue.close())


async def _check_sample(
    queue: AdapterQueue, second_queue: AdapterQueue, sample: dict[str, Any], first_result: AdapterResult
) -> list[str]:
    """Return the problems of a reward with one right completion and with poor completions of the same question.

    Args:
        queue: Calls the reward.
        second_queue: Calls the reward in another process.
        sample: A sample whose completion is right.
        first_result: The result of the first call with that sample.
    """
    problems = []
    if first_result.status is not RewardStatus.OK:
        problems.append(f"the right completion {_as_words(first_result)}")
    for description, text in POOR_COMPLETIONS.items():
        result = await queue.score(sample_of(sample, text))
        if result.status.is_lost:
            problems.append(f"{description} {_as_words(result)}")
        elif queue.stats.has_hook or result.reward is None or first_result.reward is None:
            continue  # a reward with a group hook may distinguish right from wrong only in the hook
        elif result.reward >= first_result.reward:
            problems.append(f"{description} {_as_words(result)}, and the right one no more than that")
    if problems:
        return problems
    results = {
        "asked again": await queue.score(sample),
        "in another process": await second_queue.score(sample),
    }
    cancelled_call = asyncio.create_task(queue.score(sample_of(sample, "abandoned")))
    await asyncio.sleep(CANCEL_AFTER_S)
    cancelled_call.cancel()
    await asyncio.gather(cancelled_call, return_exceptions=True)
    results["after a cancelled call"] = await queue.score(sample)
    for circumstance, result in results.items():
        if not _are_equal(result, first_result):
            first_words = _as_words(first_result)
            problems.append(f"{circumstance}, it {_as_words(result)}, while at first it {first_words}")
    return problems


def _are_equal(result: AdapterResult, other_result: AdapterResult) -> bool:
    """Return whether two results are equal, apart from their times."""
    return (
        result.status == other_result.status
        and result.reward == other_result.reward
        and result.extra == other_result.extra
        and result.steps == other_result.steps
    )


def _as_words(result: AdapterResult) -> str:
    """Return words about a result that follow the subject of a sentence, such as "is worth 1"."""
    if result.status is RewardStatus.OK:
        parts = "".join(f", {name} {value:g}" for name, value in result.extra.items())
        return f"is worth {result.reward:g}{parts}"
    verb = "was" if result.status is RewardStatus.ABSTAINED else "has"
    return f"{verb} {result.status.value}: {result.reason}"
