"""The packed forward against transformers' own eager attention, one sequence at a time."""

import copy
import inspect
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_policy import VOCAB, tiny_model
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from async_grpo.errors import ConfigurationError
from async_grpo.modeling import packed as packed_module
from async_grpo.modeling.packed import Packing, packed_attention, rows_of_beginnings
from async_grpo.modeling.policy import PolicyModel

MODEL = tiny_model()
EAGER = copy.deepcopy(MODEL)
EAGER.set_attn_implementation("eager")
POLICY = PolicyModel(MODEL)


def eager_logprobs(model, ids, temperature=1.0):
    """(L,) log-probs of one unpacked sequence; the first is 0."""
    with torch.no_grad():
        logits = model(ids[None]).logits[0].float() / temperature
    spoken = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return torch.cat([torch.zeros(1), spoken])


def packed(policy, sequences, temperature=1.0):
    ids, bounds = torch.cat(sequences), np.cumsum([0, *map(len, sequences)])
    everything = torch.ones(len(ids), dtype=torch.bool)
    logprobs, entropies = policy(ids, torch.tensor(bounds), everything, temperature)
    return logprobs.split([len(s) for s in sequences]), entropies


def alike(sequences, beginnings):
    """The sequences, each of which begins as the first one does for so many tokens."""
    return [
        torch.cat([sequences[0][:n], s[n:]])[: len(s)] for s, n in zip(sequences, beginnings, strict=True)
    ]


def random_ids(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (length,), generator=generator) for length in lengths]


@given(
    shapes=st.lists(st.tuples(st.integers(1, 70), st.integers(0, 40)), min_size=1, max_size=12),
    temperature=st.sampled_from([0.6, 1.0, 1.7]),
)
@settings(max_examples=25, deadline=None)
def test_packed_logprobs_equal_those_of_each_sequence_alone(shapes, temperature):
    lengths, beginnings = zip(*shapes, strict=True)
    sequences = alike(random_ids(lengths), beginnings)
    logprobs, _ = packed(POLICY, sequences, temperature)
    for ids, got in zip(sequences, logprobs, strict=True):
        torch.testing.assert_close(got, eager_logprobs(EAGER, ids, temperature), atol=1e-5, rtol=1e-5)


@given(st.lists(st.integers(1, 70), min_size=1, max_size=9))
@settings(max_examples=25, deadline=None)
def test_attention_of_each_token_is_that_of_its_sequence_alone_to_the_last_token(lengths):
    query, key, value = torch.randn(3, 1, 2, sum(lengths), 4)
    with_last = torch.tensor([0, *(length + 1 for length in lengths)]).cumsum(0)  # which is no input
    packing = Packing(torch.arange(with_last[-1]), with_last)
    output, _ = packed_attention(torch.nn.Module(), query, key, value, None, packing=packing)
    sequences = zip(*(one.split(lengths, dim=2) for one in (query, key, value)), strict=True)
    alone = [torch.nn.functional.scaled_dot_product_attention(*one, is_causal=True) for one in sequences]
    torch.testing.assert_close(output, torch.cat(alone, dim=2).transpose(1, 2))


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=9))
def test_tokens_share_their_states_exactly_where_all_up_to_them_is_equal(sequences):
    """Sequences of two different tokens: many begin alike."""
    ids, bounds = np.concatenate(sequences), np.cumsum([0, *map(len, sequences)])
    beginnings = [tuple(s[: t + 1]) for s in sequences for t in range(len(s))]
    rows = rows_of_beginnings(ids, bounds)
    assert sorted(set(rows)) == list(range(len(set(beginnings))))
    assert len(set(zip(rows, beginnings, strict=True))) == len(set(beginnings))


