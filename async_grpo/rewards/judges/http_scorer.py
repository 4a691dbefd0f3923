"""`HTTPScorer`: any reward behind a small JSON protocol, version 1.

The request is POSTed to `path`, one sample at a time:

    {"protocol": 1, "id": "9f86d081884c7d65",
     "samples": [{"prompt": ..., "completion": ..., "answer": ..., and the chosen columns}],
     "images": [["<base64>", ...]]}                        only if a column of images is named; a list per sample

The reply is a 200 with one score per sample, in their order:

    {"protocol": 1, "id": "9f86d081884c7d65",                 the id may be left out; another one is refused
     "scores": [{"reward": 0.5, and any further finite numbers} | {"abstain": "why"} | {"error": "why"}]}

An `error` is a failed call, and the sample is left out of training; so is a reply of another version or id, of
another length, or with a number that is none. Everything is JSON and base64: nothing of a reply can be run.
`examples/http_scorer_server.py` is a server to begin with.
"""

import base64
import binascii
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.http.endpoint import BadReply
from async_grpo.rewards.judges.judge_prompts import as_text, column
from async_grpo.rewards.judges.judge_replies import MAX_QUOTE, quote
from async_grpo.rewards.judges.remote_judge import (
    CHARACTERS_PER_TOKEN,
    JudgeAddresses,
    RemoteJudge,
    fits,
    require,
)

if TYPE_CHECKING:
    from async_grpo.rewards.http.endpoint import Deadline
    from async_grpo.rewards.http.http_client import EndpointClient


PROTOCOL = 1
MAX_EXTRAS = 64  # each becomes a column of the metrics


@dataclass(frozen=True, kw_only=True)
class HTTPScorer(RemoteJudge):
    """What a server of yours says, by the protocol of this module.

    Args:
        columns: of the sample to send beside prompt, completion and answer (which is sent if there is one).
        images: the column with the sample's images: a list of bytes or of base64.

    Raises:
        ConfigurationError: the settings cannot work.
    """

    columns: Sequence[str] = ()
    images: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(not isinstance(self.columns, str), f"columns={self.columns!r} must be a list of names")

    def default_path(self) -> str:
        """That of the protocol."""
        return "/score"

    def run_urls(self, addresses: JudgeAddresses) -> tuple[str, ...]:
        """By `--http-scorer-urls`; by default where `examples/http_scorer_server.py` listens."""
        return addresses.scorer_urls

    async def score(
        self, sample: Mapping[str, Any], client: "EndpointClient", *, phase: str, deadline: "Deadline | float"
    ) -> dict[str, Any]:
        """The answer for one sample; `deadline` is for the client.

        Raises:
            ConfigurationError: the sample lacks a column, or its images are none.
            JudgeError: no reply came, one that breaks the protocol, or an `error`.
        """
        body = self._body(sample)
        estimate = sum(len(str(value)) for value in body["samples"][0].values()) / CHARACTERS_PER_TOKEN
        reply = await client.post(self.path, body, tokens=estimate, phase=phase, deadline=deadline)
        if reply.get("id", body["id"]) != body["id"]:
            raise BadReply(f"the scorer answers the request {quote(reply['id'])}, not {body['id']!r}")
        return score_of(reply)

    def _body(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        shown = {"prompt": as_text(column(sample, "prompt")), "completion": column(sample, "completion")}
        if "answer" in sample:
            shown["answer"] = sample["answer"]
        shown |= {name: column(sample, name) for name in self.columns}
        body: dict[str, Any] = {"protocol": PROTOCOL, "id": secrets.token_hex(8), "samples": [shown]}
        if self.images is not None:
            body["images"] = [_as_base64(column(sample, self.images), self.images)]
        return body


def score_of(reply: Mapping[str, Any]) -> dict[str, Any]:
    """The one score of a reply. Raises BadReply for an error, and for whatever breaks the protocol.

    >>> score_of({"protocol": 1, "scores": [{"reward": 1, "style": 0.5}]})
    {'reward': 1.0, 'style': 0.5}
    """
    if reply.get("protocol") != PROTOCOL:
        raise BadReply(f"the scorer speaks protocol {quote(reply.get('protocol'))}, not {PROTOCOL}")
    scores = reply.get("scores")
    if not isinstance(scores, list) or len(scores) != 1 or not isinstance(scores[0], dict):
        raise BadReply(f"the scorer's `scores` must be one object for one sample, not {quote(scores)}")
    (score,) = scores
    if "error" in score:
        raise BadReply(f"the scorer failed: {str(score['error'])[:MAX_QUOTE]}")
    if "abstain" in score:
        return {"abstain": str(score["abstain"])[:MAX_QUOTE]}
    if "reward" not in score or len(score) > MAX_EXTRAS:
        raise BadReply(
            f"the scorer's score must hold `reward` and at most {MAX_EXTRAS} numbers: {quote(score)}"
        )
    wrong = {name: value for name, value in score.items() if not fits(value)}
    if wrong:
        raise BadReply(f"the scorer's score holds what is no finite number: {quote(wrong)}")
    return {name: float(value) for name, value in score.items()}


def _as_base64(images: Any, name: str) -> list[str]:
    if not isinstance(images, list | tuple):
        raise ConfigurationError(
            f"the column {name!r} must hold a list of images, not {type(images).__name__}"
        )
    encoded = []
    for image in images:
        if isinstance(image, bytes):
            encoded.append(base64.b64encode(image).decode())
            continue
        try:
            base64.b64decode(image, validate=True)
        except (TypeError, ValueError, binascii.Error) as error:
            raise ConfigurationError(f"an image of {name!r} is neither bytes nor base64: {error}") from error
        encoded.append(image)
    return encoded
