"""Requests to vLLM, the tokens that they have generated so far, and the time of the engine's last progress."""

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase

from async_grpo.errors import ConfigurationError
from async_grpo.inference.vllm_edges.continued_draws import DRAWN
from async_grpo.inference.vllm_edges.unfinished_tokens import unfinished_output
from async_grpo.messages import SharedRunSettings, Truncation
from async_grpo.types import Sampling, Tokens

UNSYNCED = -1  # policy version of an engine that still has the weights of its model folder
NO_TOKENS = Tokens(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32))
# Parameters of a request for the log-probs of its prompt at temperature 1. It also samples one token, which is ignored
PROMPT_LOGPROBS = SamplingParams(
    temperature=1.0,
    max_tokens=1,
    prompt_logprobs=0,
    detokenize=False,
    skip_reading_prefix_cache=True,
)
_request_numbers = itertools.count()


class TokenTimeline(StatLoggerBase):
    """Records (Unix time, generated tokens) of every engine step, and the time of the last step that made progress."""

    def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:
        self.steps: list[tuple[float, int]] = []
        self.last_progress = time.monotonic()

    def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
        """Record an engine step. vLLM calls this method."""
        if iteration_stats is None:
            return
        if iteration_stats.num_generation_tokens or iteration_stats.num_prompt_tokens:
            self.last_progress = time.monotonic()
        if iteration_stats.num_generation_tokens:
            self.steps.append((time.time(), iteration_stats.num_generation_tokens))

    def log_engine_initialized(self) -> None:
        """Do nothing. vLLM calls this method when the engine starts."""


def tokens_of(output: CompletionOutput) -> Tokens:
    """Return a copy of an output's tokens. The original lists grow as long as the request is unfinished."""
    token_ids = np.array(output.token_ids, np.int32)
    flat_logprobs = output.logprobs
    assert isinstance(flat_logprobs, FlatLogprobs), type(flat_logprobs)
    assert len(flat_logprobs) == len(token_ids), (len(flat_logprobs), len(token_ids))
    # vLLM lists several log-probs per position. The first one belongs to the sampled token
    logprobs = np.array(flat_logprobs.logprobs, np.float32)[flat_logprobs.start_indices]

    versions = np.full(len(token_ids), UNSYNCED, np.int32)
    for span in output.weight_versions or ():
        # Before the first weight update, vLLM's version may be a word such as "default"
        is_number = span.version.lstrip("-").isdigit()
        if is_number:
            versions[span.start : span.end] = int(span.version)
    return Tokens(token_ids, logprobs, versions)


def prompt_logprobs(output: RequestOutput, token_ids: np.ndarray) -> np.ndarray:
    """Return the log-probs (N,) float32 of a prompt's tokens (N,), from a request with PROMPT_LOGPROBS.

    The log-prob of the first token is 0.
    """
    logprobs = [0.0]
    for token, candidates in zip(token_ids[1:].tolist(), output.prompt_logprobs[1:], strict=True):
        logprobs.append(candidates[token].logprob)
    return np.asarray(logprobs, np.float32)


