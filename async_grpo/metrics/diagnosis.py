"""`diagnose`: say in one sentence what holds up a run.

Kinds of waits:

    rank     what a rank does
    weights  workers load weights
    slot     a group waits for a slot of the staleness budget
    place    a group waits for a place in a worker
    worker   a group waits for the completions of a worker
    reward   a group waits for a verdict
    step     a group waits for a place in a step
    call     a sample is with a worker of its reward
    permit   a call of a judge waits for the judge's limits
    sent     a call of a judge waits for the judge's answer
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import psutil

from async_grpo.processes.look import ProcessState
from async_grpo.processes.waits import Wait

FULL_MB = 8.0  # a disk with less free space is full
BUSY_CORES = 0.2  # a process that uses more may be in an endless loop
NOTHING = "nothing is seen that the run waits for: it may be starting, or between two steps"
NOBODY = "though nobody has one: a permit was lost"


@dataclass(frozen=True)
class Snapshot:
    """The state of a run as its rank 0 sees it."""

    waits: Sequence[Wait]  # of rank 0 and of the controller
    silence: str = ""  # why the controller does not answer; "" if it does
    processes: Sequence[ProcessState] = ()  # of this machine
    free_mb: Mapping[str, float] = field(default_factory=dict)  # of the disks, by folder

    def of(self, *kinds: str) -> list[Wait]:
        """Return the waits of these kinds, the oldest first, and those of evaluations last: no step waits for them."""
        waits = [wait for wait in self.waits if wait.kind in kinds]

        def sort_key(wait: Wait) -> tuple[bool, float]:
            # Prompts of evaluations have negative numbers
            is_evaluation = "prompt -" in wait.who
            return is_evaluation, -wait.age_s

        return sorted(waits, key=sort_key)


def diagnose(snapshot: Snapshot) -> str:
    """Return the first cause, which explains all other waits."""
    cause = next(_causes(snapshot), NOTHING)
    return cause[0].upper() + cause[1:]


def _causes(snapshot: Snapshot) -> Iterator[str]:
    """Yield what may hold up the run, the first cause first: what is stopped, full or silent explains all waits."""
    yield from _stopped_processes(snapshot)
    for path, free_mb in snapshot.free_mb.items():
        if free_mb < FULL_MB:
            yield f"the disk of {path} is full: {free_mb:.0f} MB are free"
    if snapshot.silence:
        controllers = [str(process) for process in snapshot.processes if process.role == "the controller"]
        controller = controllers[0] if controllers else "the controller"
        yield f"{controller} is silent: {snapshot.silence}"
    # A rank that does not wait for experience waits for workers to load weights, or for another rank
    for wait in snapshot.of("weights"):
        yield f"the weights of {wait.who} have been on their way to {wait.whom} for {wait.age_s:.0f} s"
    yield from _late_ranks(snapshot)
    groups = snapshot.of("worker", "place", "reward", "step") or snapshot.of("slot")
    if groups:
        yield _cause_of_late_group(groups[0], snapshot)


def _stopped_processes(snapshot: Snapshot) -> Iterator[str]:
    for process in snapshot.processes:
        if process.status == psutil.STATUS_STOPPED:
            is_engine = process.role == "the engine"
            consequence = f", and holds up {len(snapshot.of('worker'))} groups" if is_engine else ""
            yield (
                f"{process.role} (process {process.pid}) is stopped, as by SIGSTOP{consequence}; "
                f"`kill -CONT {process.pid}` lets it go on"
            )


def _late_ranks(snapshot: Snapshot) -> Iterator[str]:
    """Yield which ranks are late: those that are in no collective, in which the others wait."""
    ranks = [process for process in snapshot.processes if process.role.startswith("rank ")]
    late_ranks = [rank for rank in ranks if not _is_in_collective(rank)]
    places = "; ".join(f"{rank} is in {rank.frames[0]}" for rank in late_ranks or ranks)
    consequence = ", and the other ranks wait for it" if 0 < len(late_ranks) < len(ranks) else ""
    for wait in snapshot.of("rank"):
        if wait.whom not in ("waiting_for_experience", "evaluating"):
            yield f"{places}{consequence}: {wait.who} has been {wait.whom} for {wait.age_s:.0f} s"


def _is_in_collective(rank: ProcessState) -> bool:
    return any("torch/distributed/" in frame for frame in rank.frames[:3])


def _cause_of_late_group(group: Wait, snapshot: Snapshot) -> str:
    """Return what a group on its way to a step waits for.

    A group that waits for a verdict is explained by the waits of the samples of that reward.

    Args:
        group: The oldest wait of a group.
        snapshot: The state of the run.
    """
    name = group.whom
    waits = [wait for wait in snapshot.of(group.kind) if wait.whom == name]
    # Each kind is further on the way of a sample
    for kind in ("call", "permit", "sent"):
        waits = [wait for wait in snapshot.of(kind) if wait.who == name] or waits
    count = f"({len(waits)} wait, the longest for {waits[0].age_s:.0f} s)"
    verifiers = [process for process in snapshot.processes if process.role == "the process of a verifier"]
    busy_verifiers = [process for process in verifiers if process.cores > BUSY_CORES]
    loop = f"; {busy_verifiers[0]} may be in an endless loop" if busy_verifiers else ""
    idle = "" if snapshot.of("worker") else f", {NOBODY}"
    sentences = {
        "worker": f"{name} keeps a group waiting {count}",
        "place": f"a group waits for {name} {count}{idle}",
        "step": f"the queue of finished groups is deadlocked: one waits for {name} {count}",
        "slot": f"{group.who} waits for {name} {count}, {NOBODY}",
        "reward": f"the queue of the verifier {name} is deadlocked: no worker has a sample of it {count}",
        "call": f"the verifier {name} owes a verdict {count}{loop}",
        "permit": f"a call of the judge {name} waits for a permit {count}, {NOBODY}, or its limits leave none",
        "sent": f"the judge {name} at {waits[0].whom} owes an answer {count}",
    }
    return sentences[waits[0].kind]
