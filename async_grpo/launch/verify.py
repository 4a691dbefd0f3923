"""`async-grpo verify`: try rewards on a file of completions, with the verifier pool of a run, but without Ray."""

import ast
import asyncio
import errno
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from async_grpo.errors import ConfigurationError, RunFailed
from async_grpo.experience.column_paths import parse_paths
from async_grpo.experience.data_files import raw_rows
from async_grpo.experience.prompt_options import PromptOptions
from async_grpo.experience.prompts import PromptRenderer
from async_grpo.experience.row_columns import ColumnMap
from async_grpo.options.fields import (
    LIST,
    POSITIVE,
    TABLE,
    dashed,
    option,
    parse_assignments,
    refuse,
    required,
)
from async_grpo.rewards.adapter.registry_source import registry_file
from async_grpo.rewards.bench.completions import (
    LABEL,
    CompletionRow,
    check_adapter,
    read_completion_rows,
    score_rows,
)
from async_grpo.rewards.bench.kinds import kind_column
from async_grpo.rewards.bench.report import MAX_EXAMPLES, Report, Scorecard, one_line
from async_grpo.rewards.judges.remote_judge import JudgeAddresses
from async_grpo.rewards.local_workers import LocalWorkers
from async_grpo.rewards.pool import VerifierPool
from async_grpo.types import Verdict

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
TABLES_OF_TEXT = (".csv", ".tsv")
LABELS = {"": None, "true": True, "false": False}  # labels in CSV and TSV files that are not numbers
MAX_PROMPT_TOKENS = 1 << 20  # no model of this library has a longer context
FILE_WIDTH = 100  # width of the report in characters if stdout is not a terminal
_bench = partial(option, panel="Bench")


