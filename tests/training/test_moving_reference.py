"""The reference follows the policy: its weights, its way to the workers, and a run that goes on with it."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from fake_chain import Chain, chain_config
from safetensors.numpy import load_file
from tiny_policy import pack, random_sequence, tiny_model
from two_ranks import full, on_two_ranks

from async_grpo.algorithm.config import AlgorithmConfig
from async_grpo.inference.logprob_worker import LogprobWorker
from async_grpo.modeling.policy import PolicyModel, named_weights
from async_grpo.training.accumulator import GradientAccumulator
from async_grpo.training.config import OptimizerConfig
from async_grpo.training.moving_reference import MovingReference
from async_grpo.training.objective import Objective
from async_grpo.training.optimizer import build_policy_optimizer
from async_grpo.training.sharding import shard_policy
from async_grpo.types import REFERENCE

MIX = 0.3
MOVING = {"kl_coef": 0.5, "ref_update_steps": 2, "ref_mix": MIX}


def whole_weights(policy):
    return {name: full(weight.detach()).clone() for name, weight in named_weights(policy)}


def trained_steps(ranks, **options):
    """(weights of the policy after each of four steps, weights that were sent, number of moments after each step)."""
    config = AlgorithmConfig(**MOVING | options)
    policy = shard_policy(PolicyModel(tiny_model(), chunk_tokens=13), ranks)
    settings = OptimizerConfig(learning_rate=0.05, num_warmup_steps=0)
    optimizer, scheduler = build_policy_optimizer(policy, settings)
    reference = MovingReference(policy, optimizer, config)
    sent = {}

    def publish(model, version, *, self_test):
        sent[version, self_test] = whole_weights(model)
        return dict

    reference.publisher = SimpleNamespace(publish=publish)
    objective = Objective(AlgorithmConfig())
    accumulator = GradientAccumulator(policy, optimizer, scheduler, objective, ranks, settings)
    reference.send_after_self_test(0)
    trained, moments = [whole_weights(policy)], []
    for step in range(1, 5):
        sequences = [random_sequence(np.random.default_rng(10 * step + number)) for number in range(6)]
        accumulator.add(pack(sequences))
        accumulator.finish()
        before = whole_weights(policy)
        metrics = reference.follow(step)
        assert set(metrics) == ({"reference_sync_s"} if step % 2 == 0 else set())
        trained.append(whole_weights(policy))
        assert all(torch.equal(before[name], weight) for name, weight in trained[-1].items())
        moments.append(len(optimizer.state))
    return trained, sent, moments


def work(ranks, folder):
    return {
        "mixed": trained_steps(ranks),
        "reset": trained_steps(ranks, ref_mix=1.0, ref_reset_optimizer=True),
    }


def test_two_ranks_send_a_mixture_of_policy_and_reference_and_keep_the_policy(tmp_path):
    results = on_two_ranks(work, tmp_path)
    trained, sent, moments = results["mixed"]
    assert list(sent) == [(0, True), (2, False), (4, False)]
    for name in trained[0]:
        expected = trained[0][name].double()
        assert torch.equal(sent[0, True][name].double(), expected)
        for version in (2, 4):
            expected = MIX * trained[version][name].double() + (1 - MIX) * expected
            torch.testing.assert_close(sent[version, False][name].double(), expected, rtol=1e-6, atol=1e-6)
        assert not torch.equal(trained[2][name], sent[2, False][name])
    assert min(moments) == max(moments) > 0
    trained, sent, moments = results["reset"]
    for version in (2, 4):
        assert all(
            torch.equal(sent[version, False][name], weight) for name, weight in trained[version].items()
        )
    assert moments[1] == moments[3] == 0 < moments[0] == moments[2]


class ReferenceChain(Chain):
    """A run with a worker for the reference. Nothing in it depends on time."""

    def __init__(self, folder: Path, steps: int, **options) -> None:
        config = chain_config(
            num_training_batches=steps,
            deterministic=True,
            checkpoint_every_s=600.0,
            min_samples_per_checkpoint=10**9,
            **{"max_staleness": 0, **MOVING, **options},
        )
        super().__init__(folder, config=config, logprob_roles=(REFERENCE,), moves_reference=True)
        self.worker = self.join("r0", LogprobWorker, REFERENCE)

    def reference(self):
        return {name: weight.numpy().copy() for name, weight in self.trainer.reference.named_weights()}

    def policy(self):
        (model,) = (self.folder / "out" / "hf_format").glob(f"samples_{8 * self.config.num_training_batches}")
        return load_file(model / "model.safetensors")


def same(first, second):
    return first.keys() == second.keys() and all(first[n].tobytes() == second[n].tobytes() for n in first)


def test_the_worker_gets_the_moved_weights_with_a_proof_and_a_resumed_run_keeps_them(tmp_path):
    """The engine draws at random, so the weights of two runs differ only if their references do."""
    whole = ReferenceChain(tmp_path / "whole", 5)
    lines = whole.train()
    delivered = [version for version in whole.link.reference_connection.delivered if version >= 0]
    assert delivered == [0, 2, 4]
    assert ["reference_sync_s" in line for line in lines] == [False, True, False, True, False]
    worker_weights = dict(named_weights(whole.worker.engine._policy))
    for name, weight in whole.reference().items():
        assert np.array_equal(worker_weights[name].numpy(), weight), name
    assert lines[0]["avg_kl_div"] < 1e-6 < lines[1]["avg_kl_div"]

    # The first part ends after a step in which the reference stays; its checkpoint holds a reference that has moved
    for number, steps in enumerate((3, 5)):
        part = ReferenceChain(tmp_path / "parts", steps)
        part.train()
        assert bool(part.settings.checkpoint) == bool(number)
    assert part.link.reference_connection.delivered[-2:] == [3, 4]
    assert same(part.reference(), whole.reference()) and same(part.policy(), whole.policy())
    fixed = ReferenceChain(tmp_path / "fixed", 5, ref_update_steps=100)
    fixed.train()
    assert not same(fixed.policy(), whole.policy())


def test_a_schedule_goes_on_where_the_optimizer_was_reset(tmp_path):
    options = {"ref_mix": 1.0, "ref_reset_optimizer": True, "lr_scheduler": "inverse_sqrt"}
    whole = ReferenceChain(tmp_path / "whole", 4, **options)
    rates = [line["lr"] for line in whole.train()]
    ReferenceChain(tmp_path / "parts", 2, **options).train()
    second = ReferenceChain(tmp_path / "parts", 4, **options)
    assert [line["lr"] for line in second.train()] == rates[2:] and len(set(rates)) == 4
    assert same(second.policy(), whole.policy())


def test_a_worker_that_joins_late_gets_the_reference_before_it_works(tmp_path):
    chain = ReferenceChain(tmp_path, 6, max_staleness=1)
    joined = []

    def write(line):
        chain.lines.append(line)
        if line["step"] == 3:
            joined.append(chain.join("r1", LogprobWorker, REFERENCE))

    chain.write_line = write
    chain.train()
    assert joined, "the run wrote no third line"
    weights = dict(named_weights(joined[0].engine._policy))
    for name, weight in chain.reference().items():
        assert np.array_equal(weights[name].numpy(), weight), name
