"""`Recorder` and `Recording`: what a rank was trained on, step by step, in files; and a run from these files alone.

<output_dir>/record/step_<k>/rank_<r>.safetensors     the micro-batches of step k (0 is the first) in their order, with
                                                       the trainer's log-probs under the weights that the step starts from
                             rank_<r>.json            the end of the step, with the rollout side's metrics
"""

import dataclasses
import errno
import logging
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from async_grpo.errors import ConfigurationError
from async_grpo.messages import Message, MicroBatch, StepEnd
from async_grpo.metrics.writer import as_json
from async_grpo.processes.untrusted_files import files_inside, is_regular, read_json
from async_grpo.protocols import ExperienceSource
from async_grpo.types import PROMPT_TOKEN

log = logging.getLogger(__name__)
ARRAYS = tuple(one.name for one in dataclasses.fields(MicroBatch) if one.name != "is_dummy")
MAX_STEP_BYTES = 64 << 20  # of the end of a step with its metrics
MAX_ARRAYS_BYTES = 4 << 30  # of a rank's step: some 100 million tokens; a sparse file says any size
MOST_RANKS = 1 << 20
# What JSON and safetensors raise for files that hold anything
UNREADABLE = (OSError, ValueError, TypeError, LookupError, AttributeError, SafetensorError)
NUMBERS = ("versions", "mask", "logprobs", "advantages", "ratios")  # of a token: `recorded_completions`


def record_folder(output_dir: Path, step: int) -> Path:
    return output_dir / "record" / f"step_{step:09d}"


class Recorder:
    """An `ExperienceSource` that keeps what another one hands out, in the run's folder."""

    def __init__(
        self, source: ExperienceSource, output_dir: Path, world_size: int, options: Mapping[str, Any]
    ) -> None:
        self._source, self._output_dir = source, output_dir
        self._told = {"world_size": world_size, "options": dict(options)}
        self._batches: list[MicroBatch] = []
        self._logprobs: list[np.ndarray] = []  # the trainer's, of as many of them as it has computed
        self._end: tuple[int, StepEnd] | None = None  # rank and end, waiting for the rest of these
        self.start = source.start

    def next_message(self, rank: int) -> Message:
        message = self._source.next_message(rank)
        if isinstance(message, MicroBatch):
            if not self._batches:  # a step without any has the trainer compute a dummy
                self._logprobs = []
            self._batches.append(message)
        elif isinstance(message, StepEnd):
            self._end = rank, message
            self._write_if_whole()
        return message

    def keep_logprobs(self, logprobs: Any) -> None:
        """The trainer's of the next micro-batch, (1, N); of a loss that looks at whole steps they come after its end."""
        self._logprobs.append(logprobs[0].float().cpu().numpy())
        self._write_if_whole()

    def _write_if_whole(self) -> None:
        if self._end is None or len(self._logprobs) < len(self._batches):
            return
        (rank, end), self._end = self._end, None
        try:
            self._write(rank, end)
        except (OSError, SafetensorError) as error:
            log.error("step %d could not be recorded; the run goes on: %s", end.step, error)
        self._batches = []

    def _write(self, rank: int, end: StepEnd) -> None:
        folder = record_folder(self._output_dir, end.step)
        folder.mkdir(parents=True, exist_ok=True)
        arrays = {
            f"{number}.{name}": np.ascontiguousarray(array)
            for number, batch in enumerate(self._batches)
            for name in ARRAYS
            if (array := getattr(batch, name)) is not None
        }
        arrays |= {f"{number}.trained_logprobs": own for number, own in enumerate(self._logprobs)}
        save_file(arrays, folder / f"rank_{rank}.safetensors")
        # Last: a step is recorded once this is there
        told = dataclasses.asdict(end) | {"dummies": [batch.is_dummy for batch in self._batches]} | self._told
        told["stats"].pop("spans", None)  # of the run that made it, not of a replay
        (folder / f"rank_{rank}.json").write_text(as_json(told), encoding="utf-8")


