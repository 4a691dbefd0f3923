"""Prompts with images on a real vLLM engine: its log-probs are the trainer's, and wrong images are refused by name.

vLLM reads the images of Qwen2.5-VL with torchvision, of which the lock for machines without a GPU has none, because the
builds on PyPI are made for CUDA. Without it, only the tests of whole runs with the fake engine run; `scripts/test_images`
runs all of them.
"""

import asyncio
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import openai
import pytest
import torch
from engine_thread import EngineThread
from real_runs import lines, wait_for_step
from safetensors.torch import save
from vision_model import encoded, picture, save_vision_model, vision_model, vision_tokenizer
from vision_prompts import logprobs_alone, picture_row, question, seeded_picture

from async_grpo.data import shapes
from async_grpo.data.smollm2 import cache_folder
from async_grpo.environments.chat import Chat
from async_grpo.environments.config import TrajectoryLimits
from async_grpo.environments.images import ConversationImages
from async_grpo.environments.openai_server.endpoint import AgentEndpoint
from async_grpo.environments.played import Played
from async_grpo.errors import ImagesDiffer
from async_grpo.experience.packing import allowed_tokens_of
from async_grpo.experience.plain_values import data_url
from async_grpo.experience.rollouts import refuse_sampled_images
from async_grpo.experience.run_images import RunImages, images_of
from async_grpo.messages import ImageCanary
from async_grpo.modeling.image_models import ImageReader, unsampled_token_ids
from async_grpo.modeling.load import load_causal_lm, load_config, stop_token_ids
from async_grpo.modeling.policy import PolicyModel, named_weights
from async_grpo.observe.samples import SamplesConfig, write_samples_page
from async_grpo.processes.image_files import read_image
from async_grpo.training.record import Recording
from async_grpo.training.sharding import canary_logprobs
from async_grpo.types import Completion, Prompt, RewardStatus, Sample, Verdict

try:
    import torchvision  # noqa: F401
except (ImportError, RuntimeError):
    HAS_TORCHVISION = False
else:
    HAS_TORCHVISION = True

pytestmark = [pytest.mark.real]
needs_torchvision = pytest.mark.skipif(not HAS_TORCHVISION, reason="vLLM reads images with torchvision")
SEEDS = itertools.count()
VERSIONS = itertools.count(5)  # of the weights, after those of the tests above
# The fake engine takes a tenth of a second for a step: the run must not be over before it can be ended
STEPS = 4 if HAS_TORCHVISION else 60


@pytest.fixture(
    scope="module",
    params=[
        "qwen2_5_vl",
        pytest.param("qwen2_vl", marks=pytest.mark.exhaustive),
        pytest.param("qwen3_vl", marks=pytest.mark.exhaustive),
    ],
)
def kind(request) -> str:
    """The family of the model."""
    return request.param


@pytest.fixture(scope="module")
def folder(kind, tmp_path_factory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp("vision") / "model", kind=kind)


@pytest.fixture(scope="module")
def image_canary(made) -> ImageCanary:
    asked = made(6)
    return ImageCanary(tuple(asked.token_ids.tolist()), asked.images[0])


@pytest.fixture(scope="module")
def engine(folder, image_canary, engine_environment) -> Iterator[EngineThread]:
    config = load_config(folder)
    with closing(
        EngineThread(
            folder,
            vocab_size=config.text_config.vocab_size,
            stop_token_ids=stop_token_ids(folder),
            max_total_tokens=512,
            max_completion_tokens=24,
            image_token_id=config.image_token_id,
            unsampled_token_ids=unsampled_token_ids(config),
            most_images=3,
            image_canary=image_canary,
            image_processor=ImageReader.load(folder, config).name,
            temperature=1.0,
        )
    ) as thread:
        yield thread


@pytest.fixture(scope="module")
def made(folder, tmp_path_factory):
    images = tmp_path_factory.mktemp("images")
    return lambda *seeds: question(folder, images, picture_row(seeds))


def complete(engine: EngineThread, asked, members: int = 1, sampling=None) -> list[Completion]:
    async def collected() -> list[Completion]:
        seeds = {member: next(SEEDS) for member in range(members)}
        reports = engine.worker.complete(asked.token_ids, seeds, sampling, None, asked.images)
        return [report async for report in reports if isinstance(report, Completion)]

    return engine.run(collected())


