"""The NCCL transaction's order, group changes and ends, with vLLM's trainer engine played by a script (no GPU here)."""

import inspect
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scripted_engine import TwoLayers, named, publisher
from scripted_nccl import Control, Scripted
from two_ranks import on_two_ranks

from async_grpo.errors import DeadlineExceeded, WeightsDidNotLand, WorkerLost
from async_grpo.weights import nccl
from async_grpo.weights.config import WeightConfig
from async_grpo.weights.nccl import AbortingClient, NCCLPublisher, RecordingSource
from async_grpo.weights.package import SELF_TEST


def test_engines_pause_load_and_resume_before_the_proof_and_commit_after_it():
    control = Control({"g0": 2, "g1": 1})
    publisher(control, kind=Scripted).publish(TwoLayers(), 0, self_test=True)()
    a_test = [f"pause {SELF_TEST}", "send", f"resume {SELF_TEST}", f"commit {SELF_TEST} g0,g1"]
    weights = ["pause 0", "send", "resume 0", "commit 0 g0,g1"]
    assert control.log == [a_test[0], "group of 4", *a_test[1:], *a_test, *weights]


def test_the_group_is_built_anew_when_its_membership_has_changed():
    control = Control({"g0": 1})
    sender, model = publisher(control, kind=Scripted), TwoLayers()
    sender.publish(model, 0)()
    sender.publish(model, 1)()
    control.members = {"g0": 1, "g1": 1}
    sender.publish(model, 2)()
    groups = [entry for entry in control.log if entry.startswith(("group", "shutdown"))]
    assert groups == ["group of 2", "shutdown", "group of 3"]


def test_a_lost_tensor_is_refused_and_the_engines_resumed_all_the_same():
    control = Control({"g0": 1}, loses="second.bias")
    with pytest.raises(WeightsDidNotLand, match=r"missing: second\.bias"):
        publisher(control, kind=Scripted).publish(TwoLayers(), 3)()
    assert control.log[-2:] == ["resume 3", "abort WeightsDidNotLand"]
    assert not any(entry.startswith("commit") for entry in control.log)


def test_late_workers_make_a_group_of_their_own_and_when_they_are_gone_again_nothing_is_sent():
    control = Control({"g0": 1})
    sender, model = publisher(control, kind=Scripted), TwoLayers()
    sender.publish(model, 0, self_test=True)()
    control.members = {"late": 1}
    sender.publish(model, 0, self_test=True)()
    assert control.begun_for_late and control.log[-1] == "commit 0 late"
    control.members, control.log = {}, []
    sender.publish(model, 0, self_test=True)()
    assert [entry for entry in control.log if not entry.startswith(("pause", "resume"))] == [
        *("commit -2 ", "commit -2 ", "commit 0 ")
    ]


@pytest.mark.parametrize("step", ["pause", "resume", "receipt", "init_weight_transfer"])
def test_an_engine_that_is_lost_before_or_after_the_transfer_costs_only_itself(step):
    control = Control({"g0": 1, "g1": 2}, dies=step)
    sender = publisher(control, kind=Scripted)
    sender.publish(TwoLayers(), 5)()
    groups = [entry for entry in control.log if entry.startswith("group")]
    assert groups == {"pause": ["group of 2"], "init_weight_transfer": ["group of 4", "group of 2"]}.get(
        step, ["group of 4"]
    )
    assert control.log[-1] == "commit 5 g0"
    control.dies = None
    sender.publish(TwoLayers(), 6)()
    assert control.log[-1] == "commit 6 g0"  # in a group of 2, if it was one of 4
    assert [entry for entry in control.log if entry.startswith("group")][-1] == "group of 2"


@pytest.mark.parametrize("step", ["start_weight_update", "receive_weights", "finish_weight_update"])
def test_an_engine_that_is_lost_in_the_transfer_takes_its_group_and_the_run_waits_for_their_successors(
    step, caplog
):
    control = Control({"g0": 1, "g1": 1})
    sender, model = publisher(control, kind=Scripted), TwoLayers()
    sender.publish(model, 0, self_test=True)()
    control.log, control.dies = [], step
    assert sender.publish(model, 1)()["canary_error"] == 0.0
    assert control.log[-5:] == ["fence g1", *control.log[-4:-2], "resume 1", "commit 1 "]
    assert sorted(control.log[-4:-2]) == ["fence g0", "shutdown"]
    assert len(sender._source.sent) == 4  # all was gathered, as on the other ranks
    control.members, control.dies = {"late": 1}, None
    sender.publish(model, 1, self_test=True)()
    assert control.begun_for_late and control.log[-1] == "commit 1 late"


