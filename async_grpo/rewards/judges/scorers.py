"""Judges that return a number: `RewardModelJudge` and `HTTPScorer`.

`RewardModelJudge` calls a discriminative reward model through vLLM's /classify or /pooling. `HTTPScorer` calls any
server that implements version 1 of this protocol. For each sample, a request is POSTed to `path`:

    {"protocol": 1, "id": "9f86d081884c7d65",
     "samples": [{"prompt": ..., "completion": ..., "answer": ..., and the chosen columns}],
     "images": [["<base64>", ...]]}                        only if a column of images is named; one list per sample

The reply has status 200 and one score per sample, in the same order. The id may be omitted, but a different id is an
error.

    {"protocol": 1, "id": "9f86d081884c7d65",
     "scores": [{"reward": 0.5, and any further finite numbers} | {"abstain": "why"} | {"error": "why"}]}

A call fails if the score is an `error`, if the reply has another version, id or length, or if a number in it is not
finite. Nothing in a reply is executed. `examples/http_scorer_server.py` is an example of such a server.
"""

import base64
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.options.fields import is_number
from async_grpo.rewards.adapter.registry_source import parse_names
from async_grpo.rewards.adapter.result import excerpt
from async_grpo.rewards.http.endpoint import CHARACTERS_PER_TOKEN, BadReply, require_all
from async_grpo.rewards.judges.judge_prompts import (
    Template,
    as_text,
    column,
    conversation,
    refuse_unseen_picture,
)
from async_grpo.rewards.judges.judge_replies import MAX_EXTRAS, MAX_NAME_CHARACTERS, MAX_QUOTE, quote
from async_grpo.rewards.judges.remote_judge import SCORER_URL, JudgeAddresses, ModelJudge, RemoteJudge, Send

PROTOCOL = 1
ID_BYTES = 8  # length of a request's random id
# Name of the field that contains the numbers in a reply's item, by task
FIELDS = {"classify": "probs", "pooling": "data"}


@dataclass(frozen=True, kw_only=True)
class RewardModelJudge(ModelJudge):
    """A judge whose reward is the last number that a reward model returns. It has no fixed scale.

    The server renders the conversation with the model's own chat template. The conversation consists of the prompt and
    of the completion as an assistant message without its end token. A prompt that is text, not a list of messages,
    becomes one user message. Control tokens in the texts are broken (see `judge_prompts`), so that a completion cannot
    add a turn.

    Args:
        task: "classify", or "pooling" for models that cannot classify.
        activation: Whether the server applies the model's sigmoid or softmax. None uses the server's default.
        template: A text with column names in braces. It is sent instead of the conversation, without a chat template.

    The answer's extras are `judge_tokens` and, with a price, `judge_cost`.
    """

    task: str = "classify"
    activation: bool | None = False
    template: str | None = None

    def __post_init__(self) -> None:
        require_all((self.task in FIELDS, f"task={self.task!r} is unknown; known: {', '.join(FIELDS)}"))
        super().__post_init__()
        # The constructor raises an error if the template cannot be read
        Template(self.template or "")
        self._check_model("input", "use_activation")

    def default_path(self) -> str:
        """Return vLLM's path for the task."""
        return f"/{self.task}"

    async def _score(self, sample: Mapping[str, Any], send: Send) -> dict[str, Any]:
        reply = await send(self._body(sample), self.token_estimate(sample))
        return {"reward": last_number(reply, FIELDS[self.task])}

    def token_estimate(self, sample: Mapping[str, Any]) -> tuple[float, float]:
        """Estimate the (prompt, completion) tokens of a call. A reward model generates no tokens."""
        body = self._body(sample)
        texts = [message["content"] for message in body.get("messages", ())] or [body["input"]]
        num_characters = sum(len(text) for text in texts)
        return num_characters / CHARACTERS_PER_TOKEN, 0.0

    def _body(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model}
        if self.template is None:
            body["messages"] = conversation(sample)
        else:
            body["input"] = Template(self.template).render(sample, fence=False)
        if self.activation is not None:
            body["use_activation"] = self.activation
        return body | dict(self.extra_body)


def last_number(reply: Mapping[str, Any], name: str) -> float:
    """Return the last number in a field of the reply's only item. The field may contain nested lists.

    Raises:
        BadReply: There is no such number.
    """
    item = only_item(reply, "data")
    if item.get("index", 0) != 0:
        raise BadReply(
            f"the item of the reward model's reply has the index {quote(item['index'])} instead of 0"
        )
    value: Any = item.get(name)
    while isinstance(value, list) and value:
        value = value[-1]
    if not is_number(value):
        raise BadReply(f"the reward model's reply has no finite number in {name!r}: {quote(reply)}")
    return float(value)