def trainer_logprobs(policy: PolicyModel, asked, completion: Completion) -> np.ndarray:
    """The trainer's log-probs (T,) of a completion, over the tokens that the engine allowed."""
    ids = np.concatenate([asked.token_ids, completion.token_ids])
    bounds = np.array([0, len(ids)])
    is_completion = np.arange(len(ids)) >= len(asked.token_ids)
    allowed = dataclasses.replace(
        completion.allowed,
        indices=np.concatenate([np.full(len(asked.token_ids), -1, np.int32), completion.allowed.indices]),
    )
    with torch.no_grad():
        logprobs, *_ = policy(
            torch.tensor(ids, dtype=torch.int64),
            torch.tensor(bounds),
            torch.tensor(is_completion),
            1.0,
            policy.token_masks(allowed),
            policy.image_inputs([asked.images], ids, bounds),
        )
    return logprobs.numpy()[is_completion]


@needs_torchvision
def test_engine_and_trainer_agree_on_prompts_with_images_before_and_after_an_update(
    engine, kind, folder, made, image_canary
):
    policy = PolicyModel(load_causal_lm(folder, "float32")).eval()
    policy.image_reader = ImageReader.load(folder, load_config(folder))
    asked_prompts = [made(), made(0), made(1, 0, 3)]
    for version in (1, 2):
        if version == 2:
            # Every tensor changes, the vision tower's as well, so that kept features of images would show
            other = vision_model(seed=5, kind=kind).state_dict()
            policy.model.load_state_dict(other)
        tensors = {name: weight.detach().contiguous() for name, weight in named_weights(policy)}
        manifest = engine.run(engine.worker.update(version, [memoryview(save(tensors))]))
        assert manifest.keys() == tensors.keys()
        assert all(record.in_use and record.is_read_back for record in manifest.values())
        for asked in asked_prompts:
            for completion in complete(engine, asked, members=2):
                assert set(completion.versions) == {version}
                ours = trainer_logprobs(policy, asked, completion)
                np.testing.assert_allclose(completion.logprobs, ours, atol=1e-4)
        text = np.array(image_canary.token_ids, np.int32)
        expected = canary_logprobs(policy, text, images_of=image_canary.images_of)
        np.testing.assert_allclose(engine.run(engine.worker.canary(text)), expected, atol=1e-4)
    # A tower that the engine did not compute with would show in the canary
    with torch.no_grad():
        policy.model.base_model.visual.patch_embed.proj.weight.mul_(1.1)
    changed = canary_logprobs(policy, text, images_of=image_canary.images_of)
    assert np.abs(changed - expected).max() > 0.01


@needs_torchvision
def test_the_trainer_agrees_with_transformers_on_what_the_engine_sampled(engine, kind, folder, made):
    # An independent reference: transformers' own forward, whose softmax has all tokens. The excluded ones make a difference
    reference = vision_model(kind=kind)
    tensors = {name: weight.detach().contiguous() for name, weight in reference.named_parameters()}
    engine.run(engine.worker.update(3, [memoryview(save(tensors))]))
    asked = made(0)
    (completion,) = complete(engine, asked)
    ids = np.concatenate([asked.token_ids, completion.token_ids])
    alone = logprobs_alone(reference, folder, ids, [seeded_picture(0)])[len(asked.token_ids) :]
    # The engine's log-probs are larger by the share of the two excluded tokens, which is small and positive
    differences = completion.logprobs - alone
    assert (differences > 0).all() and differences.max() < 0.2


@needs_torchvision
def test_a_wrong_image_or_placeholder_is_refused_by_name(engine, made, monkeypatch):
    asked = made(0)
    other = made(2)
    (image,) = asked.images
    swapped = dataclasses.replace(asked, images=(dataclasses.replace(image, path=other.images[0].path),))
    with pytest.raises(ImagesDiffer, match="holds another image"):
        complete(engine, swapped)
    placeholder = engine.worker.settings.image_token_id
    place = asked.token_ids.tolist().index(placeholder)
    twice = np.insert(asked.token_ids, place, [placeholder] * image.num_tokens).astype(np.int32)
    with pytest.raises(ImagesDiffer, match="expanded twice"):
        complete(engine, dataclasses.replace(asked, token_ids=twice))
    # vLLM gets the expanded ids, and expands them again
    import async_grpo.inference.image_requests as module

    monkeypatch.setattr(module, "unexpanded", lambda token_ids, *_: list(token_ids))
    with pytest.raises(ImagesDiffer, match="the engine reads a prompt of .* tokens, the trainer of"):
        complete(engine, asked)


