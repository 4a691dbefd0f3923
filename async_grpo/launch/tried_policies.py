"""The policies of `async-grpo try-environment`: texts in a fixed order, texts from the terminal, or a model.

Each is a `Generation`, so a trajectory passes through the same program, endpoint and recorder as in a run.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import numpy as np
import torch

from async_grpo.errors import ConfigurationError
from async_grpo.experience.prompts import PromptRenderer
from async_grpo.messages import SharedRunSettings
from async_grpo.modeling.load import load_causal_lm
from async_grpo.types import Completion, FinishReason, Prompt, Sampling, Session

RUN_SAMPLING = Sampling()
# Text of the policy's turns in the conversation with which the template is examined
MARK = "the policy's turn"


class ScriptedPolicy:
    """A `Generation` whose policy says fixed texts, one per turn.

    Args:
        next_text: Returns the text of the next turn. It may wait for a person at the terminal.
        tokenizer: The tokenizer of the texts.
        end_token_id: The token that ends each turn; see `end_token_of`.
    """

    def __init__(self, next_text: Callable[[], str], tokenizer: Any, end_token_id: int) -> None:
        self._next_text = next_text
        self._tokenizer = tokenizer
        self._end_token_id = end_token_id

    async def generate(
        self, prompt: Prompt, count: int, sampling: Sampling | None = None, session: Session | None = None
    ) -> AsyncGenerator[Completion]:
        """Yield the next text as `count` completions; see `Generation`."""
        for _ in range(count):
            text = await asyncio.to_thread(self._next_text)
            yield self._completion(text, sampling or RUN_SAMPLING)

    def _completion(self, text: str, sampling: Sampling) -> Completion:
        """Return a text as an engine would return it, cut at the limits of the request."""
        text, is_stopped = _until_stop_text(text, sampling.stop)
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        if not is_stopped:
            token_ids.append(self._end_token_id)
        is_cut = sampling.max_tokens is not None and len(token_ids) > sampling.max_tokens
        if is_cut:
            token_ids = token_ids[: sampling.max_tokens]
            text = self._tokenizer.decode(token_ids)
        return Completion(
            token_ids=np.array(token_ids, np.int32),
            logprobs=np.zeros(len(token_ids), np.float32),
            versions=np.zeros(len(token_ids), np.int32),
            finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP,
            text=text,
        )

    async def take_stats(self) -> dict[str, Any]:
        """Return no statistics; see `Generation`."""
        return {}


class ModelPolicy:
    """A `Generation` that samples from a model on the CPU, token by token, without an engine.

    Args:
        model_path: Folder of the model.
        tokenizer: The model's tokenizer.
        settings: The settings of the run: temperature, seed and stop tokens.
    """

    def __init__(self, model_path: str, tokenizer: Any, settings: SharedRunSettings) -> None:
        self._model = load_causal_lm(model_path, settings.dtype).eval().requires_grad_(False)
        self._tokenizer = tokenizer
        self._settings = settings
        self._random = torch.Generator().manual_seed(settings.seed)

    async def generate(
        self, prompt: Prompt, count: int, sampling: Sampling | None = None, session: Session | None = None
    ) -> AsyncGenerator[Completion]:
        """Yield `count` completions; see `Generation`."""
        for _ in range(count):
            # Sample in a thread, so that the endpoint and the trajectory's time limit keep working meanwhile
            yield await asyncio.to_thread(self._sample, prompt.token_ids, sampling or RUN_SAMPLING)

    @torch.inference_mode()
    def _sample(self, prompt_token_ids: np.ndarray, sampling: Sampling) -> Completion:
        """Sample one completion of a prompt (L,) int32."""
        settings = self._settings
        temperature = settings.temperature if sampling.temperature is None else sampling.temperature
        max_tokens = sampling.max_tokens or settings.max_completion_tokens
        token_ids: list[int] = []
        logprobs: list[float] = []
        text = ""
        is_stopped = False
        inputs = torch.from_numpy(prompt_token_ids.astype(np.int64))[None]
        cache = None
        while len(token_ids) < max_tokens and not is_stopped:
            output = self._model(input_ids=inputs, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            distribution = torch.log_softmax(output.logits[0, -1].float() / (temperature or 1.0), dim=-1)
            token_id = self._draw(distribution, is_greedy=temperature == 0)
            token_ids.append(token_id)
            logprobs.append(float(distribution[token_id]))
            if token_id in settings.stop_token_ids:
                is_stopped = True
            else:
                text = self._tokenizer.decode(token_ids)
                _, is_stopped = _until_stop_text(text, sampling.stop)
            inputs = torch.tensor([[token_id]])
        return Completion(
            token_ids=np.array(token_ids, np.int32),
            logprobs=np.array(logprobs, np.float32),
            versions=np.zeros(len(token_ids), np.int32),
            finish_reason=FinishReason.STOP if is_stopped else FinishReason.LENGTH,
            text=text,
        )

    def _draw(self, distribution: torch.Tensor, *, is_greedy: bool) -> int:
        """Return the id of a token: drawn at random according to log-probs (vocabulary,), or the most probable one."""
        if is_greedy:
            return int(distribution.argmax())
        return int(torch.multinomial(distribution.exp(), 1, generator=self._random))

    async def take_stats(self) -> dict[str, Any]:
        """Return no statistics; see `Generation`."""
        return {}


def end_token_of(renderer: PromptRenderer, tokenizer: Any, stop_token_ids: Sequence[int]) -> int:
    """Return the id of the token with which the chat template ends a turn.

    A scripted turn must end with it, so that the next turn continues the same sequence.

    Args:
        renderer: Renders conversations with the chat template.
        tokenizer: The model's tokenizer.
        stop_token_ids: All tokens that end a completion. Without a template, the first of them is returned.
    """
    conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
    try:
        text = renderer.render([*conversation, {"role": "user", "content": "?"}])
    except ConfigurationError:
        return stop_token_ids[0]
    text_after = text.partition(MARK)[2]
    place_by_id = {}
    for token_id in stop_token_ids:
        place = text_after.find(tokenizer.decode([token_id]))
        if place >= 0:
            place_by_id[token_id] = place
    return min(place_by_id, key=place_by_id.__getitem__, default=stop_token_ids[0])


def texts_in_order(texts: Sequence[str]) -> Callable[[], str]:
    """Return a function that returns the texts one after the other, and after the end always the last one."""
    remaining = list(texts)

    def next_text() -> str:
        return remaining.pop(0) if len(remaining) > 1 else remaining[0]

    return next_text


def text_from_terminal() -> str:
    """Ask the person at the terminal for the text of the policy's turn.

    Raises:
        ConfigurationError: The standard input has ended.
    """
    try:
        return input("your turn as the policy> ")
    except EOFError as error:
        raise ConfigurationError(
            "--say - reads the policy's turns from the standard input, which has ended: give more lines, or --say TEXT"
        ) from error


def _until_stop_text(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """Return the text up to and including the first of the `stop` texts, and whether it contains one."""
    ends = [text.find(stop_text) + len(stop_text) for stop_text in stop if stop_text in text]
    if not ends:
        return text, False
    return text[: min(ends)], True