@dataclass
class EngineRequest:
    """A request to vLLM for one completion."""

    member: int  # index of the completion in its group
    token_ids: list[int]  # what vLLM reads: the prompt's token ids, then those of `first_tokens`
    params: SamplingParams
    first_tokens: Tokens  # beginning of the completion that a lost engine had already sampled; often empty
    name: str  # vLLM's request id
    num_reported: int = 0  # number of tokens that `new_tokens` has returned so far

    @classmethod
    def of(
        cls,
        settings: SharedRunSettings,
        prompt: np.ndarray,
        member: int,
        seed: int,
        sampling: Sampling | None = None,
        first_tokens: Tokens = NO_TOKENS,
    ) -> Self:
        """Make a request for one completion of a prompt (L,).

        Raises:
            ConfigurationError: The prompt leaves no room to answer.
        """
        sampling = sampling or Sampling()
        structured_outputs = None
        if sampling.grammar:
            structured_outputs = StructuredOutputsParams(structural_tag=sampling.grammar)
            # Start again from the beginning, because vLLM applies a grammar from the first token that it samples. With
            # the same seed, the same tokens are drawn again
            first_tokens = NO_TOKENS
        room = settings.max_total_tokens - len(prompt)
        if room < 1:
            raise ConfigurationError(
                f"a prompt of {len(prompt)} tokens leaves no room in {settings.max_total_tokens} tokens: shorten it or "
                "raise --max-generation-tokens"
            )
        temperature = settings.temperature if sampling.temperature is None else sampling.temperature
        max_tokens = min(sampling.max_tokens or settings.max_completion_tokens, room)
        truncation = settings.truncation or Truncation()
        params = SamplingParams(
            temperature=temperature,
            top_p=truncation.top_p,
            top_k=truncation.top_k,
            min_p=truncation.min_p,
            seed=seed,
            max_tokens=max_tokens - len(first_tokens),
            # Repeat the random draws of the known tokens, so that the seed continues where the lost engine stopped
            extra_args={DRAWN: len(first_tokens)} if len(first_tokens) else None,
            stop_token_ids=list(settings.stop_token_ids),
            stop=list(sampling.stop) or None,
            # The completion's tokens include the stop text, so its text must include it, too
            include_stop_str_in_output=True,
            detokenize=bool(sampling.stop),
            # Keep special tokens in the text, because a stop text may be the text of one
            skip_special_tokens=False,
            # 0 requests only the log-probs of sampled tokens. Flat means lists instead of one dictionary per token
            logprobs=0,
            flat_logprobs=True,
            # Nothing changes these parameters, so vLLM need not copy them
            skip_clone=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
            structured_outputs=structured_outputs,
            # Never sample a placeholder for an image: an engine would look for an image that the request does not have
            logit_bias=dict.fromkeys(settings.unsampled_token_ids, -math.inf) or None,
        )
        token_ids = [*prompt.tolist(), *first_tokens.token_ids.tolist()]
        return cls(member, token_ids, params, first_tokens, new_name())

    @property
    def has_grammar(self) -> bool:
        """Return whether a grammar restricts the tokens of the completion."""
        return self.params.structured_outputs is not None

    def new_tokens(self, engine: AsyncLLM) -> Tokens:
        """Return the tokens sampled since the last call; no tokens if the request has finished or has a grammar.

        A request with a grammar cannot be continued, so its tokens need not be reported.
        """
        if self.has_grammar:
            return NO_TOKENS
        output = unfinished_output(engine, self.name, self.num_reported)
        if output is None:
            return NO_TOKENS
        tokens = tokens_of(output)
        first_new = self.num_reported
        self.num_reported = len(tokens)
        return Tokens(*(array[first_new:] for array in tokens.arrays))


def new_tokens_by_member(requests: Sequence[EngineRequest], engine: AsyncLLM) -> dict[int, Tokens]:
    """Return the tokens sampled since the last call, by member. Requests without new tokens are left out."""
    tokens_by_member = {}
    for request in requests:
        tokens = request.new_tokens(engine)
        if len(tokens):
            tokens_by_member[request.member] = tokens
    return tokens_by_member


class RequestTimes:
    """The time intervals (Unix time) during which an engine worked on each of its requests."""

    def __init__(self) -> None:
        # Request id -> Unix time at which an unfinished request began
        self._begin_by_name: dict[str, float] = {}
        self._finished: list[tuple[float, float]] = []

    @property
    def num_unfinished(self) -> int:
        """Return the number of unfinished requests."""
        return len(self._begin_by_name)

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Measure the time of a request, which counts as unfinished while the block runs."""
        self._begin_by_name[name] = time.time()
        try:
            yield
        finally:
            begin = self._begin_by_name.pop(name)
            self._finished.append((begin, time.time()))

    def take(self) -> list[tuple[float, float]]:
        """Return all intervals since the last call.

        The interval of an unfinished request is cut in two: one part ends now and is returned, the other begins now.
        """
        now = time.time()
        intervals = self._finished + [(begin, now) for begin in self._begin_by_name.values()]
        self._finished = []
        self._begin_by_name = dict.fromkeys(self._begin_by_name, now)
        return intervals


def new_name() -> str:
    """Return a request id that this process has not used yet."""
    return str(next(_request_numbers))
