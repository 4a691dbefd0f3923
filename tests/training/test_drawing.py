"""Training a policy that draws: its gradient equals that of plain torch, on two ranks, and its export can be loaded."""

from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from tiny_flow import NEEDS_DIFFUSERS, NOISE_LEVEL, NUM_STEPS, random_pictures, save_tiny_flow_model
from torch.distributions import Normal
from two_ranks import WORLD_SIZE, on_two_ranks, recording_accumulator, relative_error

from async_grpo.algorithm.config import AlgorithmConfig
from async_grpo.experience.packing import pack
from async_grpo.messages import dummy_micro_batch
from async_grpo.modeling.flow.canary import canary_texts
from async_grpo.modeling.flow.folder import read_flow_folder
from async_grpo.modeling.flow.policy import FlowPolicy
from async_grpo.modeling.flow.prompt_inputs import PromptInputs
from async_grpo.training.config import OptimizerConfig
from async_grpo.training.drawing.export import FlowExporter
from async_grpo.training.drawing.objective import FlowObjective
from async_grpo.training.drawing.policy import shard_flow_policy, trainer_canary_logprobs
from async_grpo.types import Completion, FinishReason, Prompt, RewardStatus, Sample, Verdict

pytestmark = NEEDS_DIFFUSERS

KL_COEF = 0.3
NUM_PICTURES = 11


def sample_of(picture, ordinal):
    """Return a picture of `random_pictures` as a trained sample."""
    prompt = Prompt(ordinal, np.array([picture["label"]], np.int32), {"input": "a"})
    num_steps = len(picture["steps"])
    completion = Completion(
        token_ids=picture["steps"],
        logprobs=picture["behaviour"],
        versions=np.zeros(num_steps, np.int32),
        finish_reason=FinishReason.STOP,
        text="",
        latents=picture["latents"],
    )
    return Sample(
        prompt,
        completion,
        Verdict(RewardStatus.OK, 1.0),
        advantages=picture["advantages"],
        loss_mask=np.ones(num_steps, bool),
        group_tokens=num_steps,
    )


def policy_of(folder, **options):
    """Return a policy whose reference is another model, so that the KL penalty has a gradient."""
    policy = FlowPolicy.of_folder(read_flow_folder(folder / "model"), NUM_STEPS, NOISE_LEVEL, **options)
    if policy.reference is not None:
        policy.reference.load_state_dict(read_flow_folder(folder / "reference").load_model().state_dict())
    return policy


