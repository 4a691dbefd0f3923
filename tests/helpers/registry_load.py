"""What a `WorkerRegistry` has given away."""

from async_grpo.experience.worker_registry import WorkerRegistry


def outstanding(registry: WorkerRegistry) -> tuple[int, int]:
    """(sequences, tokens) admitted and not yet given back."""
    members = registry._members.values()
    return sum(m.sequences for m in members), sum(m.tokens for m in members)
