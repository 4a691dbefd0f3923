"""The verifiers of a run: for each adapter some actors with killable processes, on any node, and the judges.

Judges need no process: they run in the controller's own, and share the cluster's traffic control.
"""

import contextlib
import dataclasses
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import ray

from async_grpo.cluster.channel import Channel, ChannelServer
from async_grpo.cluster.rate_limit_actor import RemoteRateLimiter
from async_grpo.cluster.ray_session import zero_cpu_actor
from async_grpo.options.command_line import log_to_own_file
from async_grpo.options.redaction import register_secrets
from async_grpo.rewards.adapter.decorators import is_judge
from async_grpo.rewards.adapter.registry_source import RewardRegistrySource, resolve
from async_grpo.rewards.cache.verdicts import VerdictCache, version_of, version_of_judge
from async_grpo.rewards.config import RewardConfig
from async_grpo.rewards.inline import BOUNDED, InlineReward
from async_grpo.rewards.isolation.adapter_process import AdapterProcess
from async_grpo.rewards.judge_worker import JudgeWorker, LimitedWorker
from async_grpo.rewards.judges.idle_sleep import IdleSleep
from async_grpo.rewards.middleware import PRICE, Budget, CallMiddleware, most_it_costs
from async_grpo.rewards.pool import EVALUATION, TRAINING, VerifierPool
from async_grpo.rewards.verifier_worker import VerifierWorker

log = logging.getLogger(__name__)
SLOTS_PER_ACTOR = 8  # adapter processes of one verifier actor: they share its messages, and a node


class VerifierActor(ChannelServer):
    """Some killable processes of one adapter, on any node. Each is a slot, called by `score SLOT` and the like."""

    def __init__(self, make_process: Callable[[], AdapterProcess]) -> None:
        log_to_own_file("verifiers")
        self._make_process = make_process
        self._methods: dict[str, Callable[..., Awaitable[Any]]] = {"open": self._open}
        self.serve(self._methods)

    async def _open(self, slot: int) -> tuple[int, bool, bool]:
        """Start a process; returns what a queue wants to know of a worker: capacity, prefetch, has_post_process."""
        process = self._make_process()
        for name in ("score", "post_process", "close"):
            self._methods[f"{name} {slot}"] = getattr(process, name)
        await process.start()
        if not process.prefetch:  # a place is empty until its answer has travelled
            self.answer_delay_s = 0.02
        return process.capacity, process.prefetch, process.has_post_process