def test_the_prompt_of_a_group_is_computed_once():
    """And what few sequences have in common is not: it would not pay."""
    widths = []
    layer = MODEL.model.layers[0].mlp
    hook = layer.register_forward_pre_hook(lambda module, inputs: widths.append(inputs[0].shape[1]))
    members = [torch.arange(40) + 7 * i for i in range(8)]  # below VOCAB
    packed(POLICY, alike(members, [30] * 8))
    packed(POLICY, alike(members, [1] * 8))
    hook.remove()
    assert widths == [30 + 8 * 9, 8 * 39]  # and of no last token anything


def test_many_key_value_heads_and_an_untied_head_work_too():
    torch.manual_seed(0)
    sizes = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    heads = dict(num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=False)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    sequences = random_ids([5, 20])
    for ids, got in zip(sequences, packed(PolicyModel(model), sequences)[0], strict=True):
        torch.testing.assert_close(got, eager_logprobs(eager, ids), atol=1e-5, rtol=1e-5)


def test_only_the_positions_asked_for_are_computed_and_first_tokens_never():
    ids = torch.cat(random_ids([6, 5]))
    mask = torch.zeros(11, dtype=torch.bool)
    mask[[0, 2, 6, 10]] = True  # 0 and 6 begin a sequence
    bounds = torch.tensor([0, 6, 11])
    some, _ = POLICY(ids, bounds, mask, 1.0)
    every, _ = POLICY(ids, bounds, torch.ones_like(mask), 1.0)
    assert some.nonzero().flatten().tolist() == [2, 10]
    torch.testing.assert_close(some[[2, 10]], every[[2, 10]])


def test_sliding_windows_and_dropout_are_refused():
    window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    with pytest.raises(ConfigurationError, match="sliding_window 8"):
        PolicyModel(tiny_model(**window))
    mistral = MistralConfig(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=1, num_attention_heads=2)
    mistral.sliding_window, mistral.intermediate_size, mistral.num_key_value_heads = 16, 64, 1
    with pytest.raises(ConfigurationError, match="full attention"):
        PolicyModel(MistralForCausalLM(mistral))
    with pytest.raises(ConfigurationError, match=r"dropout 0\.1"):
        PolicyModel(tiny_model(attention_dropout=0.1))


def attention_of_torch_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)
):
    """The signature of torch 2.11's kernel, which has no `enable_gqa`; it is computed by the CPU's own attention."""
    assert window_size == (-1, 0) and max_q == max_k and torch.equal(cu_seq_q, cu_seq_k)
    outputs = []
    for begin, end in itertools.pairwise(cu_seq_q.tolist()):
        parts = [states[begin:end].transpose(0, 1)[None] for states in (query, key, value)]
        output = scaled_dot_product_attention(*parts, is_causal=True, scale=scale, enable_gqa=True)
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


def attention_of_torch_2_13(*inputs, scale=None, window_size=(-1, -1), enable_gqa=False):
    assert enable_gqa
    return attention_of_torch_2_11(*inputs, scale=scale, window_size=window_size)


@pytest.mark.parametrize("kernel", [attention_of_torch_2_11, attention_of_torch_2_13])
def test_the_kernel_of_each_torch_is_called_with_arguments_that_it_has(monkeypatch, kernel):
    """On a GPU the kernel computes the attention; here a stand-in with the signature of that torch does."""
    monkeypatch.setattr(packed_module, "flash_attn_varlen_func", None)
    monkeypatch.setattr(packed_module, "varlen_attn", kernel)
    torch.manual_seed(0)
    packing = Packing(torch.arange(11), torch.tensor([0, 4, 11]))
    query, key, value = (torch.randn(1, heads, 9, 8) for heads in (4, 2, 2))
    expected, _ = packed_attention(torch.nn.Module(), query, key, value, None, packing=packing)
    states = [part[0].transpose(0, 1) for part in (query, key, value)]
    output = packed_module._attend_with_kernel(*states, packing, None)
    torch.testing.assert_close(output[None], expected)


def test_the_installed_kernel_has_all_arguments_that_it_is_called_with():
    kernel = packed_module.varlen_attn
    assert {"scale", *packed_module.varlen_options(kernel)} <= inspect.signature(kernel).parameters.keys()
