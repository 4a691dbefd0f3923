"""Arguments that must be refused on the CPU, where drafted tokens come out wrong.

Written for vLLM 0.31 and 0.32. With speculative decoding at a temperature above 0, `_expand_kernel_impl` of the kernels for
the CPU fills a copy of its output, so that log-probs are divided by uninitialized memory. Seeded requests end the engine,
because generators for the CPU have no offset by which drafts are taken back. vLLM accepts the arguments without a warning.

Not needed any more when temperatures arrive in the kernel's output.
"""

from vllm.platforms import current_platform

DRAFT_ARGUMENTS = ("speculative_config", "spec_method", "spec_model", "spec_tokens")


def problem_with_drafts(name: str, temperature: float) -> str:
    """Return why this argument of vLLM's engine must not be given here; "" if it may."""
    if name in DRAFT_ARGUMENTS and current_platform.is_cpu():
        return (
            f"vLLM 0.32 on the CPU divides by uninitialized memory where tokens are drafted at a temperature above 0 "
            f"(the run's: {temperature}), and ends at the first seeded request; leave it out"
        )
    return ""
