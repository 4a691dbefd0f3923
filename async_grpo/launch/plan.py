"""What a run will take (processes, memory, disk, time), and whether it is there: looks that cost less than a second."""

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

from async_grpo.inference.config import GIB, cpu_kv_cache, kv_cache_bytes
from async_grpo.launch.local_config import LocalConfig
from async_grpo.launch.process_variables import gpus
from async_grpo.metrics.lines import duration, metrics_lines
from async_grpo.metrics.writer import METRICS_FILE
from async_grpo.options.fields import is_number
from async_grpo.training.checkpoint_folder import checkpoints_of

if TYPE_CHECKING:
    from async_grpo.config.preflight import Prepared

OK, WARNING, ERROR = "ok", "warning", "error"  # an error: no run could work so
STYLES = {OK: "green", WARNING: "yellow", ERROR: "bold red"}
SHARED_MEMORY, SMALL = Path("/dev/shm"), GIB // 4  # with less Ray keeps everything on the disk
FEW_FILES, TOO_FEW_FILES = 4096, 256  # a process of Ray has one open for each process and connection
NO_CARDS = (OSError, subprocess.SubprocessError, ValueError)  # the last for words in the place of numbers


class Finding(NamedTuple):
    """What one look has found; the cure is for what is not ok."""

    name: str
    level: str
    found: str
    cure: str = ""


def show(findings: Iterable[Finding]) -> None:
    """Print one line per finding."""
    for name, level, found, cure in findings:
        said = f"{name:<18} {found}" + (f". Cure: {cure}" if cure and level != OK else "")
        said = repr(said)[1:-1]  # it may hold anything
        Console().print(Text.assemble((f"{level:<8}", STYLES[level]), said), soft_wrap=True)


def resources(config: LocalConfig, prepared: "Prepared") -> list[Finding]:
    """Check limits, disk and memory, as `run` does. ConfigurationError: the model's weights are not whole."""
    total = parameters_of(Path(config.model_name_or_path))
    return [*limits(2 * total), disk(config, total), *memory(config, prepared, total)]


def parameters_of(folder: Path) -> int:
    """Return how many numbers a model's weights have, read off the headers.

    Raises:
        ConfigurationError: there are no weights, not all of them, or they are pickles.
    """
    from async_grpo.modeling.model_files import refuse_pickles, weight_shapes

    refuse_pickles(folder)
    return sum(math.prod(shape) for shape in weight_shapes(folder).values())


