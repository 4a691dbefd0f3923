"""The options of a logprob worker."""

from dataclasses import dataclass

from async_grpo.options.fields import NOT_NEGATIVE, POSITIVE, Section, option


@dataclass(frozen=True, kw_only=True)
class LogprobConfig(Section):
    """The options of one logprob worker."""

    max_tokens_per_gpu: int = option(
        46_000, "Maximum number of tokens in one packed forward pass.", "Logprob mode", range=POSITIVE
    )
    max_wait_s: float = option(
        0.02,
        "Maximum seconds that a sequence waits for others to fill a forward pass.",
        "Logprob mode",
        range=NOT_NEGATIVE,
    )
    role: str = option(
        "reference",
        "Policy that computes the log-probs: reference (frozen) or proximal (follows the trained policy).",
        "Logprob mode",
        choices=("reference", "proximal"),
    )
