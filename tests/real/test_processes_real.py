"""The processes of an engine on GPUs, on the CPU: a Ray actor, EngineCore, and a worker for each of two shards."""

from dataclasses import replace

import pytest
import ray
import torch
from engine_actor import ActorLink, ObservedActor
from engine_thread import CANARY, MODEL, SETTINGS, hf_logprobs

from async_grpo.cluster.ray_session import zero_cpu_actor
from async_grpo.config.run import WorkerConfig
from async_grpo.modeling.load import load_causal_lm
from async_grpo.modeling.policy import PolicyModel, named_weights
from async_grpo.options.source_file import library_version
from async_grpo.training.sharding import canary_logprobs
from async_grpo.weights.canary import Canary
from async_grpo.weights.config import WeightConfig
from async_grpo.weights.publisher import Publisher

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("engine_environment")]


@pytest.mark.exhaustive
def test_an_engine_of_several_processes_takes_weights_proves_them_and_changes_them_in_flight(monkeypatch):
    """On the CPU the model runs in the engine's own process otherwise, which no GPU does."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        settings = replace(SETTINGS, library=library_version(), stop_token_ids=())
        config = WorkerConfig(
            run_name="test",
            mode="generation",
            model_path=str(MODEL),
            tensor_parallel_size=2,
            max_num_seqs=16,
            enforce_eager=True,
        )
        actor = zero_cpu_actor(ObservedActor).remote()
        ray.get(actor.start.remote(config, settings), timeout=120)
        # EngineCore, and its two workers
        assert ray.get(actor.num_engine_processes.remote(), timeout=20) == (1, 2)

        policy = PolicyModel(load_causal_lm(MODEL, "float32"))
        link = ActorLink(actor)
        canary = Canary([CANARY], canary_logprobs)
        deltas = WeightConfig(weight_sync_deltas=True)
        publisher = Publisher(link, named_weights, canary, torch.float32, 0, deltas)
        whole = publisher.publish(policy, 0, self_test=True)()
        assert whole["canary_error"] < 1e-4
        assert not publisher._unread.names  # each shard's weights were read back
        ray.get(actor.begin.remote(CANARY[:12], 4), timeout=20)
        with torch.no_grad():
            for weight in policy.parameters():
                weight.mul_(1.01)
        assert publisher.publish(policy, 1)()["canary_error"] < 1e-4
        assert link.committed[-2:] == [0, 1]
        completions = ray.get(actor.finish.remote(), timeout=60)
        versions = [completion.versions.tolist() for completion in completions]
        assert len(versions) == 4 and all(sorted(each) == each and {*each} == {0, 1} for each in versions)
        for completion in completions:
            # Later tokens depend on a cache that the first weights computed in part, so only the first ones are exact
            is_first = completion.versions == 0
            expected = hf_logprobs(
                load_causal_lm(MODEL, "float32"), [*CANARY[:12], *completion.token_ids], temperature=0.7
            )
            assert abs(completion.logprobs - expected[12:])[is_first].max() < 1e-4
        with torch.no_grad():
            for weight in policy.parameters():
                weight.view(-1)[::50] *= 1.1
        changes = publisher.publish(policy, 2)()
        assert changes["canary_error"] < 1e-4 and link.committed[-1] == 2
        assert changes["weight_sync_bytes"] < 0.1 * whole["weight_sync_bytes"]
        # The engine must have loaded what the trainer has now, not what it had: the canary sees the difference
        before = publisher.canary.logprobs(policy, CANARY)
        with torch.no_grad():
            for weight in policy.parameters():
                weight.view(-1)[::50] /= 1.1
        assert abs(publisher.canary.logprobs(policy, CANARY) - before).max() > 1e-3
        ray.get(actor.close.remote(), timeout=20)
    finally:
        ray.shutdown()
