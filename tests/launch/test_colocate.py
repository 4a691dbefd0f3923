"""`--colocate`: trainer and engine share one GPU, with a share of its memory each."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from async_grpo.__main__ import main
from async_grpo.config.preflight import prepare
from async_grpo.data import COUNTDOWN_TRAIN, TINY_MODEL
from async_grpo.errors import ConfigurationError
from async_grpo.launch import local_run, plan, process_variables
from async_grpo.launch.local_config import LocalConfig
from async_grpo.training import distributed

MIB = 1 << 20
CARD_MIB = 80_000


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch, tmp_path):
    """A machine with one GPU of 80,000 MiB, as its driver's program describes it."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho 'Card, {CARD_MIB}, {CARD_MIB}, 590.10'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")


def options(folder: Path, **changes) -> dict:
    given = {
        "model_name_or_path": str(TINY_MODEL),
        "data_path": str(COUNTDOWN_TRAIN),
        "reward_fns": "countdown",
    }
    given |= {"output_dir": str(folder / "run"), "batch_size": 4, "samples_per_question": 4}
    return given | {"max_generation_tokens": 24, "dtype": "bfloat16"} | changes


def test_one_gpu_is_enough_and_both_sides_see_it(tmp_path):
    with pytest.raises(
        ConfigurationError, match="2 GPUs are needed .*, 1 are here: use fewer, --colocate to let"
    ):
        LocalConfig(**options(tmp_path))
    config = LocalConfig(**options(tmp_path, colocate=True, gpu_memory_utilization=0.4))
    trainer = process_variables.run_environment("", config.nproc_per_node, Path("up"), Path("logs"))
    ray = process_variables.ray_environment(trainer, config.trainer_gpus_alone, config.judge_gpus_alone)
    assert trainer["CUDA_VISIBLE_DEVICES"] == ray["CUDA_VISIBLE_DEVICES"] == "0"


