"""DiffusionNFT in the trainer: its gradient is that of plain torch, on two ranks, and the old policy keeps its place."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_flow import NEEDS_DIFFUSERS, NOISE_LEVEL, NUM_LABELS, NUM_STEPS, SHAPE, save_tiny_flow_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from two_ranks import on_two_ranks, recording_accumulator, relative_error

from async_grpo.algorithm.config import AlgorithmConfig
from async_grpo.experience.packing import pack
from async_grpo.messages import dummy_micro_batch
from async_grpo.modeling.flow.folder import read_flow_folder
from async_grpo.modeling.flow.policy import FlowPolicy
from async_grpo.modeling.flow.schedule import FlowSchedule
from async_grpo.training.config import OptimizerConfig
from async_grpo.training.drawing.export import FlowExporter
from async_grpo.training.drawing.nft_objective import NFTObjective, NFTSettings, noised_pictures
from async_grpo.training.drawing.old_policy import OldPolicy
from async_grpo.training.drawing.policy import shard_flow_policy
from async_grpo.types import Completion, FinishReason, Prompt, RewardStatus, Sample, Verdict

pytestmark = NEEDS_DIFFUSERS

NUM_PICTURES = 11
BETA = 0.7
CLIP = 1.5
NUM_TIMES = 3


def finished_pictures():
    """Return (label, seed, picture, advantage) of random finished pictures."""
    random = np.random.default_rng(5)
    for _ in range(NUM_PICTURES):
        label = int(random.integers(NUM_LABELS))
        seed = int(random.integers(2**31 - 1))
        yield label, seed, random.standard_normal(SHAPE).astype(np.float32), float(random.normal())


def samples():
    found = []
    for ordinal, (label, seed, picture, advantage) in enumerate(finished_pictures()):
        completion = Completion(
            token_ids=np.array([seed], np.int32),
            logprobs=np.zeros(1, np.float32),
            versions=np.zeros(1, np.int32),
            finish_reason=FinishReason.STOP,
            text="",
            latents=picture[None, None],
        )
        sample = Sample(
            Prompt(ordinal, np.array([label], np.int32), {"input": "a"}),
            completion,
            Verdict(RewardStatus.OK, 1.0),
            advantages=np.array([advantage], np.float32),
            loss_mask=np.ones(1, bool),
            group_tokens=1,
        )
        found.append(sample)
    return found


def reference_gradients(folder):
    """Plain diffusers, one picture and one time after the other: loss of the whole minibatch, one backward."""
    model = read_flow_folder(folder / "model").load_model()
    old = read_flow_folder(folder / "old").load_model()
    losses = []
    for label, seed, picture, advantage in finished_pictures():
        generator = torch.Generator().manual_seed(seed)
        shares = torch.rand(NUM_TIMES, generator=generator)
        noises = torch.randn(NUM_TIMES, *SHAPE, generator=generator)
        x0 = torch.from_numpy(picture)
        r = 0.5 + 0.5 * max(-1.0, min(1.0, advantage / CLIP))
        for share, noise in zip(shares, noises, strict=True):
            t = 1 - share  # the scheduler does not shift its times
            arguments = {
                "hidden_states": ((1 - t) * x0 + t * noise)[None],
                "timestep": 1000 * t[None],
                "class_labels": torch.tensor([label]),
            }
            v = model(**arguments).sample[0]
            with torch.no_grad():
                v_old = old(**arguments).sample[0]
            for weight, branch in (
                (r, (1 - BETA) * v_old + BETA * v),
                (1 - r, (1 + BETA) * v_old - BETA * v),
            ):
                error = arguments["hidden_states"][0] - t * branch - x0
                losses.append(weight * error.square().mean() / error.detach().abs().mean())
    loss = torch.stack(losses).sum() / (NUM_PICTURES * NUM_TIMES)
    loss.backward()
    return loss.item(), {f"model.{name}": parameter.grad for name, parameter in model.named_parameters()}


def work(ranks, folder):
    policy = FlowPolicy.of_folder(read_flow_folder(folder / "old"), NUM_STEPS, NOISE_LEVEL)
    shard_flow_policy(policy, ranks, OptimizerConfig())
    old = OldPolicy(policy, growth=0.25, maximum=0.5, cycle_steps=1)
    weights = read_flow_folder(folder / "model").load_model().state_dict()
    set_model_state_dict(policy.model, weights, options=StateDictOptions(full_state_dict=True))
    objective = NFTObjective(AlgorithmConfig(), NFTSettings(BETA, NUM_TIMES, CLIP), old)
    accumulator, optimizer = recording_accumulator(policy, objective, ranks)
    pictures = samples()
    hands = [[pack(pictures[:4]), pack(pictures[4:7])], [dummy_micro_batch(0), pack(pictures[7:])]]
    for micro_batch in hands[ranks.rank] if ranks.world_size > 1 else [pack(pictures)]:
        accumulator.add(micro_batch)
    metrics = accumulator.finish()
    exporter = FlowExporter(folder, folder / "model", ranks, dtype="float32")
    exporter.save(policy, 1)
    exporter.in_place = old.in_place
    exporter.save(policy, 2)
    decay = old.follow(1)["nft_old_decay"]
    exporter.save(policy, 3)
    return {"gradients": optimizer.gradients, "metrics": metrics, "decay": decay}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    save_tiny_flow_model(folder / "model", seed=0)
    save_tiny_flow_model(folder / "old", seed=1)
    return folder, on_two_ranks(work, folder)


def test_the_gradient_on_two_ranks_equals_that_of_plain_torch(two_ranks):
    folder, results = two_ranks
    loss, gradients = reference_gradients(folder)
    trained = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    whole, worst = relative_error(results["gradients"], trained)
    assert whole < 1e-5 and worst < 1e-4
    assert set(results["gradients"]) == set(trained)
    metrics = results["metrics"]
    assert metrics["avg_loss"] == pytest.approx(loss, rel=1e-5) and metrics["update_skipped"] == 0
    is_good = [0.5 + 0.5 * max(-1.0, min(1.0, advantage / CLIP)) for *_, advantage in finished_pictures()]
    assert metrics["nft_probability"] == pytest.approx(np.mean(is_good), abs=1e-6)
    assert metrics["nft_old_distance_max"] > metrics["nft_old_distance"] > 0.01


def exported(folder, name):
    return read_flow_folder(folder / "hf_format" / name).load_model().state_dict()


def test_an_export_has_the_old_weights_and_these_follow_the_trained_ones(two_ranks):
    folder, results = two_ranks
    model = read_flow_folder(folder / "model").load_model().state_dict()
    old = read_flow_folder(folder / "old").load_model().state_dict()
    assert results["decay"] == 0.25
    for name, tensor in model.items():
        assert torch.equal(exported(folder, "samples_1")[name], tensor), name
        assert torch.equal(exported(folder, "samples_2")[name], old[name]), name
        expected = 0.25 * old[name] + 0.75 * tensor
        torch.testing.assert_close(exported(folder, "samples_3")[name], expected, atol=1e-6, rtol=0)


def test_times_have_the_density_of_the_schedule_and_its_unit():
    schedule = FlowSchedule((1.0, 0.9, 0.5, 0.0), (1000.0, 900.0, 500.0))
    t, timesteps = schedule.times_at(torch.tensor([0.0, 1 / 6, 1 / 3, 0.5, 2 / 3, 5 / 6]))
    torch.testing.assert_close(t, torch.tensor([1.0, 0.95, 0.9, 0.7, 0.5, 0.25]))
    torch.testing.assert_close(timesteps, 1000 * t)


def test_a_picture_gets_the_same_times_and_noises_wherever_it_is_packed():
    schedule = FlowSchedule((1.0, 0.5, 0.0), (1000.0, 500.0))
    pictures = torch.randn(3, *SHAPE)
    together = noised_pictures(torch.tensor([7, 8, 9]), pictures, schedule, 2)
    alone = noised_pictures(torch.tensor([9]), pictures[2:], schedule, 2)
    assert torch.equal(together.states[4:], alone.states) and torch.equal(together.t[4:], alone.t)
    assert len(together.t.unique()) == 6
    # The noised state follows the path from the picture to the noise, along the target
    x0 = together.states - together.t[:, None, None, None] * together.targets
    torch.testing.assert_close(x0, pictures.repeat_interleave(2, dim=0), atol=1e-5, rtol=0)


def test_samples_of_another_engine_are_refused(tmp_path):
    from async_grpo.errors import ConfigurationError

    save_tiny_flow_model(tmp_path)
    policy = FlowPolicy.of_folder(read_flow_folder(tmp_path), NUM_STEPS, NOISE_LEVEL)
    objective = NFTObjective(AlgorithmConfig(), NFTSettings(), OldPolicy(policy, 0.1, 0.5, 1))
    with pytest.raises(ConfigurationError, match="use --engine drawing"):
        objective.check_inputs(replace(pack(samples()), latents=None))
