"""The whole chain without vLLM, Ray or torchrun, in one process: controller, verifiers, trainer and weight publishing."""

import asyncio
import math

import pytest
from fake_chain import GROUPS, MEMBERS, STEPS, Chain, PoolVerification, chain_config

from async_grpo.errors import RunFailed, WeightsDidNotLand, WorkerLost
from async_grpo.testing import FakeEngine, FakeVerification
from async_grpo.training.accumulator import GradientAccumulator
from async_grpo.weights.package import SELF_TEST

# What the self-test delivers in float32: the weights as they are, then with every tensor changed. Rounds of one layer at
# a time are for bfloat16, where an engine cannot read back some tensor
SELF_TEST_ROUNDS = [SELF_TEST, SELF_TEST]


def test_three_steps_are_generated_scored_trained_and_published(tmp_path):
    chain = Chain(tmp_path)
    (tmp_path / "own.py").write_text("def length(sample):\n    return float(len(sample['completion']))\n")
    lines = chain.train(lambda: PoolVerification(f"{tmp_path / 'own.py'}:length"))
    assert [line["policy_version"] for line in lines] == [1, 2, 3]
    assert chain.link.delivered == [*SELF_TEST_ROUNDS, 0, 1, 2, 3]  # the first weights, and each step's
    for line in lines:
        assert line["samples_in_batch"] == line["num_reward_ok"] == GROUPS * MEMBERS
        assert line["grad_norm"] > 0 and math.isfinite(line["avg_loss"]) and line["staleness_max"] <= 1
        assert line["canary_error"] < 1e-5
    assert lines[0]["staleness_mean"] == 0
    assert (
        sum(stats["ok"] for line in lines for stats in line["verifiers"].values()) == STEPS * GROUPS * MEMBERS
    )
    assert (chain.folder / "out" / "hf_format").exists()


FOLDER_TRANSPORT = """
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from async_grpo.weights.config import Transport
from async_grpo.weights.publisher import Publisher


class FolderLink:
    def __init__(self, link):
        self._link, self.folder = link, Path(tempfile.mkdtemp(dir="FOLDER"))

    def put(self, chunk):
        path = self.folder / f"{len(list(self.folder.iterdir()))}.safetensors"
        chunk.tofile(path)
        return path

    def deliver(self, package):
        chunks = [np.fromfile(path, np.uint8) for path in package.chunks]
        return self._link.deliver(replace(package, chunks=chunks))

    def commit(self, package, landed):
        self._link.commit(package, landed)

    def abort(self, error):
        self._link.abort(error)


def by_folder(engines, weights, canary, wire_dtype, rank, config):
    return Publisher(FolderLink(engines), weights, canary, wire_dtype, rank, config)


folder = Transport(by_folder)
"""


def test_a_transport_of_ones_own_is_one_file(tmp_path):
    """safetensors files in a folder, named by FILE.py:NAME; nothing in the package knows of it."""
    source = tmp_path / "by_folder.py"
    source.write_text(FOLDER_TRANSPORT.replace("FOLDER", str(tmp_path)))
    chain = Chain(tmp_path, transport=f"{source}:folder")
    lines = chain.train()
    assert [line["policy_version"] for line in lines] == [1, 2, 3] and lines[-1]["canary_error"] < 1e-5
    assert len(list(tmp_path.rglob("*.safetensors"))) > 4


def test_the_loss_of_an_engine_in_the_middle_of_its_groups_costs_no_sample(tmp_path):
    class Dying(FakeEngine):
        async def complete(self, prompt_token_ids, seeds, sampling=None):
            async for completion in super().complete(prompt_token_ids, seeds, sampling):
                yield completion
                if self.policy_version == 1 and not chain.workers[0]._lost:
                    chain.workers[0].die("killed in a test")

    chain = Chain(tmp_path, engines=2)
    chain.workers[0].engine.__class__ = Dying
    lines = chain.train()
    assert [line["samples_in_batch"] for line in lines] == [GROUPS * MEMBERS] * STEPS
    assert chain.workers[0]._lost
    members = chain.link.run(chain.controller.begin_sync())
    assert [info.worker_id for info, _ in members] == ["g1"]


def test_an_error_of_the_verifiers_ends_the_training_by_name(tmp_path):
    def broken(sample: dict) -> float:
        raise ZeroDivisionError("in the verifier")

    with pytest.raises(RunFailed, match="ZeroDivisionError: in the verifier"):
        Chain(tmp_path).train(lambda: FakeVerification(broken))


