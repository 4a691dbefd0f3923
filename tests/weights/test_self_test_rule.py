"""What the self-test allows a healthy engine, measured on a model that amplifies rounding as trained ones do."""

from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from async_grpo.errors import WeightsDidNotLand
from async_grpo.protocols import Receipt, WeightPackage
from async_grpo.weights import publisher as publisher_module
from async_grpo.weights import self_test
from async_grpo.weights.canary import Canary
from async_grpo.weights.config import WeightConfig
from async_grpo.weights.package import SELF_TEST, prove_landed, trimmed_rms, unpack
from async_grpo.weights.publisher import Publisher
from async_grpo.weights.self_test import last_bits_flipped, perturbed

LAYERS, WIDTH, VOCABULARY = 24, 48, 40
OLD_UNITS = 4.5  # in the last place of what the change moves the canary: the rule before


class Chaotic(nn.Module):
    """Layers with a gain of 3: of two states that differ by rounding, the last layer makes two others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Parameter(torch.randn(VOCABULARY, WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=3 * WIDTH**-0.5)

    def forward(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        states = self.embed[ids].to(dtype)
        for layer in self.layers:
            states = torch.tanh(nn.functional.linear(states, layer.weight.to(dtype), layer.bias.to(dtype)))
        return states.float() @ self.embed.float().T


@torch.no_grad()
def logprobs_in(model: Chaotic, text: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    ids = torch.tensor(text, dtype=torch.int64)
    rows = model(ids, dtype).log_softmax(-1)
    return rows[:-1].gather(-1, ids[1:, None])[:, 0].numpy()


def trainer_logprobs(model: Chaotic, text: np.ndarray) -> np.ndarray:
    return logprobs_in(model, text, torch.bfloat16)


class ReadingEngine:
    """`Engines`: one that computes in float32, and reads back what it holds, but for the tensors of `unread`."""

    def __init__(self, loses: str | None = None, unread: tuple[str, ...] = ()) -> None:
        self.model, self.loses, self.unread = Chaotic().bfloat16(), loses, unread
        self.sent: list[set[str]] = []
        self.misses: list[tuple[float, float]] = []  # by how much, and what is allowed

    def put(self, chunk: np.ndarray) -> np.ndarray:
        return chunk.copy()

    @torch.no_grad()
    def deliver(self, package: WeightPackage) -> Mapping[str, Receipt]:
        tensors, manifest = unpack(package.chunks)
        weights = dict(self.model.named_parameters())
        for name, tensor in tensors.items():
            if name != self.loses:
                weights[name].copy_(tensor)
        receipt = {
            name: replace(
                record,
                in_use=name in self.unread or torch.equal(weights[name], tensors[name]),
                is_read_back=name not in self.unread,
            )
            for name, record in manifest.items()
        }
        answer = logprobs_in(self.model, package.canary_texts[0], torch.float32)
        if package.version == SELF_TEST:
            self.sent.append(set(tensors))
            self.misses.append((trimmed_rms(answer - package.canary_logprobs), package.tolerance))
        return {"g0": (receipt, answer)}

    def commit(self, package: WeightPackage, landed: list[str]) -> None:
        pass

    def abort(self, error: BaseException) -> None:
        pass


def named(model: nn.Module):
    yield from model.named_parameters()


def publisher(engine: ReadingEngine | None, seed: int = 0, max_over_ranks=list) -> Publisher:
    canary = Canary([Canary.text(VOCABULARY, 64, seed)], trainer_logprobs, max_over_ranks)
    return Publisher(engine, named, canary, torch.bfloat16, int(engine is None), WeightConfig())


def trained() -> Chaotic:
    """The trainer's model: float32 masters of the values that the engine starts with."""
    return Chaotic().bfloat16().float()


def test_healthy_engines_are_accepted_where_rounding_is_amplified_and_the_rule_before_refused_them():
    model = trained()
    for seed in range(20):  # of the canary texts
        engine = ReadingEngine()
        publisher(engine, seed).publish(model, 0, self_test=True)()
        assert len(engine.misses) == 2  # the weights as they are, and all of them changed
        text = Canary.text(VOCABULARY, 64, seed)
        before = trainer_logprobs(model, text)
        with perturbed(dict(model.named_parameters())):
            moved = trainer_logprobs(model, text) - before
        refused_before = OLD_UNITS * torch.finfo(torch.bfloat16).eps * trimmed_rms(moved)
        assert refused_before < engine.misses[1][0] < engine.misses[1][1]


