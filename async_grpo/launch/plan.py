"""Estimate a run's processes, memory, disk space and time within a second, and check whether the machine suffices."""

import math
import resource
import shutil
import statistics
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil
from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from async_grpo.config.critic_model import critic_folder
from async_grpo.config.drawing_memory import drawing_parameters
from async_grpo.config.memory_plan import (
    CHECKPOINT_PARAMETER_BYTES,
    adapter_parameters,
    chunk_tokens,
    critic_rank_bytes,
    critic_state_bytes,
    engine_bytes,
    logprob_worker_bytes,
    parameters_of,
    trainer_rank_bytes,
    trainer_state_bytes,
)
from async_grpo.inference.config import GIB
from async_grpo.inference.logprob_config import FROZEN_ROLES
from async_grpo.launch.drawing_plan import drawing_roles
from async_grpo.launch.local_config import CONTEXTS_SHARE, LocalConfig
from async_grpo.launch.process_variables import gpus
from async_grpo.metrics.lines import duration, metrics_lines
from async_grpo.metrics.writer import METRICS_FILE
from async_grpo.options.fields import is_number
from async_grpo.training.checkpoint_folder import checkpoints_of
from async_grpo.weights.config import get_transport

if TYPE_CHECKING:
    from async_grpo.config.preflight import Prepared
    from async_grpo.messages import SharedRunSettings

OK = "ok"
WARNING = "warning"
ERROR = "error"  # level of a finding with which no run can work
STYLES = {OK: "green", WARNING: "yellow", ERROR: "bold red"}
SHARED_MEMORY = Path("/dev/shm")
MIN_SHARED_MEMORY_BYTES = GIB // 4  # with less, Ray stores all objects on the disk
# Numbers of files that a process may open: below FEW_FILES there is a warning, below TOO_FEW_FILES an error. Ray opens
# a file for each process and each connection
FEW_FILES = 4096
TOO_FEW_FILES = 256
# Errors that `cards` raises, and ValueError, which int() raises if nvidia-smi prints a word instead of a number
NO_CARDS = (OSError, subprocess.SubprocessError, ValueError)
TRAINER = "trainer rank"  # name of a kind of process
NUM_PACE_STEPS = 20  # number of past steps; their median time is the time that a step is expected to take
NVIDIA_SMI_TIMEOUT_S = 10.0


class Finding(NamedTuple):
    """The result of one check."""

    name: str
    level: str
    found: str
    cure: str = ""  # advice, shown unless the level is OK


def show(findings: Iterable[Finding]) -> None:
    """Print one line per finding."""
    for finding in findings:
        text = f"{finding.name:<18} {finding.found}"
        if finding.cure and finding.level != OK:
            text += f". Cure: {finding.cure}"
        printable_text = repr(text)[1:-1]  # names of files and models may contain control characters
        level = (f"{finding.level:<8}", STYLES[finding.level])
        Console().print(Text.assemble(level, printable_text), soft_wrap=True)


def resources(config: LocalConfig, prepared: "Prepared") -> list[Finding]:
    """Check open files, shared memory, disk space and memory.

    Raises:
        ConfigurationError: Weights of the model are missing, or are stored as pickles.
    """
    folder = Path(config.model_name_or_path)
    num_parameters = drawing_parameters(folder) if config.draws else parameters_of(folder)
    num_trained = None
    if prepared.settings.lora is not None:
        weights_folder = folder / "transformer" if config.draws else folder
        num_trained = adapter_parameters(weights_folder, prepared.settings.lora)
    package_bytes = 2 * num_parameters  # size of all weights in bfloat16
    return [
        *limits(package_bytes),
        disk(config, num_parameters if num_trained is None else num_trained),
        *memory(config, prepared, num_parameters, num_trained),
    ]


def limits(package_bytes: int = 0) -> Iterator[Finding]:
    """Check the limit of open files, and whether three copies of the weights fit into the shared memory.

    Three, because two copies may still be on their way to the engines while the trainer makes the next one.

    Args:
        package_bytes: Size of one copy of the weights.
    """
    max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    level = OK
    if max_files < TOO_FEW_FILES:
        level = ERROR
    elif max_files < FEW_FILES:
        level = WARNING
    yield Finding("open files", level, f"at most {max_files} in a process", "ulimit -n 65536")
    free_bytes = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    needed_bytes = MIN_SHARED_MEMORY_BYTES + 3 * package_bytes
    text = f"{decimal(free_bytes)} free in {SHARED_MEMORY}; with less than {decimal(needed_bytes)}, Ray uses the disk"
    level = WARNING if free_bytes < needed_bytes else OK
    yield Finding("shared memory", level, text, "docker run --shm-size=16g, or --ipc=host")


