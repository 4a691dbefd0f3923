"""The chunked head against torch's own log_softmax and autograd; and the facts read from a model folder."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_policy import save_tiny_model, tiny_config, tiny_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedTokenizerFast

from async_grpo.errors import ConfigurationError
from async_grpo.modeling import logprobs as module
from async_grpo.modeling.load import context_length, load_causal_lm, model_fingerprint, stop_token_ids
from async_grpo.modeling.logprobs import chunked_logprobs

HIDDEN, VOCAB = 8, 23
USED = {"log-probs": (1, 0), "entropies": (0, 1), "both": (1, 1)}


def head_inputs(tokens, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (
        torch.randn(n, HIDDEN, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
        for n in (tokens, VOCAB)
    )
    bias = torch.randn(VOCAB, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, bias, torch.randint(0, VOCAB, (tokens,), generator=generator)


def unchunked(hidden, weight, bias, targets, temperature):
    logits = (hidden @ weight.T + (0 if bias is None else bias)) / temperature
    distribution = torch.distributions.Categorical(logits=logits)
    return distribution.log_prob(targets), distribution.entropy()


@given(
    tokens=st.integers(1, 20),
    chunk_tokens=st.integers(1, 25),
    temperature=st.sampled_from([0.5, 1.0, 1.3]),
    with_bias=st.booleans(),
    used=st.sampled_from(list(USED)),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_values_and_gradients_do_not_depend_on_the_chunk_size(
    tokens, chunk_tokens, temperature, with_bias, used, seed
):
    hidden, weight, bias, targets = head_inputs(tokens, seed)
    inputs = (hidden, weight, bias) if with_bias else (hidden, weight)
    bias = bias if with_bias else None
    weights = torch.randn(2, tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

    def loss(results):  # a result that is not used is not in the sum at all, not even times 0
        return sum((w * r).sum() for use, w, r in zip(USED[used], weights, results, strict=True) if use)

    expected = unchunked(hidden, weight, bias, targets, temperature)
    expected_grads = torch.autograd.grad(loss(expected), inputs)
    got = chunked_logprobs(hidden, weight, bias, targets, temperature, chunk_tokens)
    got_grads = torch.autograd.grad(loss(got), inputs)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(got_grads, expected_grads, rtol=1e-9, atol=1e-11)


class LogitTensors(TorchDispatchMode):
    """Rows of every tensor of logits (.., VOCAB) that an operation gives."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.ndim == 2 and out.shape[1] == VOCAB:
            self.rows.append(len(out))
        return out


def logit_tensors_of_a_backward(used):
    hidden, weight, bias, targets = head_inputs(20, 0)
    with LogitTensors() as tensors:
        results = chunked_logprobs(hidden, weight, bias, targets, 1.0, 9)
        before = len(tensors.rows)
        sum(result.sum() for use, result in zip(USED[used], results, strict=True) if use).backward()
    assert before > 0 and len(tensors.rows) > before
    assert max(tensors.rows) == 9  # of 20 tokens: never the logits of all
    return len(tensors.rows) - before


def test_logits_exist_for_one_chunk_at_a_time_and_an_entropy_without_a_gradient_costs_nothing():
    assert logit_tensors_of_a_backward("log-probs") < logit_tensors_of_a_backward("both")


class HeadTensors(TorchDispatchMode):
    """Counts the tensors of the head's shape that operations give."""

    def __init__(self):
        super().__init__()
        self.num_tensors = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.num_tensors += isinstance(out, torch.Tensor) and out.shape == (VOCAB, HIDDEN)
        return out


def test_a_frozen_head_as_with_lora_costs_no_tensor_of_its_size_and_the_other_gradients_stay():
    gradients = {}
    counts = {}
    for is_frozen in (False, True):
        hidden, weight, bias, targets = head_inputs(20, 0)
        if is_frozen:
            weight.requires_grad_(False)
            bias.requires_grad_(False)
        logprobs, entropies = chunked_logprobs(hidden, weight, bias, targets, 0.7, 9)
        with HeadTensors() as tensors:
            (logprobs.sum() + entropies.square().sum()).backward()
        gradients[is_frozen] = hidden.grad
        counts[is_frozen] = tensors.num_tensors
        assert is_frozen == (weight.grad is None) == (bias.grad is None)
    assert counts[True] == 0 < counts[False]
    assert torch.equal(gradients[True], gradients[False])


