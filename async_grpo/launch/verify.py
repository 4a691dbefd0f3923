"""`async-grpo verify`: rewards on a file of completions, in the processes and the pool of a real run, without Ray."""

import ast
import asyncio
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from async_grpo.errors import ConfigurationError, RunFailed
from async_grpo.options.fields import POSITIVE, Section, option, parse_assignments, required
from async_grpo.rewards.adapter.registry_source import registry_file
from async_grpo.rewards.bench.completions import (
    CompletionRow,
    check_adapter,
    read_completion_rows,
    score_rows,
)
from async_grpo.rewards.bench.report import Report, one_line
from async_grpo.rewards.judges.remote_judge import JudgeAddresses
from async_grpo.rewards.local_workers import LocalWorkers
from async_grpo.rewards.pool import VerifierPool
from async_grpo.types import Verdict

WIDTH = 100  # of what is no terminal
_bench = partial(option, panel="Bench")


@dataclass(frozen=True, kw_only=True)
class VerifyConfig(Section):
    """On which file, how often and how long rewards are tried."""

    file: str = required(
        "JSONL file with one completion per row: `completion`, usually `answer`, and any column that the rewards "
        "read; optionally `input`, `label` (true, false or the right reward), `group_id` (rows that share it form "
        "one group; the default is one group per `input`), `completion_token_ids`.",
        "Bench",
        argument=True,
    )
    reward_fns: str = required(
        "Comma list of rewards: names of the registry file, or FILE.py:NAME of another file.", "Bench"
    )
    reward_registry: str | None = _bench(
        None, "File that defines the rewards. The default is reward_registry.py in the working directory."
    )
    reward_options: str = _bench(
        "", "Keyword options of the rewards, each passed to every reward that has it, such as weight=0.2."
    )
    reward_env: str = _bench("", "Comma list of further environment variables for the processes of rewards.")
    judge_urls: str = _bench(
        "", "Comma list of URLs of replicas that serve the judges whose registry entry names no URL."
    )
    http_scorer_urls: str = _bench("", "Comma list of URLs for http_scorer.")
    workers: int = _bench(2, "Processes of each reward.", range=POSITIVE)
    timeout_s: float = _bench(30.0, "Seconds that scoring one row may take.", range=POSITIVE)
    repeat: int = _bench(
        1,
        "Number of times that each row is scored. With 2 or more, the report says whether each reward is "
        "deterministic.",
        range=POSITIVE,
    )
    threshold: float = _bench(
        0.5, "Lowest reward that counts as right where rewards and labels are compared."
    )
    output: str | None = _bench(
        None, "File that the results of every row are also written to, one JSON line per row."
    )
    check: bool = _bench(
        False, "Also try each reward on poor completions, a second time, and in other processes."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        both = (self.output or "", self.file)
        if all(map(os.path.exists, both)) and os.path.samefile(*both):
            raise ConfigurationError(f"--output {self.output} is the file of completions itself: use another")


def verify(config: VerifyConfig) -> None:
    """Score the file and tell what came out.

    ConfigurationError: a row, a reward or a setting is wrong; nothing was scored.
    RunFailed: a reward failed or timed out on some row, or did not pass its check; the report has been printed.
    """
    width = None if sys.stdout.isatty() else WIDTH
    console = Console(width=width, markup=False, highlight=False, emoji=False)
    registry = registry_file(config.reward_registry)
    options = parse_assignments(config.reward_options, "reward-options")
    addresses = JudgeAddresses(judge_urls=config.judge_urls, http_scorer_urls=config.http_scorer_urls)
    workers = LocalWorkers(config.reward_fns, registry, options, config.reward_env, addresses)
    rows = read_completion_rows(config.file)
    texts = {str(registry): workers.source.text} | {file.path: file.text for file in workers.source.files}
    for path, text in texts.items():
        if modules := modules_beside(path, text):
            console.print(
                f"note: {path} imports {', '.join(modules)} from its own folder. The other nodes of a run get the text "
                f"of this file alone: install what it imports as a package there, or move it into the file",
                soft_wrap=True,
            )
    report = Report(workers.adapters, config.threshold, any(row.label is not None for row in rows))
    try:
        asyncio.run(_score(config, workers, rows, report))
    except OSError as error:
        raise RunFailed(f"the rewards could not be tried to the end: {error}") from error
    report.print(console, rows, config.repeat)
    unscored = {name: card.num_unscored for name, card in report.scorecards.items() if card.num_unscored}
    broken = [f"{name} failed or timed out {count} times" for name, count in unscored.items()]
    for name, card in report.scorecards.items() if config.check else ():
        rights, said, problems = [row.columns for row in card.right_rows], "passed", list[str]()
        if name in workers.judges:
            said = "skipped, a judge has no process"
        elif not rights:
            said = "skipped, it calls no row right"
        elif problems := asyncio.run(check_adapter(name, workers.make, rights)):
            said = ""
            broken.append(f"{name} did not pass its check")
        for text in (f"\ncheck of {name}: {said}", *(f"  {one_line(problem)}" for problem in problems)):
            console.print(text, soft_wrap=True)
    if broken:
        raise RunFailed("; ".join(broken))


def modules_beside(path: str, text: str) -> list[str]:
    """Return the modules that a file of this text imports, anywhere in it, and that lie in its own folder."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError):  # the process that imports the file will say so
        return []
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    names = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names - {"async_grpo"}
    return sorted(name for name in names if PathFinder.find_spec(name, [str(Path(path).parent)]))


async def _score(
    config: VerifyConfig, workers: LocalWorkers, rows: Sequence[CompletionRow], report: Report
) -> None:
    pool = VerifierPool(workers.adapters, workers.make, workers=config.workers, timeout_s=config.timeout_s)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    progress = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
    with _opened(config.output or os.devnull) as output, progress:
        bar = progress.add_task("scoring", total=len(rows))

        def on_row(row: CompletionRow, verdicts: Sequence[Verdict]) -> None:
            progress.advance(bar)
            report.add(row, verdicts)
            output.write(json.dumps(_line(row, verdicts)) + "\n")

        async with pool:
            started = time.monotonic()
            await score_rows(pool, rows, on_row, config.repeat)
            report.seconds = time.monotonic() - started


def _line(row: CompletionRow, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """`results`: for each reward, what it said in each run; status and reward: the first run's."""
    results = defaultdict[str, list[dict[str, Any]]](list)
    for result in (result for verdict in verdicts for result in verdict.results):
        said = {name: getattr(result, name) for name in ("reward", "extra", "steps", "reason", "attempts")}
        seconds = round(result.latency_s - result.queue_s, 6)
        results[result.adapter].append({"status": result.status.value, **said, "seconds": seconds})
    first = verdicts[0]
    line = {"line": row.line, "status": first.status.value, "reward": first.reward, "label": row.label}
    return line | {"results": results, "completion": row.columns["completion"]}


def _opened(path: str) -> IO[str]:
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"--output {path} cannot be written: {error}") from error