def disk(config: LocalConfig, num_trained: int) -> Finding:
    """Check the disk space for all models and checkpoints that the run keeps, and for one that is being written.

    Args:
        config: The run's options.
        num_trained: Number of trained parameters. With LoRA, checkpoints and models contain only these.
    """
    place = nearest_folder(config.output_path)
    checkpoint_bytes = _checkpoint_bytes(config, num_trained)
    model_bytes = (4 if config.has_lora else 2) * num_trained  # adapters in float32, models in bfloat16
    model_bytes += 2 * _critic_parameters(config)
    num_samples = config.num_groups * config.samples_per_question
    num_models = config.keep_models or math.ceil(num_samples / config.samples_between_models)
    num_existing = len(checkpoints_of(config.output_path))
    num_checkpoints = max(1, config.keep_checkpoints + 1 - num_existing)
    free_bytes = shutil.disk_usage(place).free
    needed_bytes = num_checkpoints * checkpoint_bytes + num_models * model_bytes
    level = OK
    if free_bytes < checkpoint_bytes + model_bytes:
        level = ERROR
    elif free_bytes < needed_bytes:
        level = WARNING
    return Finding(
        "disk",
        level,
        f"{decimal(free_bytes)} free in {place}; {num_checkpoints} checkpoints and {num_models:,} models take "
        f"{decimal(needed_bytes)}",
        "another --output-dir, or a lower --keep-models (0 keeps all)",
    )


def nearest_folder(path: Path) -> Path:
    """Return the folder itself if it exists, else its nearest parent that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def cards() -> list[list[str]]:
    """Return name, MiB in total, MiB free and driver of each visible GPU, as nvidia-smi prints them.

    nvidia-smi is used, because a query through CUDA would allocate memory on each GPU.

    Raises:
        OSError: nvidia-smi is not installed.
        SubprocessError: nvidia-smi fails.
    """
    process = subprocess.run(
        [
            "nvidia-smi",
            f"--id={','.join(gpus())}",
            "--query-gpu=name,memory.total,memory.free,driver_version",
            "--format=csv,noheader,nounits",
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=NVIDIA_SMI_TIMEOUT_S,
    )
    return [line.split(", ") for line in process.stdout.splitlines()]


def roles(
    config: LocalConfig, prepared: "Prepared", num_parameters: int, num_trained: int | None = None
) -> Iterator[tuple[str, int, int, float]]:
    """Yield the estimated memory of all processes, except the processes of rewards.

    The formulas are explained in docs/operations.md, "Before a week is spent". Real processes need somewhat more.

    Args:
        config: The run's options.
        prepared: The run's inputs.
        num_parameters: Number of the model's parameters.
        num_trained: Number of trained parameters: with LoRA, those of the adapter. None if all are trained.

    Yields:
        Name of a kind of process, number of such processes, GPUs of each process, and bytes of each process.
    """
    if config.draws:
        yield from drawing_roles(config, num_parameters)
        return
    from async_grpo.modeling.load import load_config, torch_dtype

    settings = prepared.settings
    model = load_config(config.model_name_or_path).get_text_config()
    dtype_bytes = torch_dtype(settings.dtype).itemsize
    num_ranks = config.nproc_per_node
    rank_bytes = trainer_rank_bytes(
        config,
        settings,
        model,
        num_ranks=num_ranks,
        num_parameters=num_parameters,
        num_trained=num_trained,
    )
    critic_parameters = _critic_parameters(config)
    rank_bytes += critic_rank_bytes(config, num_ranks, critic_parameters)
    offloaded_bytes = 0.0
    if config.cpu_offload:
        offloaded_bytes = _state_bytes(config, settings, num_parameters, num_trained)
        offloaded_bytes += critic_state_bytes(config, num_ranks, critic_parameters)
    sequences_per_engine = math.ceil(settings.samples_in_flight / config.generation_workers)
    worker_bytes = engine_bytes(
        settings,
        model,
        num_parameters=num_parameters,
        num_sequences=min(config.max_num_seqs or 1024, sequences_per_engine),
        has_gpu=bool(gpus()),
    )

    yield TRAINER, num_ranks, 1, rank_bytes
    yield "engine", config.generation_workers, config.tensor_parallel_size, worker_bytes
    for kind in config.logprob_roles:
        yield f"{kind} worker", 1, 1, _logprob_bytes(config, settings, kind, num_parameters)
    # Rank 0's machine: two copies of the weights, a checkpoint that is being written, and the ranks' offloaded state
    checkpoint_bytes = _checkpoint_bytes(config, num_parameters if num_trained is None else num_trained)
    main_memory_bytes = 2 * dtype_bytes * num_parameters + checkpoint_bytes + num_ranks * offloaded_bytes
    if config.weight_sync_deltas:
        num_kept = num_trained if config.sends_adapter and num_trained is not None else num_parameters
        main_memory_bytes += dtype_bytes * num_kept  # the copy of the last version that rank 0 keeps
        yield "weights kept by a worker", _num_kept_copies(config), 0, dtype_bytes * num_kept
    yield "rank 0's machine", 1, 0, main_memory_bytes


def _logprob_bytes(config: LocalConfig, settings: "SharedRunSettings", kind: str, num_parameters: int) -> int:
    """Return the estimated bytes of a logprob worker. A teacher has its own model, the other kinds the policy's."""
    folder = config.teacher_folders.get(kind)
    if folder is not None:
        num_parameters = parameters_of(Path(folder))
    return logprob_worker_bytes(
        settings, num_parameters=num_parameters, num_chunk_tokens=chunk_tokens(config)
    )


