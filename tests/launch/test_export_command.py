"""`async-grpo export`: places that cannot be written to are refused in one line, before or after the weights are read."""

import errno
from pathlib import Path

import pytest

from async_grpo.__main__ import main
from async_grpo.data import TINY_MODEL
from async_grpo.launch import export
from async_grpo.training.checkpoint_folder import Manifest


def manifest() -> Manifest:
    options = {"model_name_or_path": str(TINY_MODEL)}
    return Manifest(step=1, samples=8, world_size=1, inputs={}, versions={}, options=options)


def exit_code(target: Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["export", "checkpoint", "--output-dir", str(target)])
    return ended.value.code


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("file", "file exists: choose another folder"),
        ("folder", "folder exists: choose another folder"),
        ("file/model", "file/model cannot be made: "),
        ("file/a/model", "file/a/model cannot be made: "),
        ("n" * 300 + "/model", "/model cannot be made: File name too long"),
    ],
)
def test_a_place_that_is_taken_is_refused_before_weights_are_read(
    tmp_path, monkeypatch, capsys, name, message
):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(export, "named", lambda path: (path, manifest()))
    assert exit_code(tmp_path / name) == 2
    error = capsys.readouterr().err
    assert f"error: --output-dir {tmp_path}" in error and message in error


def test_a_full_disk_is_said_in_one_line(tmp_path, monkeypatch, capsys):
    def no_space(*arguments, **settings):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(export, "named", lambda path: (path, manifest()))
    monkeypatch.setattr("async_grpo.launch.exported_models.load_weights", lambda policy, folder: None)
    monkeypatch.setattr("async_grpo.launch.exported_models.write_model", no_space)
    assert exit_code(tmp_path / "new" / "model") == 1
    error = capsys.readouterr().err
    assert "model cannot be written: " in error and "No space left" in error and "Traceback" not in error