@dataclass(frozen=True, kw_only=True)
class HTTPScorer(RemoteJudge):
    """A judge whose reward is the score from a server that implements the protocol in this module.

    Args:
        columns: Columns of the sample to send in addition to prompt, completion and, if it exists, answer.
        images: Name of the column with the sample's images, each as bytes or base64 text.
    """

    columns: Sequence[str] = ()
    images: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_all((not isinstance(self.columns, str), f"columns={self.columns!r} must be a list of names"))

    def default_path(self) -> str:
        """Return the default path of the protocol."""
        return "/score"

    def run_urls(self, addresses: JudgeAddresses) -> tuple[str, ...]:
        """Return the addresses in `--http-scorer-urls`, or the default address of `examples/http_scorer_server.py`."""
        return parse_names(addresses.http_scorer_urls) or (SCORER_URL,)

    async def _score(self, sample: Mapping[str, Any], send: Send) -> dict[str, Any]:
        body = self._body(sample)
        num_characters = sum(len(str(value)) for value in body["samples"][0].values())
        reply = await send(body, (num_characters / CHARACTERS_PER_TOKEN, 0.0))
        if reply.get("id", body["id"]) != body["id"]:
            raise BadReply(f"the scorer answers the request {quote(reply['id'])}, not {body['id']!r}")
        return self._answer_of(reply, sample)

    def _answer_of(self, reply: Mapping[str, Any], sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer of the judge."""
        return score_of(reply)

    def _body(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        if self.images is None:
            refuse_unseen_picture(sample)
        fields = {"prompt": as_text(column(sample, "prompt")), "completion": column(sample, "completion")}
        if "answer" in sample:
            fields["answer"] = sample["answer"]
        fields |= {name: column(sample, name) for name in self.columns}
        body: dict[str, Any] = {"protocol": PROTOCOL, "id": secrets.token_hex(ID_BYTES), "samples": [fields]}
        if self.images is not None:
            body["images"] = [_as_base64(column(sample, self.images), self.images)]
        return body


def score_of(reply: Mapping[str, Any]) -> dict[str, Any]:
    """Return the only score in a reply, as the answer of the judge.

    Raises:
        BadReply: The scorer reports an error, or the reply does not follow the protocol.
    """
    score = item_of(reply)
    if "abstain" in score:
        return {"abstain": _beginning_of(score["abstain"])}
    if "reward" not in score or len(score) > MAX_EXTRAS:
        raise BadReply(f"a score must hold `reward` and at most {MAX_EXTRAS} numbers: {quote(score)}")
    other_values = {name: value for name, value in score.items() if not is_number(value)}
    if other_values:
        raise BadReply(f"the scorer's score holds a value that is not a finite number: {quote(other_values)}")
    long_names = [name for name in score if len(name) > MAX_NAME_CHARACTERS]
    if long_names:
        raise BadReply(f"a name in the scorer's score is too long: {quote(long_names[0])}")
    return {name: float(value) for name, value in score.items()}


def item_of(reply: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a reply holds for the only sample.

    Raises:
        BadReply: The server reports an error, or the reply does not follow the protocol.
    """
    if reply.get("protocol") != PROTOCOL:
        raise BadReply(f"the scorer speaks protocol {quote(reply.get('protocol'))}, not {PROTOCOL}")
    item = only_item(reply, "scores")
    if "error" in item:
        raise BadReply(f"the scorer failed: {_beginning_of(item['error'])}")
    return item


def _beginning_of(explanation: Any) -> str:
    return excerpt(explanation, MAX_QUOTE) if isinstance(explanation, str) else quote(explanation)


def only_item(reply: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the only object in a list of the reply.

    Raises:
        BadReply: The list does not contain exactly one object.
    """
    items = reply.get(name)
    if not isinstance(items, list) or len(items) != 1 or not isinstance(items[0], dict):
        raise BadReply(f"`{name}` of the reply must be one object for one sample, not {quote(items)}")
    return items[0]


def _as_base64(images: Any, name: str) -> list[str]:
    try:
        if not isinstance(images, list | tuple):
            raise TypeError(f"a {type(images).__name__}")
        encoded_images = []
        for image in images:
            encoded = base64.b64encode(image).decode() if isinstance(image, bytes) else image
            base64.b64decode(encoded, validate=True)
            encoded_images.append(encoded)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{name!r} holds no list of images, bytes or base64: {error}") from error
    return encoded_images
