"""`Recorder` writes the training data of every step to files, and `Recording` replays a run from these files.

<output_dir>/record/step_<k>/rank_<r>.safetensors     the micro-batches of step k (from 0) in their order, with the
                                                       trainer's log-probs under the weights before the step
                             rank_<r>.json            the `StepEnd` with the metrics of generation and rewards;
                                                      digests of images (the files stay in the run's image folder);
                                                      for a policy that draws, which condition each sequence has
"""

import dataclasses
import errno
import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from async_grpo.allowed_tokens import AllowedTokens
from async_grpo.errors import ConfigurationError
from async_grpo.messages import Message, MicroBatch, StepEnd
from async_grpo.metrics.writer import as_json
from async_grpo.processes.image_files import RUN_IMAGES, is_digest
from async_grpo.processes.untrusted_files import files_inside, is_regular, read_json
from async_grpo.protocols import ExperienceSource
from async_grpo.types import PROMPT_TOKEN, ImageReference

log = logging.getLogger(__name__)
OTHER_FIELDS = ("is_dummy", "allowed", "images", "conditions", "first_pass")
ARRAYS = tuple(field.name for field in dataclasses.fields(MicroBatch) if field.name not in OTHER_FIELDS)
MAX_STEP_BYTES = 64 << 20  # largest accepted rank_<r>.json
# Maximum size of rank_<r>.safetensors that is read, about 100 million tokens. A malicious sparse file can claim any
# size without using the disk
MAX_ARRAYS_BYTES = 4 << 30
MOST_RANKS = 1 << 20  # largest accepted number of ranks
# Errors that reading JSON or safetensors with arbitrary contents may raise
UNREADABLE = (OSError, ValueError, TypeError, LookupError, AttributeError, SafetensorError)


def record_folder(output_dir: Path, step: int) -> Path:
    """Return the folder with the record of a step."""
    return output_dir / "record" / f"step_{step:09d}"


class Recorder:
    """An `ExperienceSource` that returns the messages of another source, and records them in the run's folder."""

    def __init__(
        self, source: ExperienceSource, output_dir: Path, world_size: int, options: Mapping[str, Any]
    ) -> None:
        self._source = source
        self._output_dir = output_dir
        self._run_facts = {"world_size": world_size, "options": dict(options)}
        self._batches: list[MicroBatch] = []  # micro-batches of the current step
        # The trainer's log-probs that have arrived so far, in the order of `_batches`
        self._logprobs: list[np.ndarray] = []
        # (rank, message) of the end of the current step, while log-probs of the step are still missing
        self._end: tuple[int, StepEnd] | None = None
        self.start = source.start

    def next_message(self, rank: int) -> Message:
        """Return the next message of the recorded source, and record it."""
        message = self._source.next_message(rank)
        if isinstance(message, MicroBatch):
            if not self._batches:
                # In a step without micro-batches, the trainer computes log-probs of a dummy micro-batch. They may still
                # be in the list, and do not belong to this step
                self._logprobs = []
            self._batches.append(message)
        elif isinstance(message, StepEnd):
            self._end = (rank, message)
            self._write_if_complete()
        return message

    def keep_logprobs(self, logprobs: Any) -> None:
        """Record the trainer's log-probs (1, N) of the first micro-batch of the step that has no log-probs yet.

        If the loss needs the whole step, the trainer computes log-probs only after the last micro-batch of the step.
        """
        self._logprobs.append(logprobs[0].float().cpu().numpy())
        self._write_if_complete()

    def keep_first_pass(self, batch: Any) -> None:
        """Record the log-probs of a micro-batch (`BatchTensors`), unless this is a later pass over its batch."""
        if not batch.is_repeated:
            self.keep_logprobs(batch.logprobs)

    def _write_if_complete(self) -> None:
        """Write the step if its end and the log-probs of all its micro-batches have arrived."""
        if self._end is None or len(self._logprobs) < len(self._batches):
            return
        rank, end = self._end
        self._end = None
        try:
            self._write(rank, end)
        except (OSError, SafetensorError) as error:
            log.error("step %d could not be recorded; the run goes on: %s", end.step, error)
        self._batches = []

    def _write(self, rank: int, end: StepEnd) -> None:
        """Write the two files of this rank for the current step."""
        folder = record_folder(self._output_dir, end.step)
        folder.mkdir(parents=True, exist_ok=True)
        arrays: dict[str, np.ndarray] = {}
        for number, batch in enumerate(self._batches):
            for name in ARRAYS:
                array = getattr(batch, name)
                if array is not None:
                    arrays[f"{number}.{name}"] = np.ascontiguousarray(array)
            if batch.allowed is not None:
                for name, array in batch.allowed.as_arrays().items():
                    arrays[f"{number}.allowed.{name}"] = array
        conditions = []
        for number, batch in enumerate(self._batches):
            rows, condition_arrays = _described_conditions(batch)
            conditions.append(rows)
            for name, array in condition_arrays.items():
                arrays[f"{number}.{name}"] = array
        for number, logprobs in enumerate(self._logprobs):
            arrays[f"{number}.trained_logprobs"] = logprobs
        save_file(arrays, folder / f"rank_{rank}.safetensors")
        content = dataclasses.asdict(end)
        content["dummies"] = [batch.is_dummy for batch in self._batches]
        if any(batch.images for batch in self._batches):
            content["images"] = [_described_images(batch) for batch in self._batches]
        if any(conditions):
            content["conditions"] = conditions
        content |= self._run_facts
        content["stats"].pop("spans", None)  # spans are times of this run, which say nothing about a replay
        content["stats"].pop("memory", None)  # a replay has no engines
        # Write this file last: a step counts as recorded if this file exists
        (folder / f"rank_{rank}.json").write_text(as_json(content), encoding="utf-8")


