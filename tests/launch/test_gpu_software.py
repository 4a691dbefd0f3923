"""What `async-grpo doctor` says of a driver, a CUDA, a torch and a vLLM that do not fit each other."""

import os
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from async_grpo.launch import gpu_software
from async_grpo.launch.plan import Finding

ROOT = Path(__file__).resolve().parents[2]


def finding(
    monkeypatch, *, driver: str, cuda: str | None, torch: str = "2.13.0", vllm: str = "==2.13.0"
) -> Finding:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.setattr(gpu_software, "driver_version", lambda: driver)
    monkeypatch.setattr(gpu_software, "version", lambda name: torch)
    asked = ("vllm 0.32.0", Requirement(f"torch{vllm}")) if vllm else None
    monkeypatch.setattr(gpu_software, "vllm_torch", lambda: asked)
    (found,) = gpu_software.compare_versions()
    return found


@pytest.mark.parametrize(
    ("driver", "cuda"),
    [
        ("580.65.06", "13.0"),
        ("590.10", "13.0"),
        ("535.104", "12.6"),
        ("590.10", "12.8"),
        ("", "13.0"),
        ("", None),
    ],
)
def test_what_fits_is_listed(monkeypatch, driver, cuda):
    found = finding(monkeypatch, driver=driver, cuda=cuda)
    assert found.level == "ok" and found.found.startswith("torch 2.13.0, built for ")
    assert f"driver {driver}" in found.found or not driver


@pytest.mark.parametrize(
    ("driver", "cuda", "oldest"), [("570.1", "13.0", 580), ("470.82", "12.6", 525), ("570", "14.1", 580)]
)
def test_a_driver_that_is_too_old_for_the_cuda_of_torch_is_an_error(monkeypatch, driver, cuda, oldest):
    found = finding(monkeypatch, driver=driver, cuda=cuda)
    assert found.level == "error"
    assert (
        found.found.endswith(f"CUDA {cuda} needs driver {oldest} or newer")
        and f"driver {driver}" in found.cure
    )


def test_gpus_beside_a_torch_for_the_cpu_are_an_error_unless_they_are_hidden(monkeypatch):
    found = finding(monkeypatch, driver="590.10", cuda=None)
    assert found.level == "error" and "there are GPUs, which this torch cannot use" in found.found
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (hidden,) = gpu_software.compare_versions()
    assert hidden.level == "ok" and os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_a_torch_that_vllm_was_not_built_for_is_an_error(monkeypatch):
    found = finding(monkeypatch, driver="590.10", cuda="13.0", torch="2.11.0")
    assert found.level == "error" and "vllm 0.32.0 does not work with torch 2.11.0" in found.found
    assert found.cure.startswith("pip install 'torch==2.13.0'")
    assert finding(monkeypatch, driver="590.10", cuda="12.8", torch="2.11.0", vllm="").level == "ok"


def test_the_driver_is_asked_of_nvidia_smi(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_software.driver_version() == ""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 580.65.06\necho 580.65.06\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert gpu_software.driver_version() == "580.65.06"


def test_what_is_installed_here_fits(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (found,) = gpu_software.compare_versions()
    assert found.level == "ok", found


def test_the_pages_name_the_driver_that_the_lock_needs():
    lock = (ROOT / "requirements_gpu.lock").read_text()
    major = int(lock.split("cuda-toolkit==")[1].split(".")[0])
    for page in ("README.md", "docs/first-gpu-run.md"):
        text = " ".join((ROOT / page).read_text().split())
        assert f"driver {gpu_software.OLDEST_DRIVERS[major]} or newer" in text and f"CUDA {major}" in text, (
            page
        )
