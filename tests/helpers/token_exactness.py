"""The check that what is packed for training is what the engine saw and sampled, token by token."""

import numpy as np
from chat_templates import Talkative

from async_grpo.experience.packing import pack
from async_grpo.types import RewardStatus, Sample, Verdict


def trained(prompt, completion) -> Sample:
    """Return a sample of which every sampled token is trained on."""
    size = len(completion)
    values = np.ones(size, np.float32)
    return Sample(prompt, completion, Verdict(RewardStatus.OK, 1.0), values, np.ones(size, bool), size)


def check(generation: Talkative, completion, prompt) -> int:
    """Check that each request is found once, whole, in what is packed; return the number of sequences."""
    sequences = trained(prompt, completion).sequences
    batch = pack(sequences)
    found = []
    for begin, end in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
        ids, mask, versions = (of[begin:end] for of in (batch.input_ids, batch.loss_mask, batch.versions))
        # Turns by their versions, which the fake counts up: holes between them may be empty
        for version in np.unique(versions[mask]):
            places = np.flatnonzero(mask & (versions == version))
            assert (np.diff(places) == 1).all()
            found.append((ids[: places[0]], ids[places], versions[places]))
    assert len(found) == len(generation.requests)
    for found_one, asked in zip(sorted(found, key=lambda one: one[2][0]), generation.requests, strict=True):
        for one, other in zip(found_one, asked, strict=True):
            np.testing.assert_array_equal(one, other)
    assert int(batch.loss_mask.sum()) == sum(len(sampled) for _, sampled, _ in generation.requests)
    return len(sequences)
