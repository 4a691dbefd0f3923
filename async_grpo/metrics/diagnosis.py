"""`diagnose`: who holds up a run, in one sentence.

Waits are of these kinds. rank: for what a rank does; weights: to be loaded; slot: of the staleness budget. Of a group:
place: in a worker; worker: its completions; reward: a verdict; step: a place in one. Of a sample, by its reward:
call: a worker has it; permit: a judge's limits; sent: the judge's answer.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import psutil

from async_grpo.processes.look import ProcessState
from async_grpo.processes.waits import Wait

FULL_MB = 8.0
NOTHING = "nothing is seen that the run waits for: it may be starting, or between two steps"
NOBODY = "though nobody has one: a permit was lost"


@dataclass(frozen=True)
class Snapshot:
    """A run, seen from its rank 0."""

    waits: Sequence[Wait]  # of rank 0 and of the controller
    silence: str = ""  # why the controller told nothing
    processes: Sequence[ProcessState] = ()  # of this machine
    free_mb: Mapping[str, float] = field(default_factory=dict)  # of the disks, by folder

    def of(self, *kinds: str) -> list[Wait]:
        """Waits of these kinds, the oldest first; those of an evaluation last, as no step waits for it."""
        found = [wait for wait in self.waits if wait.kind in kinds]
        return sorted(found, key=lambda wait: ("prompt -" in wait.who, -wait.age_s))


def diagnose(seen: Snapshot) -> str:
    """The first of the causes: it explains all other waits."""
    said = next(_causes(seen), NOTHING)
    return said[0].upper() + said[1:]


def _causes(seen: Snapshot) -> Iterator[str]:
    # First what is stopped, full or silent
    for one in seen.processes:
        if one.status == psutil.STATUS_STOPPED:
            held = f", and holds up {len(seen.of('worker'))} groups" if one.role == "the engine" else ""
            yield f"{one.role} (process {one.pid}) is stopped, as by SIGSTOP{held}; `kill -CONT {one.pid}` lets it go on"
    for path, free in seen.free_mb.items():
        if free < FULL_MB:
            yield f"the disk of {path} is full: {free:.0f} MB are free"
    if seen.silence:
        states = [str(one) for one in seen.processes if one.role == "the controller"] or ["the controller"]
        yield f"{states[0]} is silent: {seen.silence}"
    # Where rank 0 does not wait for experience, it waits for workers to load weights, or for a rank in no collective
    for wait in seen.of("weights"):
        yield f"the weights of {wait.who} have been on their way to {wait.whom} for {wait.age_s:.0f} s"
    for wait in seen.of("rank"):
        if wait.whom not in ("waiting_for_experience", "evaluating"):
            ranks = [one for one in seen.processes if one.role.startswith("rank ")]
            late = [one for one in ranks if not any("torch/distributed/" in line for line in one.frames[:3])]
            where = "; ".join(f"{one} is in {one.frames[0]}" for one in late or ranks)
            others = ", and the other ranks wait for it" if 0 < len(late) < len(ranks) else ""
            yield f"{where}{others}: {wait.who} has been {wait.whom} for {wait.age_s:.0f} s"
    if groups := seen.of("worker", "place", "reward", "step") or seen.of("slot"):
        yield _late(groups[0], seen)


def _late(group: Wait, seen: Snapshot) -> str:
    """What the oldest group on its way to a step waits for, and what the samples of its reward wait for in turn."""
    name = group.whom
    waits = [one for one in seen.of(group.kind) if one.whom == name]
    for kind in ("call", "permit", "sent"):  # each is further on the way
        waits = [one for one in seen.of(kind) if one.who == name] or waits
    many = f"({len(waits)} wait, the longest for {waits[0].age_s:.0f} s)"
    busy = [one for one in seen.processes if one.role == "the process of a verifier" and one.cores > 0.2]
    loop = f"; {busy[0]} may be in an endless loop" if busy else ""
    idle = "" if seen.of("worker") else f", {NOBODY}"
    return {
        "worker": f"{name} keeps a group waiting {many}",
        "place": f"a group waits for {name} {many}{idle}",
        "step": f"the queue of finished groups is deadlocked: one waits for {name} {many}",
        "slot": f"{group.who} waits for {name} {many}, {NOBODY}",
        "reward": f"the queue of the verifier {name} is deadlocked: no worker has a sample of it {many}",
        "call": f"the verifier {name} owes a verdict {many}{loop}",
        "permit": f"a call of the judge {name} waits for a permit {many}, {NOBODY}, or its limits leave none",
        "sent": f"the judge {name} at {waits[0].whom} owes an answer {many}",
    }[waits[0].kind]
