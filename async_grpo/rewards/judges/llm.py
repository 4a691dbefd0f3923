"""`LLMJudge` lets a language model score completions. `GenerativeRM` does so with a model trained as a verifier.

    LLMJudge(url="http://127.0.0.1:8000", model="judge", rubric="Is the proof complete?")
    LLMJudge(url=..., model=..., json_schema={...}, score_key="score", scale=(1, 5), votes=5, temperature=0.7)

Any server with OpenAI's chat completions API can be used. `judge_prompts` describes how a completion is kept from
acting as instructions.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

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

ROUNDS = 2  # requests for each vote: an unreadable reply is requested once more
MAX_VOTES = 64
MAX_REASONS = 2  # number of reasons for unreadable replies that an error message lists
MAX_SHOWN_RUBRIC_CHARACTERS = 60  # characters of the rubric that an error message quotes
# Request fields that `extra_body` must not contain, because other settings of the judge determine them
RESERVED_FIELDS = ("n", "stream", "temperature", "response_format", "logprobs", "top_logprobs")

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
    """A judge whose reward is the score in a language model's reply, mapped from `scale` to [0, 1].

    Args:
        template: Template of the user message. Names in braces are columns of the sample, or `prompt`, `rubric`, `low`,
            `high` or `score_key`. The default shows the columns prompt, answer and completion.
        system: The system message. Use None for models without a system role.
        rubric: Text that replaces {rubric} in the template.
        fence: Put marker lines, which the policy cannot forge, around text that the policy wrote. Disable this only for
            a model that was trained with its own prompt format.
        pattern: A regular expression with one capture group. The score is the number in that group of the last match.
            With None, the reply must end with `Score: x`, where x is a plain decimal number (see `score_line`).
        json_schema: Schema of a JSON reply, used instead of `pattern`. It is sent as `response_format`, and the reply
            must satisfy it. The number named `score_key` is the score. Other numbers become extras named
            `judge_<name>`.
        score_key: Name of the score in a JSON reply.
        scale: (worst, best) score. A reply with a score outside this range counts as unreadable.
        votes: Number of replies to request for a sample.
        one_request: Request all replies in one request, with the parameter `n`, instead of one request per reply.
        aggregate: How the votes' scores are combined: mean, median or majority. The majority is the most frequent
            score, or the mean of the most frequent scores if several are tied.
        min_votes: Number of replies that must be readable. None requires more than half of `votes`.
        temperature: Sampling temperature. None uses the server's default.
        max_tokens: Maximum number of tokens in a reply.
        max_tokens_name: Name of the request field for `max_tokens`. Some servers expect `max_completion_tokens`.

    The answer's extras are `judge_score` (on the judge's scale), `judge_tokens` and, with prices, `judge_cost`. With
    several votes, there are also `judge_votes` (number of readable votes) and `judge_spread` (largest minus smallest
    score).

    A reply is requested once more if it was cut off, has no readable score, or has a score outside the scale. If the
    second reply is unreadable as well, the vote is lost. With fewer than `min_votes` votes the call fails. It never
    returns a score of 0 instead.
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
    _shown_name: ClassVar[str] = "{completion}"  # name that a template must have
    _template: Template = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "_template", Template(self.template or self.default_template()))
        self._check_model(*RESERVED_FIELDS, self.max_tokens_name)
        check_reading(self.pattern, self.json_schema, self.score_key)
        low, high = self.scale
        votes = self.votes
        is_default_rubric = self.rubric == type(self).rubric
        shows_rubric = is_default_rubric or "rubric" in self._template.names
        has_valid_min_votes = self.min_votes is None or 1 <= self.min_votes <= votes
        temperature = self.temperature or 0.0
        require_all(
            (
                shows_rubric,
                f"rubric={self.rubric[:MAX_SHOWN_RUBRIC_CHARACTERS]!r} would not be shown: the template has no {{rubric}}",
            ),
            (
                self._shows_sample(),
                f"the template shows no {self._shown_name}: every score would be the same",
            ),
            (-MAX_EXTRA <= low < high <= MAX_EXTRA, f"scale={self.scale} is not (worst, best)"),
            (1 <= votes <= MAX_VOTES, f"{votes=} is not in 1..{MAX_VOTES}"),
            (
                votes == 1 or self.temperature != 0,
                f"{votes=} at temperature=0 are one vote many times: use a temperature such as 0.7",
            ),
            (has_valid_min_votes, f"min_votes={self.min_votes} is not in 1..{votes=}"),
            (
                self.aggregate in AGGREGATES,
                f"aggregate={self.aggregate!r} is unknown: choose one of {', '.join(AGGREGATES)}",
            ),
            (self.max_tokens >= 1, f"max_tokens={self.max_tokens} leaves no room for a reply"),
            (0 <= temperature < math.inf, f"temperature={temperature} is negative or infinite"),
        )

    def _shows_sample(self) -> bool:
        """Return whether the template shows what is to be judged."""
        return not self._template.names.isdisjoint(WRITTEN_BY_THE_POLICY)

    def default_path(self) -> str:
        """Return the path of chat completions, without /v1 if all base URLs already end with it."""
        are_below_v1 = all(url.rstrip("/").endswith("/v1") for url in self.urls)
        return "/chat/completions" if are_below_v1 else "/v1/chat/completions"

    def default_template(self) -> str:
        """Return the template that is used if `template` is empty."""
        return QUESTION + (JSON_CLOSING if self.json_schema is not None else CLOSING)

    async def _score(self, sample: Mapping[str, Any], send: Send) -> dict[str, Any]:
        # Imported here, because registry files import this module and must load fast
        import asyncio

        votes: list[Vote] = []
        lost_requests: list[JudgeError] = []
        num_missing = self.votes
        unread_reasons: list[str] = []
        for _ in range(ROUNDS):
            count = num_missing if self.one_request else 1
            num_requests = num_missing // count
            requests = []
            for _ in range(num_requests):
                # Make a new body for each request: `_body` puts a new random key into the lines that mark the beginning and
                # the end of the completion (see `judge_prompts`)
                body = self._body(sample, count)
                requests.append(send(body, self._tokens(body, count)))
            unread_reasons = []
            for reply in await asyncio.gather(*requests, return_exceptions=True):
                if isinstance(reply, JudgeError):
                    # The replies to the other requests still count
                    lost_requests.append(reply)
                elif isinstance(reply, BaseException):
                    raise reply
                else:
                    readable_votes, reasons = await self._read(reply, count)
                    votes += readable_votes
                    unread_reasons += reasons
            num_missing = len(unread_reasons)
            if not num_missing:
                break
        num_needed = self.min_votes or self.votes // 2 + 1
        if len(votes) >= num_needed:
            return judge_replies.verdict(votes, self.aggregate, self.scale, self.votes)
        if lost_requests:
            raise lost_requests[0]
        different_reasons = list(dict.fromkeys(unread_reasons))
        reason = "; ".join(different_reasons[:MAX_REASONS])
        if self.votes > 1:
            reason = f"{len(votes)} of {self.votes} votes could be read, {num_needed} are needed: {reason}"
        raise BadReply(reason)

    def token_estimate(self, sample: Mapping[str, Any]) -> tuple[float, float]:
        """Estimate the (prompt, completion) tokens of a call, with the longest replies and no repeated requests."""
        prompt_tokens, completion_tokens = self._tokens(self._body(sample, 1), self.votes)
        num_requests = 1 if self.one_request else self.votes
        return prompt_tokens * num_requests, completion_tokens

    def _tokens(self, body: Mapping[str, Any], count: int) -> tuple[float, float]:
        """Estimate the (prompt, completion) tokens of a request for `count` replies of maximum length."""
        num_characters = sum(len(message["content"]) for message in body["messages"])
        return num_characters / CHARACTERS_PER_TOKEN, float(self.max_tokens * count)

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
        low, high = self.scale
        question = self._template.render(
            sample,
            fence=self.fence,
            rubric=self.rubric,
            low=f"{low:g}",
            high=f"{high:g}",
            score_key=self.score_key,
        )
        # The note about marker lines must come before the text in marker lines
        note = FENCE_NOTE if self.fence else ""
        if self.system is None:
            return [{"role": "user", "content": f"{note}\n\n{question}".lstrip()}]
        system = f"{self.system}\n\n{note}".strip()
        return [{"role": "system", "content": system}, {"role": "user", "content": question}]

    async def _read(self, reply: Mapping[str, Any], count: int) -> tuple[list[Vote], list[str]]:
        """Return the readable votes of a reply, and a reason for each unreadable one."""
        return await beside_the_loop(partial(self._votes_of, reply, count))

    def _votes_of(self, reply: Mapping[str, Any], count: int) -> tuple[list[Vote], list[str]]:
        """Return the result of `_read`, which calls this in a thread."""
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
    """A judge that reads a written score, like `LLMJudge`, or with `yes_no` the probability of the answer Yes.

    The probability is p(Yes) / (p(Yes) + p(No)) for the reply's first token, from the server's `top_logprobs`.
    "Generative Verifiers" (Zhang et al. 2024) uses p(Yes) instead, which is this probability times the extra
    `judge_mass`. Do not use `yes_no` with a model that reasons before it answers, because its first token is neither
    Yes nor No.

    Args:
        yes_no: Use the probability of Yes as the reward, instead of a written score.
        yes: Words that mean Yes. Case and surrounding spaces are ignored.
        no: Words that mean No.
        top_logprobs: Number of tokens whose log-probs the server returns. Other tokens count as probability 0.
        min_mass: Smallest accepted p(Yes) + p(No). With less, the model did not answer the question, and the call
            fails.

    With `yes_no`, the answer's extras are `judge_score` (the probability) and `judge_mass` (p(Yes) + p(No)).
    """

    yes_no: bool = False
    yes: tuple[str, ...] = ("yes",)
    no: tuple[str, ...] = ("no",)
    top_logprobs: int = 20
    min_mass: float = 0.5

    def __post_init__(self) -> None:
        yes = tuple(word.strip().casefold() for word in self.yes)
        no = tuple(word.strip().casefold() for word in self.no)
        object.__setattr__(self, "yes", yes)
        object.__setattr__(self, "no", no)
        if self.yes_no:
            object.__setattr__(self, "scale", (0.0, 1.0))
            object.__setattr__(self, "max_tokens", 1)
        super().__post_init__()
        are_words_valid = yes and no and all(yes + no) and not set(yes) & set(no)
        is_single_word = self.votes == 1 and self.json_schema is None
        require_all(
            (are_words_valid, f"{yes=} and {no=} must be words, and different ones"),
            (self.top_logprobs >= 2, f"top_logprobs={self.top_logprobs} cannot hold both Yes and No"),
            (0.0 <= self.min_mass <= 1.0, f"min_mass={self.min_mass} is no probability"),
            (
                not self.yes_no or is_single_word,
                f"yes_no reads a probability: it needs votes=1, not {self.votes}, and no json_schema",
            ),
        )

    def default_template(self) -> str:
        """Return the template that is used if `template` is empty."""
        if self.json_schema is not None and not self.yes_no:
            return super().default_template()
        return SHOWN + (YES_NO if self.yes_no else VERIFY)

    def _body(self, sample: Mapping[str, Any], count: int) -> dict[str, Any]:
        body = super()._body(sample, count)
        if self.yes_no:
            body |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        return body

    def _vote(self, choice: Mapping[str, Any], budget: ReadingBudget) -> Vote:
        if not self.yes_no:
            return super()._vote(choice, budget)
        # The reply is limited to one token, so it counts as cut off
        judge_replies.text_of(choice, cut_off=True)
        probability, mass = judge_replies.yes_probability(choice, self.yes, self.no)
        if mass < self.min_mass:
            limit = f"less than min_mass={self.min_mass:g}"
            raise BadReply(f"Yes and No hold {mass:.3g} of the probability, {limit}")
        return Vote(probability, {"mass": mass})
