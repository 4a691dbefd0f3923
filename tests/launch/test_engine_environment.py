"""`--engine-python` at the start of a run: what it allows and refuses, what the doctor says, and what is still forked."""

import importlib.util
from pathlib import Path

import pytest
from engine_environments import stand_in

from async_grpo.__main__ import main
from async_grpo.data import COUNTDOWN_TRAIN, TINY_MODEL
from async_grpo.errors import ConfigurationError
from async_grpo.inference.vllm_edges import KNOWN_VERSIONS
from async_grpo.launch import check, doctor, gpu_software
from async_grpo.launch.early_start import early_start
from async_grpo.launch.local_config import LocalConfig
from async_grpo.launch.warm_start import warm_pythons
from async_grpo.processes.supervisor import Supervisor


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def no_vllm_here(monkeypatch):
    real = importlib.util.find_spec
    for module in (check.importlib.util, doctor):
        monkeypatch.setattr(module, "find_spec", lambda name: None if name == "vllm" else real(name))


def options(folder: Path, **changes: object) -> dict[str, object]:
    given = {"model_name_or_path": str(TINY_MODEL), "data_path": str(COUNTDOWN_TRAIN)}
    given |= {"output_dir": str(folder / "run"), "reward_fns": "countdown", "max_generation_tokens": 24}
    return given | changes


def run(folder: Path, *arguments: str, **changes: object) -> int | str | None:
    """Return the exit code of a dry run."""
    flags = [f"--{name}={value}" for name, value in options(folder, **changes).items()]
    with pytest.raises(SystemExit) as ended:
        main(["run", *flags, "--dry-run", *arguments])
    return ended.value.code


def test_the_run_s_own_environment_needs_no_vllm(no_vllm_here, tmp_path, capsys):
    assert run(tmp_path) == 2
    assert "vLLM is not installed here" in capsys.readouterr().err
    assert not run(tmp_path, engine_python=stand_in(tmp_path))


def test_a_file_of_an_engine_is_read_where_the_engine_runs(tmp_path):
    (tmp_path / "engine.py").write_text("import a_package_of_the_engines\n")
    engine = f"{tmp_path / 'engine.py'}:Engine"
    assert run(tmp_path, engine=engine) == 2
    assert not run(tmp_path, engine=engine, engine_python=stand_in(tmp_path))


@pytest.mark.parametrize("command", ["run", "eval"])
def test_a_python_that_does_not_fit_is_refused_before_anything_starts(command, tmp_path, capsys, monkeypatch):
    python = stand_in(tmp_path, ray="2.1.0")
    monkeypatch.setattr(
        f"async_grpo.launch.{'local_run' if command == 'run' else 'evaluate'}.early_start", None
    )
    arguments = [f"--output-dir={tmp_path / 'run'}", "--reward-fns=countdown", f"--engine-python={python}"]
    if command == "run":
        arguments += [f"--model-name-or-path={TINY_MODEL}", f"--data-path={COUNTDOWN_TRAIN}"]
    else:
        arguments += [str(TINY_MODEL), f"--data=countdown={COUNTDOWN_TRAIN}"]
    with pytest.raises(SystemExit) as ended:
        main([command, *arguments])
    assert ended.value.code == 2
    assert f"--engine-python {python} has ray 2.1.0, the run ray " in " ".join(
        capsys.readouterr().err.split()
    )
    assert not (tmp_path / "run").exists()


def test_vllm_sends_by_nccl_to_its_own_release_alone(tmp_path, monkeypatch):
    def refuse_with(vllm: str) -> None:
        python = str(stand_in(tmp_path, vllm=vllm))
        check.refuse_without_engines(
            LocalConfig(**options(tmp_path, weight_transport="nccl"), engine_python=python)
        )

    monkeypatch.setattr(check, "own_vllm_version", lambda: "0.32.0")
    refuse_with("0.32.0")
    with pytest.raises(
        ConfigurationError, match=r"its vLLM, 0\.32\.0, to engines of 0\.31\.0: .* shared_files"
    ):
        refuse_with("0.31.0")


