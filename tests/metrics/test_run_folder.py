"""A run's folder: one run at a time, and none over another's results."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from async_grpo.errors import ConfigurationError
from async_grpo.launch.demo import MARK, DemoConfig, demo
from async_grpo.metrics.writer import LOCK_FILE, METRICS_FILE, claim

CLAIM = """
import sys
from pathlib import Path
from async_grpo.metrics.writer import claim
claim(Path(sys.argv[1]))
print("claimed", flush=True)
sys.stdin.read()
"""


def claimant(folder: Path) -> subprocess.Popen:
    """A process that claims the folder, and holds it until its input ends."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, "-c", CLAIM, str(folder)], text=True, **pipes)


def test_a_folder_in_which_another_run_writes_is_refused_until_that_run_ends(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / MARK).touch()  # of a demo, which would be emptied
    with claimant(folder) as other:
        assert other.stdout.readline() == "claimed\n"
        for mark in (None, MARK):
            with pytest.raises(ConfigurationError, match=rf"another run \(process {other.pid}\) is writing"):
                claim(folder, mark)
        other.stdin.close()
        other.wait(10)
    assert (folder / MARK).exists()
    claim(folder)


def test_a_program_that_a_run_has_started_may_write_where_the_run_does(tmp_path):
    claim(tmp_path)
    with claimant(tmp_path) as child:
        assert child.stdout.readline() == "claimed\n"
        child.stdin.close()
        assert child.wait(10) == 0


def test_a_folder_that_holds_a_run_or_is_a_file_or_cannot_be_made_is_refused_without_a_trace(tmp_path):
    (tmp_path / METRICS_FILE).touch()
    (tmp_path / "file").touch()
    for folder, message in (
        (tmp_path, "already holds a run"),
        (tmp_path / "file", "is a file"),
        (tmp_path / "file" / "below", "cannot be written to: Not a directory"),
        (Path("/proc/x"), "cannot be written to: No such file"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            claim(folder)
    assert {path.name for path in tmp_path.iterdir()} == {METRICS_FILE, "file"}


def test_a_demo_empties_the_folder_of_an_earlier_one_and_no_other(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    with pytest.raises(ConfigurationError, match="is not empty and not an earlier demo"):
        claim(tmp_path / "mine", mark=MARK)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]

    earlier = tmp_path / "demo"
    claim(earlier, mark=MARK)
    (earlier / "logs").mkdir()
    (earlier / METRICS_FILE).touch()
    claim(earlier, mark=MARK)
    assert {path.name for path in earlier.iterdir()} == {MARK, LOCK_FILE}


@pytest.mark.parametrize("fault", [{"steps": 0}, {"max_staleness": -1}])
def test_a_demo_that_is_refused_removes_nothing_and_leaves_no_folder(tmp_path, fault):
    done = tmp_path / "done"
    claim(done, mark=MARK)
    (done / METRICS_FILE).write_text(json.dumps({"step": 1}))
    for folder in (done, tmp_path / "new"):
        with pytest.raises(ConfigurationError):
            demo(DemoConfig(output_dir=str(folder), **fault))
    assert (done / METRICS_FILE).exists() and not (tmp_path / "new").exists()
