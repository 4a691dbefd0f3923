"""Rules for a reference policy that moves (`--ref-update-steps`); see `compatibility`."""

from async_grpo.config.rules import BrokenRules
from async_grpo.config.run_options import RunOptions
from async_grpo.weights.config import get_transport


def broken_reference(c: RunOptions) -> BrokenRules:
    """Find options that cannot be combined with a moving reference."""
    if c.has_lora:
        yield (
            "ref_update_steps lora_rank",
            "do not go together: the reference of a LoRA adapter is the frozen base model. Leave --ref-update-steps out, "
            "or train all weights",
        )
    if c.draws:
        yield (
            "ref_update_steps policy",
            "do not go together: the reference of a policy that draws is its initial model. Leave --ref-update-steps out",
        )
    if c.kl_coef == 0:
        yield "ref_update_steps kl_coef", "does nothing without a KL penalty: give --kl-coef"
    if c.ref_update_steps % c.cycle_steps:
        nearest = max(1, round(c.ref_update_steps / c.cycle_steps)) * c.cycle_steps
        yield (
            "ref_update_steps passes_per_batch",
            f"do not fit: weights are sent only after the {c.cycle_steps} steps of a batch. Use a multiple, such as "
            f"{nearest}",
        )


def broken_reference_transport(c: RunOptions) -> BrokenRules:
    """Find a transport that cannot send weights to reference workers."""
    if c.moves_reference and not get_transport(c.weight_transport).sends_packages:
        yield (
            "weight_transport ref_update_steps",
            "do not go together: reference workers need a --weight-transport that sends packages (object_store)",
        )
