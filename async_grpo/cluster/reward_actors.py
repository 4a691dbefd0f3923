"""The verifiers of a run: reward adapters and judges.

Most adapters run in killable processes, which actors on any node start. Inline adapters, whose time is bounded for any
input, and judges run in the controller's process. Judges keep to the limits of the cluster's rate limiter.
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
from async_grpo.options.log_setup import log_to_own_file
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
# Maximum number of adapter processes of one verifier actor. They run on the actor's node. The actor sends the answers
# of all of them in shared messages
SLOTS_PER_ACTOR = 8
# Seconds that an answer waits to be sent together with others, if its process does not prefetch work. It is short,
# because such a process gets new work only after its answer was sent
ANSWER_DELAY_WITHOUT_PREFETCH_S = 0.02


class VerifierActor(ChannelServer):
    """An actor that starts and kills processes of one adapter, on one node.

    Each process is a slot with a number N. Its handlers are named `score N`, `post_process N` and `close N`.
    """

    def __init__(self, make_process: Callable[[], AdapterProcess]) -> None:
        log_to_own_file("verifiers")
        self._make_process = make_process
        self._methods: dict[str, Callable[..., Awaitable[Any]]] = {"open": self._open}
        self.serve(self._methods)

    async def _open(self, slot: int) -> tuple[int, bool, bool]:
        """Start a process, and return its `capacity`, `prefetch` and `has_post_process` (see `VerifierWorker`)."""
        process = self._make_process()
        for name in ("score", "post_process", "close"):
            self._methods[f"{name} {slot}"] = getattr(process, name)
        await process.start()
        if not process.prefetch:
            self.answer_delay_s = ANSWER_DELAY_WITHOUT_PREFETCH_S
        return process.capacity, process.prefetch, process.has_post_process


class RunVerification:
    """`Verification` of a run: a `VerifierPool` whose workers are the slots of `VerifierActor`s, and the run's judges.

    Args:
        source: The registry and files that define the rewards.
        config: The run's options for rewards.
        budget_path: File that records what the judges cost; None keeps no record.
        secrets: Environment variables with the judges' keys, which are set in this process.
        environment: The environment variables that the adapter processes get.
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
        self._source = source
        self._config = config
        self._environment = environment
        rewards = resolve(source, config.all_names)
        self._adapters = {name: config.with_address(reward) for name, reward in rewards.items()}
        self._judges = {name: adapter for name, adapter in self._adapters.items() if is_judge(adapter)}
        # Names of the rewards that this process computes itself, because their time is bounded for any input
        self._inline = set()
        for name, adapter in self._adapters.items():
            if adapter in BOUNDED and not config.has_verifiers(name):
                self._inline.add(name)
        self._hosts: dict[str, list[_VerifierHost]] = {name: [] for name in self._adapters}
        self._resources = contextlib.AsyncExitStack()  # everything that `close` closes
        self._rate_limiter = RemoteRateLimiter()
        self._idle_sleep: IdleSleep | None = None
        if config.model_urls and config.judge_idle_sleep_s is not None:
            self._idle_sleep = IdleSleep(config.model_urls, config.judge_idle_sleep_s)
            self._resources.push_async_callback(self._idle_sleep.close)
        self._resources.push_async_callback(self._rate_limiter.close)
        self._middleware = self._make_middleware(budget_path)
        in_processes = self._adapters.keys() - self._judges.keys() - self._inline
        self._pool = VerifierPool(
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
        self._resources.push_async_callback(self._pool.close)
        self.start = self._pool.start
        self.verify = self._pool.verify
        self.post_process = self._pool.post_process
        self.close = self._resources.aclose

    async def take_stats(self) -> dict[str, Any]:
        """Return the statistics since the last call.

        The key `verifiers` has those of the adapters. The verdict cache and the budget add further keys.
        """
        return {"verifiers": self._pool.take_stats(), **self._middleware.stats()}

    def _make_middleware(self, budget_path: str | None) -> CallMiddleware:
        """Make the middleware of calls to adapters: the verdict cache and the budget of the judges."""
        config = self._config
        cache = None
        budget = None
        if config.verdict_cache:
            max_mb = config.verdict_cache_mb
            max_bytes = None if max_mb is None else round(max_mb * 2**20)
            cache = VerdictCache(config.verdict_cache, max_bytes=max_bytes)
            self._resources.push_async_callback(cache.close)
        paid_judges = {name: judge for name, judge in self._judges.items() if getattr(judge, PRICE, None)}
        if paid_judges:
            budget = Budget(config.judge_budget, policy=config.judge_budget_policy, path=budget_path)
        return CallMiddleware(
            versions=self._versions() if cache else {},
            cache=cache,
            budget=budget,
            estimates={name: partial(most_it_costs, judge) for name, judge in paid_judges.items()},
        )

    def _versions(self) -> dict[str, str]:
        """Return the version of each cacheable reward, by name. The cache ignores answers of other versions."""
        versions = {}
        options = self._config.options_by_name
        for name, adapter in self._adapters.items():
            digest = self._source.digests.get(name, self._source.sha256)
            if is_judge(adapter):
                versions[name] = version_of_judge(adapter, digest, self._config)
            # the decorator `@cacheable` sets this attribute
            elif getattr(adapter, "cacheable", False) is True:
                versions[name] = version_of(digest, options)
        log.info("the verdict cache keeps the answers of %s", ", ".join(versions) or "no reward of this run")
        return versions

    async def _make_worker(self, adapter: str, phase: str) -> VerifierWorker:
        """Make a worker of an adapter.

        Args:
            adapter: Name of the adapter.
            phase: TRAINING or EVALUATION. The rate limiter counts the calls of the two phases separately.
        """
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
        # A judge's limits apply to all runs of the cluster, but an adapter's only to this run. So its key names the run
        key = f"{adapter} of {ray.get_runtime_context().namespace}"
        return LimitedWorker(slot, self._rate_limiter, key, limits, phase)

    async def _make_slot(self, adapter: str) -> VerifierWorker:
        """Start one more process, in an actor with a free slot or in a new actor. Inline rewards need no process."""
        if adapter in self._inline:
            return InlineReward(adapter, self._adapters[adapter], self._config.options_by_name)
        hosts = [host for host in self._hosts[adapter] if not host.channel.lost]
        self._hosts[adapter] = hosts
        for host in hosts:
            if len(host.slots) < SLOTS_PER_ACTOR:
                return await host.open()
        make_process = partial(
            AdapterProcess,
            self._source,
            adapter,
            self._config.options_by_name,
            environment=self._environment,
            memory_limit_bytes=round(self._config.reward_memory_gb * 2**30),
        )
        host = _VerifierHost(adapter, make_process)
        hosts.append(host)
        return await host.open()


class _VerifierHost:
    """The pool's connection to one `VerifierActor`."""

    def __init__(self, adapter: str, make_process: Callable[[], AdapterProcess]) -> None:
        self.actor = zero_cpu_actor(VerifierActor, scheduling_strategy="SPREAD").remote(make_process)
        self.channel = Channel(self.actor, f"verifier of {adapter}")
        self.slots: set[int] = set()  # slots of the running processes

    async def open(self) -> "_VerifierSlot":
        """Start one more process in a free slot of the actor."""
        slot = min(set(range(SLOTS_PER_ACTOR)) - self.slots)
        self.slots.add(slot)
        try:
            return _VerifierSlot(self, slot, await self.channel.call("open", slot))
        except BaseException:
            self.slots.discard(slot)
            raise

    async def close(self, slot: int) -> None:
        """End a process. If it was the actor's last one, end the actor, too."""
        try:
            # Close the process even if its actor is killed next, because a reward may have a `close` function that must
            # run
            if not self.channel.lost:
                await self.channel.call(f"close {slot}")
        finally:
            # Free the slot only now that the process is closed. If the slot were free before, the actor could be killed
            # in between
            self.slots.discard(slot)
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
        """Return whether the actor is lost, and with it all of its processes."""
        return self._channel.lost is not None
