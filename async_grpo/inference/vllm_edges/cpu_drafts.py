"""Refuse speculative decoding on the CPU, where drafted tokens are wrong.

Written for vLLM 0.31 and 0.32. With speculative decoding at a temperature above 0, the CPU kernel `_expand_kernel_impl`
writes the temperatures to a copy of its output, so that log-probs are divided by uninitialized memory. Seeded requests
crash the engine: to reject a draft, vLLM sets the offset of a generator, but generators on the CPU have no offset. vLLM
accepts the arguments without a warning.

Not needed any more when the kernel writes the temperatures to its output.
"""

from vllm.platforms import current_platform

DRAFT_ARGUMENTS = ("speculative_config", "spec_method", "spec_model", "spec_tokens")


def problem_with_drafts(name: str, temperature: float) -> str:
    """Return why an argument of vLLM's engine is refused: it asks for drafts on the CPU. "" if it is not refused.

    Args:
        name: Name of the argument.
        temperature: Sampling temperature of the run, for the message.
    """
    if name in DRAFT_ARGUMENTS and current_platform.is_cpu():
        return (
            f"vLLM 0.32 on the CPU divides by uninitialized memory if tokens are drafted at a temperature above 0 "
            f"(the run's: {temperature}), and crashes at the first seeded request; leave it out"
        )
    return ""
