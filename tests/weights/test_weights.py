"""The transaction of a weight sync and its proof, with a scripted engine in place of vLLM."""

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engine import CANARY, FakeLink, TwoLayers, publisher

from async_grpo.errors import DeadlineExceeded, WeightsDidNotLand
from async_grpo.protocols import WeightPackage
from async_grpo.weights.config import WeightConfig
from async_grpo.weights.nccl import NCCLPublisher
from async_grpo.weights.package import (
    SELF_TEST,
    check_received,
    pack_weights,
    prove_landed,
    record,
    tensor_digest,
    unpack,
)
from async_grpo.weights.publisher import Publisher


@settings(max_examples=50, deadline=None)
@given(values=st.lists(st.floats(allow_nan=False, width=32), min_size=1, max_size=40), data=st.data())
def test_a_digest_notices_every_changed_element(values, data):
    tensor = torch.tensor(values, dtype=torch.float32)
    where = data.draw(st.integers(0, len(values) - 1))
    changed = tensor.clone().view(torch.int32)
    changed[where] ^= 1 << data.draw(st.integers(0, 30))
    assert tensor_digest(tensor) != tensor_digest(changed.view(torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_a_digest_speaks_of_the_values_in_order_not_of_their_place_in_memory(dtype):
    tensor = torch.arange(-6, 6).reshape(3, 4).to(dtype)
    assert tensor_digest(tensor.t().contiguous().t()) == tensor_digest(tensor)
    assert tensor_digest(tensor.t()) != tensor_digest(tensor)
    assert tensor_digest(tensor.view(-1)[1:]) == tensor_digest(tensor.view(-1)[1:].clone())


@pytest.mark.parametrize("chunk_words", [6, 16, 1 << 24])  # a GPU's passes are larger than a CPU's
def test_a_digest_of_many_passes_equals_brute_force(monkeypatch, chunk_words):
    monkeypatch.setattr("async_grpo.weights.package._CHUNK_WORDS", chunk_words)
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**62), 2**62, (53,), dtype=torch.int64, generator=generator)
    golden = 0x9E3779B97F4A7C15
    expected = sum(word * ((i * golden) % 2**64 | 1) for i, word in enumerate(words.tolist())) % 2**64
    assert tensor_digest(words) % 2**64 == expected


@settings(max_examples=50, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_chunk_is_read_by_safetensors_and_its_records_are_those_of_what_is_read(shapes, dtype):
    tensors = {f"layers.{n}.weight": torch.randn(shape) for n, shape in enumerate(shapes)}
    image, packed = pack_weights(
        {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}, dtype
    )
    read, manifest = unpack([image])
    assert manifest == {name: record(tensor) for name, tensor in packed.items()}
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor.to(dtype)) for name, tensor in tensors.items())


def test_a_receipt_is_compared_by_name_shape_dtype_and_bits():
    sent = {"a": record(torch.ones(2, 3)), "b": record(torch.zeros(4))}
    check_received(sent, dict(sent), "g0")
    with pytest.raises(WeightsDidNotLand, match="missing: b; unexpected: c"):
        check_received(sent, {"a": sent["a"], "c": sent["a"]}, "g0")
    for other in (torch.ones(3, 2), torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(2, 3) + 1e-7):
        with pytest.raises(WeightsDidNotLand, match="1 of 2 tensors as sent; differing: a"):
            check_received(sent, {**sent, "a": record(other)}, "g0")


def test_shared_bytes_are_readable_by_path_and_gone_afterwards():
    pytest.importorskip("vllm")
    from async_grpo.inference.vllm_edges.receive_weights import shared_bytes

    with shared_bytes(b"payload", "test") as path:
        assert Path(path).read_bytes() == b"payload"
    assert not Path(path).exists()


@pytest.mark.parametrize("is_prepared", [False, True])
def test_a_self_test_comes_first_and_leaves_the_model_as_it_was(is_prepared):
    link, model = FakeLink(), TwoLayers()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sender = publisher(link)
    if is_prepared:
        sender.prepare(model)
        assert not link.log
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    sender.publish(model, 0, self_test=True)()
    # The engine's weights are the trainer's, so that it is only asked; then every tensor is changed
    asked, changed = (("deliver", SELF_TEST, num_chunks) for num_chunks in (0, 1))
    end = ("commit", SELF_TEST, ["g0"])
    assert link.log == [asked, end, changed, end, ("deliver", 0, 1), ("commit", 0, ["g0"])]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_an_engine_that_starts_with_other_weights_gets_the_trainers_before_they_are_changed():
    link, model = FakeLink(), TwoLayers()
    with torch.no_grad():
        link.engine.second.weight[0] += 0.01
    sender = publisher(link)
    sender.publish(model, 0, self_test=True)()
    delivered = [entry[1:] for entry in link.log if entry[0] == "deliver"]
    # Asked; the weights as they are; every tensor changed; the first version
    assert delivered == [(SELF_TEST, 0), (SELF_TEST, 1), (SELF_TEST, 1), (0, 1)]
    assert sender._rounding < 1e-6  # of the weights that were sent, not of those that the engine started with


