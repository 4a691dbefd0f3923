"""What the rollout side goes on with after a resume: the groups alive, as JSON and safetensors.

A finished group is kept as it is. One under way is asked for again from its beginning, with the seeds that it had: fresh
draws would be short more often than the long completions that they replace.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter
from safetensors.numpy import load_file, save_file

from async_grpo.types import Completion, FinishReason, Group, Prompt, Sample, Verdict

COMPLETION_ARRAYS = ("token_ids", "logprobs", "versions", "char_ends")
SAMPLE_ARRAYS = ("ref_logprobs", "proximal_logprobs")
VERDICT = TypeAdapter(Verdict | None)


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
        finished = [group for group in self.alive.values() if isinstance(group, Group)]
        samples = [sample for group in finished for sample in group.samples]
        content = {
            **{name: getattr(self, name) for name in ("step", "admitted", "cursor")},
            "groups": [_group_row(number, group) for number, group in self.alive.items()],
        }
        (folder / "experience.json").write_text(json.dumps(content), encoding="utf-8")
        arrays = {
            name: [getattr(sample.completion, name) for sample in samples] for name in COMPLETION_ARRAYS
        }
        arrays |= {name: [getattr(sample, name) for sample in samples] for name in SAMPLE_ARRAYS}
        # All samples of a run have one, or none has
        joined = {
            name: np.concatenate(parts) for name, parts in arrays.items() if parts and parts[0] is not None
        }
        save_file(joined, folder / "experience.safetensors")

    @classmethod
    def load(cls, folder: Path, prompt: Callable[[int, int], Prompt]) -> "ExperienceState":
        """What `save` has written; `prompt(ordinal, place)` is the prompt of a question (`PromptCursor.prompt`)."""
        content = json.loads((folder / "experience.json").read_text(encoding="utf-8"))
        arrays, begin = load_file(folder / "experience.safetensors"), 0
        alive: dict[int, Group | UnfinishedGroup] = {}
        for row in content.pop("groups"):
            asked = prompt(row["ordinal"], row["question"])
            if row["samples"] is None:
                alive[row["number"]] = UnfinishedGroup(asked, row["resampled"])
                continue
            samples = []
            for sample in row["samples"]:
                end = begin + sample["tokens"]
                samples.append(
                    _sample(asked, sample, {name: array[begin:end] for name, array in arrays.items()})
                )
                begin = end
            baseline = VERDICT.validate_python(row["baseline"])
            alive[row["number"]] = Group(
                asked, tuple(samples), row["admitted_version"], row["number"], baseline, row["resampled"]
            )
        return cls(**content, alive=alive)


def _group_row(number: int, group: Group | UnfinishedGroup) -> dict[str, Any]:
    prompt = group.prompt
    row = {
        "number": number,
        "ordinal": prompt.ordinal,
        "question": prompt.question,
        "resampled": group.resampled,
    }
    if isinstance(group, UnfinishedGroup):
        return row | {"samples": None}
    return row | {
        "admitted_version": group.admitted_version,
        "baseline": VERDICT.dump_python(group.baseline, mode="json"),
        "samples": [
            {
                "tokens": len(sample.completion),
                "finish_reason": sample.completion.finish_reason.value,
                "text": sample.completion.text,
                "member": sample.completion.member,
                "verdict": VERDICT.dump_python(sample.verdict, mode="json"),
            }
            for sample in group.samples
        ],
    }


def _sample(prompt: Prompt, row: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Sample:
    own: dict[str, Any] = {name: arrays.get(name) for name in COMPLETION_ARRAYS}
    completion = Completion(
        **own,
        finish_reason=FinishReason(row["finish_reason"]),
        text=row["text"],
        member=row["member"],
    )
    further: dict[str, Any] = {name: arrays.get(name) for name in SAMPLE_ARRAYS}
    verdict = VERDICT.validate_python(row["verdict"])
    assert verdict is not None  # only a group may lack its baseline's
    return Sample(prompt, completion, verdict, **further)
