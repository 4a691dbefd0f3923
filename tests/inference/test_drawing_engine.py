"""The engine that draws: its log-probs are the trainer's, seeds repeat, and weights change between two steps."""

import asyncio
import io
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save
from tiny_flow import (
    NEEDS_DIFFUSERS,
    NOISE_LEVEL,
    NUM_LABELS,
    NUM_STEPS,
    SHAPE,
    flow_settings,
    save_tiny_flow_model,
)

from async_grpo.errors import ConfigurationError, RequestRefused, WeightsDidNotLand, WorkerLost
from async_grpo.inference.drawing.engine import DrawingEngine
from async_grpo.modeling.flow.canary import canary_texts, flow_canary_logprobs
from async_grpo.modeling.flow.folder import read_flow_folder
from async_grpo.modeling.flow.policy import FlowPolicy
from async_grpo.types import Sampling

pytestmark = NEEDS_DIFFUSERS

PROMPT = np.array([2], np.int32)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_flow_model(tmp_path_factory.mktemp("flow"))


def start(model, max_sequences=8, **flow):
    return DrawingEngine.start(
        SimpleNamespace(model_path=str(model), max_sequences=max_sequences), flow_settings(**flow)
    )


async def drawn(engine, seeds, sampling=None, prompt=PROMPT):
    completions = [completion async for completion in engine.complete(prompt, seeds, sampling)]
    return sorted(completions, key=lambda completion: completion.member)


def in_loop(work):
    """Run an async test that gets no arguments."""

    def run(model):
        asyncio.run(work(model))

    run.__name__ = work.__name__
    return run


def trainer_logprobs(policy, label, completion):
    count = len(completion) + 1
    return policy(
        torch.tensor([label, *completion.token_ids]),
        torch.tensor([0, count]),
        torch.arange(count) > 0,
        torch.cat([torch.zeros(1, 2, *SHAPE), torch.from_numpy(completion.latents)]),
    )[0][1:]


@pytest.mark.parametrize("window", [0, 2])
def test_the_trainer_recomputes_the_log_probs_of_the_engine(model, window):
    async def work():
        engine = start(model, window=window)
        completions = await drawn(engine, {member: 100 + member for member in range(6)})
        policy = FlowPolicy.of_folder(read_flow_folder(model), NUM_STEPS, NOISE_LEVEL)
        for completion in completions:
            assert len(completion) == (window or NUM_STEPS)
            expected = trainer_logprobs(policy, 2, completion)
            assert np.abs(completion.logprobs - expected.detach().numpy()).max() < 1e-5
        if not window:
            # The states form one trajectory
            latents = completions[0].latents
            assert np.array_equal(latents[1:, 0], latents[:-1, 1])

    asyncio.run(work())


@in_loop
async def test_a_seed_repeats_its_picture_whatever_else_is_drawn(model):
    engine = start(model, max_sequences=3)
    alone = await drawn(engine, {0: 7})
    both = await asyncio.gather(drawn(engine, {0: 1, 1: 7, 2: 3, 3: 4}), drawn(engine, {0: 5}, prompt=PROMPT))
    repeated = both[0][1]
    assert np.abs(alone[0].latents - repeated.latents).max() < 1e-5
    assert alone[0].picture_png == repeated.picture_png
    assert not np.allclose(both[0][0].latents, repeated.latents)


@in_loop
async def test_a_picture_is_a_png_file_of_the_last_state(model):
    (completion,) = await drawn(start(model), {0: 7})
    pixels = np.asarray(Image.open(io.BytesIO(completion.picture_png)))
    last_state = completion.latents[-1, 1, 0]
    expected = np.round(np.clip((last_state + 1) / 2, 0, 1) * 255)
    assert pixels.shape == SHAPE[1:] and np.array_equal(pixels, expected)


@in_loop
async def test_without_noise_the_ode_is_solved_in_as_many_steps_as_asked(model):
    engine = start(model)
    first = await drawn(engine, {0: 7}, Sampling(temperature=0.0, max_tokens=12))
    again = await drawn(engine, {0: 7}, Sampling(temperature=0.0, max_tokens=12))
    assert len(first[0]) == 12 and first[0].latents is None
    assert first[0].picture_png == again[0].picture_png
    assert np.array_equal(first[0].logprobs, np.zeros(12))


@in_loop
async def test_new_weights_change_the_later_steps_of_a_picture(model):
    engine = start(model)
    other = FlowPolicy.of_folder(read_flow_folder(model), NUM_STEPS, NOISE_LEVEL)
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.mul_(1.5)
    weights = memoryview(save({name: t.contiguous() for name, t in other.model.state_dict().items()}))
    await engine.update(3, [weights])
    unfinished = asyncio.ensure_future(drawn(engine, {0: 7}))
    while not (engine._pictures and engine._pictures[0].step):
        await asyncio.sleep(0)
    manifest = await engine.update(4, [weights])
    (completion,) = await unfinished
    assert set(completion.versions.tolist()) <= {3, 4} and completion.versions[0] == 3
    assert all(record.in_use and record.is_read_back for record in manifest.values())
    assert set(manifest) == set(other.model.state_dict())
    # The log-probs are those of the weights that were received
    expected = trainer_logprobs(other, 2, completion)
    assert np.abs(completion.logprobs - expected.detach().numpy()).max() < 1e-5


@in_loop
async def test_a_tensor_of_another_shape_is_refused(model):
    engine = start(model)
    with pytest.raises(WeightsDidNotLand, match="proj_out_1.bias"):
        await engine.update(1, [memoryview(save({"proj_out_1.bias": torch.zeros(3)}))])