class OffsetEngine(ReadingEngine):
    """Its log-probs differ from the trainer's by a constant, as with kernels that round more coarsely."""

    offset = 0.0

    def deliver(self, package: WeightPackage) -> Mapping[str, Receipt]:
        receipt, _ = super().deliver(package)["g0"]
        signs = np.where(np.arange(len(package.canary_logprobs)) % 2, 1, -1)
        return {"g0": (receipt, package.canary_logprobs + self.offset * signs)}


@pytest.mark.parametrize(("offset", "unread"), [(0.9, ("embed",)), (1.1, ()), (0.9, None)])
def test_a_first_difference_that_weights_may_explain_or_that_is_too_large_is_refused(
    monkeypatch, offset, unread
):
    monkeypatch.setattr(publisher_module, "measure_sensitivity", lambda *_: 0.05)
    everything = tuple(name for name, _ in Chaotic().named_parameters())
    engine = OffsetEngine(unread=everything if unread is None else unread)
    engine.offset = offset
    with pytest.raises(WeightsDidNotLand, match=f"differ from the trainer's by {offset}"):
        publisher(engine).publish(trained(), 0)()


def test_a_trained_model_that_rounds_more_than_random_ones_starts_with_a_warning(caplog, monkeypatch):
    """Its engine holds the weights to the bit; later syncs are compared with the difference that was measured."""
    monkeypatch.setattr(publisher_module, "measure_sensitivity", lambda *_: 0.05)
    engine = OffsetEngine()
    engine.offset = 0.9
    sender, model = publisher(engine), trained()
    sender.publish(model, 0)()
    assert "differ from the trainer's by 0.9 (expected: at most 0." in caplog.text
    assert sender._rounding == pytest.approx(0.9)
    engine.offset = 4.0  # 3.1 more than before
    with pytest.raises(WeightsDidNotLand, match="allowed: 2.7"):
        sender.publish(model, 1)()


def test_an_engine_that_can_read_back_nothing_is_a_warning(caplog):
    everything = tuple(name for name, _ in Chaotic().named_parameters())
    engine = OffsetEngine(unread=everything)
    publisher(engine).publish(trained(), 0, self_test=True)()
    assert caplog.text.count("worker g0 can read back none of its 49 weights") == 1


LOST = ["embed", *(f"layers.{number}.{kind}" for number in (0, 11, 23) for kind in ("weight", "bias"))]


@pytest.mark.parametrize("name", LOST)
def test_each_tensor_that_is_lost_is_named_where_the_canary_cannot_tell(name):
    with pytest.raises(WeightsDidNotLand, match=f"received, yet not in use: {name};"):
        publisher(ReadingEngine(loses=name)).publish(trained(), 0, self_test=True)()


def test_only_layers_that_cannot_be_read_back_have_a_round_of_their_own():
    everything = {name for name, _ in Chaotic().named_parameters()}
    engine = ReadingEngine(unread=("layers.3.weight", "layers.9.bias"))
    publisher(engine).publish(trained(), 0, self_test=True)()
    third, ninth = ({f"layers.{n}.weight", f"layers.{n}.bias"} for n in (3, 9))
    assert engine.sent == [everything, third, third | ninth, everything]


@pytest.mark.parametrize("unread", [(), ("layers.3.weight",)], ids=["all read back", "one layer not"])
def test_originals_that_do_not_fit_into_main_memory_at_once_make_several_rounds(unread, monkeypatch):
    sizes = {name: weight.nbytes for name, weight in trained().named_parameters()}
    two_layers_bytes = 2 * (sizes["layers.0.weight"] + sizes["layers.0.bias"])
    monkeypatch.setattr(Publisher, "originals_bytes", two_layers_bytes)
    changed_in_round, originals = [], dict(trained().named_parameters())

    @contextmanager
    def noted(weights):
        with perturbed(weights):
            changed_in_round.append(
                {n for n, weight in weights.items() if not torch.equal(weight, originals[n])}
            )
            yield

    monkeypatch.setattr("async_grpo.weights.publisher.perturbed", noted)
    engine, model = ReadingEngine(unread=unread), trained()
    publisher(engine).publish(model, 0, self_test=True)()
    layers = [{f"layers.{n}.weight", f"layers.{n}.bias"} for n in range(LAYERS)]
    assert changed_in_round[: len(unread)] == [layers[3]] * len(unread)
    # `embed` is smaller than a layer
    pairs = [first | second for first, second in zip(layers[1:-1:2], layers[2::2], strict=True)]
    assert changed_in_round[len(unread) :] == [{"embed"} | layers[0], *pairs, layers[-1]]
    assert all(torch.equal(weight, originals[name]) for name, weight in model.named_parameters())
    for name, weight in engine.model.named_parameters():  # in the engine, too
        assert torch.equal(weight, originals[name].bfloat16())


