"""`diagnose` names who holds up a run, by table: what is seen, and what the sentence must say."""

import psutil
import pytest

from async_grpo.metrics.diagnosis import Snapshot, diagnose
from async_grpo.processes.look import ProcessState
from async_grpo.processes.waits import Wait

IDLE = Wait("rank", "rank 0", "waiting_for_experience", 12.0)
BUSY = Wait("rank", "rank 0", "computing", 12.0)
NAP = 'Process 7: python\n\nThread 7 (idle): "MainThread"\n    nap (own.py:3)\n    run (trainer.py:5)\n'
SUM = 'Thread 6 (idle): "MainThread"\n    all_reduce (torch/distributed/distributed_c10d.py:1)\n    f (x.py:1)\n'


def state(pid, role, status="sleeping", cores=0.0, stack=""):
    return ProcessState(pid, role, status, cores, 100.0, stack)


def seen(*waits, **more):
    return Snapshot([IDLE, *waits], **more)


STOPPED = state(42, "the engine", psutil.STATUS_STOPPED)
RANKS = [state(6, "rank 0", stack=SUM), state(7, "rank 1", stack=NAP)]
REWARD = Wait("reward", "prompt 5", "math", 11.0)
WORKER = Wait("worker", "prompt 6", "generation worker g1", 9.0)
SLOT = Wait("slot", "the rollout loop", "a slot of the staleness budget", 12.0)


@pytest.mark.parametrize(
    ("snapshot", "sentence"),
    [
        (
            seen(WORKER, processes=[STOPPED]),
            "The engine (process 42) is stopped, as by SIGSTOP, and holds up 1 groups; `kill -CONT 42` lets it go on",
        ),
        (seen(WORKER, free_mb={"/tmp": 900.0, "/run": 0.4}), "The disk of /run is full: 0 MB are free"),
        (
            seen(silence="no answer within 5 s", processes=[state(9, "the controller", "running", 1.0)]),
            "The controller (process 9, running, 100% of a core) is silent: no answer within 5 s",
        ),
        (
            seen(Wait("weights", "policy version 3", "generation-1, generation-2", 8.0), WORKER),
            "The weights of policy version 3 have been on their way to generation-1, generation-2 for 8 s",
        ),
        (
            seen(Wait("sleep", "the trainer", "generation-1", 9.0), WORKER),
            "The trainer waits until generation-1 sleeps, for 9 s: its last requests have not ended",
        ),
        (
            Snapshot([BUSY], processes=RANKS),
            "Rank 1 (process 7, sleeping, 0% of a core) is in nap (own.py:3), and the other ranks wait for it: "
            "rank 0 has been computing for 12 s",
        ),
        (
            Snapshot([BUSY], processes=[state(6, "rank 0", "running", 1.0, NAP)]),
            "Rank 0 (process 6, running, 100% of a core) is in nap (own.py:3): rank 0 has been computing for 12 s",
        ),
        (seen(WORKER, WORKER), "Generation worker g1 keeps a group waiting (2 wait, the longest for 9 s)"),
        (
            seen(Wait("place", "prompt 7", "a place in a generation worker", 9.5)),
            "A group waits for a place in a generation worker (1 wait, the longest for 10 s), though nobody has one: "
            "a permit was lost",
        ),
        (
            seen(Wait("place", "prompt 7", "a place in a generation worker", 5.0), WORKER),
            "Generation worker g1 keeps a group waiting (1 wait, the longest for 9 s)",
        ),
        (
            seen(SLOT),
            "The rollout loop waits for a slot of the staleness budget (1 wait, the longest for 12 s), though nobody "
            "has one: a permit was lost",
        ),
        (
            seen(SLOT, Wait("step", "group 3", "its step", 7.0)),
            "The queue of finished groups is deadlocked: one waits for its step (1 wait, the longest for 7 s)",
        ),
        (
            seen(REWARD, WORKER),
            "The queue of the verifier math is deadlocked: no worker has a sample of it (1 wait, the longest for 11 s)",
        ),
        (
            seen(
                *(REWARD, WORKER, Wait("call", "math", "its worker", 10.0)),
                processes=[state(8, "the process of a verifier", "running", 0.99)],
            ),
            "The verifier math owes a verdict (1 wait, the longest for 10 s); the process of a verifier (process 8, "
            "running, 99% of a core) may be in an endless loop",
        ),
        (
            seen(
                REWARD,
                Wait("call", "math", "its worker", 10.0),
                Wait("permit", "math", "math at http://a", 9.0),
            ),
            "A call of the judge math waits for a permit (1 wait, the longest for 9 s), though nobody has one: "
            "a permit was lost, or its limits leave none",
        ),
        (
            seen(
                *(REWARD, Wait("call", "math", "its worker", 10.0), Wait("permit", "math", "key", 9.0)),
                *(Wait("sent", "math", "http://a", age) for age in (3.0, 8.0)),
            ),
            "The judge math at http://a owes an answer (2 wait, the longest for 8 s)",
        ),
        (
            seen(Wait("reward", "prompt -3", "other", 99.0), WORKER),  # an evaluation's
            "Generation worker g1 keeps a group waiting (1 wait, the longest for 9 s)",
        ),
        (
            seen(),
            "The run does not wait for anything that is recorded: it may be starting, or between two steps",
        ),
    ],
)
def test_the_sentence_names_who_holds_up_the_run(snapshot, sentence):
    assert diagnose(snapshot) == sentence