@needs_torchvision
def test_the_engine_never_samples_a_placeholder_however_likely(engine, kind, made):
    # The head makes the placeholder of images far more likely than any other token
    model = vision_model(kind=kind)
    placeholder = model.config.image_token_id
    with torch.no_grad():
        model.lm_head.weight[placeholder] = 0
        model.lm_head.weight[placeholder] += 50 * model.lm_head.weight.std() * torch.randn(128)
    tensors = {name: weight.detach().contiguous() for name, weight in model.named_parameters()}
    engine.run(engine.worker.update(4, [memoryview(save(tensors))]))
    asked = made(0)
    for completion in complete(engine, asked, members=8):
        refuse_sampled_images(completion, engine.worker.settings.unsampled_token_ids)
        assert np.isfinite(completion.logprobs).all()


class EngineGeneration:
    """The turns of a trajectory on the real engine."""

    def __init__(self, engine: EngineThread) -> None:
        self.engine = engine
        self.prompts: list[Prompt] = []

    async def generate(self, prompt, count, sampling=None, session=None):
        self.prompts.append(prompt)
        for completion in await asyncio.to_thread(complete, self.engine, prompt, count, sampling):
            yield completion


async def looks_twice(prompt, policy):
    """Show an image, and after the answer another one."""
    first = await policy.complete([shown(1)], max_tokens=6)
    await policy.complete([shown(1), first.message, shown(2)], max_tokens=6)
    return policy.trajectory(1.0)


def shown(seed: int):
    address = data_url(encoded(seeded_picture(seed)), "image/png")
    parts = [{"type": "image_url", "image_url": {"url": address}}, {"type": "text", "text": "This?"}]
    return {"role": "user", "content": parts}


async def asks_the_responses_api(prompt, policy):
    """Send an image to the endpoint as OpenAI's client does, and continue the stored answer with another one."""
    endpoint = AgentEndpoint()
    await endpoint.start()
    key, _ = endpoint.open(policy)
    try:
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=key, max_retries=0) as client:
            ask = partial(client.responses.create, model="policy", max_output_tokens=6)
            first = await ask(input=[input_shown(1)])
            await ask(input=[input_shown(2)], previous_response_id=first.id)
    finally:
        await endpoint.close()
    return policy.trajectory(1.0)


def input_shown(seed: int):
    """A message with an image, as the Responses API has it."""
    address = data_url(encoded(seeded_picture(seed)), "image/png")
    parts = [{"type": "input_image", "image_url": address}, {"type": "input_text", "text": "This?"}]
    return {"role": "user", "content": parts}


@needs_torchvision
@pytest.mark.parametrize("program", [looks_twice, asks_the_responses_api])
def test_images_of_an_environment_are_read_and_trained_on_alike(engine, kind, folder, tmp_path, program):
    policy = PolicyModel(load_causal_lm(folder, "float32")).eval()
    policy.image_reader = ImageReader.load(folder, load_config(folder))
    tensors = {name: weight.detach().contiguous() for name, weight in named_weights(policy)}
    engine.run(engine.worker.update(next(VERSIONS), [memoryview(save(tensors))]))
    files = RunImages([], frozenset())
    placeholder = engine.worker.settings.image_token_id
    images = ConversationImages(policy.image_reader, placeholder, 3, tmp_path / "images", files)
    chat = Chat(vision_tokenizer(), images=images)
    limits = TrajectoryLimits(turns=9, tokens=400, turn_tokens=None, seconds=200, vocabulary=300)
    generation = EngineGeneration(engine)
    playing = Played(generation, program, chat, limits)
    prompt = Prompt(0, np.array([5], np.int32), {"input": "ab"}, 0)

    async def play() -> list[Completion]:
        return [trajectory async for trajectory in playing.generate(prompt, 1)]

    (trajectory,) = asyncio.run(play())
    assert not trajectory.failure, trajectory.failure
    sample = Sample(prompt, trajectory, Verdict(RewardStatus.OK, 1.0))
    assert [len(engine_prompt.images) for engine_prompt in generation.prompts] == [1, 2]
    for sequence in sample.sequences:
        ids = sequence.token_ids
        bounds = np.array([0, len(ids)])
        is_sampled = sequence.laid_out(np.ones(len(sequence.completion), bool), False)
        with torch.no_grad():
            logprobs, *_ = policy(
                torch.tensor(ids, dtype=torch.int64),
                torch.tensor(bounds),
                torch.tensor(is_sampled),
                1.0,
                policy.token_masks(allowed_tokens_of(sequence)),
                policy.image_inputs([images_of(sequence)], ids, bounds),
            )
        engine_logprobs = sequence.completion.logprobs
        np.testing.assert_allclose(engine_logprobs, logprobs.numpy()[is_sampled], atol=1e-4)


