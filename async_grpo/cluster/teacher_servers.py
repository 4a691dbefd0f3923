"""Connect the run's controller to the teachers on servers, within the rate limits that apply to the whole cluster."""

import contextlib
import os
from collections.abc import Mapping
from typing import Any

from async_grpo.algorithm.teacher_config import TeacherConfig
from async_grpo.cluster.rate_limit_actor import RemoteRateLimiter
from async_grpo.experience.teachers.server import TeacherServer
from async_grpo.options.redaction import register_secrets
from async_grpo.protocols import Logprobs
from async_grpo.rewards.cache.verdicts import VerdictCache

REPLACEMENT_CHARACTER = "\ufffd"
# Number of tokens whose texts are compared between the policy's tokenizer and a server
NUM_COMPARED_TOKENS = 200


class TeacherServers:
    """The teachers of a run that run on servers. Create it in the event loop that uses it.

    Args:
        config: The options of teachers.
        max_tokens: Maximum number of tokens of a sequence.
        token_texts: Texts of some tokens of the policy's vocabulary, by id, which are compared with the servers' texts.
        secrets: The environment variable with the servers' key, which is set in this process; {} if there is no key.
        cache_path: File of the verdict cache, in which the teachers' log-probs are also stored; None if there is no
            cache.
    """

    def __init__(
        self,
        config: TeacherConfig,
        max_tokens: int,
        token_texts: Mapping[int, str],
        secrets: Mapping[str, str],
        cache_path: str | None,
    ) -> None:
        os.environ.update(secrets)
        register_secrets([*secrets.values()])
        self._token_texts = token_texts
        self._resources = contextlib.AsyncExitStack()
        self.close = self._resources.aclose
        rate_limiter = RemoteRateLimiter()
        self._resources.push_async_callback(rate_limiter.close)
        cache = None
        if cache_path is not None:
            cache = VerdictCache(cache_path)
            self._resources.push_async_callback(cache.close)
        self._servers = {}
        for name, server in config.teacher_servers.items():
            teacher = TeacherServer(name, server, config, rate_limiter, max_tokens, cache)
            self._resources.push_async_callback(teacher.close)
            self._servers[name] = teacher

    async def start(self) -> dict[str, Logprobs]:
        """Check every server, and return the sources of log-probs by name.

        Raises:
            ConfigurationError: A server does not answer, or its tokenizer differs from the policy's.
        """
        teachers: dict[str, Logprobs] = {}
        for name, server in self._servers.items():
            await server.start(self._token_texts)
            teachers[name] = server
        return teachers


def compared_tokens(tokenizer: Any, max_tokens: int) -> dict[int, str]:
    """Return the texts of tokens from the whole vocabulary, by id, to compare the tokenizer with a server's.

    Tokens that are only a part of a character are left out, because servers show them in different ways.

    Args:
        tokenizer: The policy's tokenizer.
        max_tokens: Maximum number of tokens to return.
    """
    num_tokens = len(tokenizer)
    stride = max(1, num_tokens // min(NUM_COMPARED_TOKENS, max_tokens))
    texts: dict[int, str] = {}
    for token_id in range(num_tokens - 1, -1, -stride):
        text = tokenizer.decode([token_id])
        if text and REPLACEMENT_CHARACTER not in text and len(texts) < max_tokens:
            texts[token_id] = text
    return texts
