"""`DrawingEngine`: draws pictures with a flow-matching model, and receives new weights at the same time.

This module uses plain asyncio. The Ray actor that runs the engine is in `cluster/`.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any, Self

import numpy as np
import torch

from async_grpo.algorithm.flow.sde import ode_step, step_logprobs
from async_grpo.algorithm.flow.windows import stochastic_steps
from async_grpo.errors import ConfigurationError, RequestRefused, WorkerLost
from async_grpo.inference.copied_weights import copy_weights
from async_grpo.inference.drawing.pictures import Denoising, DrawnPrompt, Picture, png_of
from async_grpo.inference.drawing.prompts import prompt_reader
from async_grpo.messages import FlowSettings, SharedRunSettings
from async_grpo.modeling.flow.canary import flow_canary_logprobs
from async_grpo.modeling.flow.folder import FlowFolder, read_flow_folder
from async_grpo.modeling.flow.policy import FlowPolicy
from async_grpo.modeling.flow.prompt_inputs import PromptInputs
from async_grpo.modeling.flow.schedule import FlowSchedule
from async_grpo.modeling.load import torch_dtype
from async_grpo.protocols import Manifest
from async_grpo.types import Completion, Sampling
from async_grpo.weights.package import unpack

UNSYNCED = -1  # policy version before the first weights


class DrawingEngine:
    """An `Engine` that draws pictures.

    A prompt is the number of a label (one token), or the bytes of a text (one token each). A completion has one token
    for each stochastic denoising step, or a single token if the trainer needs finished pictures. All unfinished pictures
    take their next step in one forward pass, even if they are at different steps (continuous batching). New weights are
    loaded between two passes, so the steps of a picture may have different policy versions.

    Args:
        policy: The policy.
        folder: The description of the model's folder.
        settings: Settings that all workers of the run share.
        max_pictures: Number of pictures that are drawn at once. Others wait.
    """

    # The registry of workers requires a number of tokens for which there is room. This engine is limited only by its
    # number of pictures, so the number is just large
    kv_cache_tokens = 1 << 20

    def __init__(
        self, policy: FlowPolicy, folder: FlowFolder, settings: SharedRunSettings, max_pictures: int
    ) -> None:
        self.policy_version = UNSYNCED
        self._policy = policy.eval().requires_grad_(False)
        self._folder = folder
        self._reader = prompt_reader(folder, policy)
        self._settings = settings
        self._max_pictures = max_pictures
        self._schedule_of = cache(folder.schedule)  # number of steps -> their times
        self._pictures: list[Picture] = []  # unfinished pictures, in the order of arrival
        self._arrival = asyncio.Event()
        # A single thread, so that a forward pass and an update of the weights never run at the same time
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drawing")
        self._serving: asyncio.Task[None] | None = None
        self._failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._is_closed = False
        self._progress = _no_progress()

    @classmethod
    def check_model(cls, model_path: str, settings: SharedRunSettings) -> None:
        """Refuse a folder that describes another model than the trainer's. See `Engine`."""
        if settings.flow is None:
            raise ConfigurationError(
                f"the run {settings.run_name!r} trains a language model, and --engine drawing draws: start the run with "
                "--policy flow, or the worker with another --engine"
            )
        if read_flow_folder(model_path).fingerprint != settings.model_fingerprint:
            raise ConfigurationError(
                f"--model_path {model_path} holds another model or scheduler than the trainer of run "
                f"{settings.run_name!r}: start the worker with the trainer's --model-name-or-path"
            )

    @classmethod
    def start(cls, config: Any, settings: SharedRunSettings) -> Self:
        """Load the model, on the GPU if there is one. Must run inside an event loop. See `Engine`."""
        assert settings.flow is not None, "`check_model` has refused other runs"
        flow = settings.flow
        folder = read_flow_folder(config.model_path).with_options(flow.picture_size, flow.guidance)
        policy = FlowPolicy.of_folder(
            folder,
            flow.num_steps,
            settings.temperature,
            guidance=flow.guidance,
            dtype=torch_dtype(settings.dtype),
        )
        policy.cast_weights()
        policy.to("cuda" if torch.cuda.is_available() else "cpu")
        return cls(policy, folder, settings, config.max_sequences)

    @property
    def _flow(self) -> FlowSettings:
        assert self._settings.flow is not None
        return self._settings.flow

    async def complete(
        self, prompt_token_ids: np.ndarray, seeds: Mapping[int, int], sampling: Sampling | None = None
    ) -> AsyncGenerator[Completion]:
        """Yield the finished pictures. See `protocols.Engine`.

        At temperature 0 there are no stochastic steps: the picture depends only on its first noise, and thus on the
        seed (ODE). `Sampling.max_tokens` sets another number of denoising steps.

        Raises:
            RequestRefused: The request has a grammar or stop texts.
            ConfigurationError: The prompt is not one of this model.
            WorkerLost: A forward pass failed, or the engine is closed.
        """
        self._refuse_if_ended()
        sampling = sampling or Sampling()
        if sampling.grammar or sampling.stop:
            raise RequestRefused("--engine drawing draws pictures, which have no grammar and no stop texts")
        prompt = await asyncio.wrap_future(self._thread.submit(self._reader.read, prompt_token_ids))
        pictures = [self._begin(prompt, member, seed, sampling) for member, seed in seeds.items()]
        self._pictures += pictures
        self._arrival.set()
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve())
        try:
            for finished in asyncio.as_completed([picture.completion for picture in pictures]):
                yield await finished
        finally:
            for picture in pictures:
                picture.completion.cancel()

    def _refuse_if_ended(self) -> None:
        """Raise WorkerLost if the task that advances pictures has ended. A new request would otherwise wait forever."""
        if self._is_closed:
            raise WorkerLost("the engine that draws is closed")
        if self._failure.done():
            raise WorkerLost(self._failure.result())

    def _begin(self, prompt: DrawnPrompt, member: int, seed: int, sampling: Sampling) -> Picture:
        """Return a new picture, before its first step."""
        schedule: FlowSchedule = self._schedule_of(sampling.max_tokens or self._flow.num_steps)
        is_for_training = sampling.temperature is None
        noise_level = self._noise_level if sampling.temperature is None else sampling.temperature
        stochastic = range(0)
        if noise_level:
            # An evaluation may use more steps than training. The window of stochastic steps then has the same number of
            # steps as in training
            stochastic = stochastic_steps(
                schedule.num_steps,
                min(self._flow.window, schedule.num_steps),
                self._flow.window_order,
                seed=seed,
                policy_version=max(0, self.policy_version),
                versions_per_place=self._flow.window_every,
            )
        return Picture(
            member=member,
            prompt=prompt,
            denoising=Denoising(schedule, noise_level),
            stochastic=stochastic,
            generator=torch.Generator().manual_seed(seed),
            shape=self._folder.latent_shape,
            keeps_finished=self._flow.trains_finished and is_for_training,
        )

    @property
    def _noise_level(self) -> float:
        """Return the noise level of pictures that are trained on."""
        return 0.0 if self._flow.trains_finished else self._settings.temperature

    async def _serve(self) -> None:
        """Advance all pictures, step by step, until this task is cancelled."""
        while True:
            self._pictures = [picture for picture in self._pictures if not picture.completion.done()]
            batch = self._pictures[: self._max_pictures]
            if not batch:
                self._arrival.clear()
                await self._arrival.wait()
                continue
            try:
                await asyncio.wrap_future(self._thread.submit(self._advance, batch))
            except Exception as error:
                self._fail(error)
                return
            now = time.time()
            self._progress["token_timeline"].append((now, len(batch)))
            for picture in batch:
                if picture.is_finished and not picture.completion.done():
                    self._progress["busy"].append((picture.begun_at, now))
                    picture.completion.set_result(picture.finished())

    def _fail(self, error: Exception) -> None:
        """Fail all requests, and end the worker, because the next forward pass would probably fail, too."""
        reason = f"a denoising step failed: {type(error).__name__}: {error}"
        if not self._failure.done():
            self._failure.set_result(reason)
        for picture in self._pictures:
            if not picture.completion.done():
                picture.completion.set_exception(WorkerLost(reason))

    @torch.no_grad()
    def _advance(self, pictures: Sequence[Picture]) -> None:
        """Do one step of each picture. Runs in the engine's thread."""
        in_order = sorted(pictures, key=_denoising_order)
        for _, same_denoising in itertools.groupby(in_order, key=_denoising_order):
            self._advance_alike(list(same_denoising))
        self._decode([picture for picture in pictures if picture.is_finished])

    def _advance_alike(self, pictures: Sequence[Picture]) -> None:
        """Do one step of pictures with the same `Denoising`, in one forward pass."""
        device = self._policy.device
        denoising = pictures[0].denoising
        schedule = denoising.schedule
        states = torch.stack([picture.state for picture in pictures]).to(device)
        steps = torch.tensor([picture.step for picture in pictures], device=device)
        labels = torch.tensor([picture.prompt.label for picture in pictures], device=device)
        conditions = [picture.prompt.condition for picture in pictures]
        prompts = PromptInputs.of_steps(labels, conditions, range(len(pictures)))
        velocities = self._policy.velocity(states, steps, prompts, schedule)
        times = schedule.times(steps)
        next_states = ode_step(states, velocities, times.begin, times.end)
        logprobs = torch.zeros(len(pictures), device=device)
        is_stochastic = torch.tensor([picture.is_stochastic for picture in pictures], device=device)
        if is_stochastic.any():
            means, stds = self._policy.moments(states, velocities, steps, schedule, denoising.noise_level)
            noise = torch.stack([_noise_of(picture) for picture in pictures]).to(device)
            drawn_states = means + stds[:, None, None, None] * noise
            next_states = torch.where(is_stochastic[:, None, None, None], drawn_states, next_states)
            logprobs = step_logprobs(next_states, means, stds)
        rows = zip(pictures, next_states.cpu(), logprobs.tolist(), strict=True)
        for picture, state, logprob in rows:
            picture.advance(state, logprob, self.policy_version)

    def _decode(self, pictures: Sequence[Picture]) -> None:
        """Make the files of finished pictures. Decode them one by one, because a VAE needs much memory for each picture."""
        for picture in pictures:
            pixels = self._reader.decode(picture.state[None].to(self._policy.device))[0]
            if not torch.isfinite(pixels).all():
                # In a PNG file, these numbers would become black, and a reward would score the picture like any other
                raise ArithmeticError(
                    f"a picture with policy version {self.policy_version} has pixels that are no finite numbers"
                )
            picture.png = png_of(pixels.float().cpu().numpy())

    async def update(self, version: int, chunks: Sequence[memoryview]) -> Manifest:
        """Replace the weights between two forward passes. See `Engine`.

        Raises:
            WeightsDidNotLand: A name or shape is not the model's. Some weights may already have been replaced, so the
                engine needs another update.
        """
        tensors, manifest = await asyncio.to_thread(unpack, chunks)
        paused_at = time.monotonic()
        not_in_use = await asyncio.wrap_future(self._thread.submit(self._load, version, tensors))
        self._progress["paused_s"] += time.monotonic() - paused_at
        checked_manifest = {}
        for name, record in manifest.items():
            checked_manifest[name] = replace(record, in_use=name not in not_in_use, is_read_back=True)
        return checked_manifest

    def _load(self, version: int, tensors: Mapping[str, torch.Tensor]) -> set[str]:
        """Copy the tensors into the model, and return the names of those that the model does not use.

        Runs in the thread.
        """
        not_in_use = copy_weights(self._policy, tensors)
        self.policy_version = version
        return not_in_use

    async def canary(self, token_ids: np.ndarray) -> np.ndarray:
        """Return the log-probs (N,) of fixed steps of a fixed picture. The first is 0. See `Engine`."""
        return await asyncio.wrap_future(self._thread.submit(flow_canary_logprobs, self._policy, token_ids))

    def progress(self) -> dict[str, Any]:
        """Return the statistics since the last call; see `Engine`. A token is a denoising step."""
        progress = self._progress
        self._progress = _no_progress()
        return progress

    async def until_failure(self) -> str:
        """Wait until a forward pass fails. See `Engine`."""
        return await asyncio.shield(self._failure)

    async def begin_anew(self) -> bool:
        """Return whether the engine can serve a restarted trainer. See `Engine`."""
        self.policy_version = UNSYNCED
        return not self._failure.done()

    def close(self) -> None:
        """Fail all requests and accept no more.

        If a forward pass is running in the thread, it ends, and its result is dropped.
        """
        self._is_closed = True
        if self._serving is not None:
            self._serving.cancel()
        _cancel_all(self._pictures)
        self._thread.shutdown(wait=False, cancel_futures=True)


def _denoising_order(picture: Picture) -> tuple[int, float]:
    """Return a sort key that is equal for pictures with the same `Denoising`."""
    return picture.denoising.schedule.num_steps, picture.denoising.noise_level


def _noise_of(picture: Picture) -> torch.Tensor:
    """Return new noise if the picture's next step is stochastic, else zeros."""
    return picture.noise() if picture.is_stochastic else torch.zeros(picture.shape)


def _cancel_all(pictures: Iterable[Picture]) -> None:
    for picture in pictures:
        picture.completion.cancel()


def _no_progress() -> dict[str, Any]:
    return {"token_timeline": [], "paused_s": 0.0, "busy": []}