def test_a_lost_tensor_is_refused_in_whichever_round_it_changes(monkeypatch):
    monkeypatch.setattr(Publisher, "originals_bytes", 1)
    for name in LOST:
        with pytest.raises(WeightsDidNotLand, match=f"received, yet not in use: {name};"):
            publisher(ReadingEngine(loses=name)).publish(trained(), 0, self_test=True)()


def test_other_ranks_take_part_in_the_rounds_that_rank_0_needs(monkeypatch):
    """Rank 0 alone hears from the engines; a rank that ran another number of rounds would wait for ever."""
    gathered = []
    monkeypatch.setattr(
        "async_grpo.weights.publisher.full_tensor", lambda weight, dtype: gathered.append(weight) or weight
    )

    def of_all_ranks(flags: list[float]) -> list[float]:
        return [
            max(flag, float(number == 4)) for number, flag in enumerate(flags)
        ]  # rank 0 asks for one layer

    publisher(None, max_over_ranks=of_all_ranks).publish(trained(), 0, self_test=True)()
    all_tensors, one_layer = 1 + 2 * LAYERS, 2
    assert len(gathered) == 3 * all_tensors + one_layer  # unchanged, the layer, all changed, version 0


def test_single_tokens_that_rounding_sends_elsewhere_are_no_fault_and_many_are():
    expected = np.full(100, -3.0, np.float32)
    package = WeightPackage(1, {}, [], [], expected, tolerance=0.01)
    answer = expected.copy()
    answer[:9] += 7.0  # as single tokens of a trained model do
    prove_landed(package, "g0", ({}, answer))
    answer[9:12] += 7.0
    with pytest.raises(WeightsDidNotLand, match="worker g0 received policy version 1 unchanged"):
        prove_landed(package, "g0", ({}, answer))
    for odd in (np.nan, np.inf):  # not left out as one of the largest
        answer = expected.copy()
        answer[50] = odd
        with pytest.raises(WeightsDidNotLand, match="worker g0"):
            prove_landed(package, "g0", ({}, answer))


def test_noise_is_drawn_where_the_model_is_computed(monkeypatch):
    """A CPU would take 10 to 20 s for 10^9 weights. Here a stand-in for a GPU draws, beside an offloaded shard."""
    gpu, devices = torch.device("cuda", 0), []
    randn = torch.randn
    generator_on_cpu = torch.Generator()

    def generator(device):
        devices.append(device)
        return generator_on_cpu

    def drawn(shape, generator, device):
        devices.append(device)
        return randn(shape, generator=generator)

    monkeypatch.setattr(self_test.torch, "randn", drawn)
    monkeypatch.setattr(self_test.torch, "Generator", generator)
    monkeypatch.setattr(self_test, "compute_device", lambda weight: gpu)
    weights = {"a": torch.ones(4, 3), "b": torch.ones(5)}
    with perturbed(weights):
        assert not torch.equal(weights["a"], torch.ones(4, 3))
    assert devices == [gpu] * 3 and torch.equal(weights["b"], torch.ones(5))


@pytest.mark.parametrize(
    ("dtype", "wire_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_every_second_weight_differs_by_one_unit_in_the_last_place_of_the_wire_and_is_restored(
    dtype, wire_dtype
):
    generator = torch.Generator().manual_seed(0)
    shapes = [(6, 8), (7,), ()]
    weights = [torch.randn(shape, generator=generator).to(wire_dtype).to(dtype) for shape in shapes]
    before = [weight.clone() for weight in weights]
    with last_bits_flipped(weights, wire_dtype):
        for weight, original in zip(weights, before, strict=True):
            on_wire, original_on_wire = (x.to(wire_dtype).double().flatten() for x in (weight, original))
            # A value in [2^e, 2^(e + 1)) has units of 2^e * eps
            units = 2.0 ** original_on_wire.abs().log2().floor() * torch.finfo(wire_dtype).eps
            moved = (on_wire - original_on_wire).abs() / units
            assert set(moved.tolist()) <= {0.0, 1.0}
            assert moved.view(-1, weight.shape[-1] if weight.ndim else 1)[:, ::2].eq(1).all()
            assert moved.sum() == sum(len(range(0, row.numel(), 2)) for row in torch.atleast_2d(original))
    assert all(torch.equal(weight, original) for weight, original in zip(weights, before, strict=True))
