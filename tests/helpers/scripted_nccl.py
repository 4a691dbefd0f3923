"""An NCCL transfer without GPUs: vLLM's trainer engine is played by a script, the engines by a model of two layers."""

import threading

from scripted_engine import TwoLayers, logprobs

from async_grpo.errors import WorkerLost
from async_grpo.weights.delta_tensors import ReceivedTensors
from async_grpo.weights.nccl import AbortingClient, NCCLPublisher
from async_grpo.weights.package import record


class Control:
    """`Engines`: engines that receive what the scripted trainer sends; a log of what they were told. `dies`: the step over
    which `g1` is lost."""

    def __init__(self, members, loses=None, dies=None):
        self.members, self.loses, self.dies, self.log = dict(members), loses, dies, []
        self.model, self.received, self.received_tensors = TwoLayers(), {}, ReceivedTensors()

    def begin(self, for_late):
        self.begun_for_late = for_late

    def each(self, method, argument):
        if method == self.dies and "g1" in self.members:
            self.fence("g1", WorkerLost("g1 died"))
        if method == "receipt":
            return dict.fromkeys(self.members, (self.received, logprobs(self.model, *argument)))
        self.log.append(f"{method} {argument}")
        return dict.fromkeys(self.members)

    def together(self, method, *arguments):
        if method == self.dies and "g1" in self.members:
            self.fence("g1", WorkerLost("g1 died"))
            raise WorkerLost(f"g1 was lost in an NCCL weight sync, by {method}")

    def fence(self, worker_id, error):
        del self.members[worker_id]
        self.log.append(f"fence {worker_id}")

    def commit(self, package, landed):
        self.log.append(f"commit {package.version} {','.join(landed)}")

    def abort(self, error):
        self.log.append(f"abort {type(error).__name__}")


class Scripted(NCCLPublisher):
    """In place of vLLM's trainer engine it is one itself. A broadcast to a peer that is gone ends when it is aborted."""

    def make_engine(self, world_size: int):
        if self.engines:
            self.engines.log.append(f"group of {world_size}")
            self.client, self.is_aborted = AbortingClient(self.engines, self._leave_group), threading.Event()
            self.client.init_weight_transfer_engine({"rank_offset": 1})
        return self

    def send_weights(self):
        control = self.engines
        self.client.start_weight_update()
        try:
            self.client.update_weights({})
        except WorkerLost as lost:  # vLLM's broadcast ends with an error of NCCL; it has gathered a part
            assert self.is_aborted.wait(5)
            next(iter(self._source))
            raise RuntimeError("NCCL error: unhandled system error") from lost
        sent = list(self._source)
        control.num_bytes = sum(tensor.nbytes for _, tensor in sent)
        control.names_on_wire = [name for name, _ in sent]
        tensors = dict(control.received_tensors.restore(sent))
        control.log.append("send")
        arrived = {name: tensor for name, tensor in tensors.items() if name != control.loses}
        control.received = {name: record(tensor) for name, tensor in arrived.items()}
        control.arrived = arrived
        control.model.load_state_dict(arrived, strict=False)
        self.client.finish_weight_update()

    def shutdown(self):
        self.is_aborted.set()
        self.engines.log.append("shutdown")