class Recording:
    """An `ExperienceSource` of one rank that replays recorded messages.

    Args:
        output_dir: The folder of the recorded run.
        world_size: Number of ranks of the replay.
        first: The first step to replay.

    Raises:
        ConfigurationError: The first step was not recorded, or was recorded by a different number of ranks.
    """

    def __init__(self, output_dir: Path, world_size: int, first: int = 0) -> None:
        self._output_dir = output_dir
        self._step = first
        self._remaining: Iterator[Message] = iter(())  # messages of the current step, not replayed yet
        # The distinct sets of options under which steps were recorded. There are several if a resumed run changed them
        self.options: list[dict[str, Any]] = []
        self.num_steps = first  # number of the first step that is missing in the record
        num_ranks = self._num_recorded_ranks(first)
        if num_ranks != world_size:
            reason = f"by {num_ranks} ranks, not {world_size}" if num_ranks else "not at all"
            raise ConfigurationError(f"{output_dir}: step {first} was recorded {reason} (--record)")
        while num_ranks == world_size:
            self.num_steps += 1
            num_ranks = self._num_recorded_ranks(self.num_steps)

    def _num_recorded_ranks(self, step: int) -> int:
        """Return the number of ranks that recorded a step, or 0 if the files of any rank are missing."""
        folder = record_folder(self._output_dir, step)
        if not (folder / "rank_0.json").exists():
            return 0
        try:
            content = read_json(folder / "rank_0.json", MAX_STEP_BYTES)
            options = dict(content["options"])
            world_size = content["world_size"]
            if type(world_size) is not int or not 0 < world_size <= MOST_RANKS:
                raise ValueError(
                    f"world_size must be an integer from 1 to {MOST_RANKS}, not {world_size!r:.50}"
                )
        except UNREADABLE as error:
            raise ConfigurationError(f"the record {folder} cannot be read: {error}") from error
        if options not in self.options:
            self.options.append(options)
        is_complete = all((folder / f"rank_{rank}.json").exists() for rank in range(world_size))
        return world_size if is_complete else 0

    def start(self) -> None:
        """Do nothing, because a replay generates no completions."""

    def next_message(self, rank: int) -> Message:
        """Return the next recorded message of a rank."""
        message = next(self._remaining, None)
        if message is None:
            self._remaining = self._messages(rank)
            message = next(self._remaining)
            self._step += 1
        return message

    def _messages(self, rank: int) -> Iterator[Message]:
        """Yield the recorded messages of a rank for the current step."""
        folder = record_folder(self._output_dir, self._step)
        try:
            messages = self._read(folder, rank)
        except UNREADABLE as error:
            raise ConfigurationError(f"the record {folder} cannot be read: {error}") from error
        yield from messages

    @staticmethod
    def _read(folder: Path, rank: int) -> list[Message]:
        """Return the messages of a rank that are recorded in the folder of a step."""
        content: dict[str, Any] = read_json(folder / f"rank_{rank}.json", MAX_STEP_BYTES)
        file = folder / f"rank_{rank}.safetensors"
        if not is_regular(file):
            raise ValueError(f"{file.name} is no regular file")
        arrays = _load_arrays(file)
        messages: list[Message] = []
        dummies = content.pop("dummies")
        images_of_batches = content.pop("images", [[]] * len(dummies))
        conditions_of_batches = content.pop("conditions", [[]] * len(dummies))
        images_folder = folder.parent.parent / RUN_IMAGES
        for number, is_dummy in enumerate(dummies):
            fields: dict[str, Any] = {name: arrays.get(f"{number}.{name}") for name in ARRAYS}
            prefix = f"{number}.allowed."
            mask_arrays = {}
            for name, array in arrays.items():
                if name.startswith(prefix):
                    mask_arrays[name.removeprefix(prefix)] = array
            allowed = AllowedTokens.from_arrays(mask_arrays) if mask_arrays else None
            images = _images_of(images_of_batches[number], images_folder)
            conditions = _conditions_of(conditions_of_batches[number], arrays, number)
            messages.append(
                MicroBatch(
                    **fields,
                    allowed=allowed,
                    images=images,
                    conditions=conditions,
                    is_dummy=bool(is_dummy),
                )
            )
        step_end = {field.name: content[field.name] for field in dataclasses.fields(StepEnd)}
        messages.append(StepEnd(**step_end))
        return messages


