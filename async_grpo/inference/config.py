"""The options of one engine, and the registry of engines.

Settings that all workers of a run must share are in `SharedRunSettings`.
"""

import dataclasses
import math
import os
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import Any, Self

from async_grpo.messages import SharedRunSettings
from async_grpo.options.fields import (
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_SHARE,
    TABLE,
    Section,
    option,
    parse_assignments,
    refuse,
    required,
)
from async_grpo.options.source_file import absolute, find_entry
from async_grpo.protocols import Engine

GIB = 1 << 30
UNLIMITED = 2**31 - 1

DRAWING_ENGINE = "drawing"  # draws pictures with a flow-matching model (--policy flow)
# Engine name -> module:class. The class implements `protocols.Engine`. It is imported only in the process that runs the
# engine
ENGINES = {
    "vllm": "async_grpo.inference.generation_worker:GenerationWorker",
    # Draws tokens at random, to test the rest of the library without a real engine
    "fake": "async_grpo.testing.engine:FakeEngine",
    DRAWING_ENGINE: "async_grpo.inference.drawing.engine:DrawingEngine",
}
ENGINES_WITHOUT_VLLM = ("fake", DRAWING_ENGINE)
_OTHER_MODEL = "the engine must serve the model of --model-path as its folder describes it"
_OTHER_POLICY = "the engine would sample from another policy than the trained one, and report the log-probs of that policy"
# Arguments of vLLM's engine that are refused, each with the reason. With them, log-probs would silently have another
# meaning, or the proof of new weights would prove nothing
REFUSED_ENGINE_OPTIONS = {
    **dict.fromkeys(("logits_processors", "watermark_config", "diffusion_config"), _OTHER_POLICY),
    **dict.fromkeys(
        ("hf_config_path", "config_format", "model_weights", "model_class_overrides"), _OTHER_MODEL
    ),
    **dict.fromkeys(("revision", "code_revision", "convert", "runner"), _OTHER_MODEL),
    **dict.fromkeys(
        ("generation_config", "override_generation_config"),
        "they can only add tokens at which completions end, which the trainer does not know: put end tokens into "
        "generation_config.json of the model's folder",
    ),
    **dict.fromkeys(
        ("enable_lora", "default_mm_loras"),
        "the only adapter of an engine is the policy's, which --lora-rank and --lora-sync set: other adapters could not "
        "be proven",
    ),
    **dict.fromkeys(
        ("pipeline_parallel_size", "data_parallel_size"),
        "an engine has --tensor-parallel-size processes, for which GPUs are reserved and weights are proven: use more "
        "--generation-workers instead",
    ),
    "kv_transfer_config": "keys and values kept outside the engine would outlive the weights that computed them",
    "disable_log_stats": "the worker reads from these statistics whether the engine makes progress",
}
# Default values of refused arguments. The user may write a default explicitly, because this changes nothing
HARMLESS_ENGINE_OPTIONS = {
    "disable_log_stats": "false",
    "enable_lora": "false",
    "pipeline_parallel_size": "1",
    "data_parallel_size": "1",
    "override_generation_config": "{}",
    "runner": "auto",
    "convert": "auto",
    "config_format": "auto",
}
MAX_CPU_SEQUENCES = 1024
# Number of pictures that an engine draws at once if --max-num-seqs is not set. With more pictures, each step of the
# engine takes longer, and new weights must wait for the end of a step
MAX_PICTURES = 64
NO_SLEEP_ON_CPU = (
    "vLLM's engine on the CPU has no sleep mode, and would ignore the call; leave the option out"
)
# The values that vLLM accepts as `max_lora_rank`, the highest rank of an adapter that it serves, in ascending order
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# Number of tokens in a block of the KV cache on the CPU: the minimum of vLLM's kernels. Sequences share only whole
# blocks. With vLLM's default of 128, completions could never share the cache of a shorter prompt
CPU_BLOCK_SIZE = 32
SMALLEST_CPU_CACHE = GIB // 8
# vLLM's variable for the size of the KV cache of an engine on the CPU, in GiB
CPU_CACHE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
# vLLM's defaults for max_num_seqs: on GPUs with at least LARGE_GPU_BYTES of memory, and on smaller GPUs
MAX_SEQUENCES_ON_LARGE_GPU = 1024
MAX_SEQUENCES_ON_GPU = 256
LARGE_GPU_BYTES = 70 * GIB
# If engine and trainer share a GPU: the engine's memory, minus its weights, is multiplied by this fraction to get the
# size of the KV cache. The rest is for activations, logits and CUDA graphs
COLOCATED_CACHE_SHARE = 0.75
ENGINE_METHODS = ("start", "complete", "update", "canary", "progress", "until_failure", "close")


