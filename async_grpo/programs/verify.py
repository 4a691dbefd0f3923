"""`async-grpo verify`: rewards on a file of completions, in the processes and the pool of a real run, without Ray."""

import ast
import asyncio
import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from async_grpo.data import registry_file
from async_grpo.errors import ConfigurationError, RunFailed
from async_grpo.options.fields import option, parse_assignments, required
from async_grpo.programs.verify_report import print_report
from async_grpo.rewards.adapter.registry_source import RewardRegistrySource
from async_grpo.rewards.bench.adapter_check import check_adapter
from async_grpo.rewards.bench.completions import CompletionRow, FileSummary, check_file, read_rows
from async_grpo.rewards.bench.score_rows import score_rows
from async_grpo.rewards.bench.scorecard import Report
from async_grpo.rewards.judges.remote_judge import JudgeAddresses
from async_grpo.rewards.local_workers import LocalWorkers
from async_grpo.rewards.pool import VerifierPool
from async_grpo.types import AdapterResult, Verdict

WIDTH = 100  # of what is no terminal


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """On which file, how often and how long rewards are tried."""

    file: str = required(
        "JSONL, one completion per line: `completion`, as a rule `answer`, and any column that the rewards read; "
        "optionally `input`, `label` (true, false or the right reward), `group_id` (rows that share it are one group; "
        "default: those of one `input`), `completion_token_ids`.",
        "Bench",
        argument=True,
    )
    reward_fns: str = required(
        "Comma list of rewards: names of the registry file, or FILE.py:NAME for one of another file.", "Bench"
    )
    reward_registry: str | None = option(
        None, "The registry file of rewards (default: reward_registry.py here).", "Bench"
    )
    reward_options: str = option(
        "", "Keyword options for the rewards that name them: weight=0.2,...", "Bench"
    )
    reward_env: str = option(
        "", "Comma list of environment variables that the rewards' processes get as well.", "Bench"
    )
    judge_urls: str = option(
        "", "Where the judges without an url of their own are asked: URL,URL,...", "Bench"
    )
    http_scorer_urls: str = option("", "The same for http_scorer.", "Bench")
    workers: int = option(2, "Processes for each reward.", "Bench")
    timeout_s: float = option(30.0, "Longest scoring of one row.", "Bench")
    repeat: int = option(
        1, "Score each row so many times; with 2 or more, say whether a reward is deterministic.", "Bench"
    )
    threshold: float = option(0.5, "A reward from here on says right, where opinions are compared.", "Bench")
    output: str | None = option(
        None, "Also write a JSON line per row, with every result, to this file.", "Bench"
    )

    check: bool = option(
        False, "Also try each reward on poor completions, again, and in other processes.", "Bench"
    )

    def __post_init__(self) -> None:
        for name in ("workers", "timeout_s", "repeat"):
            if not getattr(self, name) > 0:
                dashed = name.replace("_", "-")
                raise ConfigurationError(f"--{dashed} must be above 0, not {getattr(self, name)}")
        both = (self.output or "", self.file)
        if all(map(os.path.exists, both)) and os.path.samefile(*both):
            raise ConfigurationError(
                f"--output {self.output} is the file of completions itself: name another one"
            )


def verify(config: VerifyConfig, console: Console | None = None) -> Report:
    """Score the file and tell what came out.

    Raises:
        ConfigurationError: a row, a reward or a setting is wrong; nothing was scored.
        RunFailed: a reward failed or timed out on some row, or did not pass its check; the report has been printed.
    """
    console = console or Console(
        width=None if sys.stdout.isatty() else WIDTH, markup=False, highlight=False, emoji=False
    )
    registry = registry_file(config.reward_registry)
    options = parse_assignments(config.reward_options, "reward-options")
    addresses = JudgeAddresses.of(config.judge_urls, config.http_scorer_urls)
    workers = LocalWorkers.from_registry(config.reward_fns, registry, options, config.reward_env, addresses)
    summary = check_file(config.file)
    for path, modules in modules_beside(registry, workers.source).items():
        console.print(
            f"note: {path} imports {', '.join(modules)} from its own folder. The other nodes of a run get the text "
            f"of this file alone: install what it imports as a package there, or move it into the file",
            soft_wrap=True,
        )
    right_rows = RightRows(config.threshold)
    try:
        report = asyncio.run(_score(config, workers, summary, right_rows))
    except OSError as error:
        raise RunFailed(f"the rewards could not be tried to the end: {error}") from error
    print_report(console, report, summary, config.repeat)
    broken = [
        f"{name} failed or timed out {card.num_unscored} times"
        for name, card in report.scorecards.items()
        if card.num_unscored
    ]
    if config.check:
        for name in workers.adapters:
            problems = _check(
                console, workers.source, name, right_rows.by_adapter[name], options, workers.environment
            )
            broken += [f"{name} did not pass its check"] if problems else []
    if broken:
        raise RunFailed("; ".join(broken))
    return report


