"""`diagnose`: describe in one sentence why a run makes no progress.

Kinds of waits:

    rank     a rank is busy with an activity or waits
    weights  workers load weights
    sleep    engines finish their requests, to sleep while the trainer computes
    slot     the rollout loop waits for a slot of the staleness budget
    place    a group waits for a worker with room
    worker   a group waits for completions from a worker
    reward   a group waits for a verdict
    step     a finished group waits to be placed in a step
    call     a worker of a reward processes a sample
    permit   a call to a judge waits for a permit of the rate limiter
    sent     a call to a judge waits for the judge's answer
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import psutil

from async_grpo.processes.look import ProcessState
from async_grpo.processes.waits import Wait

FULL_MB = 8.0  # free space in MB below which a disk counts as full
# If a verdict is late and its verifier's process uses more cores than this, the process may be in an endless loop
BUSY_CORES = 0.2
NOTHING = "the run does not wait for anything that is recorded: it may be starting, or between two steps"
NOBODY = "though nobody has one: a permit was lost"


@dataclass(frozen=True)
class Snapshot:
    """The state of a run as seen from rank 0."""

    waits: Sequence[Wait]  # waits of rank 0 and of the controller
    silence: str = ""  # why the controller does not answer; "" if it answers
    processes: Sequence[ProcessState] = ()  # the run's processes on this machine
    free_mb: Mapping[str, float] = field(default_factory=dict)  # free space of the disks in MB, by folder

    def of(self, *kinds: str) -> list[Wait]:
        """Return the waits of these kinds, the oldest first.

        Waits of evaluations come last, because no step depends on them.
        """
        waits = [wait for wait in self.waits if wait.kind in kinds]

        def sort_key(wait: Wait) -> tuple[bool, float]:
            # Prompts of evaluations have negative numbers
            is_evaluation = "prompt -" in wait.who
            return is_evaluation, -wait.age_s

        return sorted(waits, key=sort_key)


def diagnose(snapshot: Snapshot) -> str:
    """Return the most likely cause why the run makes no progress, as a sentence."""
    cause = next(_causes(snapshot), NOTHING)
    return cause[0].upper() + cause[1:]


def _causes(snapshot: Snapshot) -> Iterator[str]:
    """Yield possible causes of the stall, the most likely first.

    Stopped processes, full disks and a silent controller come first, because they explain all other waits.
    """
    yield from _stopped_processes(snapshot)
    for path, free_mb in snapshot.free_mb.items():
        if free_mb < FULL_MB:
            yield f"the disk of {path} is full: {free_mb:.0f} MB are free"
    if snapshot.silence:
        controllers = [str(process) for process in snapshot.processes if process.role == "the controller"]
        controller = controllers[0] if controllers else "the controller"
        yield f"{controller} is silent: {snapshot.silence}"
    # If a rank does not wait for experience, it waits for workers to load weights, or for another rank
    for wait in snapshot.of("weights"):
        yield f"the weights of {wait.who} have been on their way to {wait.whom} for {wait.age_s:.0f} s"
    for wait in snapshot.of("sleep"):
        yield f"{wait.who} waits until {wait.whom} sleeps, for {wait.age_s:.0f} s: its last requests have not ended"
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
    """Yield which ranks are late: the ranks that are not in a collective, while the other ranks wait in one."""
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
    """Return a sentence that says what an unfinished group waits for.

    If the group waits for a verdict, the sentence is about the samples that wait for the same reward.

    Args:
        group: The oldest wait of a group.
        snapshot: The state of the run.
    """
    name = group.whom
    waits = [wait for wait in snapshot.of(group.kind) if wait.whom == name]
    # A sample passes through these kinds of waits in this order, so the last one found is the most specific
    for kind in ("call", "permit", "sent"):
        later_waits = [wait for wait in snapshot.of(kind) if wait.who == name]
        if later_waits:
            waits = later_waits
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