def reference_gradients(folder):
    """Plain diffusers and torch.distributions, one step at a time: loss of the whole minibatch, one backward."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    model = read_flow_folder(folder / "model").load_model()
    other = read_flow_folder(folder / "reference").load_model()
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(sigmas=[1 - k / NUM_STEPS for k in range(NUM_STEPS)])
    losses = []
    for picture in random_pictures(NUM_PICTURES, seed=1):
        for place, step in enumerate(picture["steps"].tolist()):
            before, after = torch.from_numpy(picture["latents"][place])
            arguments = {
                "timestep": scheduler.timesteps[step][None],
                "class_labels": torch.tensor([picture["label"]]),
            }
            t = scheduler.sigmas[step].item()
            duration = t - scheduler.sigmas[step + 1].item()
            scale = NOISE_LEVEL * (min(t, 0.75) / (1 - min(t, 0.75))) ** 0.5

            def normal(velocity, x=before, t=t, d=duration, s=scale):
                return Normal(x - d * (velocity + s**2 / (2 * t) * (x + (1 - t) * velocity)), s * d**0.5)

            policy_step = normal(model(before[None], **arguments).sample[0])
            with torch.no_grad():
                other_step = normal(other(before[None], **arguments).sample[0])
            ratio = torch.exp(policy_step.log_prob(after).mean() - float(picture["behaviour"][place]))
            advantage = float(picture["advantages"][place])
            loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28))
            losses.append(loss + KL_COEF * torch.distributions.kl_divergence(policy_step, other_step).mean())
    torch.stack(losses).mean().backward()
    return {f"model.{name}": parameter.grad for name, parameter in model.named_parameters()}


def work(ranks, folder):
    policy = shard_flow_policy(policy_of(folder, keeps_reference=True), ranks, OptimizerConfig())
    objective = FlowObjective(AlgorithmConfig(kl_coef=KL_COEF, clip_low=0.2, clip_high=0.28))
    accumulator, optimizer = recording_accumulator(policy, objective, ranks)
    samples = [sample_of(p, k) for k, p in enumerate(random_pictures(NUM_PICTURES, seed=1))]
    hands = [[pack(samples[:4]), pack(samples[4:7])], [dummy_micro_batch(0), pack(samples[7:])]]
    for micro_batch in hands[ranks.rank] if ranks.world_size > 1 else [pack(samples)]:
        accumulator.add(micro_batch)
    metrics = accumulator.finish()
    canary = trainer_canary_logprobs(policy, *canary_texts(5, NUM_STEPS))
    are_sharded = all(hasattr(parameter, "full_tensor") for parameter in policy.parameters())
    exporter = FlowExporter(folder, folder / "model", ranks, dtype="float32")
    exporter.save(policy, 77)
    return {
        "gradients": optimizer.gradients,
        "metrics": metrics,
        "canary": torch.tensor(canary),
        "are_sharded": are_sharded,
    }


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    save_tiny_flow_model(folder / "model", seed=0)
    save_tiny_flow_model(folder / "reference", seed=1)
    return folder, on_two_ranks(work, folder)


def test_the_gradient_on_two_ranks_equals_that_of_plain_torch(two_ranks):
    folder, results = two_ranks
    expected = reference_gradients(folder)
    trained = {name: g for name, g in expected.items() if g is not None}
    whole, worst = relative_error(results["gradients"], trained)
    assert whole < 1e-5 and worst < 1e-4
    assert set(results["gradients"]) == set(trained)
    assert results["metrics"]["update_skipped"] == 0 and results["metrics"]["avg_kl_div"] > 0.01
    assert WORLD_SIZE == 2


def test_the_canary_of_a_sharded_policy_is_that_of_one_process_and_leaves_no_weights_gathered(two_ranks):
    folder, results = two_ranks
    alone = trainer_canary_logprobs(policy_of(folder), *canary_texts(5, NUM_STEPS))
    torch.testing.assert_close(results["canary"], torch.from_numpy(alone), atol=1e-5, rtol=0)
    assert results["are_sharded"]


def test_diffusers_loads_an_export_with_the_weights_of_the_policy(two_ranks):
    from diffusers import DiTTransformer2DModel

    folder, _ = two_ranks
    exported = DiTTransformer2DModel.from_pretrained(folder / "hf_format" / "samples_77" / "transformer")
    original = read_flow_folder(folder / "model").load_model()
    for (name, tensor), (_, expected) in zip(
        exported.named_parameters(), original.named_parameters(), strict=True
    ):
        assert torch.equal(tensor, expected), name
    exported_folder = read_flow_folder(folder / "hf_format" / "samples_77")
    assert exported_folder.fingerprint == read_flow_folder(folder / "model").fingerprint


def test_on_policy_all_ratios_are_one_and_the_reference_is_not_trained(tmp_path):
    save_tiny_flow_model(tmp_path)
    policy = FlowPolicy.of_folder(read_flow_folder(tmp_path), NUM_STEPS, NOISE_LEVEL, keeps_reference=True)
    pictures = random_pictures(6, seed=2)
    samples = [sample_of(picture, k) for k, picture in enumerate(pictures)]
    batch = pack(samples)
    logprobs = policy(
        torch.tensor(batch.input_ids, dtype=torch.int64),
        torch.tensor(batch.cu_seqlens),
        torch.tensor(batch.loss_mask),
        torch.tensor(batch.latents),
    )[0]
    assert logprobs[~torch.tensor(batch.loss_mask)].eq(0).all()
    batch = replace(batch, behaviour_logprobs=logprobs.detach().numpy())
    ranks = Mock(world_size=1, device=torch.device("cpu"))
    ranks.sum_and_max.side_effect = lambda sums, maxima: (sums, maxima)
    ranks.gathered.side_effect = lambda own_row: own_row[None]
    objective = FlowObjective(AlgorithmConfig(kl_coef=0.1))
    accumulator, optimizer = recording_accumulator(policy, objective, ranks)
    accumulator.add(batch)
    metrics = accumulator.finish()
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-6)
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-6)
    assert metrics["avg_kl_div"] == 0  # the reference is the policy itself
    assert not any(name.startswith("reference") for name in optimizer.gradients)


def test_dropout_of_labels_is_off_in_training_mode(tmp_path):
    save_tiny_flow_model(tmp_path)
    policy = FlowPolicy.of_folder(read_flow_folder(tmp_path), NUM_STEPS, NOISE_LEVEL).train()
    x = torch.randn(200, 1, 4, 4)
    steps = torch.zeros(200, dtype=torch.int64)
    prompts = PromptInputs(torch.zeros(200, dtype=torch.int64))
    assert torch.equal(policy.velocity(x, steps, prompts), policy.velocity(x, steps, prompts))
