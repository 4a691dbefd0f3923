"""The NCCL transaction's order, group changes and ends, with vLLM's trainer engine played by a script (no GPU here)."""

import subprocess
import sys
import time
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from test_weights import CANARY, TwoLayers, logprobs, named

from async_grpo.errors import DeadlineExceeded, WeightsDidNotLand
from async_grpo.protocols import Receipt, WeightPackage
from async_grpo.weights.config import WeightConfig
from async_grpo.weights.nccl import NCCLPublisher, RecordingSource
from async_grpo.weights.package import SELF_TEST


class Control:
    """Engines that receive what the scripted trainer engine sends; a log of what they were told."""

    def __init__(self, members: dict[str, int], loses: str | None = None) -> None:
        self.members, self.loses, self.log = members, loses, []
        self.address = "127.0.0.1"
        self.model = TwoLayers()
        self.received: dict = {}

    def begin(self) -> Mapping[str, int]:
        return self.members

    def pause(self, version: int) -> None:
        self.log.append(f"pause {version}")

    def resume(self, version: int) -> None:
        self.log.append(f"resume {version}")

    def receipts(self, package: WeightPackage) -> Mapping[str, Receipt]:
        return {w: (self.received, logprobs(self.model, package.canary_ids)) for w in self.members}

    def commit(self, package: WeightPackage, landed: list[str]) -> None:
        self.log.append(f"commit {package.version} {','.join(landed)}")


class ScriptedEngine:
    """In place of vLLM's `NCCLTrainerWeightTransferEngine`."""

    def __init__(self, control: Control | None, source: RecordingSource, world_size: int) -> None:
        self.control, self.source = control, source
        if control:
            control.log.append(f"group of {world_size}")

    def send_weights(self) -> None:
        tensors = dict(self.source)
        if self.control:
            self.control.log.append("send")
            arrived = {name: tensor for name, tensor in tensors.items() if name != self.control.loses}
            self.control.received = {name: self.source.sent[name] for name in arrived}
            with torch.no_grad():
                for name, tensor in arrived.items():
                    self.control.model.get_parameter(name).copy_(tensor)

    def shutdown(self) -> None:
        if self.control:
            self.control.log.append("shutdown")


def publisher(control: Control | None, named=named, engine=ScriptedEngine, timeout_s=5.0) -> NCCLPublisher:
    class Scripted(NCCLPublisher):
        def make_engine(self, source: RecordingSource, world_size: int) -> ScriptedEngine:
            return engine(self._engines, source, world_size)

    rank, config = int(control is None), WeightConfig(sync_timeout_s=timeout_s)
    return Scripted(control, named, CANARY, torch.float32, rank, config)


def test_engines_pause_load_and_resume_before_the_proof_and_commit_after_it():
    control = Control({"g0": 2, "g1": 1})
    publisher(control).publish(TwoLayers(), 0, self_test=True)
    unchanged = changed = [f"pause {SELF_TEST}", "send", f"resume {SELF_TEST}", f"commit {SELF_TEST} g0,g1"]
    weights = ["pause 0", "send", "resume 0", "commit 0 g0,g1"]
    assert control.log == ["group of 4", *unchanged, *changed, *weights]


def test_the_group_is_built_anew_when_its_membership_has_changed():
    control = Control({"g0": 1})
    sender, model = publisher(control), TwoLayers()
    sender.publish(model, 0)
    sender.publish(model, 1)
    control.members = {"g0": 1, "g1": 1}
    sender.publish(model, 2)
    assert [entry for entry in control.log if entry.startswith(("group", "shutdown"))] == [
        "group of 2",
        "shutdown",
        "group of 3",
    ]


def test_a_lost_tensor_is_refused_and_the_engines_resumed_all_the_same():
    control = Control({"g0": 1}, loses="second.bias")
    with pytest.raises(WeightsDidNotLand, match=r"missing: second\.bias"):
        publisher(control).publish(TwoLayers(), 3)
    assert control.log[-1] == "resume 3" and not any(entry.startswith("commit") for entry in control.log)


def test_a_transfer_whose_peer_is_gone_ends_by_the_deadline():
    class Stuck(ScriptedEngine):
        def send_weights(self) -> None:
            time.sleep(1.0)

    control = Control({"g0": 1})
    with pytest.raises(DeadlineExceeded, match="NCCL transfer did not end within 0 s"):
        publisher(control, engine=Stuck, timeout_s=0.2).publish(TwoLayers(), 0)
    assert control.log[-1] == "pause 0"  # nobody resumes an engine that still sits in the transfer


def test_a_transfer_that_never_ends_does_not_keep_the_process_alive():
    code = """
import threading, torch
from async_grpo.errors import DeadlineExceeded
from async_grpo.weights.config import WeightConfig
from async_grpo.weights.nccl import NCCLPublisher
publisher = NCCLPublisher(None, None, None, torch.float32, 0, WeightConfig(sync_timeout_s=0.2))
try:
    publisher._within_deadline(threading.Event().wait)
except DeadlineExceeded:
    print("ended")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "ended\n" and done.returncode == 0, done.stderr


def test_other_ranks_take_part_in_every_gathering_and_send_nothing():
    gathered: list[str] = []

    def gathering(model):
        for name, tensor in named(model):
            gathered.append(name)
            yield name, tensor

    silent = publisher(None, gathering)
    assert silent.publish(TwoLayers(), 0, self_test=True)["canary_error"] == 0.0
    assert len(gathered) == 4 * 4  # unchanged, to find the groups, one changed group, version 0


def test_the_source_says_beforehand_what_it_will_yield():
    pytest.importorskip("vllm")
    source = RecordingSource(TwoLayers(), named, torch.bfloat16)
    declared = [(meta.name, meta.dtype, meta.shape) for meta in source.metadata()]
    assert declared == [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in source]
    assert np.all([tensor.is_contiguous() for _, tensor in source])
