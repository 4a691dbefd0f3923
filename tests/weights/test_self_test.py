"""The self-test and the canary, over widths and depths: healthy engines pass, each tensor lost shows.

The engine is transformers' own forward, another order of evaluation than the trainer's. The models in bfloat16 are fresh
ones (weights of std 0.02, biases 0), as narrow or deep as makes queries, keys and their biases hard to see.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from long_tests import HAS_BFLOAT16, long_without_bfloat16
from transformers import Qwen2Config, Qwen2ForCausalLM
from watched_link import WatchedLink

from async_grpo.errors import WeightsDidNotLand
from async_grpo.modeling.policy import PolicyModel, named_weights
from async_grpo.protocols import Manifest
from async_grpo.training.sharding import canary_logprobs
from async_grpo.weights.canary import Canary
from async_grpo.weights.config import WeightConfig
from async_grpo.weights.package import record
from async_grpo.weights.publisher import Publisher

VOCAB, TOKENS = 256, 128


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for one another on a busy machine take minutes for what takes seconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def fresh_model(layers: int, hidden: int, dtype=torch.bfloat16) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    heads = max(2, hidden // 128)
    shape = {"hidden_size": hidden, "intermediate_size": hidden, "num_hidden_layers": layers}
    attention = {"num_attention_heads": heads, "num_key_value_heads": heads // 2}
    tied = hidden < 2048 and dtype is torch.bfloat16
    config = Qwen2Config(vocab_size=VOCAB, tie_word_embeddings=tied, **shape, **attention)
    return Qwen2ForCausalLM(config).to(dtype)


@torch.no_grad()
def with_a_massive_activation(model: Qwen2ForCausalLM) -> Qwen2ForCausalLM:
    """Dimension 0 of the states is a large constant, by which some tokens are never drawn, as in many trained models."""
    for weight in model.parameters():
        weight.mul_(3.0 if weight.ndim > 1 else 1.0)
    model.model.embed_tokens.weight[:, 0] = 1.0
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0.0
    model.lm_head.weight[::50, 0] = -300.0
    return model


class Engine(WatchedLink):
    """A model of transformers'; `bias` is added to all that it computes. `is_stale`: it loads no more."""

    def __init__(
        self,
        layers: int,
        hidden: int,
        watched: tuple[int, ...] = (),
        dtype=torch.bfloat16,
        is_watched=None,
    ):
        self.model, self.bias, self.is_stale = fresh_model(layers, hidden, dtype), 0.0, False
        self.weights = dict(self.model.named_parameters())
        super().__init__(self.update, self.logprobs, self.weights, watched, is_watched)

    @torch.no_grad()
    def update(self, tensors: Mapping[str, torch.Tensor]) -> Manifest:
        for name, tensor in tensors.items() if not self.is_stale else ():
            self.weights[name].copy_(tensor)
        return {name: record(tensor) for name, tensor in tensors.items()}

    @torch.no_grad()
    def logprobs(self, ids: np.ndarray) -> np.ndarray:
        tokens = torch.tensor(ids, dtype=torch.int64)
        rows = self.model(tokens[None]).logits[0].float().log_softmax(-1)
        chosen = rows[:-1].gather(-1, tokens[1:, None])[:, 0].numpy()
        return np.concatenate([np.zeros(1, np.float32), chosen]) + np.float32(self.bias)


