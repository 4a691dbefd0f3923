"""The folder of a run that was recorded, with what completions one likes: written by the library's own code."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from async_grpo.data import TINY_MODEL
from async_grpo.experience.packing import pack
from async_grpo.experience.step_metrics import readable_samples
from async_grpo.messages import StepEnd
from async_grpo.metrics.writer import METRICS_FILE, PARAMS_FILE, as_json
from async_grpo.training.record import Recorder
from async_grpo.types import (
    AdapterResult,
    Completion,
    FinishReason,
    Group,
    Prompt,
    RewardStatus,
    Sample,
    Verdict,
)

END = 258  # <|im_end|>
RATIO = 0.25  # ln trainer / engine, at every trained token


def sample(tokenizer: Any, prompt: Prompt, member: int, text: str, step: int) -> Sample:
    """Its first half is of the policy before; its first token is not trained."""
    ids = np.array([*tokenizer.encode(text, add_special_tokens=False), END], np.int32)
    versions = np.where(np.arange(len(ids)) < len(ids) // 2, step + 2, step + 3).astype(np.int32)
    reward = (member % 3) / 2
    result = AdapterResult("countdown", RewardStatus.OK, reward, {"format": 0.1}, reason=f"said {text[:20]}")
    completion = Completion(
        token_ids=ids,
        logprobs=-np.linspace(0.0, 4.0, len(ids), dtype=np.float32),
        versions=versions,
        finish_reason=FinishReason.STOP,
        text=tokenizer.decode(ids[:-1], skip_special_tokens=False),
        member=member,
    )
    assert completion.text == text
    return Sample(
        prompt=prompt,
        completion=completion,
        verdict=Verdict(RewardStatus.OK, reward, (result,)),
        advantages=np.full(len(ids), reward - 0.5, np.float32),
        loss_mask=np.arange(len(ids)) > 0,
        group_tokens=len(ids),
    )


def write_run(folder: Path, steps: Sequence[Sequence[Sequence[str]]], alarms: Sequence[str] = ()) -> Path:
    """`steps`: of each step its groups, of each group the completions. Two micro-batches a step, one rank."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, ordinal = AutoTokenizer.from_pretrained(TINY_MODEL), 0
    rows, messages, logprobs = [], [], []
    for step, texts_of_groups in enumerate(steps):
        groups = []
        for texts in texts_of_groups:
            prompt = Prompt(
                ordinal, np.array([1, 2, 3], np.int32), {"input": f"question {ordinal}?", "answer": "7"}
            )
            members = [sample(tokenizer, prompt, member, text, step) for member, text in enumerate(texts)]
            groups.append(Group(prompt, tuple(members), step, ordinal))
            ordinal += 1
        trained = [one for group in groups for one in group.samples]
        batches = [pack(part) for part in (trained[::2], trained[1::2]) if part]
        rows += [{"step": step + 1, **row} for row in readable_samples(groups)]
        messages += [*batches, StepEnd(step, len(groups), len(trained), {})]
        logprobs += [*(batch.behaviour_logprobs + np.float32(RATIO) for batch in batches), None]
    recorder = Recorder(SimpleNamespace(start=None, next_message=lambda rank: messages.pop(0)), folder, 1, {})
    for own in logprobs:
        recorder.next_message(0)
        if own is not None:
            recorder.keep_logprobs(torch.from_numpy(own)[None])
    lines = [{"step": step + 1, "alarms": list(alarms)} for step in range(len(steps))]
    (folder / METRICS_FILE).write_text("".join(map(as_json, lines)), encoding="utf-8")
    (folder / "samples.jsonl").write_text("".join(map(as_json, rows)), encoding="utf-8")
    options = {"dump_samples_filename": "samples.jsonl", "model_name_or_path": str(TINY_MODEL)}
    settings = {"settings": {"stop_token_ids": [END]}}
    (folder / PARAMS_FILE).write_text(json.dumps(options | settings), encoding="utf-8")
    return folder