def test_a_sampled_placeholder_is_refused_by_name(made):
    completion = dataclasses.replace(
        Completion(
            token_ids=np.array([5, 261], np.int32),
            logprobs=np.zeros(2, np.float32),
            versions=np.zeros(2, np.int32),
            finish_reason="stop",
            text="",
        )
    )
    refuse_sampled_images(completion, ())
    with pytest.raises(ImagesDiffer, match="the policy sampled the image token 261 as token 1"):
        refuse_sampled_images(completion, (261, 262))


def write_rows(folder: Path) -> Path:
    """Rows with no, one and two pictures: as files beside the rows, and as data URLs."""
    rows = []
    for number in range(8):
        row = picture_row([number] * (number % 3), "Write numbers.")
        if number % 3 == 1:
            (folder / f"{number}.png").write_bytes(encoded(picture(number)))
            row["messages"][0]["content"][0] = {"type": "image", "image": f"{number}.png"}
        rows.append(row)
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def start(folder: Path, model: Path, rows: Path, **changes) -> subprocess.Popen:
    options = {
        "model-name-or-path": model,
        "data-path": rows,
        "reward-fns": "format",
        "batch-size": 4,
        "samples-per-question": 4,
        "num-training-batches": STEPS,
        "max-tokens-per-gpu": 1024,
        "max-generation-tokens": 16,
        "kl-coef": 0,
        "num-warmup-steps": 0,
        "checkpoint-every-s": 1,
        "dump-samples-filename": "samples.jsonl",
        "start-timeout-s": 240,
        "output-dir": folder,
        "run-name": folder.name,
        "engine": "vllm" if HAS_TORCHVISION else "fake",
        "enforce-eager": "true",
        "record": "true",
    }
    command = [sys.executable, "-m", "async_grpo", "run"]
    command += [f"--{name}={value}" for name, value in (options | changes).items()]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@needs_torchvision
@pytest.mark.exhaustive
@pytest.mark.timeout(400)
def test_the_demo_of_seeing_shows_what_the_model_counted(tmp_path):
    # A model of few training steps: the demo's own takes minutes
    shapes.make_shapes(
        tmp_path / "cache" / "async-grpo" / cache_folder("shapes", shapes.RECIPE).name, max_steps=2
    )
    command = [sys.executable, "-m", "async_grpo", "demo", "--see", "--steps", "2"]
    command += ["--output-dir", str(tmp_path / "demo")]
    variables = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "accuracy" in done.stdout and "512 completions of 128 held-out tasks" in done.stdout
    assert "data:image/png;base64," in (tmp_path / "demo" / "samples.html").read_text()
    assert lines(tmp_path / "demo")[0]["mismatch_kl"] < 1e-4


@pytest.mark.exhaustive
@pytest.mark.timeout(500)
def test_a_run_on_images_is_ended_and_goes_on_where_it_was(tmp_path):
    folder = save_vision_model(tmp_path / "model")
    rows = write_rows(tmp_path)
    run = tmp_path / "run"
    first = start(run, folder, rows)
    wait_for_step(run, 2, first)
    first.send_signal(signal.SIGTERM)
    said, _ = first.communicate(timeout=120)
    assert first.returncode == 75, said
    second = start(run, folder, rows)
    said, _ = second.communicate(timeout=300)
    assert second.returncode == 0, said
    steps = lines(run)
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    samples = lines(run, "samples.jsonl")
    stored = {path.name for path in (run / "images").iterdir()}
    shown = {digest for sample in samples for digest in sample.get("images", ())}
    assert shown and shown <= stored
    assert all(sample["input"].count("<|image_pad|>") == len(sample.get("images", ())) for sample in samples)
    if HAS_TORCHVISION:
        # On the policy, the engine's log-probs are the trainer's
        assert steps[0]["mismatch_kl"] < 1e-4
    write_samples_page(SamplesConfig(path=str(run), output=str(tmp_path / "samples.html")))
    assert "data:image/png;base64," in (tmp_path / "samples.html").read_text()
    # The record names the images by their digests, for a replay
    batch = Recording(run, 1).next_message(0)
    for images in batch.images:
        for image in images:
            assert read_image(image).mode == "RGB"
    (model,) = sorted((run / "hf_format").iterdir())[-1:]
    assert (model / "preprocessor_config.json").is_file()
    assert load_causal_lm(model, "float32").config.model_type == "qwen2_5_vl"
