"""The state from which the rollout side resumes: the groups that are alive, as JSON and safetensors.

A group is alive from its admission until the engines use the weights that were trained on it. A finished group
is saved completely. An unfinished group is generated again from its beginning, with the same seeds. New seeds would
favor short completions, because the unfinished ones are mostly long.

Older versions of this library saved the turns of a finished group without their order in time. If a trajectory of such a
group has several sequences, the order is unknown, and the group is generated again, too. So is a group whose prompt had
other images when it was saved.

Images are saved by their digests, without paths: a path of another machine would be wrong, and that of a malicious
checkpoint could name any file.
"""

import base64
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from async_grpo.allowed_tokens import AllowedTokens
from async_grpo.errors import CheckpointBroken
from async_grpo.experience.running_means import checked_means
from async_grpo.processes.image_files import is_digest
from async_grpo.processes.untrusted_files import is_regular, parse_json, read_bytes
from async_grpo.types import (
    COMPLETION_ARRAYS,
    POLICY_ARRAYS,
    Completion,
    FinishReason,
    Group,
    ImageReference,
    Outcome,
    Prompt,
    Sample,
    Turn,
    Verdict,
)

MAX_STATE_BYTES = 4 << 30  # largest experience.json that is read; it contains the texts of all groups alive
GROUP_NUMBERS = ("number", "ordinal", "question", "resampled")
# Errors that JSON, safetensors and the checks of our own records raise for files with arbitrary contents
UNREADABLE = (SafetensorError, OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError)
SAVED_MASKS = "allowed."  # names of saved arrays of allowed tokens begin with this
SAVED_CONDITION = "condition."  # names of saved embeddings of prompts begin with this
# Keys in the saved files that differ from the names of the fields. They stay, because older checkpoints have them
SAVED_START_VERSION = "admitted_version"
SAVED_TURN_NAMES = {"num_tokens": "tokens", "before_text": "said"}  # field -> key
VERDICT = TypeAdapter(Verdict | None)
OUTCOME = TypeAdapter(Outcome | None)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class UnfinishedGroup:
    """A group that is admitted but not completely generated and scored."""

    prompt: Prompt
    resampled: int = 0  # how often the prompt of this group was replaced by another one


