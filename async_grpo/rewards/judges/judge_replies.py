"""From a judge's replies to one score. They are data like the completion: parsed, checked, and never run."""

import json
import math
import re
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from async_grpo.errors import ConfigurationError
from async_grpo.options.fields import is_number
from async_grpo.rewards.http.endpoint import BadReply, require_all

MAX_QUOTE = 200  # characters of a reply in the reason of a failure
# What servers call a whole reply. Others are cut off ("length"), censored ("content_filter") or no answer
# ("tool_calls"): "Score: 1" may be all that is left of "Score: 10".
FINISHED = frozenset({"stop", "eos", "eos_token", "stop_sequence", "end_turn"})
# A thought's beginning may stand in the chat template; and the verdict may stand in a block of code
_THOUGHT = re.compile(r"\A\s*(?:<think>)?.*</think>", re.DOTALL)
_CODE_BLOCK = re.compile(r"```(?:json)?(.*)```", re.DOTALL)


class Vote(NamedTuple):
    """One verdict: the score on the judge's own scale, and further numbers of the reply."""

    score: float
    extra: Mapping[str, float] = {}


def choices_of(reply: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """The choices of a chat completion. Raises BadReply for anything that is no list of `count` of them."""
    choices = reply.get("choices")
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise BadReply(f"the judge's reply is no chat completion: {quote(reply)}")
    if len(choices) != count:
        raise BadReply(f"the judge answered {len(choices)} choices, {count} were asked for")
    return choices


def text_of(choice: Mapping[str, Any], *, cut_off: bool = False) -> str:
    """The text of a finished reply, or with `cut_off` of one that was cut off at max_tokens.

    Raises BadReply if there is none, or if it is not whole by its `finish_reason` (null says that it goes on).
    """
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else None
    reason = choice.get("finish_reason", "stop")
    if reason == "length" and not cut_off:
        raise BadReply(f"the reply was cut off at max_tokens: {quote(text)}")
    if reason not in FINISHED | {"length"}:
        raise BadReply(f"the reply is not whole, its finish_reason is {quote(reason)}: {quote(text)}")
    if not isinstance(text, str):
        raise BadReply(f"the reply holds no text: {quote(choice)}")
    return text


def by_pattern(text: str, pattern: str) -> Vote:
    """The number in the group of the pattern's last match. Raises BadReply if there is none."""
    try:
        return Vote(float([match[1] for match in re.finditer(pattern, text)][-1]))
    except (IndexError, TypeError, ValueError):  # no match, one without the group, or no number in it
        raise BadReply(f"nothing in the reply matches {pattern!r}: {quote(text)}") from None


def by_schema(text: str, schema: Mapping[str, Any], score_key: str) -> Vote:
    """The score of a JSON reply that satisfies the schema; its other numbers are extras.

    A thought before it (`<think>...</think>`) is left out, and so is text around a single JSON object.
    """
    import jsonschema

    try:
        verdict = _json_of(text)
        jsonschema.Draft202012Validator(dict(schema)).validate(verdict)
    except jsonschema.ValidationError as error:
        why = error.message[:MAX_QUOTE]
        raise BadReply(f"the reply breaks the schema ({why}): {quote(text)}") from error
    except (ValueError, RecursionError) as error:
        raise BadReply(f"the reply is no JSON ({type(error).__name__}): {quote(text)}") from error
    found = verdict if isinstance(verdict, dict) else {}
    numbers = {str(name): float(value) for name, value in found.items() if is_number(value)}
    if score_key not in numbers:
        raise BadReply(f"the reply has no number {score_key!r}: {quote(text)}")
    return Vote(numbers.pop(score_key), numbers)


def check_reading(pattern: str, schema: Mapping[str, Any] | None, score_key: str) -> None:
    """Raise ConfigurationError for a pattern without its one group, or a schema without the score."""
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise ConfigurationError(f"pattern={pattern!r} cannot be read: {error}") from error
    require_all((groups == 1, f"{pattern=} has {groups} groups: the score must be the only one"))
    if schema is None:
        return
    import jsonschema

    try:
        jsonschema.Draft202012Validator.check_schema(dict(schema))
    except jsonschema.SchemaError as error:
        raise ConfigurationError(f"json_schema is no JSON schema: {error.message}") from error
    required, known = schema.get("required", ()), schema.get("properties", {})
    wanted = f"json_schema must have the property {score_key=}, and require it"
    require_all((score_key in known and score_key in required, f"{wanted}; it has {sorted(known)}"))


def _json_of(text: str) -> Any:
    """The JSON value that a reply is, or the only JSON object in it. Raises ValueError if it is not clear."""
    text = _THOUGHT.sub("", text).strip()
    if block := _CODE_BLOCK.fullmatch(text):
        text = block[1].strip()
    if text.startswith("<think>"):
        raise ValueError("the thought never ends")
    try:
        return json.loads(text)
    except ValueError:  # the completion may have been quoted: of two objects, which is the verdict?
        return json.loads(text[text.find("{") : text.rfind("}") + 1])


def yes_probability(
    choice: Mapping[str, Any], yes: Collection[str], no: Collection[str]
) -> tuple[float, float]:
    """(p_yes / (p_yes + p_no), p_yes + p_no) of the reply's first token, by its top log-probs.

    Tokens that differ in case or in spaces around them count together; what is not among the top counts as 0.
    """
    try:
        shown = choice["logprobs"]["content"][0]["top_logprobs"]
        top = [(str(one["token"]), math.exp(one["logprob"])) for one in shown]
    except (KeyError, IndexError, TypeError, OverflowError) as error:
        raise BadReply(f"the reply holds no top_logprobs: {quote(choice)}") from error
    p_yes, p_no = (sum(p for token, p in top if token.strip().casefold() in words) for words in (yes, no))
    mass = p_yes + p_no
    if not 0.0 < mass <= 1.001:
        likeliest = ", ".join(repr(token) for token, _ in top[:5])[:MAX_QUOTE]
        raise BadReply(f"the tokens {[*yes, *no]} hold {mass:g} of the probability; the top is {likeliest}")
    return p_yes / mass, mass


def quote(value: Any) -> str:
    """The beginning of a reply, for a reason."""
    shown = value if isinstance(value, str) else json.dumps(value, default=str)
    return repr(shown) if len(shown) <= MAX_QUOTE else repr(shown[:MAX_QUOTE]) + " ..."


AGGREGATES: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "majority": lambda scores: statistics.fmean(statistics.multimode(scores)),
}


def verdict(
    votes: Sequence[Vote], aggregate: str, scale: tuple[float, float], asked: int
) -> dict[str, float]:
    """The answer of at least one vote: `reward` in [0, 1], and the judge's numbers."""
    scores = [vote.score for vote in votes]
    score = AGGREGATES[aggregate](scores)
    low, high = scale
    answer = {"reward": (score - low) / (high - low), "judge_score": score}
    if asked > 1:
        answer |= {"judge_votes": len(votes), "judge_spread": max(scores) - min(scores)}
    for name in sorted(set().union(*(vote.extra for vote in votes))):
        values = [vote.extra[name] for vote in votes if name in vote.extra]
        answer.setdefault(f"judge_{name}", statistics.fmean(values))
    return answer
