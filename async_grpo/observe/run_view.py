"""`RunView`: read all files of one run, for the commands that show a run.

The folder is untrusted, so lines of an unexpected form are skipped.
"""

import re
import sys
from collections.abc import Iterator
from functools import cached_property
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from async_grpo.experience.config import SAMPLES_FILE
from async_grpo.metrics.lines import (
    is_count,
    metrics_lines,
    sample_lines,
    span_lines,
    spread_metrics,
    whole_option,
)
from async_grpo.metrics.tail import last_lines, last_records, spread_records
from async_grpo.metrics.watchdog import stalls_of
from async_grpo.metrics.writer import (
    EVAL_FILE,
    LOCK_FILE,
    METRICS_FILE,
    TIMELINE_FILE,
    holder,
    options_of,
)
from async_grpo.options.fields import refuse
from async_grpo.processes.untrusted_files import files_inside, is_regular, plain_parts
from async_grpo.training.checkpoint_folder import Manifest, checkpoints_of, read

EVALUATION_SAMPLES = re.compile(r"eval_samples_(\d{1,15})(_.*)?")
Line = dict[str, Any]


class RunView:
    """The content of a run's folder.

    The options are read once. All other files are read at each call, because a run may still write them. Methods that
    need the options raise ConfigurationError if the folder contains no run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock_file = folder / LOCK_FILE

    @cached_property
    def options(self) -> Line:
        """The run's options, and facts such as the number of its ranks."""
        return options_of(self.folder)

    @cached_property
    def total_steps(self) -> int:
        """The number of optimizer steps of the whole run.

        Raises:
            ConfigurationError: The run's parameters do not determine the number.
        """
        group_size = whole_option(self.options, "samples_per_question")
        samples_per_batch = whole_option(self.options, "batch_size") * group_size
        samples_per_step = samples_per_batch
        if self.options.get("train_minibatch_size"):
            samples_per_step = whole_option(self.options, "train_minibatch_size")
        steps_per_batch = samples_per_batch // samples_per_step
        # Runs of earlier versions, which had one pass over each batch, do not have this option
        if "passes_per_batch" in self.options:
            steps_per_batch *= whole_option(self.options, "passes_per_batch")
        return whole_option(self.options, "num_training_batches") * steps_per_batch

    def writer_process(self) -> int | None:
        """Return the id of the process that writes the run's files; None if it has ended or runs on another machine."""
        return holder(self.folder)

    def metrics(self, count: int) -> list[Line]:
        """Return the metrics of the newest `count` steps."""
        return metrics_lines(self.folder / METRICS_FILE, count)

    def metrics_from(self, byte: int, count: int) -> tuple[int, list[Line], int]:
        """Read the metrics file from a position on.

        Args:
            byte: Position in the file. If the file is shorter, because a resumed run has cut it, reading begins at 0.
            count: Maximum number of lines. If there are more, evenly spread lines are read.

        Returns:
            The position at which reading began, the lines, and the position after the last line.
        """
        file = self.folder / METRICS_FILE
        if not is_regular(file) or file.stat().st_size < byte:
            byte = 0
        lines_with_ends = list(spread_metrics(file, byte, count))
        lines = [line for line, _ in lines_with_ends]
        next_byte = lines_with_ends[-1][1] if lines_with_ends else byte
        return byte, lines, next_byte

    def evaluations(self, count: int) -> list[Line]:
        """Return the newest `count` lines of evaluation results. An evaluation has one line per file of questions."""
        return metrics_lines(self.folder / EVAL_FILE, count)

    def spans(self, count: int) -> list[Line]:
        """Return the spans among the newest `count` lines of the timeline."""
        return span_lines(last_records(self.folder / TIMELINE_FILE, count))

    def spans_of_steps(self, first: int, last: int) -> list[Line]:
        """Return all spans of the steps from `first` to `last`, both included."""
        records = []
        for record, _ in spread_records(self.folder / TIMELINE_FILE, 0, sys.maxsize):
            if is_count(record.get("step")) and first <= record["step"] <= last:
                records.append(record)
        return span_lines(records)

    def samples(self, count: int) -> list[Line]:
        """Return the newest `count` training samples, oldest first; [] if the run writes no samples.

        Raises:
            ConfigurationError: The run's parameters name a file outside the run's folder.
        """
        name = self.options.get("dump_samples_filename") or SAMPLES_FILE
        return sample_lines(last_records(self.folder / _plain_name(name), count))

    def evaluation_samples(self, count: int) -> list[Line]:
        """Return the newest `count` samples of evaluations, oldest first."""
        return sorted(islice(self._evaluation_samples(count), count), key=itemgetter("step"))

    def _evaluation_samples(self, count: int) -> Iterator[Line]:
        """Yield at most `count` samples of each evaluation file, newest evaluation first."""
        steps: dict[Path, int] = {}
        for file in files_inside(self.folder, "eval_samples_*.jsonl"):
            if match := EVALUATION_SAMPLES.fullmatch(file.stem):
                steps[file] = int(match[1])
        for file in sorted(steps, key=lambda file: steps[file], reverse=True):
            rows = [{"step": steps[file], "file": file.stem, **row} for row in last_records(file, count)]
            yield from sample_lines(rows)

    def stalls(self) -> dict[Path, str]:
        """Return the watchdog's report of each stall, by the stall's folder, newest first."""
        return stalls_of(self.folder)

    def log_lines(self, count: int, name: str = "trainer") -> dict[str, list[str]]:
        """Return the last lines of each log, by file name.

        Args:
            count: Number of lines of each log.
            name: Name of a program, or `*` for all programs.
        """
        return {path.name: last_lines(path, count) for path in files_inside(self.folder, f"logs/{name}.log")}

    def newest_manifest(self) -> Manifest | None:
        """Return the manifest of the newest checkpoint, or None if there is no checkpoint.

        Raises:
            CheckpointBroken: The manifest cannot be read.
        """
        for checkpoint in checkpoints_of(self.folder)[:1]:
            return read(checkpoint)
        return None


def _plain_name(name: Any) -> str:
    """Return the name of the file of samples, after checking that it is a plain file name.

    Raises:
        ConfigurationError: The name is a path, which could point outside of the run's folder.
    """
    try:
        parts = plain_parts(str(name))
    except OSError:
        parts = ()
    refuse(
        len(parts) != 1,
        f"the run's parameters say dump_samples_filename = {name!r:.80}, which is not a plain file name",
    )
    return parts[0]