class Recording:
    """`ExperienceSource` of one rank that hands out what was recorded, from step `first` on.

    ConfigurationError: the step was not recorded, or by another number of ranks.
    """

    def __init__(self, output_dir: Path, world_size: int, first: int = 0) -> None:
        self._output_dir, self._step = output_dir, first
        self._left: Iterator[Message] = iter(())
        self.options: list[dict[str, Any]] = []  # each that a step was recorded with
        while (recorded := self._recorded(self._step)) == world_size:
            self._step += 1
        if self._step == first:
            why = f"by {recorded} ranks, not {world_size}" if recorded else "not at all"
            raise ConfigurationError(f"{output_dir}: step {first} was recorded {why} (--record)")
        self.num_steps, self._step = self._step, first  # as far as the record goes without a gap

    def _recorded(self, step: int) -> int:
        """By how many ranks; 0: not at all, or not by all of them."""
        folder = record_folder(self._output_dir, step)
        if not (folder / "rank_0.json").exists():
            return 0
        try:
            told = read_json(folder / "rank_0.json", MAX_STEP_BYTES)
            options, world_size = dict(told["options"]), told["world_size"]
            if type(world_size) is not int or not 0 < world_size <= MOST_RANKS:
                raise ValueError(f"world_size is {world_size!r:.50}")
        except UNREADABLE as error:
            raise ConfigurationError(f"the record {folder} cannot be read: {error}") from error
        if options not in self.options:
            self.options.append(options)
        whole = all((folder / f"rank_{rank}.json").exists() for rank in range(world_size))
        return world_size if whole else 0

    def start(self) -> None:
        """There is nothing to generate."""

    def next_message(self, rank: int) -> Message:
        message = next(self._left, None)
        if message is None:
            self._left = self._messages(rank)
            message = next(self._left)
            self._step += 1
        return message

    def _messages(self, rank: int) -> Iterator[Message]:
        folder = record_folder(self._output_dir, self._step)
        try:
            messages = self._read(folder, rank)
        except UNREADABLE as error:
            raise ConfigurationError(f"the record {folder} cannot be read: {error}") from error
        yield from messages

    @staticmethod
    def _read(folder: Path, rank: int) -> list[Message]:
        told: dict[str, Any] = read_json(folder / f"rank_{rank}.json", MAX_STEP_BYTES)
        file = folder / f"rank_{rank}.safetensors"
        if not is_regular(file):
            raise ValueError(f"{file.name} is no regular file")
        arrays = _load_arrays(file)
        messages: list[Message] = []
        for number, is_dummy in enumerate(told.pop("dummies")):
            fields: dict[str, Any] = {name: arrays.get(f"{number}.{name}") for name in ARRAYS}
            messages.append(MicroBatch(**fields, is_dummy=bool(is_dummy)))
        messages.append(StepEnd(**{one.name: told[one.name] for one in dataclasses.fields(StepEnd)}))
        return messages


def _load_arrays(file: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a file of at most MAX_ARRAYS_BYTES; OSError if it is larger."""
    size_bytes = file.stat().st_size
    if size_bytes > MAX_ARRAYS_BYTES:
        limit_mb = MAX_ARRAYS_BYTES >> 20
        raise OSError(errno.EFBIG, f"is larger than {limit_mb} MB, the most that is read", str(file))
    return load_file(file)


def recorded_completions(folder: Path) -> Iterator[tuple[int, list[int], dict[str, list[Any]]]]:
    """Of a step's folder every completion: group, token ids, and numbers of each token; nothing if there is none.

    `ratios`: natural logarithm of the trainer's probability over the engine's; NaN where a token was not trained.
    """
    for arrays in map(_load_arrays, files_inside(folder, "rank_*.safetensors")):
        for number in range(sum(name.endswith(".cu_seqlens") for name in arrays)):
            begins = f"{number}."
            of = {name.removeprefix(begins): one for name, one in arrays.items() if name.startswith(begins)}
            mask, logprobs, versions = of["loss_mask"], of["behaviour_logprobs"], of["versions"]
            ratios = np.where(mask, of["trained_logprobs"] - logprobs, np.nan)
            columns = versions, mask, logprobs, of["advantages"], ratios
            for group, (begin, end) in zip(of["group_ids"].tolist(), pairwise(of["cu_seqlens"]), strict=True):
                places = begin + np.flatnonzero(versions[begin:end] != PROMPT_TOKEN)
                told = (column[places].astype(float).round(4).tolist() for column in columns)
                if len(places):
                    yield group, of["input_ids"][places].tolist(), dict(zip(NUMBERS, told, strict=True))
