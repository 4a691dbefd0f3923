"""Training policies that draw from texts: two ranks compute the gradient of one process, also with guidance and KL."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch
from tiny_flow import NEEDS_DIFFUSERS
from tiny_pipelines import NOISE_LEVEL, NUM_STEPS, PICTURE_SIZE, PIPELINES, save_tiny_pipeline
from two_ranks import on_two_ranks, recording_accumulator, relative_error

from async_grpo.algorithm.config import AlgorithmConfig
from async_grpo.experience.packing import pack
from async_grpo.messages import dummy_micro_batch
from async_grpo.modeling.flow.folder import read_flow_folder
from async_grpo.modeling.flow.policy import FlowPolicy
from async_grpo.training.config import OptimizerConfig
from async_grpo.training.drawing.objective import FlowObjective
from async_grpo.training.drawing.policy import shard_flow_policy
from async_grpo.types import Completion, FinishReason, Prompt, RewardStatus, Sample, Verdict

pytestmark = NEEDS_DIFFUSERS
GUIDANCE = 3.0


def policy_of(folder):
    """Return a policy whose reference differs, so that the KL penalty has a gradient."""
    described = read_flow_folder(folder).with_options(PICTURE_SIZE, GUIDANCE)
    policy = FlowPolicy.of_folder(described, NUM_STEPS, NOISE_LEVEL, guidance=GUIDANCE, keeps_reference=True)
    with torch.no_grad():
        for parameter in policy.reference.parameters():
            parameter.mul_(0.9)
    return policy


def samples_of(policy, count=5):
    random = np.random.default_rng(4)
    samples = []
    for ordinal in range(count):
        num_steps = 1 + ordinal % NUM_STEPS
        completion = Completion(
            token_ids=np.arange(num_steps, dtype=np.int32),
            logprobs=random.normal(-1, 0.1, num_steps).astype(np.float32),
            versions=np.zeros(num_steps, np.int32),
            finish_reason=FinishReason.STOP,
            text="",
            latents=random.standard_normal((num_steps, 2, *policy.latent_shape)).astype(np.float32),
            condition=policy.random_condition(random),
        )
        samples.append(
            Sample(
                Prompt(ordinal, np.array([97, 98], np.int32), {"input": "ab"}),
                completion,
                Verdict(RewardStatus.OK, 1.0),
                advantages=random.normal(size=num_steps).astype(np.float32),
                loss_mask=np.ones(num_steps, bool),
                group_tokens=num_steps,
            )
        )
    return samples


def gradients_of(policy, ranks, micro_batches):
    objective = FlowObjective(AlgorithmConfig(kl_coef=0.3))
    accumulator, optimizer = recording_accumulator(policy, objective, ranks)
    for micro_batch in micro_batches:
        accumulator.add(micro_batch)
    metrics = accumulator.finish()
    return {"gradients": optimizer.gradients, "metrics": metrics}


def work(ranks, folder):
    policy = policy_of(folder / "model")
    samples = samples_of(policy)
    config = OptimizerConfig(gradient_checkpointing=True)
    policy = shard_flow_policy(policy, ranks, config)
    hands = [[pack(samples[:2]), pack(samples[2:3])], [dummy_micro_batch(0), pack(samples[3:])]]
    return gradients_of(policy, ranks, hands[ranks.rank])


@pytest.mark.parametrize("name", PIPELINES)
def test_two_ranks_that_recompute_activations_have_the_gradient_of_one_process(tmp_path, name):
    save_tiny_pipeline(name, tmp_path / "model")
    sharded = on_two_ranks(work, tmp_path)
    policy = policy_of(tmp_path / "model")
    ranks = Mock(world_size=1, device=torch.device("cpu"))
    ranks.sum_and_max.side_effect = lambda sums, maxima: (sums, maxima)
    ranks.gathered.side_effect = lambda own_row: own_row[None]
    alone = gradients_of(policy, ranks, [pack(samples_of(policy))])
    trained = {name: g for name, g in alone["gradients"].items() if g is not None}
    whole, worst = relative_error(sharded["gradients"], trained)
    assert whole < 1e-5 and worst < 1e-4
    assert sharded["metrics"]["avg_kl_div"] == pytest.approx(alone["metrics"]["avg_kl_div"], rel=1e-4)
    assert sharded["metrics"]["avg_kl_div"] > 1e-3
