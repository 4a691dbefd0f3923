"""`LLMJudge`: a language model reads the completion and writes a score; `GenerativeRM`: one that was trained to verify.

    LLMJudge(url="http://127.0.0.1:8000", model="judge", rubric="Is the proof complete?")
    LLMJudge(url=..., model=..., json_schema={...}, score_key="score", scale=(1, 5), votes=5, temperature=0.7)

Any server that speaks OpenAI's chat completions will do. The completion is data: see `judge_prompts` for what keeps it
from posing as instructions.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from async_grpo.metrics.free_numbers import MAX_EXTRA
from async_grpo.rewards.http.endpoint import (
    CHARACTERS_PER_TOKEN,
    BadReply,
    JudgeError,
    require_all,
)
from async_grpo.rewards.judges import judge_replies
from async_grpo.rewards.judges.judge_prompts import FENCE_NOTE, WRITTEN_BY_THE_POLICY, Template
from async_grpo.rewards.judges.judge_replies import AGGREGATES, Vote
from async_grpo.rewards.judges.judge_schemas import check_reading
from async_grpo.rewards.judges.reading import ReadingBudget, beside_the_loop
from async_grpo.rewards.judges.remote_judge import ModelJudge, Send

ROUNDS = 2  # a reply that cannot be read is asked for once more
MAX_VOTES = 64
OURS = ("n", "stream", "temperature", "response_format", "logprobs", "top_logprobs")

SYSTEM = "You are a careful, impartial judge of answers."
QUESTION = "Question:\n{prompt}\n\nReference answer:\n{answer}\n\nRubric:\n{rubric}\n\nResponse to judge:\n{completion}\n\n"
CLOSING = "Explain your judgement briefly, then end with one line `Score: x`, x from {low} (worst) to {high} (best)."
JSON_CLOSING = (
    "Reply with a JSON object that satisfies the schema; {score_key} is from {low} (worst) to {high} (best)."
)
SHOWN = "Question:\n{prompt}\n\nResponse:\n{completion}\n\n"
VERIFY = "Rate how good the response is, from {low} (worst) to {high} (best). End with one line `Score: x`."
YES_NO = "Is the response correct? Answer with one word, Yes or No."
RUBRIC = "The response is correct: it agrees with the reference answer, and its reasoning supports it."


@dataclass(frozen=True, kw_only=True)
class LLMJudge(ModelJudge):
    """A score from the reply of a language model, mapped from `scale` to [0, 1].

    Args:
        template: of the user's message: any column of the sample in braces, `prompt`, `rubric`, `low`, `high`, and
            `score_key`; the default shows the columns prompt, answer and completion.
        system: the system message; None for models that have no such role.
        rubric: put where the template says {rubric}.
        fence: put what the policy wrote between lines that it cannot forge. Switch it off only for a model that
            was trained on a prompt of its own.
        pattern: None: the reply ends with `Score: x`, and the score is x, the whole plain decimal number, or cannot be
            read: see `score_line`. Else a regular expression with one group: the score is the number in the group of its
            last match in the reply.
        json_schema: instead of the pattern: sent as `response_format`, and the reply must satisfy it; its number
            `score_key` is the score, its other numbers are extras `judge_<name>`.
        scale: (worst, best) score. A score outside cannot be read.
        votes: replies asked for, in as many requests or, with `one_request`, by the parameter `n` of one.
        aggregate: of the votes' scores: mean, median or majority (most votes; several such: their mean).
        min_votes: how many must be readable; more than half of them if not given.
        temperature, max_tokens: of the reply; a temperature of None leaves it to the server.
        max_tokens_name: some servers want `max_completion_tokens`.

    Extras: `judge_score` (on its scale), `judge_tokens` and, with prices, `judge_cost`; with several votes
    `judge_votes` (readable ones) and `judge_spread` (largest - smallest score).

    A reply that was cut off, holds no score that can be read or lies outside the scale is asked for once more; after that
    the vote is lost, and with fewer than `min_votes` the call has failed. It is never a score of 0.
    """

    template: str = ""
    system: str | None = SYSTEM
    rubric: str = RUBRIC
    fence: bool = True
    pattern: str | None = None
    json_schema: Mapping[str, Any] | None = field(default=None, hash=False)
    score_key: str = "score"
    scale: tuple[float, float] = (0.0, 10.0)
    votes: int = 1
    one_request: bool = False
    aggregate: str = "mean"
    min_votes: int | None = None
    temperature: float | None = 0.0
    max_tokens: int = 512
    max_tokens_name: str = "max_tokens"
    _template: Template = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "_template", Template(self.template or self.default_template()))
        self._check_model(*OURS, self.max_tokens_name)
        shown = not self._template.names.isdisjoint(WRITTEN_BY_THE_POLICY)
        (low, high), votes = self.scale, self.votes
        visible = self.rubric == RUBRIC or "rubric" in self._template.names
        warmth, least, known = self.temperature or 0.0, self.min_votes, ", ".join(AGGREGATES)
        same = "are one vote many times: use a temperature such as 0.7"
        check_reading(self.pattern, self.json_schema, self.score_key)
        require_all(
            (visible, f"rubric={self.rubric[:60]!r} would not be shown: the template has no {{rubric}}"),
            (shown, "the template shows no {completion}: every score would be the same"),
            (-MAX_EXTRA <= low < high <= MAX_EXTRA, f"scale={self.scale} is not (worst, best)"),
            (1 <= votes <= MAX_VOTES, f"{votes=} is not in 1..{MAX_VOTES}"),
            (votes == 1 or self.temperature != 0, f"{votes=} at temperature=0 {same}"),
            (least is None or 1 <= least <= votes, f"min_votes={least} is not in 1..{votes=}"),
            (self.aggregate in AGGREGATES, f"aggregate={self.aggregate!r} is unknown: choose of {known}"),
            (self.max_tokens >= 1, f"max_tokens={self.max_tokens} leaves no room for a reply"),
            (0 <= warmth < math.inf, f"temperature={warmth} is negative or infinite"),
        )

    def default_path(self) -> str:
        """OpenAI's, for base URLs with and without their /v1."""
        below_v1 = all(url.rstrip("/").endswith("/v1") for url in self.urls)
        return "/chat/completions" if below_v1 else "/v1/chat/completions"

    def default_template(self) -> str:
        """Used when no template is given."""
        return QUESTION + (JSON_CLOSING if self.json_schema is not None else CLOSING)

    async def _score(self, sample: Mapping[str, Any], send: Send) -> dict[str, Any]:
        import asyncio  # here, because registry files import this module and must stay cheap

        votes, lost, unread = list[Vote](), list[JudgeError](), [""] * self.votes
        for _ in range(ROUNDS):
            count = len(unread) if self.one_request else 1
            bodies = [self._body(sample, count) for _ in range(0, len(unread), count)]  # each with a new key
            asked = (send(body, self._tokens(body, count)) for body in bodies)
            unread = []
            for reply in await asyncio.gather(*asked, return_exceptions=True):
                if isinstance(reply, JudgeError):
                    lost.append(reply)  # the others are no worse for it
                elif isinstance(reply, BaseException):
                    raise reply
                else:
                    await self._read(reply, count, votes, unread)
            if not unread:
                break
        needed = self.min_votes or self.votes // 2 + 1
        if len(votes) >= needed:
            return judge_replies.verdict(votes, self.aggregate, self.scale, self.votes)
        reasons = "; ".join(list(dict.fromkeys(unread))[:2])
        if self.votes > 1:
            reasons = f"{len(votes)} of {self.votes} votes could be read, {needed} are needed: {reasons}"
        raise lost[0] if lost else BadReply(reasons)

    def token_estimate(self, sample: Mapping[str, Any]) -> tuple[float, float]:
        """(prompt, completion) tokens that a call takes if every reply is as long as it may be, and can be read."""
        prompt, completion = self._tokens(self._body(sample, 1), self.votes)
        return prompt * (1 if self.one_request else self.votes), completion

    def _tokens(self, body: Mapping[str, Any], count: int) -> tuple[float, float]:
        characters = sum(len(message["content"]) for message in body["messages"])
        return characters / CHARACTERS_PER_TOKEN, float(self.max_tokens * count)

    def _body(self, sample: Mapping[str, Any], count: int) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "messages": self._messages(sample)}
        body[self.max_tokens_name] = self.max_tokens
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if count > 1:
            body["n"] = count
        if self.json_schema is not None:
            schema = {"name": "verdict", "schema": dict(self.json_schema), "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return body | dict(self.extra_body)

    def _messages(self, sample: Mapping[str, Any]) -> list[dict[str, str]]:
        low, high = (f"{bound:g}" for bound in self.scale)
        given = {"rubric": self.rubric, "low": low, "high": high, "score_key": self.score_key}
        question = self._template.render(sample, fence=self.fence, **given)
        note = FENCE_NOTE if self.fence else ""
        if self.system is None:  # the note goes first in any case: what it speaks of comes after it
            return [{"role": "user", "content": f"{note}\n\n{question}".lstrip()}]
        system = f"{self.system}\n\n{note}".strip()
        return [{"role": "system", "content": system}, {"role": "user", "content": question}]

    async def _read(self, reply: Mapping[str, Any], count: int, votes: list[Vote], unread: list[str]) -> None:
        """Sort the votes of a reply into those that can be read and the reasons of the others."""
        readable_votes, reasons = await beside_the_loop(partial(self._votes_of, reply, count))
        votes += readable_votes
        unread += reasons

    def _votes_of(self, reply: Mapping[str, Any], count: int) -> tuple[list[Vote], list[str]]:
        """Return the votes of a reply that can be read, and the reasons of the others. It runs in a thread."""
        budget = ReadingBudget()
        votes: list[Vote] = []
        reasons: list[str] = []
        try:
            choices = judge_replies.reply_choices(reply, count)
        except BadReply as error:
            return votes, [str(error)] * count
        for choice in choices:
            try:
                budget.left_s()
                votes.append(self._vote(choice, budget))
            except (BadReply, TimeoutError) as error:
                reasons.append(str(error))
        return votes, reasons

    def _vote(self, choice: Mapping[str, Any], budget: ReadingBudget) -> Vote:
        text = judge_replies.text_of(choice)
        low, high = self.scale
        if self.json_schema is not None:
            vote = judge_replies.by_schema(text, self.json_schema, self.score_key, budget)
        elif self.pattern is not None:
            vote = judge_replies.by_pattern(text, self.pattern, budget)
        else:
            vote = judge_replies.by_score_line(text, high)
        if not low <= vote.score <= high:
            raise BadReply(f"the score {vote.score:g} is outside of {low:g} to {high:g}")
        return vote


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
        settled = {"yes": yes, "no": no} | ({"scale": (0.0, 1.0), "max_tokens": 1} if self.yes_no else {})
        for name, value in settled.items():
            object.__setattr__(self, name, value)
        super().__post_init__()
        usable = yes and no and all(yes + no) and not set(yes) & set(no)
        plain = not self.yes_no or (self.votes == 1 and self.json_schema is None)
        beside = f"votes={self.votes} and json_schema have no meaning beside it"
        require_all(
            (usable, f"{yes=} and {no=} must be words, and different ones"),
            (self.top_logprobs >= 2, f"top_logprobs={self.top_logprobs} cannot hold both Yes and No"),
            (0.0 <= self.min_mass <= 1.0, f"min_mass={self.min_mass} is no probability"),
            (plain, f"yes_no reads a probability: {beside}"),
        )

    def default_template(self) -> str:
        """Used when no template is given."""
        if self.json_schema is not None and not self.yes_no:
            return super().default_template()
        return SHOWN + (YES_NO if self.yes_no else VERIFY)

    def _body(self, sample: Mapping[str, Any], count: int) -> dict[str, Any]:
        body = super()._body(sample, count)
        return body | {"logprobs": True, "top_logprobs": self.top_logprobs} if self.yes_no else body

    def _vote(self, choice: Mapping[str, Any], budget: ReadingBudget) -> Vote:
        if not self.yes_no:
            return super()._vote(choice, budget)
        judge_replies.text_of(choice, cut_off=True)  # one token was asked for
        probability, mass = judge_replies.yes_probability(choice, self.yes, self.no)
        if mass < self.min_mass:
            least = f"less than min_mass={self.min_mass:g}"
            raise BadReply(f"Yes and No hold {mass:.3g} of the probability, {least}")
        return Vote(probability, {"mass": mass})
