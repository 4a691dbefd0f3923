"""Parse and check a judge's replies, and combine them into one score. Nothing in a reply is executed.

Replies are parsed in threads, which share Python's global lock with the judges' event loop. To keep the loop
responsive, the length of a reply is limited, parsing takes linear time, and the user's patterns and schemas have a time
budget (see `reading`).
"""

import json
import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from async_grpo.metrics.free_numbers import MAX_EXTRA
from async_grpo.options.fields import is_number
from async_grpo.options.redaction import redacted
from async_grpo.rewards.adapter.result import excerpt, finite, unique_names
from async_grpo.rewards.http.endpoint import BadReply
from async_grpo.rewards.judges.judge_schemas import MATCH_S, breach_of
from async_grpo.rewards.judges.reading import ReadingBudget
from async_grpo.rewards.judges.score_line import score_in

MAX_QUOTE = 200  # characters of a reply that an error message quotes
# Number of characters of a reply's JSON that are searched for secrets before the reply is quoted. This exceeds
# MAX_QUOTE, because a secret that is cut in half would not be recognized
MAX_WRITTEN_CHARACTERS = 4000
MAX_REPLY_CHARACTERS = 400_000  # length limit of one reply with its reasoning, about 100,000 tokens
MAX_CHOICES_CHARACTERS = 4 * MAX_REPLY_CHARACTERS  # length limit of all choices in a reply together
MAX_VERDICT_CHARACTERS = 32_768  # length limit of a JSON verdict, without the reasoning before it
MAX_EXTRAS = 64  # numbers in one verdict, including the score; each becomes a column of the metrics
MAX_NAME_CHARACTERS = 100  # length limit of a number's name, in characters
MAX_TOP_LOGPROBS = 1000  # limit of the entries for one token; servers usually return at most 20
MAX_MASS = 1.001  # largest accepted sum of probabilities, above 1 because of rounding errors
NUM_SHOWN_TOKENS = 5  # number of likeliest tokens that an error message lists
# Finish reasons of complete replies. Other replies are truncated ("length"), censored ("content_filter") or no answer
# ("tool_calls"). A truncated reply may end with "Score: 1" where the judge meant "Score: 10"
FINISHED = frozenset({"stop", "eos", "eos_token", "stop_sequence", "end_turn"})


class Vote(NamedTuple):
    """One verdict of a judge: the score on the judge's own scale, and further numbers in the reply."""

    score: float
    extra: Mapping[str, float] = {}


