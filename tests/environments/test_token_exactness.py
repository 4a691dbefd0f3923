"""The ids trained on are those that the engine saw and sampled, position by position, whatever the chat template does."""

import asyncio
import os
import random

import numpy as np
import pytest
from chat_templates import MODEL, TEMPLATES, Talkative, chat_of, converse
from tiny_policy import pack as pack_by_hand
from tiny_policy import random_sequence
from token_exactness import check, trained
from transformers import AutoTokenizer

from async_grpo.environments.config import TrajectoryLimits
from async_grpo.environments.trajectory import TrajectoryRecorder
from async_grpo.environments.trajectory_client import TrajectoryClient
from async_grpo.experience.packing import pack
from async_grpo.types import Completion, FinishReason, Prompt, RewardStatus, Sample, Turn, Verdict

COUNT = int(os.environ.get("CONVERSATIONS", 400))  # 2,000 of each template are 10,000


@pytest.mark.parametrize("count", [80, pytest.param(COUNT, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("template", TEMPLATES)
def test_what_is_packed_is_what_the_engine_saw_and_sampled(template, count):
    chat = chat_of(template)

    async def all_of_them() -> list[int]:
        return [check(*await converse(chat, random.Random(seed))) for seed in range(count)]

    counts = asyncio.run(all_of_them())
    assert max(counts) > 1  # clients that try again, or tidy: seen in every template
    assert np.mean(np.array(counts) == 1) > 0.2  # and it is no matter of splitting always


async def talk(template: str, said: list[str], answers: list[str]) -> tuple[Talkative, list[Sample]]:
    chat = chat_of(template)
    generation = Talkative(chat, random.Random(0))
    policy = TrajectoryClient(
        generation,
        TrajectoryRecorder(chat),
        Prompt(0, np.empty(0, np.int32), {}),
        0,
        TrajectoryLimits(9, 999, None, 60),
    )
    messages = []
    generation._dice.random = lambda: 0.5  # never cut
    for user, answer in zip(said, answers, strict=True):
        generation._says = lambda answer=answer: answer
        messages.append({"role": "user", "content": user})
        messages.append((await policy.complete(messages)).message)
    completion = policy.trajectory(1.0)
    return generation, trained(policy.prompt, completion).sequences


@pytest.mark.parametrize(
    ("template", "answers", "sequences"),
    [
        ("appends", ["<think>hm</think>one", " two ", "three"], 1),
        ("forgets_thoughts", ["one", "two", "three"], 1),
        ("forgets_thoughts", ["<think>hm</think>one", "two", "three"], 2),
        ("trims", ["one", "two", "three"], 1),
        ("trims", ["one", " two ", "three"], 2),
        (
            "writes_calls_as_json",
            ['<tool_call>{"name":"add",  "arguments": {"a" :1}}</tool_call>', "two", "three"],
            1,
        ),
        ("merges_system", ["one", "two", "three"], 1),
    ],
)
def test_a_history_that_the_template_rewrites_begins_another_sequence_and_no_other_does(
    template, answers, sequences
):
    generation, found = asyncio.run(talk(template, ["a", "b", "c"], answers))
    assert len(found) == sequences
    if (
        sequences == 1
    ):  # the reference: one tokenisation of the whole conversation, where the template keeps it
        tokenizer = AutoTokenizer.from_pretrained(MODEL)
        whole = np.concatenate(generation.requests[-1][:2])
        assert tokenizer.encode(tokenizer.decode(whole)) == whole.tolist() == found[0].token_ids.tolist()
        begins = [len(seen) for seen, _, _ in generation.requests]
        assert begins == sorted(begins)


def test_turns_that_ask_beside_each_other_after_one_history_both_count():
    async def both() -> tuple[Talkative, list[Sample]]:
        chat = chat_of("appends")
        generation = Talkative(chat, random.Random(1))
        prompt = Prompt(0, np.empty(0, np.int32), {})
        policy = TrajectoryClient(
            generation, TrajectoryRecorder(chat), prompt, 0, TrajectoryLimits(9, 999, None, 60)
        )
        messages = [{"role": "user", "content": "a"}]
        messages.append((await policy.complete(messages)).message)
        messages.append({"role": "user", "content": "b"})
        await asyncio.gather(*(policy.complete(messages) for _ in range(3)))
        check(generation, policy.trajectory(1.0), prompt)
        return generation, trained(prompt, policy.trajectory(1.0)).sequences

    generation, sequences = asyncio.run(both())
    assert len(generation.requests) == 4 and len(sequences) == 3


def as_trajectory(parts: list[dict]) -> Sample:
    """Sequences with holes in their masks as what a program would have recorded: runs of sampled tokens are turns."""
    turns, sampled = [], {"ids": [], "advantages": [], "behaviour": [], "ref": []}
    for part in parts:
        edges = np.flatnonzero(np.diff(part["mask"], prepend=False, append=False))
        begins, ends = edges[::2], edges[1::2]
        for number, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            before = part["ids"][ends[number - 1] if number else 0 : begin]
            turns.append(Turn(before.astype(np.int32), int(end - begin), fresh=number == 0))
            for name, column in sampled.items():
                column.append(part[name][begin:end])
    ids, advantages, behaviour, ref = map(np.concatenate, sampled.values())
    size = len(ids)
    tokens = ids.astype(np.int32), behaviour.astype(np.float32), np.zeros(size, np.int32)
    completion = Completion(*tokens, FinishReason.STOP, "", turns=tuple(turns))
    more = {"advantages": advantages.astype(np.float32), "ref_logprobs": ref.astype(np.float32)}
    prompt = Prompt(0, np.array([1, 2, 3], np.int32), {})  # which the program made no use of
    verdict = Verdict(RewardStatus.OK, 1.0)
    return Sample(prompt, completion, verdict, loss_mask=np.ones(size, bool), group_tokens=1, **more)


@pytest.mark.parametrize("seed", range(30))
def test_a_trajectory_is_packed_as_its_sequences_with_holes_would_be_by_hand(seed):
    """Of which `tests/training/test_gradient_exactness.py` shows that two ranks have the gradient of one pass."""
    rng = np.random.default_rng(seed)
    parts = [random_sequence(rng, with_ref=True) for _ in range(8)]
    parts = [part for part in parts if part["mask"].any()]
    for part in parts:  # what follows the last sampled token is in no trajectory
        last = np.flatnonzero(part["mask"])[-1] + 1
        part |= {name: of[:last] for name, of in part.items()}
    found, by_hand = pack(as_trajectory(parts).sequences), pack_by_hand(parts)
    for name in ("input_ids", "cu_seqlens", "loss_mask", "group_ids", "group_tokens"):
        np.testing.assert_array_equal(getattr(found, name), getattr(by_hand, name))
    mask = by_hand.loss_mask
    for name in ("advantages", "behaviour_logprobs", "ref_logprobs"):
        np.testing.assert_array_equal(getattr(found, name)[mask], getattr(by_hand, name)[mask])