def test_a_proof_that_fails_while_the_next_step_accumulates_ends_the_run_and_no_step_is_taken(
    tmp_path, monkeypatch
):
    done = []

    class Wrong(FakeEngine):
        async def canary(self, token_ids):
            if self.policy_version == 2:
                while done.count("finish") == 2 and done[-1] != "add":  # gradients of the third step
                    await asyncio.sleep(0.01)
            return await super().canary(token_ids) + (self.policy_version == 2)

    for name in ("add", "finish"):
        real = getattr(GradientAccumulator, name)
        noted = lambda self, *args, name=name, real=real: done.append(name) or real(self, *args)  # noqa: E731
        monkeypatch.setattr(GradientAccumulator, name, noted)
    chain = Chain(tmp_path, engine=Wrong)
    with pytest.raises((WeightsDidNotLand, RunFailed), match="policy version 2 unchanged"):
        chain.train()
    assert done.count("finish") == 2 and done[-1] == "add"
    assert [line["step"] for line in chain.lines] == [1, 2]
    assert not (chain.folder / "out" / "hf_format").exists()


def test_ranks_that_wait_for_experience_hear_that_weights_did_not_land(tmp_path):
    """Nobody generates the second step: its groups are only admitted once version 1 is proven."""

    class Wrong(FakeEngine):
        async def canary(self, token_ids):
            return await super().canary(token_ids) + (self.policy_version == 1)

    chain = Chain(tmp_path, engine=Wrong, config=chain_config(max_staleness=1, groups_alive=GROUPS))
    with pytest.raises(RunFailed, match="WeightsDidNotLand: worker g0 received policy version 1"):
        chain.train()


def at_version(version, act):
    """A fake engine whose first completion under `version` calls `act` in a thread: it may wait for the controller."""

    class Acting(FakeEngine):
        acts = (act,)

        async def complete(self, prompt_token_ids, seeds, sampling=None):
            if self.policy_version == version and self.acts:
                (asked,), self.acts = self.acts, ()
                await asyncio.to_thread(asked, self)
            async for completion in super().complete(prompt_token_ids, seeds, sampling):
                yield completion

    return Acting


def test_a_worker_that_joins_late_passes_the_self_test_alone_and_shares_the_work(tmp_path):
    chain = Chain(tmp_path, engine=at_version(1, lambda engine: chain.join("late", FakeEngine)))
    lines = chain.train()
    assert [line["policy_version"] for line in lines] == [1, 2, 3]
    start = [*SELF_TEST_ROUNDS, 0]
    late = chain.link.delivered.index(SELF_TEST, len(start))
    # The one that is current then: it is not changed in between
    version = chain.link.delivered[late + len(SELF_TEST_ROUNDS)]
    assert version == chain.link.delivered[late - 1] and version in (1, 2)
    steps_before, steps_after = range(1, version + 1), range(version, STEPS + 1)
    assert chain.link.delivered == [*start, *steps_before, *SELF_TEST_ROUNDS, *steps_after]
    members = chain.link.run(chain.controller.begin_sync())
    assert [info.worker_id for info, _ in members] == ["g0", "late"]
    assert all(line["canary_error"] < 1e-5 and line["staleness_max"] <= 1 for line in lines)


def test_the_only_engine_is_replaced_in_the_middle_of_a_step_that_could_not_end_without(tmp_path):
    def die_and_return(engine):
        async def die():
            chain.workers[0].die("killed in a test")

        chain.link.run(die())
        chain.join("g1", FakeEngine)

    chain = Chain(tmp_path, engine=at_version(1, die_and_return))
    lines = chain.train()
    assert [line["samples_in_batch"] for line in lines] == [GROUPS * MEMBERS] * STEPS
    members = chain.link.run(chain.controller.begin_sync())
    assert [info.worker_id for info, _ in members] == ["g1"]


def test_an_engine_that_is_lost_while_weights_travel_is_left_out_and_the_sync_is_whole_without_it(tmp_path):
    class Dying(FakeEngine):
        async def update(self, version, chunks):
            if version == 2:
                chain.workers[1].die("killed in a test")
                raise WorkerLost("killed in a test")
            return await super().update(version, chunks)

    chain = Chain(tmp_path, engines=2)
    chain.workers[1].engine.__class__ = Dying
    lines = chain.train()
    assert [line["policy_version"] for line in lines] == [1, 2, 3]
    members = chain.link.run(chain.controller.begin_sync())
    assert [info.worker_id for info, _ in members] == ["g0"]