def test_without_vllm_nothing_is_sent_by_nccl_and_no_judge_is_served(no_vllm_here, tmp_path):
    python = str(stand_in(tmp_path))
    config = LocalConfig(**options(tmp_path, weight_transport="nccl"), engine_python=python)
    with pytest.raises(ConfigurationError, match="its vLLM, which it lacks, to engines of"):
        check.refuse_without_engines(config)
    given = options(tmp_path, judge_model=str(TINY_MODEL), reward_fns="llm_judge")
    with pytest.raises(ConfigurationError, match="serve the judge yourself and give --judge-urls"):
        check.refuse_without_engines(LocalConfig(**given, engine_python=python))


def test_the_doctor_names_the_versions_of_the_engines(tmp_path, no_vllm_here):
    python = str(stand_in(tmp_path))
    (versions,) = gpu_software.compare_versions(python)
    assert versions.level == "ok", versions
    assert f"engines in {python}: python " in versions.found and "torch 2.12.1, " in versions.found
    assert versions.found.endswith("their vLLM is built for torch==2.12.1")
    (vllm,) = doctor.vllm_version(python)
    assert vllm.found == f"vllm 0.31.0; known to work: {', '.join(KNOWN_VERSIONS)}"
    (packages,) = doctor.packages(python)
    assert "vllm" not in packages.found


def test_the_doctor_finds_engines_that_cannot_work(tmp_path):
    python = str(stand_in(tmp_path, torch="2.13.0"))
    (versions,) = gpu_software.compare_versions(python)
    assert versions.level == "error" and versions.found.endswith("their vLLM does not work with torch 2.13.0")
    assert versions.cure.startswith(f"{python} -m pip install 'torch==2.12.1'")
    (versions,) = gpu_software.compare_versions(str(stand_in(tmp_path, ray="2.1.0")))
    assert versions.level == "error" and "has ray 2.1.0, the run ray" in versions.found
    assert versions.cure.startswith(f"{python} -m pip install ray==")
    assert list(doctor.vllm_version("/no/python")) == []


@pytest.mark.parametrize(
    ("options", "forked"),
    [
        ({}, True),
        ({"engine": "engine.py:OnVllm"}, True),
        ({"engine": "fake"}, False),
        ({"engine_python": "/opt/engines/bin/python"}, False),
    ],
)
def test_a_server_imports_vllm_where_an_engine_of_this_environment_may_need_it(
    options, forked, tmp_path, monkeypatch
):
    """Of a run whose warm servers are only looked at; Ray and they do not start."""
    commands = []
    monkeypatch.setattr(
        Supervisor, "start", lambda supervisor, name, command, *_, **__: commands.append(command)
    )
    settings = {
        "model_name_or_path": str(TINY_MODEL),
        "data_path": str(COUNTDOWN_TRAIN),
        "reward_fns": "format",
    }
    config = LocalConfig(**settings, output_dir=str(tmp_path), warm_start="yes", **options)
    with early_start(config) as early:
        assert (early.warm.vllm is not None) == forked == ("vllm.v1" in commands[0][-1])


@pytest.mark.parametrize("with_engines", [True, False])
def test_engines_of_another_environment_are_not_forked_and_all_else_is(with_engines, tmp_path):
    warm = warm_pythons(tmp_path, True, with_engines)
    try:
        names = {"PYTHON_EXEC", "ASYNC_GRPO_WARM_TORCH"}
        names |= {"ASYNC_GRPO_WARM_VLLM"} if with_engines else set()
        assert warm.variables.keys() == names
        assert len(warm.listeners) == (2 if with_engines else 1)
        assert ("vllm.v1" in warm.command[-1]) == with_engines
    finally:
        for listener in warm.listeners:
            listener.close()
