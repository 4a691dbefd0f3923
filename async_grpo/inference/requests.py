"""What vLLM is asked, and what it says: the tokens of a request, finished or not, and when it made progress."""

import itertools
import time
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase

from async_grpo.errors import ConfigurationError
from async_grpo.messages import SharedRunSettings
from async_grpo.types import Sampling, Tokens
from async_grpo.weights.vllm_engine import DRAWN

UNSYNCED = -1  # policy version of an engine that still holds whatever its checkpoint held
_numbers = itertools.count()
NOTHING = Tokens(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32))


class TokenTimeline(StatLoggerBase):
    """Notes (wall-clock seconds, generated tokens) of every step of the engine, and when it last made one."""

    def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:
        self.steps: list[tuple[float, int]] = []
        self.last_progress = time.monotonic()

    def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
        if iteration_stats is None:
            return
        if iteration_stats.num_generation_tokens or iteration_stats.num_prompt_tokens:
            self.last_progress = time.monotonic()
        if iteration_stats.num_generation_tokens:
            self.steps.append((time.time(), iteration_stats.num_generation_tokens))

    def log_engine_initialized(self) -> None:
        pass


def tokens_of(output: CompletionOutput) -> Tokens:
    """The tokens of an output, in arrays of their own: an unfinished one goes on to grow."""
    token_ids, flat = np.array(output.token_ids, np.int32), output.logprobs
    assert isinstance(flat, FlatLogprobs) and len(flat) == len(token_ids), type(flat)
    versions = np.full(len(token_ids), UNSYNCED, np.int32)
    for span in output.weight_versions or ():  # the engine's own
        if span.version.lstrip("-").isdigit():
            versions[span.start : span.end] = int(span.version)
    logprobs = np.array(flat.logprobs, np.float32)[flat.start_indices]  # the first of each position
    return Tokens(token_ids, logprobs, versions)


@dataclass
class EngineRequest:
    """One completion that is asked of vLLM; `given`: its first tokens, of an engine that was lost."""

    member: int
    token_ids: list[int]  # of the prompt, and given
    params: SamplingParams
    given: Tokens
    name: str
    told: int = 0  # tokens that `new_tokens` returned

    @classmethod
    def of(
        cls,
        settings: SharedRunSettings,
        prompt: np.ndarray,
        member: int,
        seed: int,
        sampling: Sampling | None = None,
        given: Tokens = NOTHING,
    ) -> Self:
        """ConfigurationError: the prompt (L,) leaves no room to answer."""
        sampling, room = sampling or Sampling(), settings.max_total_tokens - len(prompt)
        if room < 1:
            raise ConfigurationError(
                f"a prompt of {len(prompt)} tokens leaves no room in {settings.max_total_tokens} tokens: shorten it or "
                "raise --max-generation-tokens"
            )
        temperature, longest = sampling.temperature, sampling.max_tokens
        params = SamplingParams(
            temperature=settings.temperature if temperature is None else temperature,
            seed=seed,
            max_tokens=min(longest or settings.max_completion_tokens, room) - len(given),
            extra_args={DRAWN: len(given)} if len(given) else None,
            stop_token_ids=list(settings.stop_token_ids),
            stop=list(sampling.stop) or None,
            include_stop_str_in_output=True,  # the tokens hold it, too
            logprobs=0,  # the sampled token's own
            flat_logprobs=True,  # lists instead of a dictionary per token
            skip_clone=True,  # nobody changes it
            detokenize=bool(sampling.stop),
            skip_special_tokens=False,  # their spelling may be such a text
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        return cls(member, [*prompt.tolist(), *given.token_ids.tolist()], params, given, new_name())

    def new_tokens(self, engine: AsyncLLM) -> Tokens:
        """What it got since the last time, while it is unfinished. vLLM 0.32 would send them, but with one output per
        token, or without versions."""
        held = engine.output_processor
        for request_id in held.external_req_ids.get(self.name, ()):
            state = held.request_states[request_id]
            if state.detokenizer.num_output_tokens() > self.told:
                output = state._new_completion_output([], None, None)
                output.weight_versions = state._weight_version_spans()
                tokens, told = tokens_of(output), self.told
                self.told = len(tokens)
                return Tokens(*(array[told:] for array in tokens.arrays))
        return NOTHING


def new_name() -> str:
    """Of a request, in this process."""
    return str(next(_numbers))
