"""`GrammarReplay`: finds out which tokens a grammar allowed at each position of a finished completion.

vLLM does not report them. So the worker replays the sampled tokens through the same grammar, with vLLM's own classes.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.outputs import CompletionOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend
from vllm.v1.structured_output.request import get_structured_output_key

from async_grpo.allowed_tokens import ALL_TOKENS, AllowedTokens, packed_mask
from async_grpo.errors import RequestRefused
from async_grpo.inference.requests import EngineRequest

# Limit for the masks of one completion. The masks of a JSON grammar usually take some kilobytes, because it visits few
# states
MAX_MASK_BYTES = 16 * 2**20


class GrammarReplay:
    """Replays completions through their grammars.

    Args:
        engine: The engine that samples the completions.
        tokenizer: The model's tokenizer.
    """

    def __init__(self, engine: AsyncLLM, tokenizer: Any) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._backend: XgrammarBackend | None = None

    async def allowed_tokens(self, request: EngineRequest, output: CompletionOutput) -> AllowedTokens | None:
        """Return the tokens that were allowed at each position of a completion; None if it has no grammar.

        Raises:
            RequestRefused: The engine could not compile the grammar, or the masks need too much memory.
            RuntimeError: The grammar does not allow a sampled token, so the engine must have used another grammar.
        """
        if not request.has_grammar:
            return None
        if output.finish_reason == "error":
            raise RequestRefused(
                "the engine cannot enforce the form of the answer: it could not compile the grammar, or no token may follow"
            )
        return await asyncio.to_thread(self._replayed, request.params, output.token_ids)

    def _replayed(self, params: SamplingParams, token_ids: Sequence[int]) -> AllowedTokens:
        if self._backend is None:
            config = self._engine.vllm_config
            vocab_size = config.model_config.get_vocab_size()
            self._backend = XgrammarBackend(config, tokenizer=self._tokenizer, vocab_size=vocab_size)
        assert params.structured_outputs is not None
        grammar = self._backend.compile_grammar(
            *get_structured_output_key(params.structured_outputs),
            stop_token_ids=self._stop_token_ids(params),
        )
        row = self._backend.allocate_token_bitmask(1)
        bits = row.numpy()[0]  # a view of the same memory
        indices = np.full(len(token_ids), ALL_TOKENS, np.int32)
        places: dict[bytes, int] = {}  # digest of a mask -> its place in `masks`
        masks: list[bytes] = []
        num_bytes = 0
        for position, token_id in enumerate(token_ids):
            # After its end, a grammar allows all tokens
            if grammar.is_terminated():
                break
            grammar.fill_bitmask(row, 0)
            if not (bits == -1).all():
                digest = hashlib.blake2b(bits.tobytes(), digest_size=16).digest()
                if digest not in places:
                    places[digest] = len(masks)
                    masks.append(packed_mask(bits))
                    num_bytes += len(masks[-1])
                    _refuse_more_bytes(num_bytes)
                indices[position] = places[digest]
            if not grammar.accept_tokens("", [token_id]):
                raise RuntimeError(f"the grammar of a request does not allow the sampled token {token_id}")
        return AllowedTokens(indices, tuple(masks))

    def _stop_token_ids(self, params: SamplingParams) -> set[int]:
        """Return all tokens that end the completion.

        vLLM adds the end tokens of the tokenizer and of the generation config.
        """
        completed_params = params.clone()
        completed_params.update_from_generation_config(
            self._engine.model_config.try_get_generation_config(),
            self._engine.renderer.get_eos_token_id(),
        )
        return completed_params.all_stop_token_ids


def refuse_grammar(params: SamplingParams, error: Exception) -> None:
    """Refuse a request if the error says that vLLM does not accept its grammar.

    Raises:
        RequestRefused: The request has a grammar, and vLLM found its parameters invalid.
    """
    if params.structured_outputs is not None and isinstance(error, (ValueError, VLLMValidationError)):
        raise RequestRefused(f"the engine refuses the form of the answer: {error}") from error


def _refuse_more_bytes(num_bytes: int) -> None:
    if num_bytes > MAX_MASK_BYTES:
        raise RequestRefused(
            f"the grammar has too many states: the masks of one answer have more than {MAX_MASK_BYTES} bytes; simplify the "
            "schema, limit the answer with max_tokens, or start the run with --typed-output hint"
        )