def engine_class(name: str) -> type[Engine]:
    """Return the class of the engine that `--engine` names.

    Raises:
        ConfigurationError: There is no such engine, or the class in the user's file lacks methods of an engine.

    >>> engine_class("tgi")
    Traceback (most recent call last):
    async_grpo.errors.ConfigurationError: --engine 'tgi' is unknown; known: vllm, fake, drawing; or FILE.py:NAME
    >>> engine_class("fake").__name__
    'FakeEngine'
    """
    engine: Any = find_entry(name, ENGINES, lambda user_class: user_class, "engine")
    if isinstance(engine, str):
        engine = resolve_name(engine)
    missing = [method for method in ENGINE_METHODS if not callable(getattr(engine, method, None))]
    refuse(bool(missing), f"--engine {name}: lacks {', '.join(missing)} (see async_grpo.protocols.Engine)")
    return engine


def may_import_vllm(engine: str) -> bool:
    """Return whether the engine that `--engine` names imports vLLM. An engine in a user's file counts as one that does.

    >>> may_import_vllm("vllm"), may_import_vllm("fake"), may_import_vllm("drawing")
    (True, False, False)
    """
    return engine not in ENGINES_WITHOUT_VLLM


def kv_cache_bytes(model: Any, itemsize: int) -> int:
    """Return how many bytes the KV cache needs for one token, over all layers.

    Args:
        model: Hugging Face configuration of the model's text part.
        itemsize: Bytes per cached number.
    """
    width = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    heads = getattr(model, "num_key_value_heads", None) or model.num_attention_heads
    return int(2 * model.num_hidden_layers * heads * width * itemsize)


def largest_cpu_kv_cache() -> int:
    """Return the maximum size in bytes of the KV cache of an engine on the CPU. The default is 1 GiB."""
    return int(os.environ.get(CPU_CACHE_VARIABLE) or 1) * GIB


def cpu_kv_cache(num_sequences: int, max_total_tokens: int, token_bytes: int) -> int:
    """Return the size of the KV cache of an engine on the CPU, in bytes.

    vLLM fills the whole cache with zeros when it starts, so the cache should not be larger than the sequences can use.
    If the user has set CPU_CACHE_VARIABLE, its value is the size.

    Args:
        num_sequences: Number of sequences that the engine decodes at once.
        max_total_tokens: Maximum number of tokens of a sequence.
        token_bytes: Bytes of one token in the cache (`kv_cache_bytes`).

    >>> cpu_kv_cache(num_sequences=1024, max_total_tokens=100, token_bytes=2048) // (CPU_BLOCK_SIZE * 2048)
    5120
    """
    if os.environ.get(CPU_CACHE_VARIABLE):
        return largest_cpu_kv_cache()
    # Add one block for each sequence, because cached prompts of groups that wait also take blocks
    blocks_per_sequence = math.ceil(max_total_tokens / CPU_BLOCK_SIZE) + 1
    needed_bytes = num_sequences * blocks_per_sequence * CPU_BLOCK_SIZE * token_bytes
    return min(max(SMALLEST_CPU_CACHE, needed_bytes), largest_cpu_kv_cache())


def colocated_kv_cache_bytes(weight_bytes: int, share_bytes: int) -> int:
    """Return the size of the KV cache of an engine that shares a GPU with the trainer, in bytes.

    Without this size, vLLM would measure how much of the GPU is in use, and count the trainer's memory as the engine's.

    Args:
        weight_bytes: Size of the engine's weights on the GPU.
        share_bytes: Memory of the GPU that belongs to the engine.

    Raises:
        ConfigurationError: The share is too small for the weights.
    """
    rest_bytes = share_bytes - weight_bytes
    refuse(
        rest_bytes <= 0,
        f"--colocate: the engine's share of the GPU, {share_bytes / 1e9:.1f} GB, does not hold its weights, "
        f"{weight_bytes / 1e9:.1f} GB: raise --gpu-memory-utilization or --tensor-parallel-size",
    )
    return int(COLOCATED_CACHE_SHARE * rest_bytes)


_engine = partial(option, panel="Engine")