def _num_kept_copies(config: LocalConfig) -> int:
    """Return how many copies of the weights all workers together keep with `--weight-sync-deltas`.

    If weights travel in packages, each worker keeps one copy; with NCCL, each process of an engine keeps one.
    """
    if get_transport(config.weight_transport).sends_packages:
        num_followers = sum(kind.partition(":")[0] not in FROZEN_ROLES for kind in config.logprob_roles)
        return config.generation_workers + num_followers + config.moves_reference
    return config.generation_workers * config.tensor_parallel_size


def _checkpoint_bytes(config: LocalConfig, num_trained: int) -> int:
    """Return the size of a checkpoint in bytes, including a separate critic and the weights of a moving reference."""
    num_bytes = CHECKPOINT_PARAMETER_BYTES * (num_trained + _critic_parameters(config))
    return num_bytes + (4 * num_trained if config.moves_reference else 0)


def _critic_parameters(config: LocalConfig) -> int:
    """Return the number of parameters of a separate critic model; 0 if there is none."""
    from async_grpo.modeling.load import model_folder

    folder = critic_folder(config)
    return 0 if folder is None else parameters_of(model_folder(folder))


def _state_bytes(
    config: LocalConfig, settings: "SharedRunSettings", num_parameters: int, num_trained: int | None
) -> float:
    """Return the size in bytes of a rank's shard of weights, gradients and optimizer moments."""
    return trainer_state_bytes(
        config,
        settings,
        num_ranks=config.nproc_per_node,
        num_parameters=num_parameters,
        num_trained=num_trained,
    )


def shared_gpu(
    config: LocalConfig, prepared: "Prepared", num_parameters: int, num_trained: int | None, card_bytes: int
) -> Finding:
    """Check how `--colocate` divides a GPU's memory between engine and trainer.

    It is an error if a share is smaller than what its program needs at least: the engine its weights; the trainer its
    weights, gradients and moments.
    """
    from async_grpo.modeling.load import torch_dtype

    dtype_bytes = torch_dtype(prepared.settings.dtype).itemsize
    weight_bytes = dtype_bytes * num_parameters // config.tensor_parallel_size
    state_bytes = 0
    if not config.cpu_offload:
        state_bytes = int(_state_bytes(config, prepared.settings, num_parameters, num_trained))
        state_bytes += int(critic_rank_bytes(config, config.nproc_per_node, _critic_parameters(config)))
    engine_bytes = int(config.gpu_memory_utilization * card_bytes)
    trainer_bytes = int(config.trainer_gpu_share * card_bytes)
    # Minimum and maximum of `--gpu-memory-utilization` with which both programs fit, rounded to hundredths
    least_share = math.ceil(100 * weight_bytes / card_bytes) / 100
    largest_share = math.floor(100 * (1 - CONTEXTS_SHARE - state_bytes / card_bytes)) / 100
    cure = f"--gpu-memory-utilization between {least_share} and {largest_share}"
    if least_share >= largest_share:
        cure = "--cpu-offload, --optimizer adamw_8bit, or a GPU for each, without --colocate"
    fits = weight_bytes < engine_bytes and state_bytes < trainer_bytes
    return Finding(
        "shared GPU",
        OK if fits else ERROR,
        f"--colocate gives the engine {config.gpu_memory_utilization:g} of each GPU, {decimal(engine_bytes)}, of which its "
        f"weights take {decimal(weight_bytes)}; the trainer {config.trainer_gpu_share:.2g}, {decimal(trainer_bytes)}, of "
        f"which weights, gradients and moments take {decimal(state_bytes)}",
        cure,
    )