def _described_images(batch: MicroBatch) -> list[list[tuple[str, int]]]:
    """Return (digest, number of tokens) of each image, one list for each sequence; [] if no sequence has an image."""
    return [[(image.digest, image.num_tokens) for image in images] for images in batch.images]


def _images_of(described: Sequence[Sequence[Any]], folder: Path) -> tuple[tuple[ImageReference, ...], ...]:
    """Return the images of a recorded micro-batch.

    The record may come from a stranger. So it names no paths, only digests, and images are read from the run's own
    folder.

    Args:
        described: What `_described_images` returned.
        folder: Folder of the run's images.

    Raises:
        ValueError: An entry is not a digest and a number of tokens.
    """
    images_by_sequence = []
    for sequence in described:
        references = []
        for digest, num_tokens in sequence:
            if not is_digest(digest) or type(num_tokens) is not int:
                raise ValueError(f"{digest!r:.80} and {num_tokens!r:.80} describe no image")
            references.append(ImageReference(str(folder.absolute() / digest), digest, num_tokens))
        images_by_sequence.append(tuple(references))
    return tuple(images_by_sequence)


def _described_conditions(batch: MicroBatch) -> tuple[list[int], dict[str, np.ndarray]]:
    """Return for each sequence the index of its condition, and the distinct conditions as arrays by name."""
    index_by_identity: dict[int, int] = {}
    rows: list[int] = []
    arrays: dict[str, np.ndarray] = {}
    for condition in batch.conditions:
        is_new = id(condition) not in index_by_identity
        index = index_by_identity.setdefault(id(condition), len(index_by_identity))
        rows.append(index)
        if is_new:
            for place, array in enumerate(condition):
                arrays[f"condition.{index}.{place}"] = np.ascontiguousarray(array)
    return rows, arrays


def _conditions_of(
    rows: Sequence[int], arrays: Mapping[str, np.ndarray], batch_number: int
) -> tuple[tuple[np.ndarray, ...], ...]:
    """Return the conditions of the sequences of a recorded micro-batch. Sequences of one group share the same arrays."""
    conditions = []
    for index in range(max(rows, default=-1) + 1):
        prefix = f"{batch_number}.condition.{index}."
        places = sorted(int(name.removeprefix(prefix)) for name in arrays if name.startswith(prefix))
        conditions.append(tuple(arrays[f"{prefix}{place}"] for place in places))
    return tuple(conditions[index] for index in rows)


def _load_arrays(file: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a file, or raise OSError if it is larger than MAX_ARRAYS_BYTES."""
    size_bytes = file.stat().st_size
    if size_bytes > MAX_ARRAYS_BYTES:
        limit_mb = MAX_ARRAYS_BYTES >> 20
        raise OSError(errno.EFBIG, f"is larger than {limit_mb} MB, the most that is read", str(file))
    return load_file(file)


def recorded_completions(folder: Path) -> Iterator[tuple[int, list[int], dict[str, list[Any]]]]:
    """Yield (group id, token ids, values per token by name) for every completion in the folder of a step.

    The value `ratios` is the natural logarithm of (the trainer's probability / the engine's), and NaN at tokens that
    are not trained on.
    """
    for path in files_inside(folder, "rank_*.safetensors"):
        arrays = _load_arrays(path)
        num_batches = sum(name.endswith(".cu_seqlens") for name in arrays)
        for number in range(num_batches):
            prefix = f"{number}."
            batch = {}
            for name, array in arrays.items():
                if name.startswith(prefix):
                    batch[name.removeprefix(prefix)] = array
            yield from _completions_of_batch(batch)


def _completions_of_batch(
    batch: Mapping[str, np.ndarray],
) -> Iterator[tuple[int, list[int], dict[str, list[Any]]]]:
    """Yield the completions of one micro-batch, as `recorded_completions` does."""
    ratios = batch["trained_logprobs"] - batch["behaviour_logprobs"]
    columns = {
        "versions": batch["versions"],
        "mask": batch["loss_mask"],
        "logprobs": batch["behaviour_logprobs"],
        "advantages": batch["advantages"],
        "ratios": np.where(batch["loss_mask"], ratios, np.nan),
    }
    bounds = pairwise(batch["cu_seqlens"])
    for group, (begin, end) in zip(batch["group_ids"].tolist(), bounds, strict=True):
        places = begin + np.flatnonzero(batch["versions"][begin:end] != PROMPT_TOKEN)
        if not len(places):
            continue
        numbers = {}
        for name, column in columns.items():
            numbers[name] = column[places].astype(float).round(4).tolist()
        yield group, batch["input_ids"][places].tolist(), numbers