def test_at_the_start_an_engine_is_needed():
    with pytest.raises(WorkerLost, match="no engine took the weights of version 0"):
        publisher(Control({"g1": 1}, dies="receive_weights"), kind=Scripted).publish(TwoLayers(), 0)()


def test_a_fault_that_is_no_engine_s_ends_the_run():
    class Faulty(Scripted):
        def send_weights(self):
            raise RuntimeError("CUDA error")

    with pytest.raises(RuntimeError, match="CUDA error"):
        publisher(Control({"g0": 1}), kind=Faulty).publish(TwoLayers(), 0)()


def test_a_transfer_whose_peer_is_gone_ends_by_the_deadline(monkeypatch):
    class Stuck(Scripted):
        def send_weights(self):
            time.sleep(1.0)

    monkeypatch.setattr(nccl, "ABORT_S", 0.0)
    control = Control({"g0": 1})
    with pytest.raises(DeadlineExceeded, match="NCCL transfer did not end within 0 s"):
        publisher(control, kind=Stuck, config=WeightConfig(sync_timeout_s=0.2)).publish(TwoLayers(), 0)()
    assert control.log[-1] == "group of 2"  # nobody resumes an engine that still sits in the transfer


def test_an_engine_that_dies_while_it_joins_is_left_out_at_once():
    """vLLM's trainer side sits in ncclCommInitRank until all members are there, and looks at its client only then."""
    is_over = threading.Event()

    class WaitsForMembers(Scripted):
        def make_engine(self, world_size: int):
            try:
                self.is_aborted = threading.Event()
                self.client = AbortingClient(self.engines, self._leave_group, self._abort_join)
                self.client.init_weight_transfer_engine({"rank_offset": 1})
            except WorkerLost:
                is_over.wait(20)  # for the lost member
                raise
            return self

    control = Control({"g0": 1, "g1": 1}, dies="init_weight_transfer")
    begun = time.monotonic()
    publisher(control, kind=WaitsForMembers).publish(TwoLayers(), 0)()
    is_over.set()
    assert control.log[-1] == "commit 0 g0" and time.monotonic() - begun < 10


def test_a_transfer_that_never_ends_does_not_keep_the_process_alive():
    code = """
import threading, torch
from async_grpo.weights import nccl
from async_grpo.weights.config import WeightConfig
from async_grpo.weights.nccl import NCCLPublisher
nccl.ABORT_S = 0.0
publisher = NCCLPublisher(None, None, None, torch.float32, 0, WeightConfig(sync_timeout_s=0.2))
publisher._within_deadline(threading.Event().wait)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "DeadlineExceeded: the NCCL transfer did not end" in done.stderr


def test_the_source_says_beforehand_what_it_will_yield():
    pytest.importorskip("vllm")
    source = RecordingSource(torch.bfloat16, dict(named(TwoLayers())))
    declared = [(meta.name, meta.dtype, meta.shape) for meta in source.metadata()]
    assert declared == [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in source]
    assert np.all([tensor.is_contiguous() for _, tensor in source])


class FakeStream:
    """In place of a CUDA stream: its work ends when it is waited for."""

    current = ""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def synchronize(self):
        self.log.append(f"wait {self.name}")

    @contextmanager
    def use(self):
        FakeStream.current = self.name
        yield


def gathered_while_sending(ranks, folder):
    """The order of gathers and broadcasts on every rank, with vLLM's own loop over the tensors on rank 0."""
    from torch.distributed.tensor import distribute_tensor
    from vllm.distributed.weight_transfer import packed_tensor
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (ranks.world_size,))
    weights = {
        f"layer.{number}": distribute_tensor(torch.full((4, 6), 1.0 + number), mesh) for number in range(6)
    }
    log, arrived = [], []

    def gather(weight, dtype):
        log.append("gather")
        return weight.full_tensor().to(dtype)

    def broadcast(packed, src):
        log.append(f"broadcast {FakeStream.current}")
        arrived.append(packed.clone())

    streams = [FakeStream("first", log), FakeStream("second", log)]
    fakes = pytest.MonkeyPatch()
    fakes.setattr(nccl, "full_tensor", gather)
    fakes.setattr(packed_tensor, "_get_streams", lambda device, count: tuple(streams[:count]))
    fakes.setattr(torch.cuda, "stream", FakeStream.use)
    fakes.setattr(torch.accelerator, "current_device_index", lambda: 0)
    control = Control({"g0": 1}) if ranks.is_main else None
    if control:
        control.address = "127.0.0.1"
    infos = []
    fakes.setattr(WeightTransferTrainerFactory, "trainer_init", lambda info, **_: infos.append(info))
    sender = publisher(control, kind=NCCLPublisher)
    sender.make_engine(2)
    engine = NCCLTrainerWeightTransferEngine(
        client=None,
        source=sender._source,
        is_sender=infos[0].is_sender,
        packed_buffer_size_bytes=150,  # two tensors of 96 bytes
        packed_num_buffers=infos[0].packed_num_buffers,
    )
    engine.model_update_group = SimpleNamespace(broadcast=broadcast)
    sender._source.begin(weights)
    engine._broadcast(sender._source, sender._source.metadata())
    fakes.undo()
    logs = [None] * ranks.world_size
    torch.distributed.all_gather_object(logs, log)
    return logs, arrived


