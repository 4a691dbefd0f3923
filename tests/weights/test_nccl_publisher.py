"""The NCCL transaction's order, group changes and ends, with vLLM's trainer engine played by a script (no GPU here)."""

import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from test_weights import TwoLayers, logprobs, named, publisher

from async_grpo.errors import DeadlineExceeded, WeightsDidNotLand
from async_grpo.weights.config import WeightConfig
from async_grpo.weights.nccl import NCCLPublisher, RecordingSource
from async_grpo.weights.package import SELF_TEST


class Control:
    """`Engines`: engines that receive what the scripted trainer sends; a log of what they were told."""

    def __init__(self, members, loses=None):
        self.members, self.loses, self.log = members, loses, []
        self.model, self.received = TwoLayers(), {}

    def begin(self, for_late):
        self.begun_for_late = for_late
        return self.members

    def each(self, method, argument):
        if method == "receipt":
            return dict.fromkeys(self.members, (self.received, logprobs(self.model, *argument)))
        self.log.append(f"{method} {argument}")

    def commit(self, package, landed):
        self.log.append(f"commit {package.version} {','.join(landed)}")

    def abort(self, error):
        self.log.append(f"abort {type(error).__name__}")


class Scripted(NCCLPublisher):
    """In place of vLLM's trainer engine it is one itself."""

    def make_engine(self, world_size: int):
        if self.engines:
            self.engines.log.append(f"group of {world_size}")
        return self

    def send_weights(self):
        tensors, control = dict(self._source), self.engines
        if control:
            control.log.append("send")
            arrived = {name: tensor for name, tensor in tensors.items() if name != control.loses}
            control.received = {name: self._source.sent[name] for name in arrived}
            control.model.load_state_dict(arrived, strict=False)

    def shutdown(self):
        self.engines.log.append("shutdown")


def test_engines_pause_load_and_resume_before_the_proof_and_commit_after_it():
    control = Control({"g0": 2, "g1": 1})
    publisher(control, kind=Scripted).publish(TwoLayers(), 0, self_test=True)()
    a_test = [f"pause {SELF_TEST}", "send", f"resume {SELF_TEST}", f"commit {SELF_TEST} g0,g1"]
    weights = ["pause 0", "send", "resume 0", "commit 0 g0,g1"]
    assert control.log == ["group of 4", *a_test, *a_test, *weights]


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
    assert control.log == ["commit -2 ", "commit -2 ", "commit 0 "]


def test_a_transfer_whose_peer_is_gone_ends_by_the_deadline():
    class Stuck(Scripted):
        def send_weights(self):
            time.sleep(1.0)

    control = Control({"g0": 1})
    with pytest.raises(DeadlineExceeded, match="NCCL transfer did not end within 0 s"):
        publisher(control, kind=Stuck, config=WeightConfig(sync_timeout_s=0.2)).publish(TwoLayers(), 0)()
    assert control.log[-1] == "pause 0"  # nobody resumes an engine that still sits in the transfer


def test_a_transfer_that_never_ends_does_not_keep_the_process_alive():
    code = """
import threading, torch
from async_grpo.weights.config import WeightConfig
from async_grpo.weights.nccl import NCCLPublisher
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
