"""`Checkpointer`: saves the whole, exact state of a trainer while the training continues.

A checkpoint can be loaded by any number of ranks. This module decides what a checkpoint contains.
`torch.distributed.checkpoint` copies the state, writes it as safetensors, and distributes it again when it is loaded.
"""

import dataclasses
import itertools
import logging
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from async_grpo.errors import AsyncGrpoError, CheckpointBroken, DeadlineExceeded
from async_grpo.messages import LoraSettings
from async_grpo.modeling import local_shard
from async_grpo.modeling.policy import PolicyModel
from async_grpo.processes.out_of_memory import naming_out_of_memory
from async_grpo.training.checkpoint_folder import (
    Manifest,
    complete,
    discard_partial,
    partial_folder,
    prune,
    versions,
)
from async_grpo.training.critic import Critic
from async_grpo.training.distributed import Ranks
from async_grpo.training.memory_cures import CHECKPOINT
from async_grpo.training.muon import MOMENTUM_BUFFER
from async_grpo.training.optimizer import optimizer_state

CRITIC = "critic"  # prefix of the names of the critic's tensors, which distinguishes them from the policy's
REFERENCE = "reference"  # prefix of the names of the weights of a moving reference
MAX_FILES = 16  # maximum number of files that a rank writes for one checkpoint
# Name of the tensor with the number of updates that the learning-rate schedule has counted
SCHEDULE = "schedule"
MOMENTS = ("exp_avg", "exp_avg_sq", MOMENTUM_BUFFER)
FILE_BYTES = 64 << 20  # approximate size of a file; files are larger if more than MAX_FILES would be needed
# Errors that safetensors and torch raise when they read shards with arbitrary contents
UNREADABLE = (SafetensorError, OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError)
CANNOT_WRITE = (OSError, SafetensorError, CheckpointException, AsyncGrpoError)
# (folder, step) -> a function that waits until the experience is written into the folder
SaveExperience = Callable[[Path, int], Callable[[], Any]]

# Typed as Any, because type checkers report public names that torch's module does not list in `__all__`
dcp: Any = torch_checkpoint
log = logging.getLogger(__name__)