@dataclass(frozen=True)
class ExperienceState:
    """State of an `ExperienceBatcher`, from which a resumed run continues."""

    step: int  # next step to train, which is the trainer's policy version
    admitted: int  # number of groups admitted so far
    cursor: Mapping[str, Any]  # position in the data set
    alive: Mapping[int, Group | UnfinishedGroup]  # by sequence number
    # Running mean of the rewards before the step, by question or agent; empty if the estimator uses none
    running_means: Mapping[str, float] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write `experience.json` and `experience.safetensors` into the folder, which is created if necessary."""
        folder.mkdir(parents=True, exist_ok=True)
        content = {
            "step": self.step,
            "admitted": self.admitted,
            "cursor": self.cursor,
            "running_means": self.running_means,
            "groups": [_group_row(number, group) for number, group in self.alive.items()],
        }
        (folder / "experience.json").write_text(json.dumps(content), encoding="utf-8")
        save_file(self._arrays(), folder / "experience.safetensors")

    def _arrays(self) -> dict[str, np.ndarray]:
        """Return each array of all finished samples, concatenated, by name."""
        samples: list[Sample] = []
        for group in self.alive.values():
            if isinstance(group, Group):
                samples.extend(group.samples)
        parts: dict[str, list[np.ndarray]] = {}
        for sample in samples:
            arrays = {name: getattr(sample.completion, name) for name in COMPLETION_ARRAYS}
            arrays |= {name: getattr(sample, name) for name in POLICY_ARRAYS}
            for name, array in arrays.items():
                # In one run, an array is present in either all samples or none
                if array is not None:
                    parts.setdefault(name, []).append(array)
        joined_arrays = {name: np.concatenate(arrays) for name, arrays in parts.items()}
        completions = [sample.completion for sample in samples]
        allowed = AllowedTokens.joined(
            [completion.allowed for completion in completions], list(map(len, completions))
        )
        if allowed is not None:
            for name, array in allowed.as_arrays().items():
                joined_arrays[SAVED_MASKS + name] = array
        return joined_arrays | self._condition_arrays()

    def _condition_arrays(self) -> dict[str, np.ndarray]:
        """Return the embeddings of the prompts, once for each group, with names of the form `condition.GROUP.INDEX`."""
        arrays: dict[str, np.ndarray] = {}
        for number, group in self.alive.items():
            if isinstance(group, Group):
                for index, array in enumerate(group.samples[0].completion.condition):
                    arrays[f"{SAVED_CONDITION}{number}.{index}"] = array
        return arrays

    @classmethod
    def load(
        cls, folder: Path, prompt: Callable[[int, int], Prompt], images_folder: Path | None = None
    ) -> "ExperienceState":
        """Read the state that `save` wrote.

        Args:
            folder: The folder of the state.
            prompt: Returns the prompt for an ordinal and an index in the data set, as `PromptCursor.prompt` does.
            images_folder: Folder of the images of the run that continues. Without it, turns must not have images.

        Raises:
            CheckpointBroken: The files cannot be read, or their contents are invalid.
        """
        try:
            return cls._read(folder, prompt, images_folder)
        except UNREADABLE as error:
            raise CheckpointBroken(
                f"{folder}: the groups alive cannot be read ({type(error).__name__}: {error})"
            ) from error

    @classmethod
    def _read(
        cls, folder: Path, prompt: Callable[[int, int], Prompt], images_folder: Path | None
    ) -> "ExperienceState":
        content = parse_json(read_bytes(folder / "experience.json", MAX_STATE_BYTES))
        file = folder / "experience.safetensors"
        if not is_regular(file):
            raise ValueError(f"{file.name} is not a regular file")
        arrays = load_file(file)
        allowed = _taken_masks(arrays)
        conditions = _taken_conditions(arrays)
        begin = 0  # index in the arrays where the next sample begins
        alive: dict[int, Group | UnfinishedGroup] = {}
        num_with_other_images = 0
        for row in content.pop("groups"):
            number, ordinal, question, resampled = (_count(row, name) for name in GROUP_NUMBERS)
            group_prompt = prompt(ordinal, question)
            unfinished_group = UnfinishedGroup(group_prompt, resampled)
            if row["samples"] is None:
                alive[number] = unfinished_group
                continue
            is_order_known = not any(map(_has_unknown_order, row["samples"]))
            samples = []
            for sample_row in row["samples"]:
                end = begin + _count(sample_row, "tokens")
                if any(len(array) < end for array in arrays.values()):
                    raise ValueError(f"group {number} has more tokens than {file.name} holds")
                sample_row.pop("tokens")
                sample_arrays = {name: array[begin:end] for name, array in arrays.items()}
                sample_masks = allowed and AllowedTokens.joined([allowed[begin:end]], [end - begin])
                sample_row["condition"] = conditions.get(number, ())
                samples.append(_sample(group_prompt, sample_row, sample_arrays, sample_masks, images_folder))
                begin = end
            if not is_order_known:
                alive[number] = unfinished_group
                continue
            digests = _digests(group_prompt)
            # Checkpoints of earlier versions do not name the images of prompts
            if row.get("images", digests) != digests:
                num_with_other_images += 1
                alive[number] = unfinished_group
                continue
            alive[number] = Group(
                prompt=group_prompt,
                samples=tuple(samples),
                start_version=_count(row, SAVED_START_VERSION),
                sequence_number=number,
                baseline=VERDICT.validate_python(row["baseline"]),
                resampled=resampled,
            )
        if num_with_other_images:
            log.warning(
                "%d finished groups of the checkpoint are generated again, because the data has other images for their "
                "prompts than when they were generated",
                num_with_other_images,
            )
        _count(content, "step")
        _count(content, "admitted")
        # Checkpoints of earlier versions have no running means
        content["running_means"] = checked_means(content.get("running_means", {}))
        return cls(**content, alive=alive)


def _count(row: Mapping[str, Any], name: str) -> int:
    """Return a field that must be a nonnegative integer, or raise ValueError.

    A negative number would silently index from the end of a list.
    """
    value = row[name]
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} is {value!r:.50}, not a whole number of 0 or more")
    return value


def _group_row(number: int, group: Group | UnfinishedGroup) -> dict[str, Any]:
    """Return a group as JSON, without its arrays."""
    row: dict[str, Any] = {
        "number": number,
        "ordinal": group.prompt.ordinal,
        "question": group.prompt.question,
        "resampled": group.resampled,
        "samples": None,
    }
    if isinstance(group, Group):
        row[SAVED_START_VERSION] = group.start_version
        row["baseline"] = VERDICT.dump_python(group.baseline, mode="json")
        row["images"] = _digests(group.prompt)
        row["samples"] = [_sample_row(sample) for sample in group.samples]
    return row


def _digests(prompt: Prompt) -> list[str]:
    """Return the digests of a prompt's images."""
    return [image.digest for image in prompt.images]


