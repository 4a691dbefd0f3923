"""`TeacherServer`: a teacher that runs on a server such as vLLM's, which returns the log-probs of a prompt's tokens.

Each sequence is sent to `/completions` as token ids, with `prompt_logprobs`. Requests are limited, repeated and cached
like those of judges. A sequence whose request failed gets NaN, so that it is left out of the loss.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from async_grpo.algorithm.teacher_config import TeacherAddress, TeacherConfig
from async_grpo.allowed_tokens import AllowedTokens
from async_grpo.errors import ConfigurationError
from async_grpo.options.fields import is_number
from async_grpo.rewards.cache.verdicts import VerdictCache, key_of, version_of
from async_grpo.rewards.http.endpoint import (
    BadReply,
    Deadline,
    Endpoint,
    JudgeError,
    Limits,
    call_beside,
)
from async_grpo.rewards.http.http_client import EndpointClient
from async_grpo.rewards.http.rate_limiter import RateLimiter
from async_grpo.types import ImageReference

# A reply may have at most REPLY_BYTES, plus this for each log-prob, for which vLLM writes about 100 bytes
REPLY_BYTES_PER_TOKEN = 1024
REPLY_BYTES = 2**16
LARGE_SEQUENCE_TOKENS = 2048  # the reply for a longer sequence is read in a thread
LOWEST_LOGPROB = -9999.0  # vLLM writes this number for a probability of 0
MAX_TOKEN_ID_DIGITS = 9
MAX_SHOWN_CHARACTERS = 60
log = logging.getLogger(__name__)


class TeacherServer:
    """`Logprobs` of one teacher on a server. Use it from one event loop, and call `start` first.

    Args:
        name: Name of the teacher; "" if it is the only one.
        server: Address of the server, and name of the model.
        config: The options of teachers.
        rate_limiter: Enforces the limits of the requests.
        max_tokens: Maximum number of tokens of a sequence.
        cache: Cache of the log-probs; None without one.

    Attributes:
        first_failure: Reason for which a sequence got no log-probs for the first time; "" if this has not happened.

    Raises:
        ConfigurationError: The address is invalid, or the API key is not in the environment.
    """

    def __init__(
        self,
        name: str,
        server: TeacherAddress,
        config: TeacherConfig,
        rate_limiter: RateLimiter,
        max_tokens: int,
        cache: VerdictCache | None = None,
    ) -> None:
        self._label = f"teacher {name}".rstrip()
        self._server = server
        self._cache = cache
        self._top_k = config.teacher_top_k
        self._deadline_s = config.teacher_timeout_s * config.teacher_attempts
        endpoint = Endpoint(
            urls=(server.url,),
            limits=Limits(
                concurrency=config.teacher_concurrency,
                requests_per_minute=config.teacher_requests_per_minute,
            ),
            api_key_env=config.teacher_api_key_env,
            attempts=config.teacher_attempts,
            timeout_s=config.teacher_timeout_s,
            max_body_bytes=REPLY_BYTES + REPLY_BYTES_PER_TOKEN * max_tokens * (1 + config.teacher_top_k),
        )
        self._path = "/completions" if endpoint.urls[0].endswith("/v1") else "/v1/completions"
        self._client = EndpointClient(self._label, endpoint, rate_limiter)
        self.close = self._client.close
        self.first_failure = ""

    async def start(self, token_texts: Mapping[int, str]) -> None:
        """Check that the server answers with log-probs, and that its tokens have the same texts.

        Args:
            token_texts: Texts of some tokens of the policy's vocabulary, by id.

        Raises:
            ConfigurationError: The server does not answer, or its tokenizer differs.
        """
        compared_ids = list(token_texts)
        # The server gives no log-prob for the first token, so one token more is sent
        token_ids = [compared_ids[0], *compared_ids]
        try:
            # Ask for as many of the most probable tokens as the run will, because a server may allow fewer
            positions = _positions_of(await self._post(token_ids, self._top_k), token_ids)
        except JudgeError as error:
            raise ConfigurationError(
                f"--teacher {self._server.url}: {error}; a teacher's server must return prompt_logprobs={self._top_k} "
                "(--teacher-top-k) for token ids, as vLLM's does, which allows as many as its --max-logprobs"
            ) from error
        for token_id, position in zip(compared_ids, positions, strict=True):
            text = position[str(token_id)].get("decoded_token")
            if text != token_texts[token_id]:
                raise ConfigurationError(
                    f"--teacher {self._server.url}: its tokenizer differs from the policy's: token {token_id} is "
                    f"{text!r:.{MAX_SHOWN_CHARACTERS}} there and {token_texts[token_id]!r:.{MAX_SHOWN_CHARACTERS}} here; a "
                    "teacher must have the policy's vocabulary"
                )

    async def logprobs(
        self,
        sequences: Sequence[np.ndarray],
        prompt_lengths: Sequence[int],
        allowed: Sequence[AllowedTokens | None] | None = None,
        images: Sequence[tuple[ImageReference, ...]] | None = None,
    ) -> list[np.ndarray]:
        """Return the log-probs (T,) of each completion, NaN where the server gave none; see `Logprobs`.

        `allowed` and `images` are always None, because runs with typed output or images refuse such a teacher.
        """
        assert allowed is None and images is None, "`config.teachers` refuses grammars and images"
        return [rows[:, 1, 0] for rows in await self.logprobs_with_top(sequences, prompt_lengths, 0)]

    async def logprobs_with_top(
        self, sequences: Sequence[np.ndarray], prompt_lengths: Sequence[int], k: int
    ) -> list[np.ndarray]:
        """Return ids and log-probs (T, 2, 1 + k) of each completion: of the sampled token, and of the k most probable.

        Log-probs are NaN where the server gave none.
        """
        requests = [
            self._completion_logprobs(token_ids, length, k)
            for token_ids, length in zip(sequences, prompt_lengths, strict=True)
        ]
        return list(await asyncio.gather(*requests))

    async def _completion_logprobs(self, token_ids: np.ndarray, prompt_length: int, k: int) -> np.ndarray:
        """Return ids and log-probs (T, 2, 1 + k) of the tokens after the prompt, all NaN if the server failed."""
        num_tokens = len(token_ids) - prompt_length
        if not num_tokens:
            return np.zeros((0, 2, 1 + k), np.float32)
        call = partial(self._answer, token_ids.tolist(), prompt_length, k)
        try:
            if self._cache is None:
                answer = await call()
            else:
                version = version_of(self._server.model, self._server.url)
                content = {"token_ids": token_ids.tolist(), "prompt_length": prompt_length, "k": k}
                answer = await self._cache.get_or_call(key_of(self._label, version, content), call)
        except JudgeError as error:
            if not self.first_failure:
                self.first_failure = str(error)
                log.warning(
                    "%s gave no log-probs; the sequence is left out of the loss: %s", self._label, error
                )
            return np.full((num_tokens, 2, 1 + k), np.nan, np.float32)
        # A missing log-prob is None, which becomes NaN
        return np.array(answer["logprobs"], np.float32)

    async def _answer(self, token_ids: list[int], prompt_length: int, k: int) -> dict[str, Any]:
        """Return the log-probs of a completion in the form of the cache's answers.

        Raises:
            JudgeError: The server gave no usable reply.
        """
        reply = await self._post(token_ids, k)
        read = partial(_rows_of, reply, token_ids, prompt_length, k)
        rows = await call_beside(read, size=len(token_ids) * (1 + k), large=LARGE_SEQUENCE_TOKENS)
        return {"status": "ok", "logprobs": rows}

    async def _post(self, token_ids: Sequence[int], k: int = 0) -> dict[str, Any]:
        """Ask for the log-probs of a sequence's tokens, and of the k most probable tokens at each position.

        Raises:
            JudgeError: The server gave no reply.
        """
        body: dict[str, Any] = {
            "prompt": list(token_ids),
            "prompt_logprobs": k,  # the server always returns the log-prob of the token itself, too
            "max_tokens": 1,
            "temperature": 0.0,
        }
        if self._server.model:
            body["model"] = self._server.model
        return await self._client.post(
            self._path, body, tokens=float(len(token_ids) + 1), deadline=Deadline(self._deadline_s)
        )


def _rows_of(
    reply: Mapping[str, Any], token_ids: Sequence[int], prompt_length: int, k: int
) -> list[list[list[float | None]]]:
    """Return ids and log-probs (T, 2, 1 + k) of the tokens after the prompt, None for a missing log-prob.

    Raises:
        BadReply: The reply has another form, or other tokens.
    """
    positions = _positions_of(reply, token_ids)
    rows: list[list[list[float | None]]] = []
    for token_id, position in list(zip(token_ids[1:], positions, strict=True))[prompt_length - 1 :]:
        top = [(_logprob(entry), int(key)) for key, entry in position.items() if _is_token_id(key)]
        usable = sorted(((-logprob, key) for logprob, key in top if logprob is not None))[:k]
        ids: list[float | None] = [float(token_id), *(float(key) for _, key in usable)]
        logprobs = [_logprob(position[str(token_id)]), *(-negated for negated, _ in usable)]
        missing = 1 + k - len(ids)
        rows.append([ids + [0.0] * missing, logprobs + [None] * missing])
    return rows


def _is_token_id(key: str) -> bool:
    """Return whether a key is a token id. A longer number would be too large for an array, or even for `int`."""
    return len(key) <= MAX_TOKEN_ID_DIGITS and key.isascii() and key.isdecimal()


def _logprob(entry: Any) -> float | None:
    """Return the log-prob of an entry, or None if it has no usable one."""
    value: Any = entry.get("logprob") if isinstance(entry, dict) else None
    return float(value) if is_number(value) and LOWEST_LOGPROB < value <= 0 else None


def _positions_of(reply: Mapping[str, Any], token_ids: Sequence[int]) -> list[dict[str, Any]]:
    """Return the entries of the reply, by token id, for each position except the first.

    Raises:
        BadReply: The reply has another form, or other tokens.
    """
    try:
        (choice,) = reply["choices"]
        positions = [dict(position) for position in choice["prompt_logprobs"][1:]]
        entries = [
            position[str(token_id)] for position, token_id in zip(positions, token_ids[1:], strict=True)
        ]
    except (LookupError, TypeError, ValueError) as error:
        raise BadReply(
            f"the reply has no prompt_logprobs for the {len(token_ids)} tokens that were sent "
            f"({type(error).__name__})"
        ) from error
    if not all(isinstance(entry, dict) for entry in entries):
        raise BadReply("an entry of prompt_logprobs is no object")
    return positions