@dataclass
class Checkpointer:
    """Saves and loads weights (float32), optimizer, schedule and random states. All public methods are collectives."""

    output_dir: Path
    ranks: Ranks
    policy: PolicyModel
    scheduler: LambdaLR
    keep: int  # number of newest checkpoints that are kept, in addition to those that `stay` returns
    timeout_s: float  # maximum time to write a checkpoint
    options: dict[str, Any]  # options of the run, stored in the manifest
    inputs: dict[str, str]  # sha256 of the run's input files by option, stored in the manifest
    # Starts to save the groups that have not been trained on yet; set only on rank 0
    save_experience: SaveExperience | None = None
    # Returns the names of checkpoints that are never removed; the default, tuple, returns none
    stay: Callable[[], Collection[str]] = tuple
    critic: Critic | None = None  # the critic, if it is a separate model
    lora: LoraSettings | None = None  # settings of the adapter that is trained, stored in the manifest
    # Yields (name, tensor) of the weights of a moving reference, or of the old policy of DiffusionNFT; the default, tuple,
    # yields none
    reference: Callable[[], Iterable[tuple[str, Tensor]]] = tuple

    def __post_init__(self) -> None:
        # A separate process group, because its collectives run at the same time as those of the training
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout_s))
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        if self.ranks.is_main:
            discard_partial(self.output_dir)

    def save(self, step: int, samples: int, end_reason: str = "") -> None:
        """Copy the state after `step` steps and `samples` trained samples, and write it in the background.

        If a checkpoint cannot be written, the error is logged, the run continues, and the previous checkpoint is kept.
        If the previous checkpoint is still being written, no checkpoint is saved. Only if there is an `end_reason`,
        which means that the run ends, does this method wait for the previous checkpoint and then save this one.
        """
        is_busy = self._writing is not None and not self._writing.done()
        if self.ranks.max([float(is_busy)])[0] and not end_reason:
            log.warning("no checkpoint after step %d: the one before it is still being written", step)
            return
        self.wait()
        partial = partial_folder(self.output_dir, step)
        wait_for_experience = None
        if self.ranks.is_main and self.save_experience is not None:
            wait_for_experience = self.save_experience(partial, step)
        manifest = Manifest(
            step=step,
            samples=samples,
            world_size=self.ranks.world_size,
            options=self.options,
            inputs=self.inputs,
            versions=versions(),
            ended=end_reason,
            lora=dataclasses.asdict(self.lora) if self.lora else {},
        )
        tensors = dict(self._tensors())
        writer = dcp.HuggingFaceStorageWriter(
            str(partial / "training"),
            fqn_to_index_mapping=self._files(tensors),
            save_distributed=True,
        )
        shards = dcp.async_save(tensors, storage_writer=writer, process_group=self._group)
        assert isinstance(shards, Future)
        self._writing = self._thread.submit(self._complete, shards, wait_for_experience, partial, manifest)

    def _complete(
        self,
        shards: Future[Any],
        wait_for_experience: Callable[[], Any] | None,
        partial: Path,
        manifest: Manifest,
    ) -> None:
        """Wait until all parts are written, and rename the folder to its final name. Runs in a background thread."""
        try:
            # If the memory does not suffice, log it in the same way as any other failure to write a checkpoint
            with naming_out_of_memory(
                f"while the checkpoint of step {manifest.step} was written", CHECKPOINT
            ):
                shards.result()
            if wait_for_experience is not None:
                wait_for_experience()
            if not self.ranks.is_main:
                return
            files = (partial / "training").glob("*.safetensors")
            num_ranks = len({file.name.partition("-model-")[0] for file in files})
            if num_ranks < manifest.world_size:
                raise OSError(
                    f"{partial} holds the shards of {num_ranks} ranks, not of {manifest.world_size}: --output-dir must be "
                    "a folder that all nodes share"
                )
            complete(partial, manifest)
        except CANNOT_WRITE:
            if self.ranks.is_main:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        prune(self.output_dir, self.keep, self.stay())

    def _files(self, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the index of the file to which each tensor is written, by the tensor's name, for all ranks' tensors.

        The state is split into several files to save memory, because each file is built in memory, in addition to the
        copy of the state.
        """
        suffix = f".{self.ranks.rank}"
        names = list(tensors)
        for name in tensors:
            if name.endswith(suffix):
                base = name.removesuffix(suffix)
                names += [f"{base}.{rank}" for rank in range(self.ranks.world_size)]
        names = list(dict.fromkeys(names))
        sizes = [tensors[name].nbytes if name in tensors else 0 for name in names]
        num_files = max(1, min(MAX_FILES, sum(sizes) // FILE_BYTES))
        ends = itertools.accumulate(sizes)
        return {name: 1 + num_files * (end - 1) // sum(sizes) for name, end in zip(names, ends, strict=True)}

    def wait(self) -> bool:
        """Wait until all ranks have written the checkpoint.

        Returns:
            Whether the checkpoint was written. If not, the log contains the reason.

        Raises:
            DeadlineExceeded: The checkpoint was not written in time.
        """
        writing = self._writing
        self._writing = None
        if writing is None:
            return True
        has_failed = False
        try:
            writing.result(self.timeout_s)
        except CANNOT_WRITE as error:
            if not writing.done():
                raise DeadlineExceeded(
                    f"a checkpoint was not written within {self.timeout_s:.0f} s (--checkpoint-timeout-s)"
                ) from error
            log.error("a checkpoint could not be written; the run goes on, the last one stays: %s", error)
            has_failed = True
        # All ranks wait until rank 0 has completed the folder. If a rank exited earlier, torchrun might end rank 0
        return not self.ranks.max([float(has_failed)])[0]

    def load(self, folder: Path) -> None:
        """Load policy, optimizer and schedule from a checkpoint that `verify_checkpoint` has accepted.

        Raises:
            CheckpointBroken: The checkpoint belongs to another model or optimizer, or its shards cannot be read.
        """
        with _shards_of(folder) as reader:
            stored_tensors = reader.read_metadata().state_dict_metadata
            tensors = {}
            for name, tensor in self._tensors():
                # Two kinds of tensors may be missing in a checkpoint. A random state is missing if the checkpoint was
                # written by fewer ranks or on another device. The counter of the schedule is missing if an earlier
                # version of this library wrote the checkpoint
                if name in stored_tensors or not name.startswith(("random.", SCHEDULE)):
                    tensors[name] = tensor
            _refuse_other_dtypes(folder, stored_tensors, tensors)
            dcp.load(tensors, storage_reader=reader, process_group=self._group)
        for name, state in tensors.items():
            if name.startswith("random.cpu"):
                torch.set_rng_state(state)
            elif name.startswith("random.cuda"):
                torch.cuda.set_rng_state(state)
        # Earlier versions stored no counter of the schedule. They never reset the optimizer, so its number of updates
        # is that of the schedule
        updates_of_optimizer = next(value for name, value in tensors.items() if name.startswith("updates."))
        _restore_schedule(self.scheduler, int(tensors.get(SCHEDULE, updates_of_optimizer)))
        if self.critic is not None:
            _restore_schedule(self.critic.scheduler, int(tensors[f"{SCHEDULE}.{CRITIC}"]))

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) for everything that a checkpoint contains. A sharded policy yields its shards.

        The tensors are not copies, so that a checkpoint can be loaded into them. Frozen weights, which LoRA leaves as they
        are in the model's folder, are not part of a checkpoint.
        """
        yield from self._trained_tensors(self.policy, self.scheduler.optimizer)
        if self.critic is not None:
            yield from self._trained_tensors(self.critic.model, self.critic.optimizer, CRITIC)
            yield f"{SCHEDULE}.{CRITIC}", torch.tensor([self.critic.scheduler.last_epoch])
        for name, tensor in self.reference():
            yield f"{REFERENCE}.{name}", tensor
        yield SCHEDULE, torch.tensor([self.scheduler.last_epoch])
        yield f"random.cpu.{self.ranks.rank}", torch.get_rng_state()
        if self.ranks.device.type == "cuda":
            yield f"random.cuda.{self.ranks.rank}", torch.cuda.get_rng_state()

    def _trained_tensors(
        self, model: PolicyModel, optimizer: Optimizer, prefix: str = ""
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of the trained weights of a model, their moments and their numbers of updates.

        Args:
            model: The policy or the critic.
            optimizer: Its optimizer.
            prefix: Beginning of the names of its weights.
        """
        for parameter_name, parameter in trained_parameters(model):
            name = f"{prefix}.{parameter_name}" if prefix else parameter_name
            state = optimizer_state(optimizer, parameter)
            yield f"weights.{name}", parameter.detach()
            for moment in MOMENTS:
                if moment not in state:
                    continue
                shard: Any = local_shard(state[moment])
                if hasattr(shard, "codes"):
                    # 8-bit moments consist of codes and scales, which exist only for this rank's rows
                    yield f"{moment}.{name}.codes.{self.ranks.rank}", shard.codes
                    yield f"{moment}.{name}.scale.{self.ranks.rank}", shard.scale
                else:
                    yield f"{moment}.{name}", state[moment]
            yield f"updates.{name}", state["step"].reshape(1)


def _restore_schedule(scheduler: LambdaLR, num_updates: int) -> None:
    """Set the schedule of a new optimizer to a number of updates."""
    if num_updates == 0:
        # The new schedule is already at update 0. The policy has had no update if all steps trained only the critic
        return
    scheduler.load_state_dict(
        {
            "lr_lambdas": [None] * len(scheduler.base_lrs),  # None keeps the current function
            "last_epoch": num_updates - 1,
            "_step_count": num_updates + 1,
        }
    )
    scheduler.step()


def trained_parameters(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, parameter) of all parameters of a module that are trained: with LoRA, those of the adapters."""
    return ((name, parameter) for name, parameter in policy.named_parameters() if parameter.requires_grad)


def load_weights(policy: PolicyModel, folder: Path) -> None:
    """Load the trained weights of a checkpoint into a policy that is not sharded. No process group is needed.

    Raises:
        CheckpointBroken: The checkpoint belongs to another model, or its shards cannot be read.
    """
    tensors = {f"weights.{name}": parameter.detach() for name, parameter in trained_parameters(policy)}
    _load_into(tensors, folder)


def load_reference_weights(policy: PolicyModel, folder: Path) -> None:
    """Load what `Checkpointer.reference` has yielded into the model of a policy that is not sharded.

    Raises:
        CheckpointBroken: The checkpoint belongs to another model, or its shards cannot be read.
    """
    tensors = {}
    for name, parameter in trained_parameters(policy.model):
        tensors[f"{REFERENCE}.{name}"] = parameter.detach()
    _load_into(tensors, folder)


def _load_into(tensors: dict[str, Tensor], folder: Path) -> None:
    """Read tensors of a checkpoint, by name, in place."""
    with _shards_of(folder) as reader:
        _refuse_other_dtypes(folder, reader.read_metadata().state_dict_metadata, tensors)
        dcp.load(tensors, storage_reader=reader, no_dist=True)


def _refuse_other_dtypes(
    folder: Path, stored_tensors: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Refuse a checkpoint with a tensor of another dtype. torch would convert it, and so round the weights, silently.

    Args:
        folder: The folder of the checkpoint.
        stored_tensors: torch's metadata of the tensors in the checkpoint, by name. torch itself refuses a missing one.
        tensors: The tensors into which they are loaded, by name.

    Raises:
        CheckpointBroken: The dtypes differ.
    """
    for name, tensor in tensors.items():
        if name not in stored_tensors:
            continue
        stored_dtype = stored_tensors[name].properties.dtype
        if stored_dtype != tensor.dtype:
            raise CheckpointBroken(
                f"{folder}: {name} in training/ has the dtype {stored_dtype}, but the trainer has {tensor.dtype}: the "
                "checkpoint was not written by this library, or was converted"
            )


@contextmanager
def _shards_of(folder: Path) -> Iterator[Any]:
    """Yield a reader of a checkpoint's shards, and turn the errors of reading into CheckpointBroken.

    The reader takes all metadata from the headers of the safetensors files. Other readers of torch unpickle the file
    `.metadata`, which is unsafe.
    """
    try:
        yield dcp.HuggingFaceStorageReader(str(folder / "training"))
    except CheckpointException as error:
        first_failure = next(iter(error.failures.values()))[0]
        raise CheckpointBroken(f"{folder} is not of this model and optimizer: {first_failure}") from error
    except UNREADABLE as error:
        raise CheckpointBroken(
            f"{folder}: the shards in training/ cannot be read: {type(error).__name__}: {error}"
        ) from error