def reply_choices(reply: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Return the choices of a chat completion.

    Raises:
        BadReply: The reply does not contain exactly `count` choices, or the choices are too long.
    """
    choices = reply.get("choices")
    if not isinstance(choices, list):
        raise BadReply(f"the judge's reply is no chat completion: {quote(reply)}")
    if len(choices) != count:
        raise BadReply(f"the judge answered {len(choices)} choices, {count} were asked for")
    if not all(isinstance(choice, dict) for choice in choices):
        raise BadReply(f"the judge's reply is no chat completion: {quote(reply)}")
    num_characters = sum(_num_characters(choice) for choice in choices)
    if num_characters > MAX_CHOICES_CHARACTERS:
        limit = f"{MAX_CHOICES_CHARACTERS} are read at most"
        raise BadReply(f"the choices are too long together: {num_characters} characters, {limit}")
    return choices


def _num_characters(choice: Mapping[str, Any]) -> int:
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else None
    return len(text) if isinstance(text, str) else 0


def text_of(choice: Mapping[str, Any], *, cut_off: bool = False) -> str:
    """Return the text of a complete reply.

    Args:
        choice: A choice of a chat completion.
        cut_off: Accept a reply that was cut off at max_tokens.

    Raises:
        BadReply: There is no text, the text is too long, or the `finish_reason` says that the reply is not complete. A
            `finish_reason` of null means that the reply continues.
    """
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else None
    reason = choice.get("finish_reason", "stop")
    if reason == "length" and not cut_off:
        raise BadReply(f"the reply was cut off at max_tokens: {quote(text)}")
    if not isinstance(reason, str) or reason not in FINISHED | {"length"}:
        raise BadReply(f"the reply is not whole, its finish_reason is {quote(reason)}: {quote(text)}")
    if not isinstance(text, str):
        raise BadReply(f"the reply holds no text: {quote(choice)}")
    if len(text) > MAX_REPLY_CHARACTERS:
        raise BadReply(
            f"the reply is too long: {len(text)} characters, {MAX_REPLY_CHARACTERS} are read at most"
        )
    return text


def by_score_line(text: str, best: float) -> Vote:
    """Return the score of a reply that ends with `Score: x` (see `score_line`). Reasoning before `</think>` is ignored.

    Raises:
        BadReply: There is no score, or it is not a plain decimal number.
    """
    try:
        return Vote(score_in(_behind_thought(text), best))
    except ValueError as error:
        raise BadReply(f"the score cannot be read ({error}): {quote_end(text)}") from None


def by_pattern(text: str, pattern: str, budget: ReadingBudget | None = None) -> Vote:
    """Return the score: the number in the capture group of the pattern's last match.

    Args:
        text: The reply.
        pattern: A regular expression with one capture group.
        budget: Time budget of the reply that contains the text. None starts a new budget.

    Raises:
        BadReply: There is no such number, or matching takes too long.
    """
    # Unlike `re`, `regex` supports a time limit
    import regex

    last = None
    budget = budget or ReadingBudget()
    try:
        for match in regex.finditer(pattern, text, timeout=min(MATCH_S, budget.left_s())):
            budget.left_s()
            last = match
        # `float` ignores underscores: 1_0 would become 10
        if last is None or "_" in last[1]:
            raise ValueError("no number")
        return Vote(finite(last[1]))
    except TimeoutError:
        raise BadReply(f"{pattern!r} takes more than {MATCH_S:g} s on the reply: {quote(text)}") from None
    except (TypeError, ValueError):
        # There is no match, the group is not part of the match, or the group is not a number
        raise BadReply(f"nothing in the reply matches {pattern!r}: {quote(text)}") from None


def by_schema(
    text: str, schema: Mapping[str, Any], score_key: str, budget: ReadingBudget | None = None
) -> Vote:
    """Return the score of a JSON reply that satisfies the schema, with its other numbers as extras.

    Reasoning before `</think>` is ignored, and so is text around a single JSON object.

    Args:
        text: The reply.
        schema: The JSON schema.
        score_key: Name of the score.
        budget: Time budget of the reply that contains the text. None starts a new budget.

    Raises:
        BadReply: The text contains no verdict that satisfies the schema, or checking it takes too long.
    """
    try:
        verdict = _json_of(text)
        breach = breach_of(verdict, schema, budget or ReadingBudget())
    except TimeoutError as error:
        raise BadReply(f"the schema takes too long on the reply: {quote(text)}") from error
    except (ValueError, RecursionError) as error:
        raise BadReply(f"the reply is no JSON ({type(error).__name__}): {quote(text)}") from error
    if breach is not None:
        raise BadReply(f"the reply breaks the schema ({excerpt(breach, MAX_QUOTE)}): {quote(text)}")
    fields = verdict if isinstance(verdict, dict) else {}
    numbers = {name: float(value) for name, value in fields.items() if is_number(value)}
    if score_key not in numbers:
        raise BadReply(f"the reply has no number {score_key!r}: {quote(text)}")
    if len(numbers) > MAX_EXTRAS or any(len(name) > MAX_NAME_CHARACTERS for name in numbers):
        limits = f"{MAX_EXTRAS} numbers, with names of {MAX_NAME_CHARACTERS} characters"
        raise BadReply(f"the reply holds more than {limits}: {quote(text)}")
    if any(abs(number) > MAX_EXTRA for number in numbers.values()):
        raise BadReply(f"the reply holds a number beyond {MAX_EXTRA:g}: {quote(text)}")
    return Vote(numbers.pop(score_key), numbers)


def _behind_thought(text: str) -> str:
    """Return the text after the last `</think>`. The opening `<think>` may be part of the chat template.

    Raises:
        ValueError: The reply contains `<think>` without `</think>`.
    """
    text = text.rpartition("</think>")[2].strip()
    if text.startswith("<think>"):
        raise ValueError("the thought never ends")
    return text


def _json_of(text: str) -> Any:
    """Parse a reply as JSON. If the whole reply is not JSON, parse the only JSON object in it.

    Raises:
        ValueError: There is no JSON value, it is too long, or several objects make the verdict ambiguous.
    """
    text = _behind_thought(text)
    is_code_block = text.startswith("```") and text.endswith("```") and len(text) >= 2 * len("```")
    if is_code_block:
        text = text.removeprefix("```").removesuffix("```").removeprefix("json").strip()
    if len(text) > MAX_VERDICT_CHARACTERS:
        raise ValueError(f"the verdict has more than {MAX_VERDICT_CHARACTERS} characters")
    try:
        return _strict_json(text)
    except json.JSONDecodeError:
        # Parsing fails if there are two objects. This is intended, because one of them may be a quote of the completion
        return _strict_json(text[text.find("{") : text.rfind("}") + 1])


def _strict_json(text: str) -> Any:
    return json.loads(text, parse_float=finite, object_pairs_hook=unique_names)


def yes_probability(
    choice: Mapping[str, Any], yes: Collection[str], no: Collection[str]
) -> tuple[float, float]:
    """Return p_yes / (p_yes + p_no) and p_yes + p_no for the reply's first token, from its top log-probs.

    Tokens that differ only in case or surrounding spaces are added up. A token without a log-prob has probability 0.

    Raises:
        BadReply: The reply has no usable log-probs.
    """
    try:
        entries = choice["logprobs"]["content"][0]["top_logprobs"]
        if len(entries) > MAX_TOP_LOGPROBS:
            raise BadReply(f"the reply holds {len(entries)} top_logprobs: {quote(choice)}")
        top = [(_token_text(entry["token"]), math.exp(entry["logprob"])) for entry in entries]
    except (KeyError, IndexError, TypeError, OverflowError) as error:
        raise BadReply(f"the reply holds no top_logprobs: {quote(choice)}") from error
    p_yes = 0.0
    p_no = 0.0
    for token, probability in top:
        word = token.strip().casefold()
        if word in yes:
            p_yes += probability
        if word in no:
            p_no += probability
    mass = p_yes + p_no
    if not 0.0 < mass <= MAX_MASS:
        likeliest = ", ".join(repr(token[:MAX_QUOTE]) for token, _ in top[:NUM_SHOWN_TOKENS])[:MAX_QUOTE]
        raise BadReply(f"the tokens {[*yes, *no]} hold {mass:g} of the probability; the top is {likeliest}")
    return p_yes / mass, mass


def _token_text(token: Any) -> str:
    if not isinstance(token, str):
        raise TypeError("a token is no text")
    return token


def quote(value: Any) -> str:
    """Return the beginning of a reply for an error message, without secrets."""
    text = value if isinstance(value, str) else _beginning_of_json(value)
    # A server may repeat an API key in its reply
    text = redacted(text)
    return repr(text) if len(text) <= MAX_QUOTE else repr(text[:MAX_QUOTE]) + " ..."


def quote_end(text: str) -> str:
    """Return the end of a reply, where the score should be, for an error message."""
    text = redacted(text)
    return repr(text) if len(text) <= MAX_QUOTE else "... " + repr(text[-MAX_QUOTE:])


def _beginning_of_json(value: Any) -> str:
    """Return a value as JSON, cut off after about `MAX_WRITTEN_CHARACTERS`."""
    beginning = ""
    for piece in json.JSONEncoder(default=str).iterencode(value):
        beginning += piece
        if len(beginning) > MAX_WRITTEN_CHARACTERS:
            break
    return beginning


AGGREGATES: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "majority": lambda scores: statistics.fmean(statistics.multimode(scores)),
}


def verdict(
    votes: Sequence[Vote], aggregate: str, scale: tuple[float, float], num_requested: int
) -> dict[str, float]:
    """Combine votes into an answer: `reward` in [0, 1], and the judge's numbers with names `judge_...`.

    Args:
        votes: The votes that could be read, at least one.
        aggregate: A name in AGGREGATES.
        scale: (worst, best) score.
        num_requested: Number of votes that were requested.
    """
    scores = [vote.score for vote in votes]
    score = AGGREGATES[aggregate](scores)
    low, high = scale
    answer = {"reward": (score - low) / (high - low), "judge_score": score}
    if num_requested > 1:
        answer |= {"judge_votes": len(votes), "judge_spread": max(scores) - min(scores)}
    names: set[str] = set()
    for vote in votes:
        names.update(vote.extra)
    for name in sorted(names):
        values = [vote.extra[name] for vote in votes if name in vote.extra]
        answer.setdefault(f"judge_{name}", statistics.fmean(values))
    return answer
