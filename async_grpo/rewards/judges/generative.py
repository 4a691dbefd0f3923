"""`GenerativeRM`: a language model trained to verify, which writes a score or says Yes or No."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from async_grpo.rewards.judges.judge_replies import Unreadable, Vote, check_finished, yes_probability
from async_grpo.rewards.judges.llm import LLMJudge
from async_grpo.rewards.judges.remote_judge import require

SHOWN = "Question:\n{prompt}\n\nResponse:\n{completion}\n\n"
SCORE = "Rate how good the response is, from {low} (worst) to {high} (best). End with one line `Score: x`."
YES_NO = "Is the response correct? Answer with one word, Yes or No."


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
        for name in ("yes", "no"):
            words = tuple(word.strip().casefold() for word in getattr(self, name))
            object.__setattr__(self, name, words)
        if self.yes_no:
            object.__setattr__(self, "scale", (0.0, 1.0))
            object.__setattr__(self, "max_tokens", 1)
        super().__post_init__()
        require(
            all(self.yes)
            and all(self.no)
            and bool(self.yes)
            and bool(self.no)
            and not set(self.yes) & set(self.no),
            f"yes={self.yes} and no={self.no} must be words, and different ones",
        )
        require(self.top_logprobs >= 2, f"top_logprobs={self.top_logprobs} cannot hold both Yes and No")
        require(0.0 <= self.min_mass <= 1.0, f"min_mass={self.min_mass} is no probability")
        require(
            not self.yes_no or (self.votes == 1 and self.json_schema is None),
            f"yes_no reads a probability: votes={self.votes} and json_schema have no meaning beside it",
        )

    def default_template(self) -> str:
        """Used when no template is given."""
        return (
            SHOWN + YES_NO
            if self.yes_no
            else (super().default_template() if self.json_schema is not None else SHOWN + SCORE)
        )

    def _body(self, sample: Mapping[str, Any], count: int) -> dict[str, Any]:
        body = super()._body(sample, count)
        return body | {"logprobs": True, "top_logprobs": self.top_logprobs} if self.yes_no else body

    def _vote(self, choice: Mapping[str, Any]) -> Vote:
        if not self.yes_no:
            return super()._vote(choice)
        check_finished(choice, "length")  # one token was asked for
        probability, mass = yes_probability(choice, self.yes, self.no)
        if mass < self.min_mass:
            raise Unreadable(
                f"Yes and No hold {mass:.3g} of the probability, less than min_mass={self.min_mass:g}"
            )
        return Vote(probability, {"mass": mass})
