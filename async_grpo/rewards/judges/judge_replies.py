"""Reading a judge's reply. It is data like the completion: parsed, checked, and never run."""

import json
import math
import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.http.endpoint import BadReply
from async_grpo.rewards.judges.remote_judge import require
from async_grpo.rewards.judges.usage import fits
from async_grpo.rewards.judges.votes import Vote

MAX_QUOTE = 200  # characters of a reply in the reason of a failure


class Unreadable(ValueError):
    """A reply without a verdict: worth one more try, then a failure."""


def choices_of(reply: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """The choices of a chat completion. Raises BadReply for anything that is no list of `count` of them."""
    choices = reply.get("choices")
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise BadReply(f"the judge's reply is no chat completion: {quote(reply)}")
    if len(choices) != count:
        raise BadReply(f"the judge answered {len(choices)} choices, {count} were asked for")
    return choices


def text_of(choice: Mapping[str, Any]) -> str:
    """The text of a finished reply. Raises Unreadable if there is none, or if it was cut off."""
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else None
    if choice.get("finish_reason") == "length":  # "Score: 1" may be all that is left of "Score: 10"
        raise Unreadable(f"the reply was cut off at max_tokens: {quote(text)}")
    if not isinstance(text, str):
        raise Unreadable(f"the reply holds no text: {quote(choice)}")
    return text


def by_pattern(text: str, pattern: str) -> Vote:
    """The number in the group of the pattern's last match.

    >>> by_pattern("Score: 10 would be too much. Score: 7", r"Score: (\\d+)").score
    7.0
    """
    found = [match[1] for match in re.finditer(pattern, text)]
    if not found or found[-1] is None:
        raise Unreadable(f"nothing in the reply matches {pattern!r}: {quote(text)}")
    try:
        score = float(found[-1])
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        raise Unreadable(f"{found[-1][:MAX_QUOTE]!r} is no score: {quote(text)}")
    return Vote(score)


def by_schema(text: str, schema: Mapping[str, Any], score_key: str) -> Vote:
    """The score of a JSON reply that satisfies the schema; its other numbers are extras.

    >>> by_schema('{"score": 4, "style": 2, "why": "terse"}', {"required": ["score"]}, "score")
    Vote(score=4.0, extra={'style': 2.0})
    """
    import jsonschema

    try:
        verdict = json.loads(_without_code_block(text))
        _validator(json.dumps(schema)).validate(verdict)
    except jsonschema.ValidationError as error:
        raise Unreadable(
            f"the reply breaks the schema ({error.message[:MAX_QUOTE]}): {quote(text)}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"the reply is no JSON ({type(error).__name__}): {quote(text)}") from error
    numbers = {
        str(name): float(value)
        for name, value in (verdict.items() if isinstance(verdict, dict) else ())
        if fits(value)
    }
    if score_key not in numbers:
        raise Unreadable(f"the reply has no number {score_key!r}: {quote(text)}")
    return Vote(numbers.pop(score_key), numbers)


def check_pattern(pattern: str) -> None:
    """Raise ConfigurationError unless it is a regular expression with one group."""
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise ConfigurationError(f"pattern={pattern!r} cannot be read: {error}") from error
    require(groups == 1, f"pattern={pattern!r} has {groups} groups: the score must be the only one")


def check_schema(schema: Mapping[str, Any], score_key: str) -> None:
    """Raise ConfigurationError unless it is a JSON schema of objects that hold the score."""
    import jsonschema

    try:
        jsonschema.Draft202012Validator.check_schema(dict(schema))
    except jsonschema.SchemaError as error:
        raise ConfigurationError(f"json_schema is no JSON schema: {error.message}") from error
    required, known = schema.get("required", ()), schema.get("properties", {})
    require(
        score_key in known and score_key in required,
        f"json_schema must have the property score_key={score_key!r}, and require it; it has {sorted(known)}",
    )


def _without_code_block(text: str) -> str:
    """
    >>> _without_code_block('```json\\n{"score": 1}\\n```')
    '\\n{"score": 1}\\n'
    """
    text = text.strip()
    if not (len(text) >= 6 and text.startswith("```") and text.endswith("```")):
        return text
    return text[3:-3].removeprefix("json")


@lru_cache(maxsize=16)
def _validator(schema: str) -> Any:
    import jsonschema

    return jsonschema.Draft202012Validator(json.loads(schema))


def yes_probability(
    choice: Mapping[str, Any], yes: Collection[str], no: Collection[str]
) -> tuple[float, float]:
    """(p_yes / (p_yes + p_no), p_yes + p_no) of the reply's first token, by its top log-probs.

    Tokens that differ in case or in spaces around them count together; what is not among the top counts as 0.

    >>> top = [{"token": "Yes", "logprob": math.log(0.5)}, {"token": " yes", "logprob": math.log(0.1)},
    ...        {"token": "No", "logprob": math.log(0.2)}]
    >>> share, mass = yes_probability({"logprobs": {"content": [{"top_logprobs": top}]}}, ["yes"], ["no"])
    >>> round(share, 6), round(mass, 6)
    (0.75, 0.8)
    """
    try:
        top = [
            (str(one["token"]), math.exp(one["logprob"]))
            for one in choice["logprobs"]["content"][0]["top_logprobs"]
        ]
    except (KeyError, IndexError, TypeError, OverflowError) as error:
        raise Unreadable(f"the reply holds no top_logprobs: {quote(choice)}") from error
    p_yes, p_no = (sum(p for token, p in top if token.strip().casefold() in words) for words in (yes, no))
    mass = p_yes + p_no
    if not 0.0 < mass <= 1.001:
        likeliest = ", ".join(repr(token) for token, _ in top[:5])
        raise Unreadable(
            f"the tokens {[*yes, *no]} hold {mass:g} of the probability; the top is {likeliest[:MAX_QUOTE]}"
        )
    return p_yes / mass, mass


def quote(value: Any) -> str:
    """The beginning of a reply, for a reason.

    >>> quote("no " * 1000)[-12:]
    "o no no' ..."
    """
    shown = value if isinstance(value, str) else json.dumps(value, default=str)
    return repr(shown) if len(shown) <= MAX_QUOTE else repr(shown[:MAX_QUOTE]) + " ..."
