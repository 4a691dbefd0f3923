"""Policies that draw from texts: the engine agrees with the pipelines of diffusers, and the trainer with the engine."""

import asyncio
import io
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_flow import NEEDS_DIFFUSERS, flow_settings
from tiny_pipelines import NOISE_LEVEL, NUM_STEPS, PICTURE_SIZE, PIPELINES, save_tiny_pipeline

from async_grpo.config.flow_prompts import TextPrompts
from async_grpo.errors import ConfigurationError
from async_grpo.experience.packing import pack
from async_grpo.inference.drawing.engine import DrawingEngine
from async_grpo.modeling.flow.canary import canary_texts, flow_canary_logprobs
from async_grpo.modeling.flow.folder import read_flow_folder
from async_grpo.modeling.flow.policy import FlowPolicy
from async_grpo.types import Prompt, RewardStatus, Sample, Sampling, Verdict

pytestmark = NEEDS_DIFFUSERS

GUIDANCE = {"stable_diffusion_3": 4.5, "flux": 3.5, "qwen_image": 4.0}
TEXTS = ["a red ball", "two blue boxes on a table"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipelines")
    return {name: save_tiny_pipeline(name, folder / name) for name in PIPELINES}


def prompt_of(text):
    return np.array(TextPrompts().prompt_tokens({"input": text}, 4096), np.int32)


def start(folder, **flow):
    config = SimpleNamespace(model_path=str(folder), max_sequences=8)
    return DrawingEngine.start(config, flow_settings(picture_size=PICTURE_SIZE, **flow))


async def drawn(engine, text, seeds, sampling=None):
    completions = [completion async for completion in engine.complete(prompt_of(text), seeds, sampling)]
    return sorted(completions, key=lambda completion: completion.member)


def policy_of(folder, guidance, **options):
    described = read_flow_folder(folder).with_options(PICTURE_SIZE, guidance)
    return FlowPolicy.of_folder(described, NUM_STEPS, NOISE_LEVEL, guidance=guidance, **options)


def trained_sample(text, ordinal, completion):
    num_steps = len(completion)
    return Sample(
        Prompt(ordinal, prompt_of(text), {"input": text}),
        completion,
        Verdict(RewardStatus.OK, 1.0),
        advantages=np.ones(num_steps, np.float32),
        loss_mask=np.ones(num_steps, bool),
        group_tokens=num_steps,
    )


def recomputed(policy, batch):
    return policy(
        torch.tensor(batch.input_ids, dtype=torch.int64),
        torch.tensor(batch.cu_seqlens),
        torch.tensor(batch.loss_mask),
        torch.tensor(batch.latents),
        batch.conditions,
    )[0]


def reference_picture(name, folder, text, guidance, noise):
    """Draw with the pipeline of diffusers itself, from the same noise."""
    import diffusers

    pipeline_class = getattr(diffusers, read_flow_folder(folder).family.pipeline_class)
    pipeline = pipeline_class.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    options = {"guidance_scale": guidance}
    if name == "qwen_image":
        options = {"true_cfg_scale": guidance, "negative_prompt": " "}
    if name != "stable_diffusion_3":
        noise = pipeline._pack_latents(noise, 1, *noise.shape[1:])
    return pipeline(
        text,
        height=PICTURE_SIZE,
        width=PICTURE_SIZE,
        num_inference_steps=NUM_STEPS,
        latents=noise,
        output_type="np",
        **options,
    ).images[0]


@pytest.mark.parametrize("name", PIPELINES)
def test_without_noise_the_engine_draws_what_the_pipeline_of_diffusers_draws(folders, name):
    async def work():
        engine = start(folders[name], guidance=GUIDANCE[name])
        (completion,) = await drawn(engine, TEXTS[0], {0: 7}, Sampling(temperature=0.0))
        pixels = np.asarray(Image.open(io.BytesIO(completion.picture_png)), np.float32) / 255
        shape = engine._folder.latent_shape
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(7))[None]
        expected = reference_picture(name, folders[name], TEXTS[0], GUIDANCE[name], noise)
        assert pixels.shape == (PICTURE_SIZE, PICTURE_SIZE, 3)
        # The PNG file has 256 levels
        assert np.abs(pixels - expected).max() < 0.6 / 255
        assert completion.condition == ()

    asyncio.run(work())


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("name", PIPELINES)
def test_the_trainer_recomputes_the_log_probs_of_texts_of_different_lengths(folders, name, guidance):
    async def work():
        engine = start(folders[name], guidance=guidance)
        groups = await asyncio.gather(*(drawn(engine, text, {0: 3, 1: 4}) for text in TEXTS))
        samples = []
        for ordinal, (text, group) in enumerate(zip(TEXTS, groups, strict=True)):
            samples += [trained_sample(text, ordinal, completion) for completion in group]
        batch = pack(samples)
        assert len(batch.input_ids) == len(samples) * (1 + NUM_STEPS)
        assert batch.conditions[0] is batch.conditions[1] and batch.conditions[0] is not batch.conditions[2]
        logprobs = recomputed(policy_of(folders[name], guidance), batch).detach().numpy()
        assert np.abs((logprobs - batch.behaviour_logprobs)[batch.loss_mask]).max() < 1e-5
        # The text matters: with the conditions of the two prompts exchanged, the log-probs differ
        exchanged = replace(batch, conditions=tuple(reversed(batch.conditions)))
        others = recomputed(policy_of(folders[name], guidance), exchanged).detach().numpy()
        assert np.abs((others - batch.behaviour_logprobs)[batch.loss_mask]).max() > 1e-3

    asyncio.run(work())