def rounded_to_eight_bits(weight: torch.Tensor) -> torch.Tensor:
    """What vLLM's fp8 makes of a matrix: e4m3 (448 at most) times one scale."""
    scale = weight.float().abs().max() / 448
    return ((weight.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(weight.dtype)


class EightBitEngine(Engine):
    """An engine whose linear layers keep their weights in fp8, as vLLM's do with quantization=fp8."""

    def update(self, tensors: Mapping[str, torch.Tensor]) -> Manifest:
        manifest = super().update(tensors)
        with torch.no_grad():
            for name in tensors:
                if name.endswith("_proj.weight"):
                    self.weights[name].copy_(rounded_to_eight_bits(self.weights[name]))
        return manifest


def synced(
    layers=2, hidden=256, watched=(), tolerance=None, dtype=torch.bfloat16, is_watched=None
) -> tuple[Engine, Publisher, PolicyModel]:
    """An engine, its trainer's publisher and policy."""
    engine = Engine(layers, hidden, watched, dtype, is_watched)
    sender = publisher_of(engine, dtype, tolerance)
    return engine, sender, PolicyModel(fresh_model(layers, hidden, dtype))


def publisher_of(engine: Engine, dtype=torch.bfloat16, tolerance: float | None = None) -> Publisher:
    canary = Canary([Canary.text(VOCAB, TOKENS)], canary_logprobs)
    return Publisher(engine, named_weights, canary, dtype, 0, WeightConfig(canary_tolerance=tolerance))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("layers", "hidden", "watched", "smallest"),
    [
        (12, 256, (0, 7, 12), 1.5),
        # Kernels with AVX512's instructions for bfloat16 round otherwise than those with AVX2's
        pytest.param(
            *(28, 256, (28,), 1.25 if HAS_BFLOAT16 else 1.5),
            marks=[long_without_bfloat16, pytest.mark.exhaustive],
        ),
        pytest.param(4, 1024, (0, 4), 1.5, marks=pytest.mark.exhaustive),
        pytest.param(2, 2048, (0, 2), 1.5, marks=[long_without_bfloat16, pytest.mark.exhaustive]),
    ],
)
def test_a_healthy_bfloat16_engine_starts_and_each_tensor_that_it_loses_shows(
    layers, hidden, watched, smallest
):
    """Group 0 lies outside the layers. Before, all tensors were changed at once by noise of at least 0.1."""
    engine, sender, policy = synced(layers, hidden, watched)
    metrics = sender.publish(policy, 0, self_test=True)()
    # This engine reads nothing back: one round per layer, one of what lies outside, one of all
    assert len(engine.healthy) == layers + 2 and max(engine.healthy) < 0.75
    assert len(engine.lost) == sum(2 + (hidden >= 2048) if group == 0 else 12 for group in watched)
    assert min(engine.lost.values()) > smallest  # what exceeds 1 is refused
    assert metrics["canary_error"] < 0.1


def test_the_sums_of_a_wide_float32_model_may_round_in_the_self_test():
    """Noise makes log-probs of 60; one of 31 M parameters missed them by 8e-5, and 5e-5 was allowed."""

    def is_watched(name: str) -> bool:
        return ".layers." not in name or ".layers.9." in name

    engine, sender, policy = synced(10, 512, (0,), dtype=torch.float32, is_watched=is_watched)
    for model in (
        engine.model.double(),
        policy.model,
    ):  # in float64: rounding that the trainer's own does not share
        with_a_massive_activation(model)
    sender.publish(policy, 0, self_test=True)()
    assert len(engine.healthy) == 1 and engine.healthy[0] < 0.5
    assert len(engine.lost) == 15 and min(engine.lost.values()) > 20
    assert engine.tolerances[-1] <= 5e-5  # of the syncs that follow: there the weights are not so wild


def test_an_engine_with_weights_in_eight_bits_starts_and_each_tensor_that_it_loses_shows():
    """Changed layers amplify its coarser rounding, too: what it differs by unchanged is not enough for all of them."""
    engine = EightBitEngine(4, 256, watched=(1,))
    sender = publisher_of(engine)
    policy = PolicyModel(fresh_model(4, 256))
    sender.publish(policy, 0, self_test=True)()
    assert len(engine.healthy) == 4 + 2  # one round per layer, one of what lies outside, one of all
    assert len(engine.lost) == 12 and min(engine.lost.values()) > 1.25


def test_an_engine_that_rounds_too_coarsely_to_be_proven_is_refused_with_the_way_out():
    engine = EightBitEngine(4, 256, dtype=torch.float32)
    sender = publisher_of(engine, torch.float32)
    policy = PolicyModel(fresh_model(4, 256, torch.float32))
    way_out = r"--canary-tolerance sets what is allowed; an engine with quantised weights .* may need it"
    with pytest.raises(WeightsDidNotLand, match=way_out):
        sender.publish(policy, 0, self_test=True)()


def change(model: PolicyModel, size: float) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(size * torch.randn(parameter.shape).to(parameter.dtype))


def test_after_the_start_the_tolerance_is_three_times_the_rounding_that_was_measured():
    engine, sender, policy = synced()
    sender.publish(policy, 0, self_test=True)()
    rounding = engine.tolerances[-1] / 3
    assert rounding < 0.01  # the tolerance was 0.3 before
    change(policy, 0.002)
    sender.publish(policy, 1)()
    engine.bias = 4 * rounding
    with pytest.raises(WeightsDidNotLand, match="policy version 2 unchanged"):
        sender.publish(policy, 2)()


def test_what_engine_and_trainer_always_differ_by_is_no_fault_of_a_sync():
    engine, sender, policy = synced()
    engine.bias = 0.02
    sender.publish(policy, 0)()
    sender._rounding = 0.002  # 0.02 would be ten times too much
    change(policy, 0.002)
    assert sender.publish(policy, 1)()["canary_error"] > 0.02


def test_a_stale_engine_is_refused_as_soon_as_the_policy_has_moved():
    engine, sender, policy = synced()
    sender.publish(policy, 0, self_test=True)()
    engine.is_stale = True
    sender.publish(policy, 1)()  # the same weights: nothing to see
    change(policy, 0.01)
    with pytest.raises(WeightsDidNotLand, match="policy version 2"):
        sender.publish(policy, 2)()


def test_the_first_weights_that_were_prepared_have_the_same_tolerances_and_are_not_computed_again():
    tolerances = []
    num_forwards = []
    for is_prepared in (False, True):
        engine, sender, policy = synced(dtype=torch.float32)
        if is_prepared:
            sender.prepare(policy)
        forwards = []

        def counted(model, *texts, forwards=forwards):
            forwards.append(model)
            return canary_logprobs(model, *texts)

        sender.canary = replace(sender.canary, logprobs=counted)
        sender.publish(policy, 0, self_test=True)()
        num_forwards.append(len(forwards))
        change(policy, 0.01)
        sender.publish(policy, 1)()
        tolerances.append(engine.tolerances)
        # The second sync computes its own log-probs, not those that were prepared
        assert len(forwards) == num_forwards[-1] + 1
    assert tolerances[0] == tolerances[1]
    # Each of the first and the changed weights need two forward passes: one of them, and one with their last bits flipped.
    # All of them were prepared
    assert num_forwards == [2 + 2, 0]


def test_in_bfloat16_the_first_weights_are_prepared_and_no_round_whose_tensors_depend_on_the_engines():
    _, sender, policy = synced()
    sender.prepare(policy)
    assert sender._prepared is not None and sender._prepared_round is None


def test_rounds_that_do_not_fit_into_memory_together_are_packed_one_after_the_other():
    engine, sender, policy = synced(layers=2, dtype=torch.float32)
    sender.originals_bytes = 1  # each layer has a round of its own
    sender.prepare(policy)
    assert sender._prepared_round is None
    sender.publish(policy, 0, self_test=True)()
    assert len(engine.healthy) == 3


def test_a_tolerance_that_is_given_is_the_one_that_counts():
    engine, sender, policy = synced(tolerance=0.5)
    sender.publish(policy, 0, self_test=True)()
    assert set(engine.tolerances) == {0.5}