def test_ranks_and_engines_of_a_node_share_its_gpus_one_to_one(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    four = {"colocate": True, "nproc_per_node": 4, "generation_workers": 4}
    assert LocalConfig(**options(tmp_path, **four)).num_gpus == 4
    assert (
        LocalConfig(
            **options(tmp_path, **four | {"generation_workers": 1, "tensor_parallel_size": 2})
        ).num_gpus
        == 4
    )
    with pytest.raises(ConfigurationError, match="5 GPUs are needed"):
        LocalConfig(**options(tmp_path, **four, kl_coef=0.1))


def test_a_gpu_that_is_named_twice_is_refused_with_the_way_to_share_it(tmp_path, monkeypatch):
    """torch counts no device then, so that a healthy machine looked as if it had none."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,0")
    with pytest.raises(ConfigurationError, match="CUDA_VISIBLE_DEVICES=0,0 names a GPU twice.* --colocate"):
        LocalConfig(**options(tmp_path))


@pytest.mark.parametrize(
    ("visible", "ids"),
    [
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0,-1,1", ["0"]),
        ("GPU-8f,2", ["GPU-8f", "2"]),
        (" 3 , 1", ["3", "1"]),
    ],
)
def test_the_gpus_of_a_process_are_those_that_cuda_finds(monkeypatch, visible, ids):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert process_variables.gpus() == ids


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"weight_transport": "nccl"},
            "--colocate True --weight-transport nccl do not fit together: NCCL needs a GPU for each",
        ),
        ({"ray_address": "head:6379"}, "--colocate True --ray-address head:6379 do not fit"),
        (
            {"gpu_memory_utilization": 0.98},
            "--gpu-memory-utilization 0.98 leave the trainer nothing of its GPU",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(tmp_path, changes, reason):
    with pytest.raises(ConfigurationError, match=reason):
        LocalConfig(**options(tmp_path, colocate=True, **changes))


def findings(config: LocalConfig, num_parameters: int) -> dict[str, plan.Finding]:
    return {finding.name: finding for finding in plan.memory(config, prepare(config), num_parameters)}


def test_the_shares_are_planned(tmp_path):
    """1.5 x 10^9 parameters: 3 GB in the engine, and 20 bytes each, 30 GB, in the trainer."""
    config = LocalConfig(**options(tmp_path, colocate=True, gpu_memory_utilization=0.4))
    found = findings(config, 1_500_000_000)
    share = found["shared GPU"]
    assert share.level == "ok"
    assert "the engine 0.4 of each GPU, 33.6 GB, of which its weights take 3.0 GB" in share.found
    assert "the trainer 0.57, 47.8 GB, of which weights, gradients and moments take 30.0 GB" in share.found
    assert "of 47.8 GB" in found["trainer rank"].found and "of 33.6 GB" in found["engine"].found


@pytest.mark.parametrize(
    ("num_parameters", "utilization", "cure"),
    [
        (1_500_000_000, 0.9, "--gpu-memory-utilization between 0.04 and 0.61"),
        (1_500_000_000, 0.03, "--gpu-memory-utilization between 0.04 and 0.61"),
        (7_600_000_000, 0.4, "--cpu-offload, --optimizer adamw_8bit, or a GPU for each, without --colocate"),
    ],
)
def test_a_share_that_cannot_hold_the_weights_is_an_error(tmp_path, num_parameters, utilization, cure):
    config = LocalConfig(**options(tmp_path, colocate=True, gpu_memory_utilization=utilization))
    share = findings(config, num_parameters)["shared GPU"]
    assert (share.level, share.cure) == ("error", cure)


def test_a_run_whose_shares_cannot_fit_is_not_started(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(local_run, "start", lambda config: pytest.fail("the run was started"))
    monkeypatch.setattr(plan, "parameters_of", lambda folder: 1_500_000_000)
    flags = [f"--{name}={value}" for name, value in options(tmp_path).items()]
    with pytest.raises(SystemExit) as ended:
        main(["run", *flags, "--colocate"])
    assert ended.value.code == 2
    assert "shared GPU: --colocate gives the engine 0.9 of each GPU" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["run", *flags, "--colocate", "--dry-run"])
    assert not ended.value.code and "shared GPU" in capsys.readouterr().out


def test_the_trainer_cannot_take_the_engine_s_memory(tmp_path, monkeypatch):
    config = LocalConfig(**options(tmp_path, colocate=True, gpu_memory_utilization=0.4))
    limits = []
    for name, value in process_variables.trainer_memory(config.trainer_gpu_share).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *call: limits.append(call))
    monkeypatch.setattr(distributed.dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(distributed.dist, "destroy_process_group", lambda: None)
    with distributed.distributed_run():
        pass
    assert limits == [(0.57, torch.device("cuda", 0))]
    assert "ASYNC_GRPO_GPU_SHARE" not in process_variables.trainer_memory(1.0)


def test_the_engine_s_cache_does_not_depend_on_what_the_trainer_allocates_meanwhile(monkeypatch):
    """vLLM would profile the GPU, and count the trainer's memory as its own."""
    pytest.importorskip("vllm")
    from async_grpo.inference import engine_arguments as module
    from async_grpo.inference.config import EngineConfig

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = SimpleNamespace(total_memory=80 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    settings = SimpleNamespace(
        dtype="bfloat16",
        max_total_tokens=64,
        seed=0,
        transport="object_store",
        float32_head=False,
        temperature=1.0,
        has_grammars=False,
        lora=None,
        sleep_level=0,
        unsampled_token_ids=(),
    )

    def cache_bytes(**changes) -> int | None:
        config = EngineConfig(model_path=str(TINY_MODEL), gpu_memory_utilization=0.4, **changes)
        return module.engine_arguments(config, settings, "extension").kv_cache_memory_bytes

    weights = 2 * plan.parameters_of(TINY_MODEL)
    assert cache_bytes() is None
    assert cache_bytes(colocate=True) == int(0.75 * (32 * 10**9 - weights))
    assert cache_bytes(colocate=True, engine_options="kv_cache_memory_bytes=5000000") == 5_000_000
    config = EngineConfig(model_path=str(TINY_MODEL))
    assert not module.engine_arguments(config, settings, "extension").enable_sleep_mode
    settings.sleep_level = 1
    assert module.engine_arguments(config, settings, "extension").enable_sleep_mode
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ConfigurationError, match="--engine-sleep 1: vLLM's engine on the CPU has no sleep mode"
    ):
        module.engine_arguments(config, settings, "extension")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    settings.sleep_level = 0
    properties.total_memory = weights
    with pytest.raises(ConfigurationError, match="does not hold its weights.*raise --gpu-memory-utilization"):
        cache_bytes(colocate=True)


def test_a_trainer_whose_engine_sleeps_may_take_its_share_while_it_computes(tmp_path):
    given = options(tmp_path, colocate=True, gpu_memory_utilization=0.6, max_staleness=0, engine_sleep="1")
    config = LocalConfig(**given)
    # Between two steps the engine is awake: weights, gradients and moments must fit beside its share
    assert (config.trainer_gpu_share, config.trainer_peak_share) == pytest.approx((0.37, 0.92))
    found = findings(config, 1_000_000_000)
    assert "the trainer 0.37" in found["shared GPU"].found and "of 77.2 GB" in found["trainer rank"].found
    awake = LocalConfig(**given | {"engine_sleep": "off"})
    assert awake.trainer_peak_share == awake.trainer_gpu_share


def test_an_engine_that_cannot_sleep_or_sleeps_for_nobody_is_refused(tmp_path, monkeypatch):
    asleep = {"max_staleness": 0, "engine_sleep": "2"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ConfigurationError, match="--engine-sleep 2 --colocate False do not fit together"):
        LocalConfig(**options(tmp_path, **asleep))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(
        ConfigurationError, match="--engine-sleep 2 needs a GPU: vLLM's engine on the CPU has no sleep"
    ):
        LocalConfig(**options(tmp_path, **asleep, colocate=True))