@in_loop
async def test_the_canary_shows_a_single_changed_weight(model):
    engine = start(model)
    policy = FlowPolicy.of_folder(read_flow_folder(model), NUM_STEPS, NOISE_LEVEL)
    texts = canary_texts(NUM_LABELS, NUM_STEPS)
    expected = flow_canary_logprobs(policy, *texts)
    answers = np.concatenate([await engine.canary(text) for text in texts])
    assert np.abs(answers - expected).max() < 1e-5
    with torch.no_grad():
        policy.model.transformer_blocks[1].attn1.to_v.weight[0, 0] += 0.5
    assert np.abs(flow_canary_logprobs(policy, *texts) - expected).max() > 1e-4


@pytest.mark.parametrize("num_steps", [1, 4, 1000])
def test_the_canary_has_few_steps_from_the_first_to_the_last(num_steps):
    (first, *_) = canary_texts(NUM_LABELS, num_steps)
    assert first[1] == 0 and first[-1] == num_steps - 1
    assert len(set(first[1:].tolist())) == len(first) - 1 == min(8, num_steps)


@in_loop
async def test_closing_a_request_frees_its_places(model):
    engine = start(model, max_sequences=2)
    stream = engine.complete(PROMPT, dict.fromkeys(range(4), 1))
    await anext(stream)
    await stream.aclose()
    assert len(await drawn(engine, {0: 1})) == 1
    await asyncio.sleep(0)
    assert not [picture for picture in engine._pictures if not picture.completion.done()]


@in_loop
async def test_a_failing_step_ends_the_worker(model):
    engine = start(model)
    engine._policy.model.forward = None
    with pytest.raises(WorkerLost, match="a denoising step failed: TypeError"):
        await drawn(engine, {0: 1})
    assert "TypeError" in await engine.until_failure()
    assert not await engine.begin_anew()
    with pytest.raises(WorkerLost, match="a denoising step failed: TypeError"):
        await asyncio.wait_for(drawn(engine, {0: 1}), timeout=5)


@in_loop
async def test_a_picture_that_is_no_number_ends_the_worker_and_is_not_scored(model):
    engine = start(model)
    with torch.no_grad():
        next(engine._policy.model.parameters()).fill_(float("nan"))
    with pytest.raises(WorkerLost, match="a picture with policy version -1 has pixels that are no finite"):
        await drawn(engine, {0: 1}, Sampling(temperature=0.0))


@pytest.mark.parametrize("num_steps", [1, 2])
def test_few_steps_have_log_probs_that_the_trainer_recomputes(model, num_steps):
    """With a single step, the noise scale cannot be taken at the beginning of a second one."""

    async def work():
        engine = start(model, num_steps=num_steps)
        policy = FlowPolicy.of_folder(read_flow_folder(model), num_steps, NOISE_LEVEL)
        for completion in await drawn(engine, {0: 1, 1: 2}):
            assert completion.token_ids.tolist() == list(range(num_steps))
            expected = trainer_logprobs(policy, 2, completion).detach().numpy()
            assert np.isfinite(expected).all()
            assert np.abs(completion.logprobs - expected).max() < 1e-5

    asyncio.run(work())


@in_loop
async def test_a_closed_engine_refuses_requests(model):
    engine = start(model)
    await drawn(engine, {0: 1})
    engine.close()
    with pytest.raises(WorkerLost, match="is closed"):
        await asyncio.wait_for(drawn(engine, {0: 1}), timeout=5)


@in_loop
async def test_wrong_requests_are_refused(model):
    engine = start(model)
    with pytest.raises(ConfigurationError, match="one number below 5"):
        await drawn(engine, {0: 1}, prompt=np.array([5]))
    with pytest.raises(RequestRefused, match="grammar"):
        await drawn(engine, {0: 1}, Sampling(grammar="{}"))


def test_another_model_is_refused(model, tmp_path):
    fingerprint = read_flow_folder(model).fingerprint
    DrawingEngine.check_model(str(model), flow_settings(fingerprint))
    other = save_tiny_flow_model(tmp_path, num_layers=1)
    with pytest.raises(ConfigurationError, match="another model"):
        DrawingEngine.check_model(str(other), flow_settings(fingerprint))


def test_a_finished_picture_is_one_token_drawn_without_noise_and_its_seed_repeats(model):
    async def work():
        engine = start(model, trains_finished=True)
        seeds = {0: 100, 1: 101}
        pictures = await drawn(engine, seeds)
        for picture in pictures:
            assert len(picture) == 1 and picture.logprobs.tolist() == [0.0]
            assert picture.latents.shape == (1, 1, *SHAPE)
        assert pictures[0].token_ids[0] != pictures[1].token_ids[0]
        again = await drawn(engine, seeds)
        assert [picture.token_ids[0] for picture in again] == [picture.token_ids[0] for picture in pictures]
        # The same noise without noise in the steps, in an evaluation
        evaluated = await drawn(engine, seeds, Sampling(temperature=0.0))
        assert [picture.picture_png for picture in evaluated] == [picture.picture_png for picture in pictures]
        assert all(picture.latents is None for picture in evaluated)
        last_state = 255 * (np.clip(pictures[0].latents[0, 0, 0], -1, 1) + 1) / 2
        shown = np.asarray(Image.open(io.BytesIO(pictures[0].picture_png)))
        np.testing.assert_allclose(shown, last_state, atol=0.51)

    asyncio.run(work())


def test_a_finished_picture_has_the_oldest_version_of_its_steps(model):
    async def work():
        engine = start(model, trains_finished=True)
        engine.policy_version = 3
        drawing = asyncio.create_task(drawn(engine, {0: 5}))
        advance = engine._advance

        def advance_and_update(pictures):
            advance(pictures)
            engine.policy_version = 4

        engine._advance = advance_and_update
        (picture,) = await drawing
        assert picture.versions.tolist() == [3] and engine.policy_version == 4

    asyncio.run(work())
