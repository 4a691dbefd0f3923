"""Which tokens are observations: what the environment wrote after the first turn of a sequence that is trained on."""

from dataclasses import replace

import numpy as np

from async_grpo.experience.packing import pack
from async_grpo.testing import completion
from async_grpo.training.observations import observation_mask
from async_grpo.types import Prompt, RewardStatus, Sample, Turn, Verdict


def trajectory(turns):
    """A sample that is trained on, of turns (the environment's tokens, number of sampled tokens, begins a sequence)."""
    length = sum(num_tokens for _, num_tokens, _ in turns)
    written = [Turn(np.array(before, np.int32), number, fresh) for before, number, fresh in turns]
    return Sample(
        Prompt(0, np.zeros(3, np.int32), {}),
        replace(completion(length, 0), turns=tuple(written)),
        Verdict(RewardStatus.OK, 1.0),
        np.ones(length, np.float32),
        np.ones(length, bool),
    )


def observed(batch, is_trained):
    return batch.input_ids[observation_mask(batch, is_trained)].tolist()


def test_observations_are_the_texts_between_the_turns_and_not_the_prompt_nor_a_rewritten_history():
    sample = trajectory(
        [([50, 51], 2, True), ([60], 1, False), ([70, 71, 72], 3, True), ([80, 81], 1, False)]
    )
    batch = pack(sample.sequences)
    assert batch.num_sequences == 2
    assert observed(batch, batch.loss_mask) == [60, 80, 81]


def test_a_sequence_without_a_trained_token_has_no_observations_wherever_it_is_packed():
    sample = trajectory([([50, 51], 2, True), ([60], 1, False)])
    (sequence,) = sample.sequences
    masked = replace(sequence, loss_mask=np.zeros(3, bool))
    for sequences in ([masked], [masked, sequence], [sequence, masked, sequence]):
        batch = pack(sequences)
        assert observed(batch, batch.loss_mask) == [60] * sum(s is sequence for s in sequences)


def test_a_sampled_token_that_is_left_out_of_the_loss_is_no_observation():
    (sequence,) = trajectory([([50, 51], 2, True), ([60], 1, False)]).sequences
    batch = pack([replace(sequence, loss_mask=np.array([True, False, False]))])
    assert observed(batch, batch.loss_mask) == [60]


def test_samples_without_an_environment_have_none():
    plain = replace(trajectory([([5], 2, True)]), completion=completion(2, 0))
    batch = pack([plain, plain])
    assert observed(batch, batch.loss_mask) == []