def _sample_row(sample: Sample) -> dict[str, Any]:
    """Return a sample as JSON, without its arrays."""
    completion = sample.completion
    return {
        "tokens": len(completion),
        "finish_reason": completion.finish_reason.value,
        "text": completion.text,
        "member": completion.member,
        "picture_png": base64.b64encode(completion.picture_png).decode(),
        "turns": [_turn_row(turn) for turn in completion.turns],
        "abandoned": [_turn_row(turn) for turn in completion.abandoned],
        "outcome": OUTCOME.dump_python(completion.outcome, mode="json"),
        "verdict": VERDICT.dump_python(sample.verdict, mode="json"),
    }


def _turn_row(turn: Turn) -> dict[str, Any]:
    """Return a turn as JSON."""
    row = {SAVED_TURN_NAMES.get(name, name): value for name, value in vars(turn).items()}
    row["before"] = turn.before.tolist()
    images = row.pop("images")
    if images:
        row["images"] = [{"digest": image.digest, "num_tokens": image.num_tokens} for image in images]
    return row


def _turn(row: Mapping[str, Any], images_folder: Path | None) -> Turn:
    """Make a turn from its row."""
    fields = dict(row)
    for name, key in SAVED_TURN_NAMES.items():
        if key in fields:
            fields[name] = fields.pop(key)
    fields["before"] = np.asarray(row["before"], np.int32)
    # Turns without images, and checkpoints of earlier versions, have no such key
    fields["images"] = tuple(_image(image, images_folder) for image in row.get("images", []))
    return Turn(**fields)


def _image(row: Mapping[str, Any], images_folder: Path | None) -> ImageReference:
    """Make an image from its row. Checkpoints of earlier versions also have its path, which is ignored.

    Raises:
        ValueError: The row names no digest, or the model reads no images.
    """
    digest = row["digest"]
    if not is_digest(digest):
        raise ValueError(f"{digest!r:.80} is not the digest of an image")
    if images_folder is None:
        raise ValueError("a turn has an image, and the run has no folder of images")
    return ImageReference(str(images_folder / digest), digest, _count(row, "num_tokens"))


def _has_unknown_order(row: Mapping[str, Any]) -> bool:
    """Return whether the time order of a sample's turns is unknown.

    Older versions of this library saved turns without their numbers. Then the order is known only if all turns belong to
    one sequence.
    """
    turns = row["turns"]
    has_no_times = any("number" not in turn for turn in turns)
    num_sequences = sum(turn["fresh"] for turn in turns)
    return has_no_times and num_sequences > 1


def _taken_masks(arrays: dict[str, np.ndarray]) -> AllowedTokens | None:
    """Remove the arrays of the allowed tokens of all samples, and return the allowed tokens; None if there are none."""
    names = [name for name in arrays if name.startswith(SAVED_MASKS)]
    if not names:
        return None
    return AllowedTokens.from_arrays({name.removeprefix(SAVED_MASKS): arrays.pop(name) for name in names})


def _taken_conditions(arrays: dict[str, np.ndarray]) -> dict[int, tuple[np.ndarray, ...]]:
    """Remove the embeddings of the prompts, and return them by the number of their group."""
    arrays_of_group: dict[int, dict[int, np.ndarray]] = {}
    for name in [name for name in arrays if name.startswith(SAVED_CONDITION)]:
        number, index = name.removeprefix(SAVED_CONDITION).split(".")
        arrays_of_group.setdefault(int(number), {})[int(index)] = arrays.pop(name)
    conditions = {}
    for group_number, group_arrays in arrays_of_group.items():
        conditions[group_number] = tuple(group_arrays[index] for index in range(len(group_arrays)))
    return conditions


def _sample(
    prompt: Prompt,
    row: dict[str, Any],
    arrays: Mapping[str, np.ndarray],
    allowed: AllowedTokens | None,
    images_folder: Path | None = None,
) -> Sample:
    """Make a sample from its row, its arrays (T,) and the tokens that were allowed at its T tokens."""
    verdict = VERDICT.validate_python(row.pop("verdict"))
    assert verdict is not None  # None is valid only for the baseline of a group
    row["turns"] = tuple(_turn(turn_row, images_folder) for turn_row in row["turns"])
    # Checkpoints of earlier versions have no abandoned turns and no pictures
    row["abandoned"] = tuple(_turn(turn_row, images_folder) for turn_row in row.get("abandoned", []))
    row["picture_png"] = base64.b64decode(row.get("picture_png", ""), validate=True)
    row["outcome"] = OUTCOME.validate_python(row["outcome"])
    row["finish_reason"] = FinishReason(row["finish_reason"])
    completion_arrays: dict[str, Any] = {name: arrays.get(name) for name in COMPLETION_ARRAYS}
    sample_arrays: dict[str, Any] = {name: arrays.get(name) for name in POLICY_ARRAYS}
    completion = Completion(**completion_arrays, **row, allowed=allowed)
    return Sample(prompt, completion, verdict, **sample_arrays)
