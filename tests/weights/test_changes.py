"""The encoding of changed words: exact for every bit pattern, never much larger than the whole, bounded when damaged."""

import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.errors import WeightsDidNotLand
from async_grpo.weights.changes import BLOCK_WORDS, COMPRESSED, RAW_DEFLATE, apply_changes, encode_changes

# NaNs with payloads, both zeros, both infinities, the smallest and the largest numbers, as bfloat16
SPECIAL_WORDS = [0x7FC0, 0x7F81, 0xFFFF, 0x0000, 0x8000, 0x7F80, 0xFF80, 0x0001, 0x7F7F]
WORDS = st.sampled_from(SPECIAL_WORDS) | st.integers(0, 2**16 - 1)


def as_bytes(words: list[int] | np.ndarray) -> np.ndarray:
    return np.array(words, "<u2").view(np.uint8)


def assert_exact(base: np.ndarray, new: np.ndarray, compress: bool = False) -> int:
    """Apply the changes to a copy of the base, and return their size."""
    changes = encode_changes(base, new, compress=compress)
    assert changes.num_changed == int((base.view("<u2") != new.view("<u2")).sum())
    result = base.copy()
    apply_changes(result, changes.payload)
    assert result.tobytes() == new.tobytes()
    return len(changes.payload)


@settings(max_examples=300, deadline=None)
@given(pairs=st.lists(st.tuples(WORDS, WORDS), max_size=60), compress=st.booleans())
def test_any_words_become_any_other_words(pairs, compress):
    assert_exact(as_bytes([base for base, _ in pairs]), as_bytes([new for _, new in pairs]), compress)