def test_with_a_tolerance_that_may_hide_a_lost_tensor_engines_first_receive_the_weights_that_they_have():
    """Only then can the read-back tell a place that lost its weights from one that cannot be read."""
    link = FakeLink()
    publisher(link, config=WeightConfig(canary_tolerance=0.5)).publish(TwoLayers(), 0, self_test=True)()
    delivered = [entry[1:] for entry in link.log if entry[0] == "deliver"]
    assert delivered == [(SELF_TEST, 1), (SELF_TEST, 1), (0, 1)]


def test_all_ranks_send_unchanged_weights_or_none_does():
    """Rank 0 alone knows what the engines answer; a rank that went another way would wait for ever in a collective."""
    for engine_shift, rounds in ((0.0, 1), (0.01, 2)):
        flags = []

        def share(values, flags=flags):
            flags.append(values)
            return values

        link, model = FakeLink(), TwoLayers()
        with torch.no_grad():
            link.engine.second.weight[0] += engine_shift
        first, other = publisher(link), publisher(None)
        first.canary = replace(CANARY, max_over_ranks=share)
        first.publish(model, 0, self_test=True)()
        other.canary = replace(CANARY, max_over_ranks=lambda values, flags=flags: flags.pop(0))
        sends = []
        send = other._send
        other._send = lambda draft, weights, send=send, sends=sends: (
            sends.append(len(weights)) or send(draft, weights)
        )
        other.publish(model, 0, self_test=True)()
        assert [count for count in sends if count] == [4] * (rounds + 1)  # the rounds, and the first version


def test_a_worker_whose_weights_do_not_land_is_fenced_unless_all_fail_alike():
    class Two(FakeLink):
        blind_ones = ()

        def deliver(self, package):
            ((_, (receipt, answer)),) = super().deliver(package).items()
            return {name: (receipt, answer + (name in self.blind_ones)) for name in ("g0", "g1")}

    link, model = Two(), TwoLayers()
    sender = publisher(link)
    sender.publish(model, 0, self_test=True)()
    link.blind_ones = ["g1"]
    sender.publish(model, 1)()
    assert link.log[-2:] == [("fence", "g1"), ("commit", 1, ["g0"])]
    link.blind_ones = ["g0", "g1"]
    with pytest.raises(WeightsDidNotLand, match="worker g0 received policy version 2"):
        sender.publish(model, 2)()


def test_the_round_that_was_prepared_is_sent_once_and_a_late_worker_gets_one_of_the_present_weights():
    link, model = FakeLink(), TwoLayers()
    sender = publisher(link)
    sender.prepare(model)
    sender.publish(model, 0, self_test=True)()
    with torch.no_grad():
        model.first.weight += 0.01
    link.log = []
    assert sender.publish(model, 1, self_test=True)()["canary_error"] < 1e-5
    delivered = [entry[1:] for entry in link.log if entry[0] == "deliver"]
    assert delivered == [(SELF_TEST, 1), (SELF_TEST, 1), (1, 1)]  # unchanged, changed, the version


def test_a_worker_that_joined_late_and_fails_the_self_test_is_fenced_and_the_run_goes_on():
    link, model = FakeLink(), TwoLayers()
    sender = publisher(link)
    sender.publish(model, 0, self_test=True)()
    link.ignores, link.log = "first.bias", []
    sender.publish(model, 0, self_test=True)()
    assert ("fence", "g0") in link.log and link.log[-1] == (
        "commit",
        0,
        ["g0"],
    )  # unchanged weights land again
    link.ignores = None
    assert sender.publish(model, 1)()["canary_error"] < 1e-5


def test_chunks_keep_to_their_size(monkeypatch):
    link = FakeLink()
    monkeypatch.setattr(Publisher, "chunk_bytes", 100)
    publisher(link).publish(TwoLayers(), 3)()
    assert link.log[0] == ("deliver", 3, 3)  # 256 | 32 + 160 | 20 bytes


@pytest.mark.parametrize("is_prepared", [False, True])
@pytest.mark.parametrize("name", ["first.weight", "first.bias", "second.weight", "second.bias"])
def test_a_tensor_that_is_lost_or_not_used_is_noticed(name, is_prepared):
    """The engine starts from the same checkpoint: without the self-test one that is not used would not show yet."""
    with pytest.raises(WeightsDidNotLand, match=f"missing: {name}"):
        publisher(FakeLink(loses=name)).publish(TwoLayers(), 0)()
    publisher(FakeLink(ignores=name)).publish(TwoLayers(), 0, self_test=False)()
    sender, model = publisher(FakeLink(ignores=name)), TwoLayers()
    if is_prepared:
        sender.prepare(model)
    with pytest.raises(WeightsDidNotLand, match="the start-up self-test unchanged, but its log-probs differ"):
        sender.publish(model, 0, self_test=True)()


