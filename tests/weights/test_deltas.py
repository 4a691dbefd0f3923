"""Weight syncs that send only what changed: the same weights as without, and no wrong base goes unnoticed."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scripted_engine import CANARY, FakeLink, TwoLayers, logprobs, named
from torch import nn
from two_ranks import on_two_ranks

from async_grpo.cluster.worker_actors import _mapped
from async_grpo.errors import WeightsDidNotLand
from async_grpo.protocols import WeightPackage
from async_grpo.weights.config import WeightConfig
from async_grpo.weights.package import SELF_TEST, pack_weights, record, unpack
from async_grpo.weights.publisher import Publisher
from async_grpo.weights.received_chunks import ReceivedChunks
from async_grpo.weights.sent_chunks import SentChunks
from async_grpo.weights.shared_files import SharedFilesPublisher
from async_grpo.weights.traffic import Traffic

# The trainer computes in float32 and the worker with bfloat16 values, which the canary tolerates
DELTAS = WeightConfig(weight_sync_deltas=True, canary_tolerance=1.0)


class Worker:
    """A worker of two layers that restores chunks as `WorkerActor` does."""

    def __init__(self) -> None:
        self.model = TwoLayers()
        self.received = ReceivedChunks()

    def load(self, package):
        chunks = [_mapped(chunk) if isinstance(chunk, Path) else chunk.data for chunk in package.chunks]
        self.last_tensors, manifest = unpack(self.received.restore(chunks, package.chunk_digests))
        self.model.load_state_dict(self.last_tensors, strict=False)
        return manifest, logprobs(self.model, *package.canary_texts)


class Fleet(FakeLink):
    """`Engines` of several workers: late ones have no weights yet. Workers that raise are fenced."""

    def __init__(self, **workers: Worker) -> None:
        super().__init__()
        self.workers = workers
        self.late = set()
        self.packages = []
        self.sizes = []

    def deliver(self, package):
        self.packages.append(package)
        self.sizes.append(
            sum(len(np.asarray(chunk)) for chunk in package.chunks if isinstance(chunk, np.ndarray))
        )
        receipts = {}
        for name in list(self.workers):
            if (name in self.late) != package.for_late:
                continue
            try:
                receipts[name] = self.workers[name].load(package)
            except WeightsDidNotLand as error:
                self.fence(name, error)
        return receipts

    def fence(self, worker_id, error):
        self.log.append(("fence", worker_id, str(error)))
        del self.workers[worker_id]

    def commit(self, package, landed):
        if package.version != SELF_TEST:
            self.late -= set(landed)

    @property
    def fenced(self) -> dict[str, str]:
        return {entry[1]: entry[2] for entry in self.log if entry[0] == "fence"}


def sender_to(link, kind=Publisher, config=DELTAS, dtype=torch.bfloat16, named=named) -> Publisher:
    return kind(link, named, CANARY, dtype, int(link is None), config)


def change_a_little(model: nn.Module, step: int) -> None:
    """Change at least one value, and about one in a hundred, as a step at a small learning rate does."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        model.first.weight[0, step % 8] *= -1
        for weight in model.parameters():
            is_changed = torch.rand(weight.shape, generator=generator) < 0.01
            weight += is_changed * torch.randn(weight.shape, generator=generator)


