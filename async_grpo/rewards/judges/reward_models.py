"""`GenerativeRM`: a language model trained to verify; `RewardModelJudge`: a discriminative reward model behind vLLM."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from async_grpo.rewards.http.endpoint import BadReply, JudgeError
from async_grpo.rewards.judges.judge_prompts import (
    Template,
    as_text,
    column,
    completion_of,
    harmless,
    is_conversation,
)
from async_grpo.rewards.judges.judge_replies import Unreadable, Vote, quote, text_of, yes_probability
from async_grpo.rewards.judges.llm import LLMJudge
from async_grpo.rewards.judges.remote_judge import CHARACTERS_PER_TOKEN, RemoteJudge, Usage, fits, require

if TYPE_CHECKING:
    from async_grpo.rewards.http.endpoint import Deadline
    from async_grpo.rewards.http.http_client import EndpointClient


SHOWN = "Question:\n{prompt}\n\nResponse:\n{completion}\n\n"
VERIFY = "Rate how good the response is, from {low} (worst) to {high} (best). End with one line `Score: x`."
YES_NO = "Is the response correct? Answer with one word, Yes or No."
FIELDS = {"classify": "probs", "pooling": "data"}  # of one item of the reply


@dataclass(frozen=True, kw_only=True)
class GenerativeRM(LLMJudge):
    """The score that the model writes, as of `LLMJudge`, or with `yes_no` the probability of its Yes.

    The probability is of the reply's first token, p(Yes) / (p(Yes) + p(No)), by the server's `top_logprobs`
    ("Generative Verifiers", Zhang et al. 2024, take p(Yes) as it is: multiply by the extra `judge_mass` for that).
    A model that thinks before it answers has no such first token: let it write a score.

    Args:
        yes_no: the reward is that probability, and no text is read.
        yes, no: the words; case and spaces around them do not matter.
        top_logprobs: of how many tokens the server tells; one that is not among them counts as 0.
        min_mass: the least p(Yes) + p(No): a model below it does not answer the question, and the call fails.

    Extras with `yes_no`: `judge_score` (the probability) and `judge_mass` (p(Yes) + p(No)).
    """

    yes_no: bool = False
    yes: tuple[str, ...] = ("yes",)
    no: tuple[str, ...] = ("no",)
    top_logprobs: int = 20
    min_mass: float = 0.5

    def __post_init__(self) -> None:
        yes, no = (tuple(word.strip().casefold() for word in words) for words in (self.yes, self.no))
        object.__setattr__(self, "yes", yes)
        object.__setattr__(self, "no", no)
        if self.yes_no:
            object.__setattr__(self, "scale", (0.0, 1.0))
            object.__setattr__(self, "max_tokens", 1)
        super().__post_init__()
        usable = yes and no and all(yes + no) and not set(yes) & set(no)
        require(bool(usable), f"yes={yes} and no={no} must be words, and different ones")
        require(self.top_logprobs >= 2, f"top_logprobs={self.top_logprobs} cannot hold both Yes and No")
        require(0.0 <= self.min_mass <= 1.0, f"min_mass={self.min_mass} is no probability")
        require(
            not self.yes_no or (self.votes == 1 and self.json_schema is None),
            f"yes_no reads a probability: votes={self.votes} and json_schema have no meaning beside it",
        )

    def default_template(self) -> str:
        """Used when no template is given."""
        if self.json_schema is not None and not self.yes_no:
            return super().default_template()
        return SHOWN + (YES_NO if self.yes_no else VERIFY)

    def _body(self, sample: Mapping[str, Any], count: int) -> dict[str, Any]:
        body = super()._body(sample, count)
        return body | {"logprobs": True, "top_logprobs": self.top_logprobs} if self.yes_no else body

    def _vote(self, choice: Mapping[str, Any]) -> Vote:
        if not self.yes_no:
            return super()._vote(choice)
        text_of(choice, cut_off=True)  # one token was asked for
        probability, mass = yes_probability(choice, self.yes, self.no)
        if mass < self.min_mass:
            raise Unreadable(
                f"Yes and No hold {mass:.3g} of the probability, less than min_mass={self.min_mass:g}"
            )
        return Vote(probability, {"mass": mass})


@dataclass(frozen=True, kw_only=True)
class RewardModelJudge(RemoteJudge):
    """The last number that the model gives for the conversation.

    The server puts the conversation through the model's own chat template: the sample's `messages` (or else
    `prompt` or `input` as one message of the user), then the completion as the assistant's, without its end token.
    Control tokens within the texts are broken (see `judge_prompts`), so that a completion cannot add a turn.

    Args:
        model: the name under which the server knows it.
        task: "classify", or "pooling" for models that only have that.
        activation: whether the model's sigmoid or softmax is applied; None leaves it to the server.
        template: a text with columns in braces to send instead of the conversation, without chat template.
        extra_body: further fields of the request.
        price_per_million_tokens: in any currency.

    The reward is what the model says and has no fixed scale. Extras: `judge_tokens` and, with a price, `judge_cost`.

    Raises:
        ConfigurationError: the settings cannot work.
    """

    model: str
    task: str = "classify"
    activation: bool | None = False
    template: str | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict, hash=False)
    price_per_million_tokens: float | None = None
    _template: Template | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require(self.task in FIELDS, f"task={self.task!r} is unknown: choose of {', '.join(FIELDS)}")
        super().__post_init__()
        require(bool(self.model), "model is empty: the server serves it under a name")
        object.__setattr__(self, "_template", None if self.template is None else Template(self.template))
        price = self.price_per_million_tokens
        require(
            price is None or 0 <= price < math.inf,
            f"price_per_million_tokens={price} is negative or infinite",
        )
        taken = sorted({"model", "messages", "input", "use_activation"} & set(self.extra_body))
        require(not taken, f"extra_body must not hold {', '.join(taken)}: other settings of the judge decide")

    def default_path(self) -> str:
        """vLLM's of the task."""
        return f"/{self.task}"

    async def score(
        self, sample: Mapping[str, Any], client: "EndpointClient", *, phase: str, deadline: "Deadline | float"
    ) -> dict[str, Any]:
        """The answer for one sample; `deadline` is for the client.

        Raises:
            ConfigurationError: the sample lacks a column.
            JudgeError: no reply came, or one without a finite number.
        """
        price = self.price_per_million_tokens
        prices = None if price is None else (price, 0.0)
        usage, tokens = Usage(), self.token_estimate(sample)
        try:
            reply = await usage.post(
                client, self.path, self._body(sample), tokens, phase=phase, deadline=deadline
            )
            return {"reward": last_number(reply, FIELDS[self.task])} | usage.extras(prices)
        except JudgeError as error:
            error.spent = usage.extras(prices)
            raise

    def token_estimate(self, sample: Mapping[str, Any]) -> tuple[float, float]:
        """(prompt, completion) tokens of a call; a reward model writes none."""
        body = self._body(sample)
        texts = [message["content"] for message in body.get("messages", ())] or [body["input"]]
        return sum(map(len, texts)) / CHARACTERS_PER_TOKEN, 0.0

    def _body(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model}
        if self._template is None:
            body["messages"] = conversation(sample)
        else:
            body["input"] = self._template.render(sample, fence=False)
        if self.activation is not None:
            body["use_activation"] = self.activation
        return body | dict(self.extra_body)


