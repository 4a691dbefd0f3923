"""`Checkpointer`: all that a trainer goes on with, bit for bit, saved while it trains on, by any number of ranks.

Ours is what belongs to a checkpoint; torch's distributed checkpoints shard, stage, write and reshard it, as safetensors.
"""

import itertools
import logging
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim.lr_scheduler import LambdaLR

from async_grpo.errors import AsyncGrpoError, CheckpointBroken, DeadlineExceeded
from async_grpo.modeling import local_shard
from async_grpo.modeling.policy import PolicyModel
from async_grpo.training.checkpoint_folder import (
    Manifest,
    complete,
    discard_partial,
    partial_folder,
    prune,
    versions,
)
from async_grpo.training.distributed import Ranks
from async_grpo.training.optimizer import begun

FILES, FILE_BYTES = 16, 64 << 20  # of a rank, at most, and from which size on there are several
# What safetensors and torch raise for shards that hold anything
UNREADABLE = (SafetensorError, OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError)
CANNOT_WRITE = (OSError, SafetensorError, CheckpointException, AsyncGrpoError)
SaveExperience = Callable[[Path, int], Callable[[], Any]]  # folder, step -> what waits until it is written

dcp: Any = torch_checkpoint  # it names what it offers in no __all__
log = logging.getLogger(__name__)


