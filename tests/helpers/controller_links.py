"""Links from a run's controller to workers whose answers a test scripts."""

import asyncio
from dataclasses import replace
from pathlib import Path

import tiny_policy

from async_grpo.cluster.controller import RunController
from async_grpo.errors import WorkerLost
from async_grpo.messages import WorkerInfo
from async_grpo.modeling.load import model_fingerprint
from async_grpo.testing import completion

MODEL = Path(__file__).resolve().parents[2] / "sample-data" / "tiny-model"
SETTINGS = replace(
    tiny_policy.SETTINGS, model_fingerprint=model_fingerprint(MODEL), logprob_roles=("reference",)
)
ASKED = []  # of each stream that a controller asked for: worker, seeds by member, sampling


class Link:
    """`WorkerLink` to a worker whose completions do not end before `completing` is set."""

    silent_s, is_closed, is_dying = 0.0, False, False  # a dying one is lost at its third completion
    tells = ()  # of what members have, before it

    def __init__(self, handle, name, on_lost):
        self.name, self.lose, self.completing = name, on_lost, asyncio.Event()

    async def call(self, method):
        await asyncio.sleep(self.silent_s)
        return {"token_timeline": [], "paused_s": 1.0, "busy": []}

    async def stream(self, method, token_ids, seeds, sampling, *begun):
        ASKED.append((self.name, seeds, sampling, *begun))
        await self.completing.wait()
        for part in self.tells:
            yield part
        for number, member in enumerate(seeds):
            if number == 2 and self.is_dying:
                raise WorkerLost("killed in a test")
            yield replace(completion(3), member=member)

    def close(self):
        self.is_closed = True


def link_to(controller: RunController, name: str) -> Link:
    """Return the link to a generation worker that has registered."""
    return controller._generation.by_id[name].link


def worker(worker_id="g0", kind="generation", rewards="") -> WorkerInfo:
    """Return what a worker tells of itself when it registers."""
    return WorkerInfo(worker_id, kind, 8, 1000, rewards=rewards)