def test_a_round_that_was_prepared_changes_the_same_weights_as_one_that_was_not():
    delivered = []
    for is_prepared in (False, True):
        link, model = FakeLink(), TwoLayers()
        sender = publisher(link)
        if is_prepared:
            sender.prepare(model)
        deliver = link.deliver

        def kept(package, deliver=deliver):
            delivered.append((package.version, [bytes(chunk) for chunk in package.chunks], package.tolerance))
            return deliver(package)

        link.deliver = kept
        sender.publish(model, 0, self_test=True)()
    assert len(delivered) == 6 and delivered[:3] == delivered[3:]


class SlowLink(FakeLink):
    """The delivery of version 1 does not begin before `may_go` is set."""

    def __init__(self, **options):
        super().__init__(**options)
        self.may_go = threading.Event()

    def deliver(self, package):
        assert package.version == 0 or self.may_go.wait(20)
        return super().deliver(package)


def test_weights_are_on_their_way_when_publish_returns_and_what_it_returns_waits_for_them():
    link, model = SlowLink(), TwoLayers()
    sender = publisher(link)
    sender.publish(model, 0)()
    proof = sender.publish(model, 1)
    assert ("deliver", 1, 1) not in link.log
    link.may_go.set()
    metrics = proof()
    assert link.log[-2:] == [("deliver", 1, 1), ("commit", 1, ["g0"])]
    assert metrics == proof() and metrics["weight_sync_s"] > 0  # as often as one likes


def test_what_fails_on_the_way_is_told_to_those_who_wait_for_experience_and_raised_by_the_proof():
    link, model = SlowLink(loses="first.bias"), TwoLayers()
    proof = publisher(link).publish(model, 1)
    link.may_go.set()
    with pytest.raises(WeightsDidNotLand, match=r"missing: first\.bias"):
        proof()
    assert link.log[-1][0] == "abort" and "first.bias" in link.log[-1][1]


def test_no_sync_begins_before_the_one_before_is_proven():
    link, model = SlowLink(loses="first.bias"), TwoLayers()
    sender = publisher(link)
    sender.publish(model, 1)
    link.may_go.set()
    with pytest.raises(WeightsDidNotLand, match="worker g0 received"):
        sender.publish(model, 2)
    assert [entry[1] for entry in link.log if entry[0] == "deliver"] == [1]


def test_a_delivery_that_hangs_is_given_up_by_name():
    link = SlowLink()
    proof = publisher(link, config=WeightConfig(sync_timeout_s=0.05)).publish(TwoLayers(), 1)
    with pytest.raises(DeadlineExceeded, match="policy version 1 did not reach the engines within 0 s"):
        proof()
    link.may_go.set()


def test_nan_log_probs_are_no_proof():
    with pytest.raises(WeightsDidNotLand, match="by nan"):
        publisher(FakeLink(blind=True)).publish(TwoLayers(), 0)()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_an_answer_that_is_no_number_is_no_proof_even_if_all_differences_are_allowed(value):
    package = WeightPackage(0, {}, [], CANARY.texts, np.zeros(32, np.float32), tolerance=float("inf"))
    answer = np.zeros(32, np.float32)
    prove_landed(package, "g0", ({}, answer + 100))
    answer[7] = value
    with pytest.raises(WeightsDidNotLand, match="worker g0 received policy version 0"):
        prove_landed(package, "g0", ({}, answer))


@pytest.mark.parametrize("kind", [Publisher, NCCLPublisher])
def test_other_ranks_take_part_in_every_gathering_and_send_nothing(kind, monkeypatch):
    gathered = []
    for module in ("publisher", "nccl"):
        monkeypatch.setattr(
            f"async_grpo.weights.{module}.full_tensor", lambda w, dtype: gathered.append(w) or w.to(dtype)
        )

    def make_engine(self, world_size):
        return SimpleNamespace(send_weights=lambda: list(self._source))

    monkeypatch.setattr(NCCLPublisher, "make_engine", make_engine)
    assert publisher(None, kind=kind).publish(TwoLayers(), 0, self_test=True)()["canary_error"] == 0.0
    assert len(gathered) == 3 * 4  # unchanged, one changed group, version 0


@pytest.mark.parametrize("self_test", [True, False])
@pytest.mark.parametrize("tolerance", [None, 0.5])
def test_a_package_without_tensors_is_no_proof(self_test, tolerance):
    """The engine would answer with the weights that it was loaded with, which are the trainer's at the start."""
    link = FakeLink()
    sender = publisher(link, named=lambda model: iter(()), config=WeightConfig(canary_tolerance=tolerance))
    with pytest.raises(WeightsDidNotLand, match="the policy has no tensors to send"):
        sender.publish(TwoLayers(), 0, self_test=self_test)()
    assert all(entry[:2] != ("commit", 0) for entry in link.log)


def test_a_trainer_whose_own_log_probs_are_no_numbers_does_not_blame_its_engines():
    link, model = FakeLink(), TwoLayers()
    sender = publisher(link)
    sender.publish(model, 0)()
    with torch.no_grad():
        model.first.bias[0] = float("nan")
    with pytest.raises(WeightsDidNotLand, match="32 of the 32 log-probs that the trainer itself computes"):
        sender.publish(model, 1)
    assert all(entry[0] != "fence" for entry in link.log)