@dataclass
class Checkpointer:
    """Saves and loads weights (float32), optimizer, schedule and random states; every public method is a collective."""

    output_dir: Path
    ranks: Ranks
    policy: PolicyModel
    scheduler: LambdaLR
    keep: int  # so many are kept, the newest; and those whose names `stay` says
    timeout_s: float  # longest time for one to be written
    options: dict[str, Any]  # of the run, as its inputs are: for the manifest
    inputs: dict[str, str]
    save_experience: SaveExperience | None = None  # rank 0's way to the other half, the groups alive
    stay: Callable[[], Collection[str]] = tuple

    def __post_init__(self) -> None:
        # Its collectives go on beside those of the training
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout_s))
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        if self.ranks.is_main:
            discard_partial(self.output_dir)

    def save(self, step: int, samples: int, end_reason: str = "") -> None:
        """Take a copy of the state after `step` steps, trained on `samples`, and begin to write it.

        One that cannot be written is not whole: the run goes on, its last checkpoint stays, and the log says so. While
        one is still being written no other begins, unless the run ends.
        """
        is_busy = self._writing is not None and not self._writing.done()
        if self.ranks.max([float(is_busy)])[0] and not end_reason:
            log.warning("no checkpoint after step %d: the one before it is still being written", step)
            return
        self.wait()
        partial, experience = partial_folder(self.output_dir, step), None
        if self.ranks.is_main and self.save_experience is not None:
            experience = self.save_experience(partial, step)
        manifest = Manifest(
            step=step,
            samples=samples,
            world_size=self.ranks.world_size,
            options=self.options,
            inputs=self.inputs,
            versions=versions(),
            ended=end_reason,
        )
        tensors = dict(self._tensors())
        told = {"fqn_to_index_mapping": self._files(tensors), "save_distributed": True}
        writer = dcp.HuggingFaceStorageWriter(str(partial / "training"), **told)
        copied = dcp.async_save(tensors, storage_writer=writer, process_group=self._group)
        assert isinstance(copied, Future)
        self._writing = self._thread.submit(self._complete, copied, experience, partial, manifest)

    def _complete(
        self, copied: Future[Any], experience: Callable[[], Any] | None, partial: Path, manifest: Manifest
    ) -> None:
        try:
            copied.result()
            if experience is not None:
                experience()
            if not self.ranks.is_main:
                return
            files = (partial / "training").glob("*.safetensors")
            found = len({file.name.partition("-model-")[0] for file in files})
            if found < manifest.world_size:
                raise OSError(
                    f"{partial} holds the shards of {found} ranks, not of {manifest.world_size}: --output-dir must be "
                    "a folder that all nodes share"
                )
            complete(partial, manifest)
        except CANNOT_WRITE:
            if self.ranks.is_main:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        prune(self.output_dir, self.keep, self.stay())

    def _files(self, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """Which file of a rank each tensor goes into, by name, of all ranks: a file is made in memory, beside the copy."""
        ranks, own = range(self.ranks.world_size), f".{self.ranks.rank}"
        others = [f"{n.removesuffix(own)}.{rank}" for n in tensors if n.endswith(own) for rank in ranks]
        names = list(dict.fromkeys([*tensors, *others]))
        sizes = [tensors[name].nbytes if name in tensors else 0 for name in names]
        count = max(1, min(FILES, sum(sizes) // FILE_BYTES))
        ends = itertools.accumulate(sizes)
        return {name: 1 + count * (end - 1) // sum(sizes) for name, end in zip(names, ends, strict=True)}

    def wait(self) -> bool:
        """Until what is being written is whole, for all ranks; False: it cannot be, and the log says why.

        DeadlineExceeded: it is not within the time for it.
        """
        failed, writing, self._writing = False, self._writing, None
        if writing is None:
            return True
        try:
            writing.result(self.timeout_s)
        except CANNOT_WRITE as error:
            if not writing.done():
                raise DeadlineExceeded(
                    f"a checkpoint was not written within {self.timeout_s:.0f} s (--checkpoint-timeout-s)"
                ) from error
            log.error("a checkpoint could not be written; the run goes on, the last one stays: %s", error)
            failed = True
        # A rank that ended now, before rank 0 has sealed it, would have torchrun end rank 0
        return not self.ranks.max([float(failed)])[0]

    def load(self, folder: Path) -> None:
        """Give policy, optimizer and schedule the state of a checkpoint that `verify_checkpoint` found to be whole.

        CheckpointBroken: it is of another model or optimizer, or its shards cannot be read.
        """
        with _shards_of(folder) as reader:
            saved = reader.read_metadata().state_dict_metadata
            # Random states are those of other ranks, or of another device
            tensors = {n: t for n, t in self._tensors() if n in saved or not n.startswith("random.")}
            dcp.load(tensors, storage_reader=reader, process_group=self._group)
        for name, state in tensors.items():
            if name.startswith("random.cpu"):
                torch.set_rng_state(state)
            elif name.startswith("random.cuda"):
                torch.cuda.set_rng_state(state)
        updates = int(next(value for name, value in tensors.items() if name.startswith("updates.")))
        lambdas = [None] * len(self.scheduler.base_lrs)  # these stay
        self.scheduler.load_state_dict(
            {"lr_lambdas": lambdas, "last_epoch": updates - 1, "_step_count": updates + 1}
        )
        self.scheduler.step()

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What belongs to a checkpoint, by name: the live tensors, of a sharded policy their shards."""
        for name, parameter in self.policy.named_parameters():
            moments = begun(self.scheduler.optimizer, parameter)
            yield f"weights.{name}", parameter.detach()
            for which in ("exp_avg", "exp_avg_sq"):
                shard: Any = local_shard(moments[which])
                if hasattr(shard, "codes"):  # of 8 bits: codes and scales, of this rank's rows alone
                    yield f"{which}.{name}.codes.{self.ranks.rank}", shard.codes
                    yield f"{which}.{name}.scale.{self.ranks.rank}", shard.scale
                else:
                    yield f"{which}.{name}", moments[which]
            yield f"updates.{name}", moments["step"].reshape(1)
        yield f"random.cpu.{self.ranks.rank}", torch.get_rng_state()
        if self.ranks.device.type == "cuda":
            yield f"random.cuda.{self.ranks.rank}", torch.cuda.get_rng_state()


def load_weights(policy: PolicyModel, folder: Path) -> None:
    """Give a policy of the checkpoint's model, not sharded, its weights; needs no process group.

    Raises:
        CheckpointBroken: it is of another model, or its shards cannot be read.
    """
    tensors = {f"weights.{name}": parameter.detach() for name, parameter in policy.named_parameters()}
    with _shards_of(folder) as reader:
        dcp.load(tensors, storage_reader=reader, no_dist=True)


@contextmanager
def _shards_of(folder: Path) -> Iterator[Any]:
    """Yield a reader of a checkpoint's shards; what it raises for shards that do not fit becomes CheckpointBroken.

    It reads the headers of the safetensors files. torch's other readers unpickle a file `.metadata`; this one does not.
    """
    try:
        yield dcp.HuggingFaceStorageReader(str(folder / "training"))
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise CheckpointBroken(f"{folder} is not of this model and optimizer: {first}") from error
    except UNREADABLE as error:
        what = f"{type(error).__name__}: {error}"
        raise CheckpointBroken(f"{folder}: the shards in training/ cannot be read: {what}") from error