@pytest.mark.parametrize(
    ("dtype", "is_frozen", "num_chunks"),
    [(torch.float32, True, 4), (torch.float32, False, 1), (torch.bfloat16, True, 1)],
)
def test_only_a_frozen_float32_head_is_applied_to_fewer_tokens_than_the_option_says(
    monkeypatch, dtype, is_frozen, num_chunks
):
    """A bfloat16 head is converted to float32 for each chunk, which takes as long as the product with few tokens."""
    monkeypatch.setattr(module, "FROZEN_CHUNK_TOKENS_ON_CPU", 5)
    products = []
    product = module._product

    def counted(left, right):
        products.append(len(left))
        return product(left, right)

    monkeypatch.setattr(module, "_product", counted)
    hidden, weight, _, targets = head_inputs(20, 0, dtype)
    weight.requires_grad_(not is_frozen)
    chunked_logprobs(hidden, weight, None, targets, 0.7, 1024)
    assert len(products) == num_chunks and sum(products) == 20


def test_the_head_s_gradient_on_a_gpu_needs_no_second_tensor_of_its_size(monkeypatch):
    monkeypatch.setattr(module, "PRODUCT_ROWS", 5)
    generator = torch.Generator().manual_seed(0)
    grad_logits, hidden = (torch.randn(9, width, generator=generator).bfloat16() for width in (VOCAB, HIDDEN))
    total = torch.randn(VOCAB, HIDDEN, generator=generator)
    expected = total + grad_logits.float().T @ hidden.float()
    sizes = []

    def product(left, right):
        result = left.float() @ right.float()
        sizes.append(result.numel())
        return result

    monkeypatch.setattr(module, "_product", product)
    module.add_product(total, grad_logits, hidden)
    torch.testing.assert_close(total, expected)
    assert max(sizes) == 5 * HIDDEN and sum(sizes) == total.numel()


def test_bfloat16_inputs_give_float32_logprobs_of_unrounded_logits():
    hidden, weight, bias, targets = head_inputs(12, 0, torch.bfloat16)
    got, entropies = chunked_logprobs(hidden, weight, bias, targets, 0.7, 5)
    assert got.dtype is torch.float32
    exact, _ = unchunked(hidden.double(), weight.double(), bias.double(), targets, 0.7)
    torch.testing.assert_close(got.double(), exact, atol=1e-5, rtol=1e-5)
    (got + entropies).sum().backward()
    assert hidden.grad.dtype is weight.grad.dtype is torch.bfloat16


@pytest.fixture
def folder(tmp_path):
    return save_tiny_model(tmp_path / "model")


def write_tokenizer(folder, words, **special):
    model = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=model, **special).save_pretrained(folder)


def test_a_path_that_is_no_model_says_how_to_get_one(tmp_path):
    with pytest.raises(ConfigurationError, match="is not a folder.*hf download"):
        load_causal_lm("Qwen/Qwen2.5-0.5B", "float32")
    with pytest.raises(ConfigurationError, match="has no config.json"):
        load_causal_lm(tmp_path, "float32")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    with pytest.raises(ConfigurationError, match="cannot be used"):
        load_causal_lm(tmp_path, "float32")
    tiny_config(eos_token_id=None).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="no causal language model can be loaded"):
        load_causal_lm(tmp_path, "float32")
    with pytest.raises(ConfigurationError, match="eos_token_id"):
        stop_token_ids(tmp_path)


def test_stop_ids_are_the_union_of_every_place_that_names_one(folder):
    assert stop_token_ids(folder) == (3,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 3]}))
    write_tokenizer(folder, ["a", "b", "c", "d", "e", "<end>"], eos_token="<end>")
    assert stop_token_ids(folder) == (3, 5, 7)


def test_a_model_loads_in_the_asked_dtype_and_says_how_far_its_positions_reach(folder):
    assert {parameter.dtype for parameter in load_causal_lm(folder, "bfloat16").parameters()} == {
        torch.bfloat16
    }
    assert context_length(folder) == 512


def test_the_fingerprint_knows_architecture_and_vocabulary_and_ignores_weights_and_dtype(folder, tmp_path):
    write_tokenizer(folder, ["a", "b"])
    fingerprint = model_fingerprint(folder)

    twin = tmp_path / "twin"
    tiny_model(seed=5).to(torch.bfloat16).save_pretrained(twin)
    write_tokenizer(twin, ["a", "b"])
    assert model_fingerprint(twin) == fingerprint

    write_tokenizer(twin, ["b", "a"])
    assert model_fingerprint(twin) != fingerprint
    wider = save_tiny_model(tmp_path / "wider", intermediate_size=64)
    write_tokenizer(wider, ["a", "b"])
    assert model_fingerprint(wider) != fingerprint
