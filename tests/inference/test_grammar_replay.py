"""Masks of a finished completion: they are those of a plain matcher, and their memory is limited."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xgrammar
from chat_templates import MODEL
from grammar_masks import table_of
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from async_grpo.errors import RequestRefused
from async_grpo.inference import grammar_replay
from async_grpo.inference.grammar_replay import GrammarReplay

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"enum": ["yes", "no"]}, "note": {"type": "string"}},
    "required": ["ok", "note"],
    "additionalProperties": False,
}
GRAMMAR = json.dumps({"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SCHEMA}})
ANSWER = '{"ok": "yes", "note": "a\\"b<|im_start|>"}'


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


def replay(tokenizer, token_ids: list[int], finish_reason: str = "stop", grammar: str = GRAMMAR) -> Any:
    """Return the allowed tokens of a completion, by a replay with an engine that only has settings."""
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(
            get_vocab_size=lambda: len(tokenizer), hf_config=SimpleNamespace(model_type="qwen2")
        ),
        structured_outputs_config=SimpleNamespace(disable_any_whitespace=False),
        speculative_config=None,
    )
    engine: Any = SimpleNamespace(
        vllm_config=vllm_config,
        model_config=SimpleNamespace(try_get_generation_config=dict),
        renderer=SimpleNamespace(get_eos_token_id=lambda: tokenizer.eos_token_id),
    )
    outputs = StructuredOutputsParams(structural_tag=grammar) if grammar else None
    params = SamplingParams(structured_outputs=outputs)
    request: Any = SimpleNamespace(params=params, has_grammar=bool(grammar))
    output: Any = SimpleNamespace(token_ids=token_ids, finish_reason=finish_reason)
    return asyncio.run(GrammarReplay(engine, tokenizer).allowed_tokens(request, output))


def ids_of(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("num_left_out", [0, 1, 20])
def test_masks_are_those_of_a_plain_matcher_also_if_the_answer_was_cut_off(tokenizer, num_left_out):
    token_ids = [*ids_of(tokenizer, ANSWER), tokenizer.eos_token_id]
    token_ids = token_ids[: len(token_ids) - num_left_out]
    allowed = replay(tokenizer, token_ids, "length" if num_left_out else "stop")

    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
    matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(info).compile_structural_tag(GRAMMAR))
    bits = xgrammar.allocate_token_bitmask(1, len(tokenizer))
    table = np.ones((len(token_ids), len(tokenizer)), bool)
    for position, token_id in enumerate(token_ids):
        matcher.fill_next_token_bitmask(bits, 0)
        row = np.unpackbits(bits.numpy()[0].view(np.uint8), bitorder="little")
        table[position] = row[: len(tokenizer)]
        assert matcher.accept_token(token_id)
    np.testing.assert_array_equal(table_of(allowed, len(token_ids), len(tokenizer)), table)
    assert len(allowed.masks) < len(token_ids), "positions with equal masks share one"


def test_the_end_token_is_allowed_behind_the_answer_and_not_inside_a_text(tokenizer):
    token_ids = [*ids_of(tokenizer, ANSWER), tokenizer.eos_token_id]
    table = table_of(replay(tokenizer, token_ids), len(token_ids), len(tokenizer))
    assert table[-1, tokenizer.eos_token_id] and not table[:-1, tokenizer.eos_token_id].any()
    with pytest.raises(RuntimeError, match="does not allow the sampled token"):
        replay(tokenizer, [*ids_of(tokenizer, '{"ok": "yes", "note": "a'), tokenizer.eos_token_id])


def test_without_a_grammar_all_tokens_were_allowed(tokenizer):
    assert replay(tokenizer, ids_of(tokenizer, "hm"), grammar="") is None


def test_masks_that_need_too_much_memory_refuse_the_request(tokenizer, monkeypatch):
    monkeypatch.setattr(grammar_replay, "MAX_MASK_BYTES", 50)
    with pytest.raises(RequestRefused, match="more than 50 bytes; simplify the schema"):
        replay(tokenizer, ids_of(tokenizer, ANSWER))


def test_a_request_that_the_engine_ended_with_an_error_is_refused(tokenizer):
    with pytest.raises(RequestRefused, match="could not compile the grammar, or no token may follow"):
        replay(tokenizer, [], finish_reason="error")