def test_no_rank_gathers_while_a_broadcast_is_in_flight(tmp_path):
    """Two communicators at work on one device can wait for each other (FSDP2's and that of the engines)."""
    pytest.importorskip("vllm")
    (first, second), arrived = on_two_ranks(gathered_while_sending, tmp_path)
    assert second == ["gather"] * 6
    assert [entry for entry in first if entry == "gather"] == second
    in_flight = set()
    for entry in first:
        kind, _, stream = entry.partition(" ")
        assert kind != "gather" or not in_flight, first
        in_flight = in_flight | {stream} if kind == "broadcast" else in_flight - {stream}
    values = torch.cat(arrived).view(torch.float32).view(6, 24)
    assert first.count("broadcast first") == 3 and torch.equal(
        values, torch.arange(1.0, 7.0)[:, None].expand(6, 24)
    )


def test_engines_use_the_one_buffer_that_the_trainer_announces(monkeypatch):
    """With two, an engine could still read a buffer while the next tensors arrive in it (NeMo-RL#3545)."""
    factory = pytest.importorskip("vllm.distributed.weight_transfer.factory").WeightTransferTrainerFactory
    infos = []
    monkeypatch.setattr(factory, "trainer_init", lambda info, **_: infos.append(info))
    control = Control({"g0": 1})
    control.address = "127.0.0.1"
    publisher(control, kind=NCCLPublisher).make_engine(2)
    assert infos[0].packed and infos[0].packed_num_buffers == 1


def test_the_source_has_what_vllm_s_trainer_engine_asks_for():
    """vLLM 0.33 asks for `iter_full()`, and for `metadata` as a property."""
    base = pytest.importorskip("vllm.distributed.weight_transfer.base")
    assert base.WeightSource.__abstractmethods__ == {"metadata", "__iter__"}
    assert inspect.isfunction(base.WeightSource.metadata)


def test_the_client_is_what_vllm_s_trainer_engine_asks_for():
    base = pytest.importorskip("vllm.distributed.weight_transfer.base")
    for name in (
        "init_weight_transfer_engine",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
    ):
        theirs = inspect.signature(getattr(base.VLLMWeightSyncClient, name))
        assert list(inspect.signature(getattr(AbortingClient, name)).parameters) == list(theirs.parameters)
    trainer = pytest.importorskip(
        "vllm.distributed.weight_transfer.nccl_engine"
    ).NCCLTrainerWeightTransferEngine
    assert isinstance(AbortingClient(None, None), base.VLLMWeightSyncClient)
    assert {"send_weights", "shutdown", "trainer_init"} <= set(vars(trainer))