@dataclass(frozen=True, kw_only=True)
class EngineOptions(Section):
    """The options of an engine that do not depend on its model."""

    engine: str = _engine(
        "vllm",
        "Inference engine that generates completions: a name, or FILE.py:NAME of a class of your own.",
        choices="async_grpo.inference.config:ENGINES",
        takes_file=True,
    )
    engine_python: str = _engine(
        "",
        "Python of another environment in which the engines run, such as /opt/engines/bin/python, for a vLLM that needs "
        "another torch than the trainer. Its versions of Ray and of Python (such as 3.11) must be those of the run. By "
        "default engines run in the run's environment.",
    )
    max_num_seqs: int | None = _engine(
        None,
        "Maximum number of sequences that each engine decodes at once. By default the number of samples that the run "
        "has in flight, up to the maximum of the device.",
        range=POSITIVE,
        everyday=True,
    )
    overhead_seqs: int = _engine(
        16,
        "Number of sequences that wait in each engine in addition to --max-num-seqs, so that the engine never idles.",
        range=NOT_NEGATIVE,
    )
    tensor_parallel_size: int = _engine(
        1, "Number of GPUs of each generation worker.", range=POSITIVE, everyday=True
    )
    gpu_memory_utilization: float = _engine(
        0.9, "Share of the memory of each GPU that an engine may use.", range=POSITIVE_SHARE
    )
    colocate: bool = _engine(
        False,
        "Let trainer and engines share GPUs. The engine gets the share --gpu-memory-utilization of a shared GPU's "
        "memory, and the trainer the rest. By default each GPU belongs either to the trainer or to an engine.",
        everyday=True,
    )
    enable_prefix_caching: bool = _engine(
        True, "Compute the prompt of a group once, and share its KV cache among the completions."
    )
    enforce_eager: bool | None = _engine(
        None,
        "Do not compile the engine's model. The engine starts faster and generates more slowly. By default engines compile "
        "on GPUs only.",
    )
    engine_stall_s: float = _engine(
        120.0, "Seconds without progress after which an engine that has work is ended.", range=POSITIVE
    )
    engine_restarts: int = _engine(
        3,
        "Number of times in a row that a dead worker is restarted. The waits before the first restarts are 5, 25 and "
        "125 seconds.",
        range=NOT_NEGATIVE,
    )
    engine_options: str = _engine(
        "",
        "Further arguments of vLLM's engine, such as kv_cache_dtype=fp8,block_size=32.",
        form=TABLE,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        # The Ray actor that imports the user's file has another working directory, so make the path absolute
        object.__setattr__(self, "engine", absolute(self.engine))
        if self.engine_python:
            # Make the path absolute without following links. The Python of a virtual environment is a link to another
            # Python, which would not find the environment's packages
            object.__setattr__(self, "engine_python", os.path.abspath(self.engine_python))
        for name, value in self.further_options.items():
            reason = REFUSED_ENGINE_OPTIONS.get(name)
            is_default = str(value).lower() == HARMLESS_ENGINE_OPTIONS.get(name)
            # For these models, vLLM's default `auto` means `generate`
            is_generation = name == "runner" and value == "generate"
            refuse(
                reason is not None and not is_default and not is_generation,
                f"--engine-options {name}={value}: {reason}; leave it out",
            )

    @property
    def further_options(self) -> dict[str, Any]:
        """Return the arguments in `--engine-options`, with underscores in their names."""
        assignments = parse_assignments(self.engine_options, "engine-options")
        return {name.replace("-", "_"): value for name, value in assignments.items()}

    @property
    def max_sequences(self) -> int:
        """Return how many sequences a worker takes at once. It is UNLIMITED until `with_sequences` chooses a number."""
        if self.max_num_seqs is None:
            return UNLIMITED
        return self.max_num_seqs + self.overhead_seqs


def is_eager(options: EngineOptions, has_gpu: bool) -> bool:
    """Return whether engines run the model without compiling it.

    By default they compile it on GPUs only. On the CPU, compiling a model of 135 million parameters takes a minute of
    CPU time and makes generation 13 % faster, which pays off after about 130,000 tokens. For a tiny model it never pays
    off.
    """
    return not has_gpu if options.enforce_eager is None else options.enforce_eager


@dataclass(frozen=True, kw_only=True)
class EngineConfig(EngineOptions):
    """All options of one engine."""

    model_path: str = required(
        "Folder of the model in the Hugging Face format. It must be the model that the trainer uses.",
        everyday=True,
        aliases=("model_name_or_path",),
    )

    def with_sequences(self, settings: SharedRunSettings) -> Self:
        """Choose `max_num_seqs` if the user did not. Must be called in the process of the engine.

        The choice is the number of samples in flight, up to the maximum of the device. On a GPU the maximum is vLLM's
        default. On a CPU it is the smaller of 1,024 and the number of half-length sequences that fit into the KV cache.
        If the cache runs full, vLLM computes some sequences again. The choice is never smaller than a group. An engine
        that draws has no cache, and its maximum is MAX_PICTURES.
        """
        if self.max_num_seqs is not None:
            return self
        max_sequences = MAX_PICTURES
        if settings.flow is None:
            max_sequences = self._max_sequences_of_device(settings)
        if settings.samples_in_flight:
            max_sequences = min(max_sequences, settings.samples_in_flight)
        # Groups are not divided among engines, so an engine must have room for a whole group
        return dataclasses.replace(self, max_num_seqs=max(settings.group_size, max_sequences))

    def _max_sequences_of_device(self, settings: SharedRunSettings) -> int:
        import torch

        from async_grpo.modeling.load import load_config, torch_dtype

        if torch.cuda.is_available():
            gpu = torch.cuda.get_device_properties(0)
            is_large = gpu.total_memory >= LARGE_GPU_BYTES and "a100" not in gpu.name.lower()
            return MAX_SEQUENCES_ON_LARGE_GPU if is_large else MAX_SEQUENCES_ON_GPU
        text_config = load_config(self.model_path).get_text_config()
        bytes_per_token = kv_cache_bytes(text_config, torch_dtype(settings.dtype).itemsize)
        num_in_cache = 2 * largest_cpu_kv_cache() // (bytes_per_token * settings.max_total_tokens)
        return min(MAX_CPU_SEQUENCES, num_in_cache)
