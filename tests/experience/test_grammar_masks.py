"""Masks of allowed tokens on their way from a completion to a micro-batch, a checkpoint and a record."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from grammar_masks import masks_of, random_table, table_of
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.allowed_tokens import AllowedTokens
from async_grpo.experience.packing import Packer, pack
from async_grpo.experience.state import ExperienceState
from async_grpo.messages import StepEnd
from async_grpo.training.record import Recorder, Recording
from async_grpo.types import Completion, FinishReason, Group, Prompt, RewardStatus, Sample, Turn, Verdict

VOCAB = 45


def random_sample(random: np.random.Generator, ordinal: int) -> Sample:
    """Return a sample of one to three turns in one or two sequences. A turn has a grammar or none."""
    completions = []
    turns = []
    for number in range(random.integers(1, 4)):
        token_ids = random.integers(0, VOCAB, random.integers(1, 6)).astype(np.int32)
        allowed = None
        if random.random() < 0.6:
            allowed = masks_of(random_table(random, token_ids.tolist(), VOCAB))
        completions.append((token_ids, allowed))
        before = random.integers(0, VOCAB, random.integers(1, 5)).astype(np.int32)
        is_fresh = number == 0 or random.random() < 0.3
        turns.append(Turn(before, len(token_ids), fresh=is_fresh, number=number))
    token_ids = np.concatenate([ids for ids, _ in completions])
    allowed = AllowedTokens.joined([masks for _, masks in completions], [len(ids) for ids, _ in completions])
    completion = Completion(
        token_ids=token_ids,
        logprobs=-random.random(len(token_ids)).astype(np.float32),
        versions=np.zeros(len(token_ids), np.int32),
        finish_reason=FinishReason.STOP,
        text="",
        turns=tuple(turns),
        allowed=allowed,
    )
    return Sample(
        Prompt(ordinal, np.empty(0, np.int32), {"input": ""}, question=0),
        completion,
        Verdict(RewardStatus.OK, 1.0),
        advantages=np.ones(len(token_ids), np.float32),
        loss_mask=np.ones(len(token_ids), bool),
        group_tokens=len(token_ids),
    )


def tables_by_logprobs(sample: Sample) -> dict[bytes, np.ndarray]:
    """Return which tokens were allowed at each sampled token, by the bits of its log-prob, which is unique."""
    completion = sample.completion
    table = table_of(completion.allowed, len(completion), VOCAB)
    return {value.tobytes(): row for value, row in zip(completion.logprobs, table, strict=True)}


@given(seed=st.integers(0, 10_000), num_samples=st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_each_token_of_a_micro_batch_has_the_mask_with_which_it_was_sampled(seed, num_samples):
    random = np.random.default_rng(seed)
    samples = [random_sample(random, ordinal) for ordinal in range(num_samples)]
    expected = {}
    packer = Packer(2, 200)
    for sample in samples:
        expected |= tables_by_logprobs(sample)
        for sequence in sample.sequences:
            packer.add(sequence)
    num_seen = 0
    for batches in packer.flush():
        for batch in batches:
            table = table_of(batch.allowed, len(batch.input_ids), VOCAB)
            for token in np.flatnonzero(batch.loss_mask):
                np.testing.assert_array_equal(
                    table[token], expected[batch.behaviour_logprobs[token].tobytes()]
                )
                num_seen += 1
            assert table[~batch.loss_mask].all(), "tokens that were not sampled have no mask"
            if batch.allowed is not None:
                assert len(set(batch.allowed.masks)) == len(batch.allowed.masks)
                assert set(range(len(batch.allowed.masks))) <= set(batch.allowed.indices.tolist())
    assert num_seen == len(expected)


def test_samples_without_a_grammar_have_no_masks():
    random = np.random.default_rng(0)
    sample = random_sample(random, 0)
    sample = replace(sample, completion=replace(sample.completion, allowed=None))
    assert pack(sample.sequences[:1]).allowed is None


def test_masks_of_groups_alive_are_the_same_after_a_checkpoint(tmp_path):
    random = np.random.default_rng(1)
    groups = {}
    for number in range(3):
        samples = tuple(random_sample(random, number) for _ in range(3))
        if number == 1:
            completion = replace(samples[0].completion, allowed=None)
            samples = (replace(samples[0], completion=completion), *samples[1:])
        groups[number] = Group(samples[0].prompt, samples, 0, number)
    assert any(sample.completion.allowed for group in groups.values() for sample in group.samples)
    ExperienceState(0, 3, {}, groups).save(tmp_path)
    loaded = ExperienceState.load(tmp_path, lambda ordinal, _: groups[ordinal].prompt)
    for number, group in groups.items():
        for before, after in zip(group.samples, loaded.alive[number].samples, strict=True):
            tables = [
                table_of(sample.completion.allowed, len(sample.completion), VOCAB)
                for sample in (before, after)
            ]
            np.testing.assert_array_equal(*tables)


def test_masks_of_a_recorded_step_are_the_same_in_its_replay(tmp_path):
    random = np.random.default_rng(2)
    batches = [pack(random_sample(random, ordinal).sequences[:1]) for ordinal in range(4)]
    batches.append(replace(batches[0], allowed=None))
    messages = [*batches, StepEnd(0, 1, 4, {})]
    source = SimpleNamespace(start=None, next_message=lambda rank: messages.pop(0))
    recorder = Recorder(source, tmp_path, 1, {})
    for batch in batches:
        recorder.next_message(0)
        recorder.keep_logprobs(torch.zeros(1, len(batch.input_ids)))
    recorder.next_message(0)
    replay = Recording(tmp_path, 1)
    for batch in batches:
        replayed = replay.next_message(0)
        tables = [table_of(one.allowed, len(batch.input_ids), VOCAB) for one in (batch, replayed)]
        np.testing.assert_array_equal(*tables)
        assert (replayed.allowed is None) == (batch.allowed is None)


@pytest.mark.parametrize("index", [-2, 2])
def test_a_file_whose_token_refers_to_no_mask_is_refused(index):
    arrays = masks_of(~np.eye(2, VOCAB, dtype=bool)).as_arrays()
    arrays["indices"] = np.array([0, index], np.int32)
    with pytest.raises(ValueError, match="does not exist"):
        AllowedTokens.from_arrays(arrays)


@pytest.mark.parametrize("ends", [[5, 3], [1, 10**6], [-1, 4]])
def test_a_file_whose_masks_overlap_or_exceed_it_is_refused(ends):
    arrays = masks_of(~np.eye(2, VOCAB, dtype=bool)).as_arrays()
    arrays["mask_ends"] = np.array(ends)
    with pytest.raises(ValueError, match="wrong lengths"):
        AllowedTokens.from_arrays(arrays)