@dataclass(frozen=True, kw_only=True)
class VerifyConfig(PromptOptions):
    """Options of `async-grpo verify`."""

    file: str = required(
        "File with one completion per row, JSONL or another format that training reads: `completion`, usually `answer`, "
        "and any column that the rewards read; optionally `input`, `label` (true, false or the right reward), `group_id` "
        "(rows that share it form one group; the default is one group per `input`), `completion_token_ids`.",
        "Bench",
        argument=True,
    )
    model_name_or_path: str | None = _bench(
        None,
        "Hugging Face folder of a model. Rows without `input` then get the prompt that a run of this model makes of their "
        "`messages` or `prompt`.",
    )
    reward_fns: str = required(
        "Comma list of rewards: names of the registry file, or FILE.py:NAME of another file.",
        "Bench",
        form=LIST,
    )
    reward_registry: str | None = _bench(
        None, "File that defines the rewards. The default is reward_registry.py in the working directory."
    )
    reward_options: str = _bench(
        "",
        "Keyword options of the rewards, each passed to every reward that has it, such as weight=0.2.",
        form=TABLE,
    )
    reward_env: str = _bench(
        "",
        "Comma list of further environment variables that the processes of rewards get.",
        form=LIST,
    )
    judge_urls: str = _bench(
        "",
        "Comma list of URLs of the servers for all judges whose registry entry names no URL.",
        form=LIST,
    )
    http_scorer_urls: str = _bench(
        "",
        "Comma list of URLs of the servers that the reward http_scorer calls.",
        form=LIST,
    )
    workers: int = _bench(2, "Number of processes of each reward.", range=POSITIVE)
    timeout_s: float = _bench(30.0, "Seconds that scoring one row may take.", range=POSITIVE)
    repeat: int = _bench(
        1,
        "Number of times that each row is scored. With 2 or more, the report says whether each reward is "
        "deterministic.",
        range=POSITIVE,
    )
    threshold: float = _bench(
        0.5, "Lowest reward that counts as right when rewards are compared with labels."
    )
    by: str | None = _bench(
        None,
        "Column of the rows whose values divide the report into parts, which are shown in addition to the whole. The "
        "default is kind, if rows have such a column.",
    )
    examples: int = _bench(
        MAX_EXAMPLES,
        "Maximum number of examples that the report shows of each kind: failures, changed results, and disagreements of "
        "two rewards.",
        range=POSITIVE,
    )
    output: str | None = _bench(
        None, "File for the results, with one JSON line per row. By default only the report is printed."
    )
    prompt_column: str | None = _bench(
        None, "Column of the prompt, as for `async-grpo run`. Rewards get its text as `input`."
    )
    prompt_as: str = _bench(
        "message",
        "How a text in --prompt-column is used, as for `async-grpo run`: message or text. It matters only with "
        "--model-name-or-path.",
        choices=("message", "text"),
    )
    answer_column: str | None = _bench(
        None, "Column of the answer that rewards get as `answer`, as for `async-grpo run`."
    )
    check: bool = _bench(
        False, "Also try each reward on poor completions, and check that it scores alike in other processes."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("chat_template", "chat_template_kwargs", "system_prompt"):
            refuse(
                bool(getattr(self, name)) and self.model_name_or_path is None,
                f"--{dashed(name)}: only with --model-name-or-path are prompts rendered; give the model, too",
            )
        self._column_map  # noqa: B018  raises an error for an empty name
        if self.output is None or not os.path.exists(self.output) or not os.path.exists(self.file):
            return
        if os.path.samefile(self.output, self.file):
            raise ConfigurationError(
                f"--output {self.output} is also the file of completions: name another file"
            )

    @property
    def _column_map(self) -> ColumnMap:
        return ColumnMap(
            prompt=parse_paths(self.prompt_column, "--prompt-column"),
            answer=parse_paths(self.answer_column, "--answer-column"),
            # Without a model there is no chat template, so rewards get the text itself and not a message
            text_is_message=self.model_name_or_path is not None and self.prompt_as == "message",
        )

    def with_columns(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return a row with its prompt and its answer in the columns that rewards read.

        Raises:
            ValueError: The row has no such column, or its answer is not a finite number.
        """
        try:
            mapped_row = self._column_map.apply(row, needs_prompt=False)
        except ConfigurationError as error:
            raise ValueError(str(error)) from error
        messages = mapped_row.get("messages")
        if self.prompt_column and messages and self.model_name_or_path is None:
            # Without a model there is no chat template, so judges get only the texts of the messages
            texts = [message.get("content") for message in messages]
            mapped_row["input"] = "\n\n".join(text for text in texts if isinstance(text, str))
        return mapped_row


def verify(config: VerifyConfig) -> None:
    """Score every row of the file, and print a report.

    Raises:
        ConfigurationError: A row, a reward or an option is wrong. Nothing was scored.
        RunFailed: A reward failed or timed out on some row, or did not pass its check. The report was printed.
    """
    width = None if sys.stdout.isatty() else FILE_WIDTH
    console = Console(width=width, markup=False, highlight=False, emoji=False)
    registry = registry_file(config.reward_registry)
    options = parse_assignments(config.reward_options, "reward-options")
    addresses = JudgeAddresses(judge_urls=config.judge_urls, http_scorer_urls=config.http_scorer_urls)
    workers = LocalWorkers(config.reward_fns, registry, options, config.reward_env, addresses)
    rows = read_completion_rows(
        _placed_rows(config.file), config.file, config.with_columns, _input_renderer(config)
    )
    _note_local_imports(console, registry, workers)
    report = Report(
        workers.adapters,
        config.threshold,
        with_label=any(row.label is not None for row in rows),
        max_examples=config.examples,
        kind_column=kind_column(rows, config.by),
    )
    try:
        asyncio.run(_score(config, workers, rows, report))
    except OSError as error:
        if config.output is not None and error.errno in DISK_FULL:
            raise RunFailed(
                f"--output {config.output} cannot be written to the end ({error.strerror}): name a file on a disk with "
                "space, or leave the option out"
            ) from error
        raise RunFailed(f"the rewards could not be tried to the end: {error}") from error
    report.print(console, rows, config.repeat)
    failures = []
    for name, card in report.scorecards.items():
        if card.num_unscored:
            failures.append(f"{name} failed or timed out {card.num_unscored} times")
    if config.check:
        for name, card in report.scorecards.items():
            if not _passes_check(console, workers, name, card):
                failures.append(f"{name} did not pass its check")
    if failures:
        raise RunFailed("; ".join(failures))


def _placed_rows(path: str) -> Iterator[tuple[str, Any]]:
    """Yield (file and line as text, row) for each row of the file of completions. All formats of training data work.

    All cells of a CSV or TSV file are texts. There, convert labels to booleans or numbers, and read an empty cell as an
    empty completion.
    """
    is_table = Path(path).suffix.lower() in TABLES_OF_TEXT
    for place, row in raw_rows(Path(path)):
        if is_table:
            label = str(row.get(LABEL) or "").strip().lower()
            with suppress(ValueError):
                row[LABEL] = LABELS[label] if label in LABELS else float(label)
            row["completion"] = row.get("completion") or ""
        yield place, row


def _input_renderer(config: VerifyConfig) -> Callable[[dict[str, Any], str], None] | None:
    """Return a function that adds the prompt's text to a row without `input`, as a run would; None without a model."""
    if config.model_name_or_path is None:
        return None
    from async_grpo.modeling.load import load_tokenizer

    tokenizer = load_tokenizer(config.model_name_or_path)
    renderer = PromptRenderer(tokenizer, config)

    def add_input(row: dict[str, Any], place: str) -> None:
        has_prompt = any(row.get(name) is not None for name in ("input_token_ids", "messages", "prompt"))
        if has_prompt and not row.get("input"):
            row["input"] = tokenizer.decode(renderer.prompt_tokens(row, MAX_PROMPT_TOKENS, place))

    return add_input


def _note_local_imports(console: Console, registry: Path, workers: LocalWorkers) -> None:
    """Print a note about each reward file that imports other modules from its folder.

    Other nodes of a run get only the reward file, not these modules.
    """
    texts = {str(registry): workers.source.text} | {file.path: file.text for file in workers.source.files}
    for path, text in texts.items():
        modules = modules_beside(path, text)
        if modules:
            console.print(
                f"note: {path} imports {', '.join(modules)} from its own folder. The other nodes of a run get the text "
                f"of this file alone: install what it imports as a package there, or move it into the file",
                soft_wrap=True,
            )


def _passes_check(console: Console, workers: LocalWorkers, name: str, card: Scorecard) -> bool:
    """Check a reward on the rows that it scored as right, print the result, and return whether the reward passed."""
    right_rows = [row.columns for row in card.right_rows]
    problems: list[str] = []
    if name in workers.judges:
        result = "skipped, a judge has no process"
    elif not right_rows:
        result = "skipped, it calls no row right"
    else:
        problems = asyncio.run(check_adapter(name, workers.make, right_rows))
        result = "" if problems else "passed"
    console.print(f"\ncheck of {name}: {result}", soft_wrap=True)
    for problem in problems:
        console.print(f"  {one_line(problem)}", soft_wrap=True)
    return not problems


def modules_beside(path: str, text: str) -> list[str]:
    """Return the names of the modules that a Python file imports from its own folder.

    Args:
        path: Path of the file.
        text: Content of the file. The result is empty if the text is not valid Python.
    """
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError):  # the process that imports the file will report the error
        return []
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    names = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names - {"async_grpo"}
    return sorted(name for name in names if PathFinder.find_spec(name, [str(Path(path).parent)]))


async def _score(
    config: VerifyConfig, workers: LocalWorkers, rows: Sequence[CompletionRow], report: Report
) -> None:
    pool = VerifierPool(workers.adapters, workers.make, workers=config.workers, timeout_s=config.timeout_s)
    console = Console(stderr=True)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    with _opened(config.output or os.devnull) as output, progress:
        bar = progress.add_task("scoring", total=len(rows))

        def on_row(row: CompletionRow, verdicts: Sequence[Verdict]) -> None:
            progress.advance(bar)
            report.add(row, verdicts)
            output.write(json.dumps(_line(row, verdicts)) + "\n")

        async with pool:
            start_time = time.monotonic()
            await score_rows(pool, rows, on_row, config.repeat)
            report.seconds = time.monotonic() - start_time


def _line(row: CompletionRow, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Return a row's line of the output file.

    Args:
        row: The row.
        verdicts: A verdict for each time that the row was scored. The line's `status` and `reward` are those of the
            first.
    """
    results_by_adapter: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for verdict in verdicts:
        for result in verdict.results:
            results_by_adapter[result.adapter].append(
                {
                    "status": result.status.value,
                    "reward": result.reward,
                    "extra": result.extra,
                    "steps": result.steps,
                    "reason": result.reason,
                    "attempts": result.attempts,
                    "seconds": round(result.latency_s - result.queue_s, 6),
                }
            )
    return {
        "line": row.line,
        "status": verdicts[0].status.value,
        "reward": verdicts[0].reward,
        "label": row.label,
        "results": results_by_adapter,
        "completion": row.columns["completion"],
    }


def _opened(path: str) -> IO[str]:
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"--output {path} cannot be written: {error}") from error