def limits(package: int = 0) -> Iterator[Finding]:
    """Open files, and shared memory for two copies of the weights on their way (`package` bytes) and one in the making."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    level = ERROR if limit < TOO_FEW_FILES else WARNING if limit < FEW_FILES else OK
    yield Finding("open files", level, f"at most {limit} in a process", "ulimit -n 65536")
    free, wanted = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0, SMALL + 3 * package
    said = f"{decimal(free)} free in {SHARED_MEMORY}, {decimal(wanted)} wanted, or Ray uses the disk"
    level = WARNING if free < wanted else OK
    yield Finding("shared memory", level, said, "docker run --shm-size=16g, or --ipc=host")


def disk(config: LocalConfig, total: int) -> Finding:
    """Room for the checkpoints that are kept, one in the making, and the models."""
    place, checkpoint, model = nearest_folder(config.output_path), 12 * total, 2 * total
    models = math.ceil(config.num_steps * config.samples_per_step / config.samples_between_models)
    free, models = shutil.disk_usage(place).free, config.keep_models or models
    checkpoints = max(1, config.keep_checkpoints + 1 - len(checkpoints_of(config.output_path)))
    need = checkpoints * checkpoint + models * model
    said = f"{decimal(free)} free in {place}; {checkpoints} checkpoints and {models:,} models take {decimal(need)}"
    level = ERROR if free < checkpoint + model else WARNING if free < need else OK
    return Finding("disk", level, said, "another --output-dir, or a lower --keep-models (0 keeps all)")


def nearest_folder(path: Path) -> Path:
    """Return the folder itself, or the first folder above it that exists."""
    return next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())


def cards() -> list[list[str]]:
    """Return name, MiB in all, MiB free and driver of each visible GPU, as nvidia-smi says.

    CUDA itself would take memory on them.

    Raises one of NO_CARDS: there is no nvidia-smi, or it fails.
    """
    query = ["--query-gpu=name,memory.total,memory.free,driver_version", "--format=csv,noheader,nounits"]
    command = ["nvidia-smi", f"--id={','.join(gpus())}", *query]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10.0).stdout
    return [line.split(", ") for line in said.splitlines()]


def roles(config: LocalConfig, prepared: "Prepared", total: int) -> Iterator[tuple[str, int, int, float]]:
    """All but the rewards' processes: name, how many, GPUs of each, and bytes of each (allocators lose some more).

    The formulas stand in docs/operations.md, "Before a week is spent"; `total`: the model's parameters.
    """
    from async_grpo.modeling.load import load_config, torch_dtype

    settings, model = prepared.settings, load_config(config.model_name_or_path).get_text_config()
    b, layers, width = torch_dtype(settings.dtype).itemsize, model.num_hidden_layers, model.hidden_size
    inner = getattr(model, "moe_intermediate_size", None) or model.intermediate_size
    inner *= getattr(model, "num_experts_per_tok", None) or 1
    cache, tokens, ranks = kv_cache_bytes(model, b), config.max_tokens_per_gpu, config.nproc_per_node
    kept = layers * b * (16 * width + 4 * inner) + 2 * cache
    if config.gradient_checkpointing:
        kept = layers * b * width + kept // layers
    head = 4 * settings.vocab_size * (3 * min(config.logprob_chunk_size, tokens) + width)
    moments = 2 if config.optimizer == "adamw_8bit" else 8
    state = (8 + moments + 4 * config.update_stats) * total / (config.fsdp_size or ranks)
    offloaded = state if config.cpu_offload else 0.0
    yield "trainer rank", ranks, 1, state - offloaded + tokens * kept + head
    alive = math.ceil(settings.samples_in_flight / config.generation_workers)
    held = min(config.max_num_seqs or 1024, alive) * settings.max_total_tokens * cache
    engine = b * total + (held if gpus() else cpu_kv_cache())
    yield "engine", config.generation_workers, config.tensor_parallel_size, engine
    for name in config.logprob_roles:
        yield f"{name} worker", 1, 1, b * total + head
    yield "rank 0's machine", 1, 0, (2 * b + 12) * total + ranks * offloaded


def memory(config: LocalConfig, prepared: "Prepared", total: int) -> Iterator[Finding]:
    """Each role against what is there. Never an error: it is an estimate."""
    free, rest, card = psutil.virtual_memory().available, 0, 0
    cure = "lower --max-tokens-per-gpu, --gradient-checkpointing, --cpu-offload, or more ranks or engines"
    try:
        card = min(int(mib) << 20 for _, mib, *_ in cards()) if gpus() else 0
    except NO_CARDS as error:
        yield Finding("GPU memory", WARNING, f"nvidia-smi fails: {error}", "install it with the driver")
    for name, count, each, need in roles(config, prepared, total):
        have, where = float(free), "in the machine's memory"
        if card * each:
            share = config.gpu_memory_utilization if name == "engine" else 1
            have, where = share * card * each, f"{each} GPU each"
        else:
            rest += count * int(need)
        said = f"{count} x about {decimal(int(need))} of {decimal(int(have))}, {where}"
        yield Finding(name, WARNING if need > have else OK, said, cure)
    said = f"together about {decimal(rest)} of {decimal(free)} that are free"
    yield Finding("machine's memory", WARNING if rest > free else OK, said, cure)


def plan(config: LocalConfig, prepared: "Prepared") -> Iterator[Finding]:
    """Return what `run` would do."""
    settings, step = prepared.settings, prepared.resumed.step if prepared.resumed else 0
    size, left, alive = config.samples_per_step, config.num_steps - step, settings.samples_in_flight
    begins = f"goes on after step {step}" if step else "begins"
    yield Finding("run", OK, f"{config.run_name} {begins} in {config.output_path}")
    said = f"{left:,} of {size:,} samples of at most {settings.max_total_tokens} tokens"
    yield Finding("steps", OK, f"{said}: {left * size:,} samples of {len(prepared.questions):,} questions")
    said = f"at most {config.max_staleness} steps; with {alive:,} samples alive on average "
    yield Finding("staleness", OK, f"{said}{max(0.0, alive / size - 1):.3g} at most")
    said = "not measured yet; the run's first steps in this folder do"
    lines = metrics_lines(config.output_path / METRICS_FILE, 20)
    if paces := [line["time_per_batch"] for line in lines if is_number(line.get("time_per_batch"))]:
        pace = statistics.median(paces)
        said = f"{pace:.3g} s, the median of the last {len(lines)}; {duration(pace * left)} in all"
    yield Finding("a step takes", OK, said)