def memory(
    config: LocalConfig, prepared: "Prepared", num_parameters: int, num_trained: int | None = None
) -> Iterator[Finding]:
    """Compare the estimated memory of each process with the available memory.

    The estimates are rough, so findings are warnings. Only those about the shares of a GPU with `--colocate` may be
    errors.
    """
    cure = "lower --max-tokens-per-gpu, --gradient-checkpointing, --cpu-offload, or more ranks or engines"
    free_bytes = psutil.virtual_memory().available
    card_bytes = 0  # memory of the smallest GPU; 0 without GPUs
    try:
        if gpus():
            card_bytes = min(int(mebibytes) << 20 for _, mebibytes, *_ in cards())
    except NO_CARDS as error:
        yield Finding("GPU memory", WARNING, f"nvidia-smi fails: {error}", "install it with the driver")
    main_memory_bytes = 0
    needs = list(roles(config, prepared, num_parameters, num_trained))
    if card_bytes and config.colocate:
        yield shared_gpu(config, prepared, num_parameters, num_trained, card_bytes)
    for name, count, num_gpus, process_bytes in needs:
        if card_bytes and num_gpus:
            share = config.gpu_memory_utilization if config.colocate or name == "engine" else 1.0
            if name == TRAINER:
                share = config.trainer_peak_share
            available_bytes = share * card_bytes * num_gpus
            place = f"{num_gpus} GPU each"
        else:
            available_bytes = float(free_bytes)
            place = "in the machine's memory"
            main_memory_bytes += count * int(process_bytes)
        level = WARNING if process_bytes > available_bytes else OK
        sizes = f"{decimal(int(process_bytes))} of {decimal(int(available_bytes))}"
        yield Finding(name, level, f"{count} x about {sizes}, {place}", cure)
    level = WARNING if main_memory_bytes > free_bytes else OK
    text = f"together about {decimal(main_memory_bytes)} of {decimal(free_bytes)} that are free"
    yield Finding("machine's memory", level, text, cure)


def plan(config: LocalConfig, prepared: "Prepared") -> Iterator[Finding]:
    """Yield a description of what `run` would do: folder, steps, samples, staleness, and the expected time."""
    settings = prepared.settings
    step = prepared.resumed.step if prepared.resumed else 0
    step_samples = config.samples_per_step
    remaining_steps = config.num_steps - step
    remaining_samples = remaining_steps // config.passes_per_batch * step_samples
    begins = f"goes on after step {step}" if step else "begins"
    yield Finding("run", OK, f"{config.run_name} {begins} in {config.output_path}")
    yield Finding(
        "steps",
        OK,
        f"{remaining_steps:,} of {step_samples:,} samples of at most {settings.max_total_tokens} tokens: "
        f"{remaining_samples:,} samples of {len(prepared.questions):,} questions",
    )
    samples_in_flight = settings.samples_in_flight
    mean_staleness = max(0.0, samples_in_flight / step_samples * config.passes_per_batch - 1)
    yield Finding(
        "staleness",
        OK,
        f"at most {config.max_staleness} steps; with {samples_in_flight:,} samples alive on average "
        f"{mean_staleness:.3g} at most",
    )
    lines = metrics_lines(config.output_path / METRICS_FILE, NUM_PACE_STEPS)
    step_times_s = [line["time_per_batch"] for line in lines if is_number(line.get("time_per_batch"))]
    text = "not measured yet: the first steps of the run in this folder will show it"
    if step_times_s:
        step_time_s = statistics.median(step_times_s)
        total = duration(step_time_s * remaining_steps)
        text = f"{step_time_s:.3g} s, the median of the last {len(lines)}; {total} in all"
    yield Finding("a step takes", OK, text)
