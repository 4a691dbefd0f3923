"""Random schedules: what happens to a run, and when; drawn from a seed, printed as Python, made shorter when one fails."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

# what happens -> how often; see the method of `SimulatedRun` of that name
EVENTS = {
    "die": 5,  # a worker, at whatever it awaits
    "fail": 2,  # a worker's engine refuses every request, until its process ends after `lasts` seconds
    "join": 3,  # another worker
    "again": 1,  # a worker registers again, without having signed off
    "leave": 2,  # a worker signs off, its work unfinished
    "drain": 2,  # a worker is told to end, and has `lasts` seconds for its work
    "stall": 3,  # a worker does nothing for `lasts` seconds
    "refuse": 2,  # the next proof of a worker fails
    "evaluate": 2,  # beside the training
    "give_up": 1,  # evaluate, and cancel it after `lasts` seconds
    "save": 2,  # a checkpoint
    "interrupt": 1,  # a checkpoint, with which another controller goes on
    "crash": 1,  # another controller goes on with the last checkpoint
}


@dataclass(frozen=True)
class Event:
    """`at` virtual seconds after the start, and `passes` of the event loop after that, to `who` (modulo their number)."""

    at: float
    what: str
    who: int = 0
    lasts: float = 0.0
    passes: int = 0


@dataclass(frozen=True)
class Schedule:
    """A run of `steps` steps of `groups` groups of `members`; the durations of everything are drawn from `seed`."""

    seed: int
    steps: int = 4
    groups: int = 2
    members: int = 3
    staleness: int = 1
    groups_alive: int | None = None
    ranks: int = 1
    whole_steps: bool = False  # `--deterministic`: a minibatch is computed in a thread
    roles: tuple[str, ...] = ()  # of logprob workers
    workers: int = 2  # of each kind, at the start
    places: int = 4  # of each
    resample: bool = False
    refill: bool = False
    stops_at: float | None = None  # everything is cancelled, at whatever it awaits
    events: tuple[Event, ...] = ()


def drawn(seed: int) -> Schedule:
    """The schedule of that seed."""
    draw = random.Random(seed)
    groups, staleness = draw.choice((1, 2, 2, 3)), draw.choice((0, 1, 1, 2, 3))
    steps, members = draw.randint(2, 6), draw.randint(2, 4)
    is_deep = staleness and draw.random() < 0.4
    seconds = steps * 12.0
    names, weights = zip(*EVENTS.items(), strict=True)
    events = [
        Event(
            at=round(draw.uniform(0, seconds), 2),
            what=draw.choices(names, weights)[0],
            who=draw.randrange(8),
            lasts=round(draw.choice((1, 10, 60)) * draw.random(), 2),
            passes=draw.choice((0, 0, 1, 2, 3, 5, 8, 13)),
        )
        for _ in range(draw.choice((0, 2, 4, 8, 12)))
    ]
    return Schedule(
        seed=seed,
        steps=steps,
        groups=groups,
        members=members,
        staleness=staleness,
        groups_alive=draw.randint(groups, (staleness + 1) * groups) if is_deep else None,
        ranks=draw.randint(1, 3),
        whole_steps=draw.random() < 0.25,
        roles=draw.choice(((), (), ("reference",), ("proximal",), ("reference", "proximal"))),
        workers=draw.randint(1, 4),
        places=members + draw.randint(0, 6),
        resample=draw.random() < 0.3,
        refill=draw.random() < 0.3,
        stops_at=round(draw.uniform(0, seconds), 2) if draw.random() < 0.15 else None,
        events=tuple(sorted(events, key=lambda event: event.at)),
    )


def shortest(failing: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    """A schedule that still fails, but no more with any one of its events taken out or a number made plainer."""
    plain = Schedule(failing.seed)
    was = None
    while was != failing:
        was = failing
        for number in reversed(range(len(failing.events))):
            rest = failing.events[:number] + failing.events[number + 1 :]
            if fails(shorter := replace(failing, events=rest)):
                failing = shorter
        for name in (
            "stops_at",
            "resample",
            "refill",
            "whole_steps",
            "roles",
            "ranks",
            "groups_alive",
            "steps",
        ):
            if getattr(plain, name) != getattr(failing, name):
                plainer = replace(failing, **{name: getattr(plain, name)})
                failing = plainer if fails(plainer) else failing
    return failing