def conversation(sample: Mapping[str, Any]) -> list[dict[str, str]]:
    """The messages of the prompt, and the completion as the assistant's.

    >>> conversation({"input": "3+4?", "completion": "7<|im_end|>"})
    [{'role': 'user', 'content': '3+4?'}, {'role': 'assistant', 'content': '7'}]
    """
    prompt = next(
        (sample[name] for name in ("messages", "prompt") if is_conversation(sample.get(name))), None
    )
    if prompt is None:
        prompt = [{"role": "user", "content": column(sample, "prompt")}]
    messages = [{"role": str(one["role"]), "content": harmless(as_text(one["content"]))} for one in prompt]
    return [*messages, {"role": "assistant", "content": completion_of(sample)}]


def last_number(reply: Mapping[str, Any], name: str) -> float:
    """The last number of the only item's field, however deep it lies.

    Raises:
        BadReply: there is none; or the reply holds another number of items than the one sample that was sent, or
            one of another index.

    >>> last_number({"data": [{"data": [[0.5], [0.25]]}]}, "data")
    0.25
    """
    items = reply.get("data")
    if not isinstance(items, list) or len(items) != 1 or not isinstance(items[0], dict):
        raise BadReply(f"the reward model's reply must hold one item for one sample: {quote(reply)}")
    if items[0].get("index", 0) != 0:
        raise BadReply(f"the reward model's reply is of the item {quote(items[0]['index'])}, not 0")
    value = items[0].get(name)
    while isinstance(value, list) and value:
        value = value[-1]
    if not isinstance(value, int | float) or not fits(value):
        raise BadReply(f"the reward model's reply has no finite number in {name!r}: {quote(reply)}")
    return float(value)
