"""Environment variables of a run's programs: trainer, engines and judges compute and communicate by the same ones."""

import os
from pathlib import Path

from async_grpo.cluster.ray_session import forwarded_environment
from async_grpo.data import TINY_MODEL
from async_grpo.launch import process_variables
from async_grpo.rewards.judges.server import JudgeServer

OF_THE_GPU = {
    "NCCL_ALGO": "Ring",
    "NCCL_IB_DISABLE": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "TRITON_CACHE_AUTOTUNING": "1",
    "CC": "/usr/bin/gcc-13",
}
KEYS = {"VLLM_API_KEY": "secret", "NCCL_AUTH_TOKEN": "secret"}


def test_engines_and_judges_get_the_gpu_variables_that_the_trainer_inherits_but_no_keys(
    monkeypatch, tmp_path
):
    """A trainer and an engine with other NCCL variables hang in their communicator."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name, value in (OF_THE_GPU | KEYS).items():
        monkeypatch.setenv(name, value)
    trainer = process_variables.run_environment("", 1, Path("up"), Path("logs"))
    engines = process_variables.ray_environment(trainer, 1, 0)
    judge = JudgeServer(str(TINY_MODEL), log_folder=tmp_path)._environment(0)
    for variables in (trainer, engines, judge):
        assert OF_THE_GPU.items() <= variables.items()
    assert not {*engines, *judge} & {*KEYS}
    for name in ("NCCL_SOCKET_IFNAME", "RAY_AUTH_TOKEN"):
        assert engines[name] == trainer[name]


def test_workers_on_other_nodes_get_the_variables_that_do_not_belong_to_one_node():
    of_one_node = {
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_IB_HCA": "mlx5",
        "VLLM_HOST_IP": "10.0.0.1",
        "VLLM_CACHE_ROOT": "/scratch/node7",
        "CUDA_VISIBLE_DEVICES": "0",
        "CC": "/opt/gcc",
    }
    everywhere = {
        "NCCL_ALGO": "Ring",
        "NCCL_DEBUG": "INFO",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "OMP_NUM_THREADS": "1",
    }
    assert forwarded_environment(of_one_node | everywhere | KEYS | {"HF_TOKEN": "secret"}) == everywhere


def test_a_trainer_on_a_gpu_has_segments_that_grow_unless_the_user_says_otherwise(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert process_variables.trainer_memory(1.0) == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert process_variables.trainer_memory(1.0) == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    assert process_variables.trainer_memory(1.0) == {}


def test_an_optimizer_on_the_cpu_has_the_cores_even_beside_gpus(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(12))
    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.truncate(process_variables.LARGE_MODEL_BYTES + 1)
    threads = [
        process_variables.trainer_threads(str(tmp_path), 2, updates_on_cpu=offloads)["OMP_NUM_THREADS"]
        for offloads in (False, True)
    ]
    assert threads == ["1", "6"]


def test_ray_is_told_its_gpus_and_does_not_look_for_them(tmp_path):
    assert "--num-gpus=3" in process_variables.ray_command("127.0.0.1:26000", tmp_path, 3)
    assert "--num-gpus=0" in process_variables.ray_command("127.0.0.1:26001", tmp_path)


def test_the_judge_s_gpus_and_the_trainer_s_are_left_out_of_ray(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5,7")
    trainer = process_variables.run_environment("", 1, Path("up"), Path("logs"))
    engines = process_variables.ray_environment(trainer, 1, 1)
    assert (trainer["CUDA_VISIBLE_DEVICES"], engines["CUDA_VISIBLE_DEVICES"]) == ("2", "3,5")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3,5,7"
