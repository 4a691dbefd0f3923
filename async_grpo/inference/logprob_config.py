"""The options of a logprob worker."""

from dataclasses import dataclass

from async_grpo.options.fields import NOT_NEGATIVE, POSITIVE, Section, option


@dataclass(frozen=True, kw_only=True)
class LogprobConfig(Section):
    """The options of one logprob worker."""

    max_tokens_per_gpu: int = option(
        46_000, "Maximum tokens of one packed forward pass.", "Logprob mode", range=POSITIVE
    )
    max_wait_s: float = option(
        0.02,
        "Seconds that a sequence waits at most for others to fill a forward pass.",
        "Logprob mode",
        range=NOT_NEGATIVE,
    )
    role: str = option(
        "reference",
        "Policy of the log-probs: reference (frozen) or proximal (follows the trained policy).",
        "Logprob mode",
        choices=("reference", "proximal"),
    )
