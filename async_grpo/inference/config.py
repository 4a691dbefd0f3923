"""The options of one engine, and which engines there are. What all must share comes from `SharedRunSettings`."""

import dataclasses
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

# name -> module:class, imported only where the engine runs; the class satisfies `protocols.Engine`
ENGINES = {
    "vllm": "async_grpo.inference.generation_worker:GenerationWorker",
    "fake": "async_grpo.testing.engine:FakeEngine",  # draws tokens at random: to try everything but an engine
}
_OTHER_MODEL = "the engine must serve the model of --model-path as its folder describes it"
_OTHER_POLICY = (
    "tokens would be drawn from, and log-probs told of, another policy than the one that is trained"
)
# Arguments of vLLM's engine under which its log-probs would silently mean something else, or its proofs nothing
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
        "adapters are not supported: with them weights cannot be read back, and vLLM 0.32 on the CPU gives requests "
        "without an adapter that of others",
    ),
    "kv_transfer_config": "keys and values kept outside the engine would outlive the weights that computed them",
    "disable_log_stats": "the worker reads from these statistics whether the engine makes progress",
}
# vLLM's own defaults of these arguments, as they are written: they change nothing
HARMLESS_ENGINE_OPTIONS = {
    "disable_log_stats": "false",
    "enable_lora": "false",
    "override_generation_config": "{}",
    "runner": "auto",
    "convert": "auto",
    "config_format": "auto",
}
_METHODS = ("start", "complete", "update", "canary", "progress", "until_failure", "close")


def engine_class(name: str) -> type[Engine]:
    """The engine that `--engine` names. ConfigurationError: there is none, or what the user's file defines is none.

    >>> engine_class("tgi")
    Traceback (most recent call last):
    async_grpo.errors.ConfigurationError: --engine 'tgi' is unknown; known: vllm, fake; or FILE.py:NAME
    >>> engine_class("fake").__name__
    'FakeEngine'
    """
    found: Any = find_entry(name, ENGINES, lambda own: own, "engine")
    if isinstance(found, str):
        found = resolve_name(found)
    missing = ", ".join(method for method in _METHODS if not callable(getattr(found, method, None)))
    refuse(bool(missing), f"--engine {name}: lacks {missing} (see async_grpo.protocols.Engine)")
    return found


def kv_cache_bytes(model: Any, itemsize: int) -> int:
    """Keys and values of one token, in all layers; `model`: the configuration of its text part."""
    width = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    heads = getattr(model, "num_key_value_heads", None) or model.num_attention_heads
    return int(2 * model.num_hidden_layers * heads * width * itemsize)


def cpu_kv_cache() -> int:
    """Bytes that an engine without a GPU takes for them."""
    return int(os.environ.get("VLLM_CPU_KVCACHE_SPACE") or 1) * GIB


_engine = partial(option, panel="Engine")


@dataclass(frozen=True, kw_only=True)
class EngineOptions(Section):
    """How each engine runs, whatever model it serves."""

    engine: str = _engine(
        "vllm",
        "Inference engine: a name, or FILE.py:NAME of a class of your own.",
        choices="async_grpo.inference.config:ENGINES",
        own=True,
    )
    max_num_seqs: int | None = _engine(
        None,
        "Sequences that each engine decodes at once. By default as many as the run has in flight and the engine's "
        "memory holds.",
        range=POSITIVE,
        everyday=True,
    )
    overhead_seqs: int = _engine(
        16, "Further sequences that each engine takes, so that it never runs out of work.", range=NOT_NEGATIVE
    )
    tensor_parallel_size: int = _engine(1, "GPUs of each generation worker.", range=POSITIVE, everyday=True)
    gpu_memory_utilization: float = _engine(
        0.9, "Share of each GPU's memory that the engine may take.", range=POSITIVE_SHARE
    )
    enable_prefix_caching: bool = _engine(True, "Share the KV cache of the prompt within a group.")
    enforce_eager: bool = _engine(
        False, "Do not compile the engine's model, so that it starts faster and runs slower."
    )
    engine_stall_s: float = _engine(
        120.0, "Seconds without a token after which an engine that has work is ended.", range=POSITIVE
    )
    engine_restarts: int = _engine(
        3,
        "Number of times in a row that a worker which died is started again, after 5, 25 and 125 seconds.",
        range=NOT_NEGATIVE,
    )
    engine_options: str = _engine(
        "", "Further arguments of vLLM's engine, such as kv_cache_dtype=fp8,block_size=32."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "engine", absolute(self.engine))  # an actor reads it, in another folder
        for name, value in self.further_options.items():  # what is no assignment is refused by reading it
            reason = REFUSED_ENGINE_OPTIONS.get(name)
            is_default = str(value).lower() == HARMLESS_ENGINE_OPTIONS.get(name)
            is_generation = name == "runner" and value == "generate"  # what `auto` means for these models
            refuse(
                reason is not None and not is_default and not is_generation,
                f"--engine-options {name}={value}: {reason}; leave it out",
            )

    @property
    def further_options(self) -> dict[str, Any]:
        """`--engine-options` by name."""
        found = parse_assignments(self.engine_options, "engine-options")
        return {name.replace("-", "_"): value for name, value in found.items()}

    @property
    def max_sequences(self) -> int:
        """Sequences that a worker takes at once; without a limit while none is chosen (`with_sequences`)."""
        return UNLIMITED if self.max_num_seqs is None else self.max_num_seqs + self.overhead_seqs


@dataclass(frozen=True, kw_only=True)
class EngineConfig(EngineOptions):
    """What one engine is started with."""

    model_path: str = required(
        "Hugging Face folder of the model, which must be the trainer's.",
        everyday=True,
        also="model_name_or_path",
    )

    def with_sequences(self, settings: SharedRunSettings) -> Self:
        """The options as the worker's own process starts it: `max_num_seqs` is chosen if it was not given.

        One batch of all samples in flight costs the least per token. The most is vLLM's own default on a GPU; on the CPU
        1,024, and what the KV cache holds of sequences half as long as the longest (should it run full, vLLM computes
        some again).
        """
        if self.max_num_seqs is not None:
            return self
        import torch

        from async_grpo.modeling.load import load_config, torch_dtype

        if torch.cuda.is_available():
            gpu = torch.cuda.get_device_properties(0)
            most = 1024 if gpu.total_memory >= 70 * GIB and "a100" not in gpu.name.lower() else 256
        else:
            text = load_config(self.model_path).get_text_config()
            bytes_per_token = kv_cache_bytes(text, torch_dtype(settings.dtype).itemsize)
            most = min(1024, 2 * cpu_kv_cache() // (bytes_per_token * settings.max_total_tokens))
        chosen = max(settings.group_size, min(settings.samples_in_flight or most, most))
        return dataclasses.replace(self, max_num_seqs=chosen)