@pytest.mark.parametrize("name", PIPELINES)
def test_a_prompt_is_encoded_once(folders, name):
    async def work():
        engine = start(folders[name])
        family = engine._reader._family
        texts = []
        encode = type(family).encode

        def counted(self, pipeline, text, *, is_guided):
            texts.append(text)
            return encode(self, pipeline, text, is_guided=is_guided)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(family), "encode", counted)
            for _ in range(2):
                await drawn(engine, TEXTS[0], {0: 1, 1: 2})
        assert texts == [TEXTS[0]]

    asyncio.run(work())


@pytest.mark.parametrize("name", PIPELINES)
def test_the_canary_needs_no_text_encoder_and_shows_a_changed_weight(folders, name):
    policy = policy_of(folders[name], 2.0)
    texts = canary_texts(256, NUM_STEPS)
    expected = flow_canary_logprobs(policy, *texts)
    assert np.abs(expected[1:]).max() < 50
    with torch.no_grad():
        policy.family.blocks(policy.model)[0].attn.to_v.weight[0, 0] += 0.5
    assert np.abs(flow_canary_logprobs(policy, *texts) - expected).max() > 1e-4


@pytest.mark.parametrize("name", PIPELINES)
def test_a_batch_without_samples_reaches_all_weights(folders, name):
    policy = policy_of(folders[name], 2.0)
    empty = policy(torch.tensor([0, 0]), torch.tensor([0, 2]), torch.zeros(2, dtype=torch.bool), None)[0]
    empty.sum().backward()
    gradients = {n: p.grad for n, p in policy.model.named_parameters() if p.requires_grad}
    trained = [gradient for gradient in gradients.values() if gradient is not None]
    assert len(trained) > 10 and all(not gradient.any() for gradient in trained)


def test_guidance_is_refused_for_a_model_that_does_not_read_it(tmp_path):
    folder = read_flow_folder(save_tiny_pipeline("flux", tmp_path, guidance_embeds=False))
    folder.with_options(PICTURE_SIZE, 1.0)
    with pytest.raises(ConfigurationError, match=r"--guidance 3.5: the model in .* has no guidance"):
        folder.with_options(PICTURE_SIZE, 3.5)


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("flux", 18, "--picture-size 18 must be a multiple of 4"),
        ("stable_diffusion_3", 64, "draws at most 32 x 32 pixels"),
    ],
)
def test_sizes_that_the_model_cannot_draw_are_refused(folders, name, size, message):
    with pytest.raises(ConfigurationError, match=message):
        read_flow_folder(folders[name]).with_options(size, 1.0)


@pytest.mark.parametrize("name", PIPELINES)
def test_in_bfloat16_the_trainer_stays_near_the_engine_and_states_are_float32(folders, name):
    async def work():
        config = SimpleNamespace(model_path=str(folders[name]), max_sequences=8)
        settings = replace(flow_settings(picture_size=PICTURE_SIZE, guidance=3.0), dtype="bfloat16")
        engine = DrawingEngine.start(config, settings)
        completions = await drawn(engine, TEXTS[0], {0: 3, 1: 4})
        assert completions[0].latents.dtype == np.float32
        batch = pack([trained_sample(TEXTS[0], 0, completion) for completion in completions])
        policy = policy_of(folders[name], 3.0, dtype=torch.bfloat16)
        policy.cast_weights()
        assert next(policy.model.parameters()).dtype == torch.bfloat16
        logprobs = recomputed(policy, batch).detach().numpy()
        assert np.abs((logprobs - batch.behaviour_logprobs)[batch.loss_mask]).max() < 2e-2

    asyncio.run(work())