class RunVerification:
    """`Verification` of a run: a `VerifierPool` whose workers are the slots of `VerifierActor`s, and the run's judges.

    secrets: environment variables with the judges' keys, for this process. environment: those of the rewards' processes,
    which see an allow-list and none of this process's others.
    """

    def __init__(
        self,
        source: RewardRegistrySource,
        config: RewardConfig,
        budget_path: str | None,
        secrets: Mapping[str, str],
        environment: Mapping[str, str],
    ) -> None:
        os.environ.update(secrets)
        register_secrets([*secrets.values(), *environment.values()])
        self._source, self._config, self._environment = source, config, environment
        rewards = resolve(source, config.all_names)
        self._adapters = {name: config.with_address(reward) for name, reward in rewards.items()}
        self._judges = {name: adapter for name, adapter in self._adapters.items() if is_judge(adapter)}
        bounded = {name for name, adapter in self._adapters.items() if adapter in BOUNDED}
        self._inline = {name for name in bounded if not config.has_verifiers(name)}
        self._hosts: dict[str, list[_VerifierHost]] = {name: [] for name in self._adapters}
        self._open = contextlib.AsyncExitStack()  # the last is closed first
        self._rate_limiter = RemoteRateLimiter()
        self._idle_sleep: IdleSleep | None = None
        if config.model_urls and config.judge_idle_sleep_s is not None:
            self._idle_sleep = IdleSleep(config.model_urls, config.judge_idle_sleep_s)
            self._open.push_async_callback(self._idle_sleep.close)
        self._open.push_async_callback(self._rate_limiter.close)
        self._middleware = self._make_middleware(budget_path)
        in_processes = self._adapters.keys() - self._judges.keys() - self._inline
        self._pool = pool = VerifierPool(
            config.adapters,
            partial(self._make_worker, phase=TRAINING),
            make_evaluator=partial(self._make_worker, phase=EVALUATION),
            workers={name: config.num_verifiers(name) for name in in_processes},
            evaluation_workers=dict.fromkeys(in_processes, config.evaluation_verifiers),
            combination=config.combination,
            fallbacks=config.fallbacks,
            middleware=self._middleware,
            timeout_s=config.reward_timeout_s,
        )
        self._open.push_async_callback(pool.close)
        self.start, self.verify, self.post_process = pool.start, pool.verify, pool.post_process
        self.close = self._open.aclose

    async def take_stats(self) -> dict[str, Any]:
        """Since the last call: `verifiers`, by adapter, and the numbers of cache and budget."""
        return {"verifiers": self._pool.take_stats(), **self._middleware.stats()}

    def _make_middleware(self, budget_path: str | None) -> CallMiddleware:
        config, cache, budget = self._config, None, None
        if config.verdict_cache:
            max_mb = config.verdict_cache_mb
            max_bytes = None if max_mb is None else round(max_mb * 2**20)
            cache = VerdictCache(config.verdict_cache, max_bytes=max_bytes)
            self._open.push_async_callback(cache.close)
        paid = {name: judge for name, judge in self._judges.items() if getattr(judge, PRICE, None)}
        if paid:
            budget = Budget(config.judge_budget, policy=config.judge_budget_policy, path=budget_path)
        return CallMiddleware(
            versions=self._versions() if cache else {},
            cache=cache,
            budget=budget,
            estimates={name: partial(most_it_costs, judge) for name, judge in paid.items()},
        )

    def _versions(self) -> dict[str, str]:
        """Of the rewards whose answers the cache keeps: by them it tells answers apart."""
        versions, options = {}, self._config.options_by_name
        for name, adapter in self._adapters.items():
            digest = self._source.digests.get(name, self._source.sha256)
            if is_judge(adapter):
                versions[name] = version_of_judge(adapter, digest, self._config)
            elif getattr(adapter, "cacheable", False) is True:  # `@cacheable`
                versions[name] = version_of(digest, options)
        log.info("the verdict cache keeps the answers of %s", ", ".join(versions) or "no reward of this run")
        return versions

    async def _make_worker(self, adapter: str, phase: str) -> VerifierWorker:
        judge: Any = self._adapters[adapter]
        limits = self._config.limits.get(adapter)
        if is_judge(judge):
            endpoint = judge.endpoint()
            if limits:
                endpoint = dataclasses.replace(endpoint, limits=limits.over(endpoint.limits))
            idle_sleep = self._idle_sleep if self._config.are_asked_by(judge) else None
            return JudgeWorker(adapter, judge, endpoint, self._rate_limiter, phase, idle_sleep)
        slot = await self._make_slot(adapter)
        if limits is None:
            return slot
        key = f"{adapter} of {ray.get_runtime_context().namespace}"  # another run's has limits of its own
        return LimitedWorker(slot, self._rate_limiter, key, limits, phase)

    async def _make_slot(self, adapter: str) -> VerifierWorker:
        """One process more, in an actor that has room for it, or in a new one; for some rewards this process will do."""
        if adapter in self._inline:
            return InlineReward(adapter, self._adapters[adapter], self._config.options_by_name)
        hosts = self._hosts[adapter] = [host for host in self._hosts[adapter] if not host.channel.lost]
        host = next((host for host in hosts if len(host.slots) < SLOTS_PER_ACTOR), None)
        if host is None:
            given = self._source, adapter, self._config.options_by_name
            memory = round(self._config.reward_memory_gb * 2**30)
            make = partial(AdapterProcess, *given, environment=self._environment, memory_limit_bytes=memory)
            hosts.append(host := _VerifierHost(adapter, make))
        return await host.open()


class _VerifierHost:
    """A `VerifierActor` as the pool sees it; `slots`: those of its processes that run."""

    def __init__(self, adapter: str, make_process: Callable[[], AdapterProcess]) -> None:
        self.actor = zero_cpu_actor(VerifierActor, scheduling_strategy="SPREAD").remote(make_process)
        self.channel = Channel(self.actor, f"verifier of {adapter}")
        self.slots: set[int] = set()

    async def open(self) -> "_VerifierSlot":
        """Start one process more."""
        slot = min(set(range(SLOTS_PER_ACTOR)) - self.slots)
        self.slots.add(slot)
        try:
            return _VerifierSlot(self, slot, await self.channel.call("open", slot))
        except BaseException:
            self.slots.discard(slot)
            raise

    async def close(self, slot: int) -> None:
        """End a process; with the last one its actor goes, too."""
        try:
            if not self.channel.lost:  # of the last one, too: its reward may have a `close`
                await self.channel.call(f"close {slot}")
        finally:
            self.slots.discard(slot)  # not before, or the first to be closed would end the actor of all
            if not self.slots or self.channel.lost:
                self.channel.close()
                ray.kill(self.actor)


class _VerifierSlot:
    """`VerifierWorker`: one process of a `VerifierActor`."""

    def __init__(self, host: _VerifierHost, slot: int, traits: tuple[int, bool, bool]) -> None:
        call = host.channel.call
        self.score = partial(call, f"score {slot}")
        self.post_process = partial(call, f"post_process {slot}")
        self.close = partial(host.close, slot)
        self.capacity, self.prefetch, self.has_post_process = traits
        self._channel = host.channel

    @property
    def is_lost(self) -> bool:
        """The actor is gone, and so are all its slots."""
        return self._channel.lost is not None