@settings(max_examples=60, deadline=None)
@given(
    num_words=st.integers(0, 3 * BLOCK_WORDS + 5),
    changes=st.dictionaries(st.integers(0, 3 * BLOCK_WORDS + 4), WORDS, max_size=20),
)
def test_few_changes_anywhere_cost_four_bytes_each_and_four_for_each_block(num_words, changes):
    base = np.random.default_rng(0).integers(0, 2**16, num_words).astype("<u2")
    new = base.copy()
    inside = {position: word for position, word in changes.items() if position < num_words}
    new[list(inside)] = list(inside.values())
    size = assert_exact(base.view(np.uint8), new.view(np.uint8))
    assert size <= 4 * -(-num_words // BLOCK_WORDS) + 4 * len(inside)


@pytest.mark.parametrize("num_words", [1, 2, BLOCK_WORDS - 1, BLOCK_WORDS, BLOCK_WORDS + 1, 5 * BLOCK_WORDS])
def test_when_everything_changes_the_words_travel_without_positions(num_words):
    base = np.zeros(2 * num_words, np.uint8)
    num_blocks = -(-num_words // BLOCK_WORDS)
    padding = 2 * (num_words % 2)
    assert assert_exact(base, base + 1) == 2 * num_words + 4 * num_blocks + padding


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.003, 0.3, 0.49, 0.51, 0.97])
def test_any_share_of_changes_is_exact(share, compress):
    random = np.random.default_rng(1)
    base = random.integers(0, 256, 6 * BLOCK_WORDS + 10).astype(np.uint8)
    is_changed = random.random(len(base) // 2) < share
    new = np.where(is_changed, base.view("<u2") ^ 0x8000, base.view("<u2")).view(np.uint8)
    assert_exact(base, new, compress)


# -- compressed blocks


def float32_bytes(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32).view(np.uint8)


@pytest.mark.parametrize("num_values", [1, 1000, BLOCK_WORDS // 2, BLOCK_WORDS + 1, 2 * BLOCK_WORDS + 7])
def test_small_steps_of_float32_values_are_exact_and_smaller_when_compressed(num_values):
    """A step of 2e-5 changes values near 0.02 by 2**13 units in the last place: 15 of 32 bits with the sign."""
    random = np.random.default_rng(0)
    values = random.uniform(-0.0417, 0.0417, num_values)
    base = float32_bytes(values)
    new = float32_bytes(values + 2e-5 * random.normal(size=num_values))
    size = assert_exact(base, new, compress=True)
    assert size <= assert_exact(base, new)
    if num_values > 1000:
        assert 15 / 32 < size / len(new) < 0.62


def test_noise_travels_whole_because_compression_would_not_make_it_smaller():
    random = np.random.default_rng(0)
    base, new = random.integers(0, 256, (2, 2 * BLOCK_WORDS)).astype(np.uint8)
    assert assert_exact(base, new, compress=True) == len(new) + 4


def compressed_payload() -> tuple[np.ndarray, np.ndarray]:
    """A base of two blocks, and changes of which the first block is compressed."""
    base = np.zeros(4 * BLOCK_WORDS, np.uint8)
    new = base.copy()
    new[: 2 * BLOCK_WORDS] = 1
    payload = encode_changes(base, new, compress=True).payload
    assert payload[3] == 0x80 and payload[:2].view("<u2") < 1000
    return base, payload


@pytest.mark.parametrize("position", range(8, 40))
def test_a_damaged_compressed_block_is_refused_or_noticed_by_the_digest_and_never_written_beyond(position):
    base, payload = compressed_payload()
    assert position < len(payload)
    damaged = payload.copy()
    damaged[position] ^= 0xFF
    words = base.copy()
    try:
        apply_changes(words, damaged)
    except WeightsDidNotLand as error:
        assert "damaged" in str(error)
    assert not words[2 * BLOCK_WORDS :].any()


def test_a_compressed_block_that_grows_beyond_its_size_or_ends_early_is_refused():
    base, payload = compressed_payload()
    for num_bytes in (100 << 20, 2 * BLOCK_WORDS + 1, 2 * BLOCK_WORDS - 1, 0):
        compressor = zlib.compressobj(wbits=RAW_DEFLATE)
        stream = compressor.compress(bytes(num_bytes)) + compressor.flush()
        stream += bytes(-len(stream) % 4)
        counts = np.array([COMPRESSED + len(stream) // 2, 0], "<u4").view(np.uint8)
        with pytest.raises(WeightsDidNotLand, match="compressed changes of weights are damaged"):
            apply_changes(base, np.concatenate([counts, np.frombuffer(stream, np.uint8)]))
    cut_off = payload.copy()
    cut_off[:4] = np.array([COMPRESSED + 2], "<u4").view(np.uint8)
    with pytest.raises(WeightsDidNotLand, match="damaged"):
        apply_changes(base, cut_off[:12])


def test_values_that_compare_equal_or_unequal_as_numbers_are_compared_as_bits():
    base = torch.tensor([0.0, float("nan"), 1.0], dtype=torch.bfloat16).view(torch.int16).numpy()
    new = torch.tensor([-0.0, float("nan"), 1.0], dtype=torch.bfloat16).view(torch.int16).numpy()
    changes = encode_changes(base.view(np.uint8), new.view(np.uint8))
    assert changes.num_changed == 1  # -0.0 replaces 0.0; the NaN, which differs from itself, stays


def test_damaged_changes_are_refused():
    base = np.zeros(4 * BLOCK_WORDS, np.uint8)
    new = base.copy()
    new[[0, 10, 2 * BLOCK_WORDS]] = 1
    payload = encode_changes(base, new).payload
    for size in (0, 3, 8, len(payload) - 2, len(payload) - 1):
        with pytest.raises(WeightsDidNotLand, match="cut off|damaged"):
            apply_changes(base.copy(), payload[:size])
    with pytest.raises(WeightsDidNotLand, match="damaged"):
        apply_changes(base.copy(), np.concatenate([payload, payload[:2]]))
    too_many = payload.copy()
    too_many[:4] = 255  # a count beyond its block, which must not lead to a huge allocation
    with pytest.raises(WeightsDidNotLand, match="damaged"):
        apply_changes(base.copy(), too_many)


def test_a_position_outside_of_a_short_last_block_is_refused():
    base = np.zeros(20, np.uint8)
    new = base.copy()
    new[0] = 1
    payload = encode_changes(base, new).payload
    payload[4:6] = 255
    with pytest.raises(WeightsDidNotLand, match="name a position outside"):
        apply_changes(base, payload)
