"""Requests with images: one placeholder per image for vLLM, the comparison of the expanded ids, and the masks."""

import numpy as np
import pytest

from async_grpo.allowed_tokens import ALL_TOKENS, AllowedTokens, packed_mask, unpacked_mask
from async_grpo.errors import ImagesDiffer
from async_grpo.inference.image_requests import check_expanded, unexpanded, without_tokens
from async_grpo.types import ImageReference

IMAGES = [ImageReference("a", "a", 2), ImageReference("b", "b", 3)]
PLACEHOLDER = 9


def test_ids_that_are_not_expanded_or_expanded_twice_are_refused_before_vllm_reads_them():
    for ids in ([1, 9, 2, 9], [1, *[9] * 4, 2, *[9] * 9]):
        with pytest.raises(ImagesDiffer, match="expanded twice, or not at all"):
            unexpanded(ids, IMAGES, PLACEHOLDER)


def test_images_that_follow_each_other_directly_keep_one_placeholder_each():
    assert unexpanded([9, 9, 9, 9, 9, 4], IMAGES, PLACEHOLDER) == [9, 9, 4]


def test_a_difference_of_the_expanded_ids_is_shown():
    check_expanded([1, 9, 9, 4], [1, 9, 9, 4])
    with pytest.raises(
        ImagesDiffer, match=r"of 5 tokens, the trainer of 4; they differ from token 3 on: \[9, 4\] and \[4\]"
    ):
        check_expanded([1, 9, 9, 9, 4], [1, 9, 9, 4])


@pytest.mark.parametrize("vocab_size", [64, 70, 100])
def test_excluded_tokens_are_in_no_mask(vocab_size):
    excluded = [3, vocab_size - 1]
    masks = without_tokens(None, 4, excluded, vocab_size)
    bits = np.unpackbits(unpacked_mask(masks.masks[0], vocab_size), bitorder="little")[:vocab_size]
    assert masks.indices.tolist() == [0, 0, 0, 0]
    assert np.flatnonzero(bits == 0).tolist() == excluded


def test_excluded_tokens_are_taken_out_of_the_masks_of_a_grammar():
    vocab_size = 70
    allowed_bits = np.zeros(96, np.uint8)
    allowed_bits[[1, 3, 5]] = 1
    grammar = AllowedTokens(
        np.array([ALL_TOKENS, 0], np.int32), (packed_mask(np.packbits(allowed_bits, bitorder="little")),)
    )
    masks = without_tokens(grammar, 2, [3], vocab_size)
    for index, expected in zip(masks.indices, (69, 2), strict=True):
        bits = np.unpackbits(unpacked_mask(masks.masks[index], vocab_size), bitorder="little")[:vocab_size]
        assert bits.sum() == expected and not bits[3]