def modules_beside(registry: Path, source: RewardRegistrySource) -> dict[str, list[str]]:
    """By file, the modules that it imports, wherever in its text, and that lie in its own folder."""
    found = {}
    for path, text in {str(registry): source.text, **{file.path: file.text for file in source.files}}.items():
        try:
            nodes = list(ast.walk(ast.parse(text)))
        except (SyntaxError, ValueError):  # the process that imports the file will say so
            continue
        imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
        names = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names - {"async_grpo"}
        places = {name: Path(path).parent / name for name in names}
        beside = [
            name for name, place in places.items() if place.is_dir() or place.with_suffix(".py").is_file()
        ]
        if beside:
            found[path] = sorted(beside)
    return found


class RightRows:
    """For each reward, the first rows that it calls right, and no label calls wrong."""

    def __init__(self, threshold: float, most: int = 2) -> None:
        self.by_adapter: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        self._threshold, self._most = threshold, most

    def add(self, row: CompletionRow, verdict: Verdict) -> None:
        if row.label is not None and row.label < self._threshold:
            return
        for result in verdict.results:
            right = result.reward is not None and result.reward >= self._threshold
            if right and len(self.by_adapter[result.adapter]) < self._most:
                self.by_adapter[result.adapter].append(row.sample)


async def _score(
    config: VerifyConfig, workers: LocalWorkers, summary: FileSummary, right_rows: RightRows
) -> Report:
    adapters = workers.adapters
    pool = VerifierPool(adapters, workers.make, workers=config.workers, timeout_s=config.timeout_s)
    report = Report(adapters, config.threshold, with_label=summary.with_label > 0)
    with ExitStack() as stack:
        output = stack.enter_context(_opened(config.output)) if config.output else None
        progress = stack.enter_context(_progress())
        bar = progress.add_task("scoring", total=summary.rows)

        def on_row(row: CompletionRow, verdicts: Sequence[Verdict]) -> None:
            progress.advance(bar)
            right_rows.add(row, verdicts[0])
            if output is not None:
                output.write(json.dumps(_line(row, verdicts)) + "\n")

        try:
            await pool.start()
            sizes = summary.group_sizes if workers.look_at_groups else None
            rows = read_rows(config.file)
            await score_rows(pool, rows, report, repeat=config.repeat, group_sizes=sizes, on_row=on_row)
        finally:
            await pool.close()
    return report


def _check(
    console: Console,
    source: RewardRegistrySource,
    adapter: str,
    samples: Sequence[dict[str, Any]],
    options: dict[str, Any],
    environment: dict[str, str],
) -> list[str]:
    """Print and return what is wrong with the reward, whatever it is given."""
    try:
        problems = (
            check_adapter(source, adapter, samples, options, environment=environment) if samples else []
        )
        said = "passed" if samples else "skipped, it calls no row right"
    except ConfigurationError as error:
        problems, said = [], f"skipped: {error}"
    console.print(f"\ncheck of {adapter}: {'' if problems else said}", soft_wrap=True)
    for problem in problems:
        console.print(f"  {' '.join(repr(problem)[1:-1].split())}", soft_wrap=True)
    return problems


def _line(row: CompletionRow, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """`results`: for each reward, what it said in each run; status and reward: the first run's."""
    results: dict[str, list[dict[str, Any]]] = {}
    for verdict in verdicts:
        for result in verdict.results:
            results.setdefault(result.adapter, []).append(_result(result))
    first = verdicts[0]
    line = {"line": row.line, "status": first.status.value, "reward": first.reward, "label": row.label}
    return line | {"results": results, "completion": row.sample["completion"]}


def _result(result: AdapterResult) -> dict[str, Any]:
    said = {name: getattr(result, name) for name in ("reward", "extra", "steps", "reason", "attempts")}
    return {"status": result.status.value, **said, "seconds": round(result.latency_s - result.queue_s, 6)}


def _opened(path: str) -> IO[str]:
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"--output {path} cannot be written: {error}") from error


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
