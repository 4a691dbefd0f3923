"""A TMPDIR whose name is too long for sockets: the run takes a shorter directory, and says so."""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from async_grpo.errors import ConfigurationError
from async_grpo.launch import process_variables, temporary_directory
from async_grpo.launch.temporary_directory import fits_sockets, short_temporary_directory
from async_grpo.processes.private_folder import private_folder

LONG_NAMES = [
    "scratch/slurm/job_12345678/tmp",
    "pbs.1234567.server.cluster.example.org",
    "user's temporary files",
    "x" * 50,
    "x" * 200,
    "ü" * 20,
    "deep/" * 20 + "er",
]
SHORT_PATHS = ["/tmp", "/var/tmp", "/dev/shm", "/home/me/tmp", "/run/user/1000", "/t", "/tmp/job_12345678"]


@pytest.fixture
def tmpdir_named(tmp_path, monkeypatch):
    """Set TMPDIR to a folder of this name, as its user would before the start."""

    def use(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        monkeypatch.setenv("TMPDIR", str(folder))
        monkeypatch.setattr(tempfile, "tempdir", None)
        assert tempfile.gettempdir() == str(folder)
        return folder

    return use


@pytest.mark.parametrize("name", LONG_NAMES)
def test_a_long_tmpdir_is_replaced_for_the_run_and_its_programs_with_a_line_that_says_so(
    name, tmpdir_named, caplog
):
    long = tmpdir_named(name)
    code = "import tempfile; print(tempfile.gettempdir())"
    with short_temporary_directory(), private_folder() as scratch:
        assert scratch.parent == Path("/tmp")
        process_variables.check_socket_names(scratch)
        program = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert program.stdout.strip() == "/tmp"
    assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(long)
    assert not [*long.iterdir()]
    (line,) = caplog.messages
    assert f"sockets in {long} (TMPDIR)" in line and "temporary files go to /tmp instead" in line


@pytest.mark.parametrize("path", SHORT_PATHS)
def test_a_short_tmpdir_stays(path, monkeypatch, caplog):
    monkeypatch.setattr(tempfile, "tempdir", path)
    with short_temporary_directory():
        assert tempfile.gettempdir() == path
    assert not caplog.messages


def test_what_fits_is_what_the_kernel_binds():
    room = process_variables.MAX_SOCKET_BYTES - len("/grpo-12345678/ray/" + process_variables.LONGEST_SOCKET)
    for length, fits in ((room, True), (room + 1, False)):
        directory = Path("/" + "y" * (length - 1))
        assert fits_sockets(directory) == fits
        path = directory / "grpo-12345678" / "ray" / process_variables.LONGEST_SOCKET
        with (
            socket.socket(socket.AF_UNIX) as probe,
            pytest.raises(OSError, match=None if fits else "too long"),
        ):
            probe.bind(str(path))


def test_without_a_short_directory_the_run_is_refused(tmpdir_named, monkeypatch, tmp_path):
    tmpdir_named("x" * 50)
    monkeypatch.setattr(temporary_directory, "SHORT_DIRECTORIES", (tmp_path / "none", tmp_path))
    with pytest.raises(
        ConfigurationError, match="107 are possible: set TMPDIR to a folder with a shorter name"
    ):
        short_temporary_directory().__enter__()
    (finding,) = temporary_directory.temporary_directory()
    assert finding.level == "error"


def test_without_any_directory_the_run_is_refused(monkeypatch):
    def no_directory():
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", no_directory)
    with pytest.raises(ConfigurationError, match="No usable .*set TMPDIR to a folder that can be written to"):
        short_temporary_directory().__enter__()


def test_the_doctor_says_so_only_where_the_name_is_too_long(tmpdir_named, monkeypatch):
    tmpdir_named("x" * 50)
    (finding,) = temporary_directory.temporary_directory()
    assert finding.level == "warning" and "a run uses /tmp instead" in finding.found
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    assert not [*temporary_directory.temporary_directory()]
