"""What the rollout side goes on with after a resume: the groups alive, as JSON and safetensors.

A finished group is kept as it is. One under way is asked for again from its beginning, with the seeds that it had: fresh
draws would be short more often than the long completions that they replace. So is a finished one whose turns an older
version saved without their times, where they may not stand in time.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from async_grpo.errors import CheckpointBroken
from async_grpo.processes.untrusted_files import is_regular, parse_json, read_bytes
from async_grpo.types import (
    COMPLETION_ARRAYS,
    Completion,
    FinishReason,
    Group,
    Outcome,
    Prompt,
    Sample,
    Turn,
    Verdict,
)

MAX_STATE_BYTES = 4 << 30  # of experience.json, which holds the texts of all groups alive
GROUP_NUMBERS = ("number", "ordinal", "question", "resampled")
# What JSON, safetensors and the records' own checks raise for files that hold anything
UNREADABLE = (SafetensorError, OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError)
SAVED_SAMPLE_ARRAYS = ("ref_logprobs", "proximal_logprobs")
VERDICT, OUTCOME = TypeAdapter(Verdict | None), TypeAdapter(Outcome | None)


@dataclass(frozen=True)
class UnfinishedGroup:
    """A group between its admission and its last verdict. `resampled`: prompts that this one replaced."""

    prompt: Prompt
    resampled: int = 0


@dataclass(frozen=True)
class ExperienceState:
    """Of a batcher whose trainer holds policy `step`. `alive`: by sequence number, `admitted` of them so far."""

    step: int
    admitted: int
    cursor: Mapping[str, Any]
    alive: Mapping[int, Group | UnfinishedGroup]

    def save(self, folder: Path) -> None:
        """Write `experience.json` and `experience.safetensors` into the folder, which is made."""
        folder.mkdir(parents=True, exist_ok=True)
        told = {name: getattr(self, name) for name in ("step", "admitted", "cursor")}
        groups = [_group_row(number, group) for number, group in self.alive.items()]
        (folder / "experience.json").write_text(json.dumps(told | {"groups": groups}), encoding="utf-8")
        parts: dict[str, list[np.ndarray]] = {}
        for group in self.alive.values():
            for sample in group.samples if isinstance(group, Group) else ():
                for owner, names in ((sample.completion, COMPLETION_ARRAYS), (sample, SAVED_SAMPLE_ARRAYS)):
                    for name in names:  # all samples of a run have an array of that name, or none has
                        if (array := getattr(owner, name)) is not None:
                            parts.setdefault(name, []).append(array)
        save_file({name: np.concatenate(of) for name, of in parts.items()}, folder / "experience.safetensors")

    @classmethod
    def load(cls, folder: Path, prompt: Callable[[int, int], Prompt]) -> "ExperienceState":
        """Return what `save` has written; `prompt(ordinal, place)` is the prompt of a question (`PromptCursor.prompt`).

        Raises:
            CheckpointBroken: the files hold something else.
        """
        try:
            return cls._loaded(folder, prompt)
        except UNREADABLE as error:
            what = f"{type(error).__name__}: {error}"
            raise CheckpointBroken(f"{folder}: the groups alive cannot be read ({what})") from error

    @classmethod
    def _loaded(cls, folder: Path, prompt: Callable[[int, int], Prompt]) -> "ExperienceState":
        content = parse_json(read_bytes(folder / "experience.json", MAX_STATE_BYTES))
        file = folder / "experience.safetensors"
        if not is_regular(file):
            raise ValueError(f"{file.name} is not a regular file")
        arrays, begin = load_file(file), 0
        alive: dict[int, Group | UnfinishedGroup] = {}
        for row in content.pop("groups"):
            number, ordinal, place, resampled = (_count(row, name) for name in GROUP_NUMBERS)
            asked = prompt(ordinal, place)
            if row["samples"] is None:
                alive[number] = UnfinishedGroup(asked, resampled)
                continue
            is_order_known = not any(map(_has_unknown_order, row["samples"]))
            samples = []
            for sample in row["samples"]:
                end = begin + _count(sample, "tokens")
                if any(len(array) < end for array in arrays.values()):
                    raise ValueError(f"group {number} has more tokens than {file.name} holds")
                sample.pop("tokens")
                own = {name: array[begin:end] for name, array in arrays.items()}
                samples.append(_sample(asked, sample, own))
                begin = end
            if not is_order_known:
                alive[row["number"]] = UnfinishedGroup(asked, row["resampled"])
                continue
            baseline = VERDICT.validate_python(row["baseline"])
            alive[number] = Group(
                asked, tuple(samples), _count(row, "admitted_version"), number, baseline, resampled
            )
        _count(content, "step")
        _count(content, "admitted")
        return cls(**content, alive=alive)


def _count(row: Mapping[str, Any], name: str) -> int:
    """Return a number of the row that counts something; a negative one would be taken from the end of a list."""
    value = row[name]
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} is {value!r:.50}, which is no count")
    return value


def _group_row(number: int, group: Group | UnfinishedGroup) -> dict[str, Any]:
    row: dict[str, Any] = {"number": number, "resampled": group.resampled, "samples": None}
    row |= {"ordinal": group.prompt.ordinal, "question": group.prompt.question}
    if isinstance(group, Group):
        row["admitted_version"] = group.admitted_version
        row["baseline"] = VERDICT.dump_python(group.baseline, mode="json")
        row["samples"] = [_sample_row(sample) for sample in group.samples]
    return row


def _sample_row(sample: Sample) -> dict[str, Any]:
    completion = sample.completion
    return {
        "tokens": len(completion),
        "finish_reason": completion.finish_reason.value,
        "text": completion.text,
        "member": completion.member,
        "turns": [vars(turn) | {"before": turn.before.tolist()} for turn in completion.turns],
        "outcome": OUTCOME.dump_python(completion.outcome, mode="json"),
        "verdict": VERDICT.dump_python(sample.verdict, mode="json"),
    }


def _has_unknown_order(row: Mapping[str, Any]) -> bool:
    """Decide whether a sample's turns may not stand in time: older versions saved several sequences without times."""
    turns = row["turns"]
    return any("number" not in turn for turn in turns) and sum(turn["fresh"] for turn in turns) > 1


def _sample(prompt: Prompt, row: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> Sample:
    reason, verdict = FinishReason(row.pop("finish_reason")), VERDICT.validate_python(row.pop("verdict"))
    assert verdict is not None  # only a group may lack its baseline's
    turns = (Turn(**turn | {"before": np.asarray(turn["before"], np.int32)}) for turn in row.pop("turns"))
    row |= {"turns": tuple(turns), "outcome": OUTCOME.validate_python(row["outcome"])}
    of_completion: dict[str, Any] = {name: arrays.get(name) for name in COMPLETION_ARRAYS}
    of_sample: dict[str, Any] = {name: arrays.get(name) for name in SAVED_SAMPLE_ARRAYS}
    return Sample(prompt, Completion(**of_completion, **row, finish_reason=reason), verdict, **of_sample)