def assert_equal_bits(worker: Worker, model: nn.Module, dtype=torch.bfloat16) -> None:
    words = torch.int16 if dtype is torch.bfloat16 else torch.int32
    for name, weight in model.named_parameters():
        assert torch.equal(worker.last_tensors[name].view(words), weight.detach().to(dtype).view(words)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("chunk_bytes", [1 << 20, 100])
def test_after_a_hundred_steps_the_weights_are_those_of_the_trainer_bit_by_bit(
    monkeypatch, chunk_bytes, dtype
):
    monkeypatch.setattr(Publisher, "chunk_bytes", chunk_bytes)
    worker, model = Worker(), TwoLayers()
    link = Fleet(g0=worker)
    sender = sender_to(link, dtype=dtype)
    sender.publish(model, 0, self_test=True)()
    for version in range(1, 101):
        change_a_little(model, version)
        metrics = sender.publish(model, version)()
        assert_equal_bits(worker, model, dtype)
        assert metrics["weight_sync_bytes"] == link.sizes[-1]
        assert 0 <= metrics["weight_sync_changed_share"] < 0.2
    assert not link.fenced
    digests = [digest for package in link.packages[-100:] for digest in package.chunk_digests]
    assert any(digest.base_digest for digest in digests)


def test_changes_are_smaller_and_weights_that_all_change_travel_whole():
    worker, model = Worker(), TwoLayers()
    link = Fleet(g0=worker)
    sender = sender_to(link)
    whole_bytes = sender.publish(model, 0)()["weight_sync_bytes"]
    with torch.no_grad():
        model.second.bias[1] += 1
    metrics = sender.publish(model, 1)()
    assert metrics["weight_sync_bytes"] == 8 < 0.1 * whole_bytes  # one count and one change
    assert metrics["weight_sync_changed_share"] == pytest.approx(1 / (whole_bytes / 2))
    with torch.no_grad():
        for weight in model.parameters():
            weight += 1
    assert sender.publish(model, 2)()["weight_sync_bytes"] == whole_bytes
    assert_equal_bits(worker, model)
    assert sender.publish(model, 3)()["weight_sync_bytes"] == 4  # nothing changed


@pytest.mark.parametrize(("dtype", "largest_share"), [(torch.float32, 0.75), (torch.bfloat16, 0.5)])
def test_steps_of_an_adapter_travel_compressed_and_arrive_bit_by_bit(dtype, largest_share):
    generator = torch.Generator().manual_seed(0)
    a = torch.empty(16, 576).uniform_(-1 / 24, 1 / 24, generator=generator)
    b = torch.zeros(576, 16)
    sent = SentChunks(True, Traffic())
    received = ReceivedChunks()
    for version in range(30):
        weights = {f"base_model.model.q.lora_{name}.weight": value for name, value in (("A", a), ("B", b))}
        image, tensors = pack_weights(weights, dtype)
        whole = image.tobytes()
        manifest = {name: record(tensor) for name, tensor in tensors.items()}
        package = WeightPackage(version, manifest, [], [], np.zeros(0), 1.0)
        payload, digest = sent.encode(package, image, manifest)
        (arrived,) = received.restore([payload.data], [digest])
        assert arrived.tobytes() == whole
        if version > 20:
            assert digest.base_digest and len(payload) < largest_share * len(whole)
        a = a + 2e-5 * torch.randn(a.shape, generator=generator)
        b = b + 2e-5 * torch.randn(b.shape, generator=generator)


class Adapted:
    """A model of two layers with the tensors of an adapter, which computes without them."""

    def __init__(self) -> None:
        self.base = TwoLayers()
        generator = torch.Generator().manual_seed(0)
        self.adapter = {
            "base_model.model.first.lora_A.weight": torch.rand(16, 64, generator=generator) / 8,
            "base_model.model.first.lora_B.weight": torch.zeros(64, 16),
        }

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return self.base(ids)

    def step(self, version: int) -> None:
        generator = torch.Generator().manual_seed(version)
        for tensor in self.adapter.values():
            tensor += 2e-5 * torch.randn(tensor.shape, generator=generator)

    def weights_and_adapter(self):
        return [*named(self.base), *self.adapter.items()]


def sender_of_adapters(link) -> Publisher:
    named_all = Adapted.weights_and_adapter
    return Publisher(link, named_all, CANARY, torch.float32, 0, DELTAS, lambda model: model.adapter.items())


def test_an_adapter_that_is_sent_alone_travels_as_changes_from_its_first_step_and_nobody_keeps_its_base():
    worker, model = Worker(), Adapted()
    link = Fleet(g0=worker)
    sender = sender_of_adapters(link)
    sender.publish(model, 0, self_test=True)()
    adapter_bytes = sum(tensor.nbytes for tensor in model.adapter.values())
    for version in range(1, 6):
        (kept,) = worker.received._images.values()
        assert adapter_bytes < len(kept) < adapter_bytes + 500
        ((names, _),) = sender._sent_chunks._last.items()
        assert names == tuple(model.adapter)
        model.step(version)
        metrics = sender.publish(model, version)()
        # In the first of these syncs, B changes from zeros, in all of its bits
        assert metrics["weight_sync_bytes"] < 0.85 * adapter_bytes
        assert metrics["weight_sync_changed_share"] > 0
        for name, tensor in model.adapter.items():
            assert torch.equal(worker.last_tensors[name].view(torch.int32), tensor.view(torch.int32))
    assert not link.fenced


def test_a_worker_that_joins_late_gets_base_and_adapter_whole_and_then_changes_of_the_adapter():
    early, late, model = Worker(), Worker(), Adapted()
    link = Fleet(g0=early)
    sender = sender_of_adapters(link)
    sender.publish(model, 0, self_test=True)()
    model.step(1)
    sender.publish(model, 1)()
    link.workers["late"] = late
    link.late = {"late"}
    sender.publish(model, 1, self_test=True)()
    assert torch.equal(late.last_tensors["first.weight"], model.base.first.weight.detach())
    model.step(2)
    sender.publish(model, 2)()
    assert all(digest.base_digest for digest in link.packages[-1].chunk_digests)
    for worker in (early, late):
        for name, tensor in model.adapter.items():
            assert torch.equal(worker.last_tensors[name].view(torch.int32), tensor.view(torch.int32))
    assert not link.fenced


def test_without_the_option_workers_keep_nothing_and_all_weights_travel():
    worker, model = Worker(), TwoLayers()
    link = Fleet(g0=worker)
    sender = sender_to(link, config=WeightConfig())
    sizes = [sender.publish(model, version)()["weight_sync_bytes"] for version in range(2)]
    assert sizes == link.sizes and sizes[0] == sizes[1]
    assert not worker.received._images and not sender._sent_chunks._last


def test_a_worker_that_joins_late_gets_whole_weights_and_then_the_same_changes_as_the_others():
    early, late, model = Worker(), Worker(), TwoLayers()
    link = Fleet(g0=early)
    sender = sender_to(link)
    sender.publish(model, 0, self_test=True)()
    change_a_little(model, 1)
    sender.publish(model, 1)()
    link.workers["late"] = late
    link.late = {"late"}
    sender.publish(model, 1, self_test=True)()
    assert not any(digest and digest.base_digest for digest in link.packages[-1].chunk_digests)
    for version in (2, 3):
        change_a_little(model, version)
        sender.publish(model, version)()
        assert any(digest.base_digest for digest in link.packages[-1].chunk_digests)
        assert_equal_bits(early, model)
        assert_equal_bits(late, model)
    assert not link.fenced


def test_a_worker_that_missed_a_version_refuses_the_changes_by_their_base():
    good, asleep, model = Worker(), Worker(), TwoLayers()
    link = Fleet(g0=good, g1=asleep)
    sender = sender_to(link)
    sender.publish(model, 0)()
    del link.workers["g1"]
    change_a_little(model, 1)
    sender.publish(model, 1)()
    link.workers["g1"] = asleep
    change_a_little(model, 2)
    sender.publish(model, 2)()
    (base_digest,) = [digest.base_digest for digest in link.packages[-1].chunk_digests]
    assert list(link.fenced) == ["g1"]
    assert base_digest in link.fenced["g1"] and "missed a version" in link.fenced["g1"]
    assert_equal_bits(good, model)


def test_after_an_update_that_failed_the_next_changes_are_refused():
    worker, good, model = Worker(), Worker(), TwoLayers()
    link = Fleet(g0=good)
    sender = sender_to(link)
    sender.publish(model, 0)()
    worker.load(link.packages[0])
    change_a_little(model, 1)
    sender.publish(model, 1)()
    cut_off = replace(link.packages[-1], chunks=[link.packages[-1].chunks[0][:-2]])
    with pytest.raises(WeightsDidNotLand, match="damaged|cut off"):
        worker.load(cut_off)
    with pytest.raises(WeightsDidNotLand, match="which this worker does not have"):
        worker.load(link.packages[-1])


@pytest.mark.parametrize("name", ["first.weight", "first.bias", "second.weight", "second.bias"])
def test_a_base_whose_bits_were_damaged_in_memory_is_refused_by_the_tensor_s_name(name):
    good, damaged, model = Worker(), Worker(), TwoLayers()
    link = Fleet(g0=good, g1=damaged)
    sender = sender_to(link)
    sender.publish(model, 0)()
    (image,) = damaged.received._images.values()
    words = dict(model.named_parameters())[name].detach().bfloat16().view(torch.int16)
    image[image.tobytes().find(words.numpy().tobytes())] ^= 1  # a bit of the tensor's first value
    with torch.no_grad():
        model.second.bias[-1] += 1  # one value that none of the damaged ones is
    sender.publish(model, 1)()
    assert list(link.fenced) == ["g1"] and f"differing: {name}" in link.fenced["g1"]


def test_a_self_test_leaves_what_changes_apply_to_as_it_is():
    worker, model = Worker(), TwoLayers()
    link = Fleet(g0=worker)
    sender = sender_to(link)
    sender.publish(model, 0)()
    kept = {digest: image.copy() for digest, image in worker.received._images.items()}
    worker.load(replace(link.packages[0], version=SELF_TEST, chunk_digests=[None]))
    assert worker.received._images.keys() == kept.keys()
    change_a_little(model, 1)
    sender.publish(model, 1)()
    assert_equal_bits(worker, model)


def test_chunks_that_were_left_out_of_a_version_travel_whole_afterwards():
    """Workers keep the chunks of their last update alone, as when a base travels once and an adapter often."""
    worker, model = Worker(), TwoLayers()
    link = Fleet(g0=worker)
    sent_names = {"first.weight", "second.bias"}
    sender = sender_to(link, named=lambda model: ((n, w) for n, w in named(model) if n in sent_names))
    sender.publish(model, 0)()
    sent_names.remove("first.weight")
    sender.publish(model, 1)()
    sent_names.add("first.weight")
    sender.publish(model, 2)()
    assert not any(digest.base_digest for digest in link.packages[-1].chunk_digests)
    assert torch.equal(worker.last_tensors["first.weight"], model.first.weight.detach().bfloat16())


def test_a_restarted_trainer_sends_whole_weights_first():
    worker, model = Worker(), TwoLayers()
    link = Fleet(g0=worker)
    sender_to(link).publish(model, 5)()
    change_a_little(model, 1)
    resumed = sender_to(link)
    resumed.publish(model, 5)()
    assert not any(digest.base_digest for digest in link.packages[-1].chunk_digests)
    change_a_little(model, 2)
    resumed.publish(model, 6)()
    assert_equal_bits(worker, model)
    assert not link.fenced


def test_changes_travel_through_shared_files_too(tmp_path):
    worker, model = Worker(), TwoLayers()
    config = WeightConfig(
        weight_transport="shared_files", weight_folder=str(tmp_path), weight_sync_deltas=True
    )
    sender = sender_to(Fleet(g0=worker), kind=SharedFilesPublisher, config=config)
    sizes = []
    for version in range(4):
        sizes.append(sender.publish(model, version)()["weight_sync_bytes"])
        assert_equal_bits(worker, model)
        with torch.no_grad():
            model.first.weight[version, 0] *= -1
    assert sizes[1:] == [8, 8, 8] and list(tmp_path.iterdir()) == []


def publish_from_shards(ranks, folder):
    """Publish weights that are sharded over the ranks, and return the bytes of each sync."""
    from torch.distributed.tensor import distribute_tensor

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (ranks.world_size,))

    def sharded(model):
        for name, weight in model.named_parameters():
            yield name, distribute_tensor(weight.detach(), mesh)

    model, worker = TwoLayers(), Worker()
    sender = sender_to(Fleet(g0=worker) if ranks.is_main else None, named=sharded)
    sizes = []
    for version in range(4):
        sizes.append(sender.publish(model, version)()["weight_sync_bytes"])
        if ranks.is_main:
            assert_equal_bits(worker, model)
        with torch.no_grad():
            model.first.weight[version, 0] *= -1
    return sizes


def test_two_ranks_send_the_changes_of_whole_tensors(tmp_path):
    sizes = on_two_ranks(publish_from_shards, tmp_path)
    assert sizes[0] > 200 and sizes[1:] == [8, 8, 8]
