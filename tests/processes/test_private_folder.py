"""Temporary folders: nobody else enters them, and those of killed programs go at the next start."""

import fcntl
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from intruder import NOBODY

from async_grpo.errors import ConfigurationError
from async_grpo.launch import process_variables
from async_grpo.processes.private_folder import (
    OWNER_FILE,
    _cache_of_this_process,
    compile_cache,
    make_private_folder,
    private_folder,
    remove_abandoned,
    temporary_files_in,
)

INTRUDER = Path(__file__).resolve().parents[1] / "helpers" / "intruder.py"
MAKE_ONE = """
import signal
from async_grpo.processes.private_folder import make_private_folder
print(make_private_folder(), flush=True)
signal.pause()
"""


@pytest.fixture(autouse=True)
def temporary(
    tmp_path, monkeypatch
) -> Iterator[Path]:  # `tmp_path` first: pytest makes it in the real directory
    """A temporary directory of this test's own, which another user can enter as /tmp. (Those of pytest are closed.)"""
    with tempfile.TemporaryDirectory(prefix="folders-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o1777)
        monkeypatch.setattr(tempfile, "tempdir", name)
        monkeypatch.setenv("TMPDIR", name)
        yield folder


def abandoned(temporary: Path, owner: str, name: str = "grpo-old", mode: int = 0o700) -> Path:
    """A folder as another process would have left it."""
    folder = temporary / name
    folder.mkdir()
    (folder / OWNER_FILE).write_text(owner)
    folder.chmod(mode)
    return folder


BOOT_ID = Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def place(
    namespace: str = os.readlink("/proc/self/ns/pid"),
    boot_id: str = BOOT_ID,
    host: str = socket.gethostname(),
) -> str:
    """Where a process ran, as it stands in an owner file."""
    return f"{namespace} {boot_id} {host}"


GONE = "4194304 1"  # a process id above the kernel's highest, and a start time


def test_it_is_its_user_s_alone_and_gone_after_the_block():
    with private_folder() as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and folder.stat().st_uid == os.geteuid()
        (folder / "deep").mkdir()
        assert folder.name.startswith("grpo-")
    assert not folder.exists()


def test_the_folder_of_a_killed_program_goes_at_the_next_start_and_that_of_a_living_one_stays():
    programs = [
        subprocess.Popen([sys.executable, "-c", MAKE_ONE], stdout=subprocess.PIPE, text=True) for _ in "ab"
    ]
    try:
        killed, living = (Path(program.stdout.readline().strip()) for program in programs)
        programs[0].send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, programs[0].pid, os.WEXITED | os.WNOWAIT)  # it stays, as a zombie
        with private_folder() as own:
            assert not killed.exists() and living.exists() and own.exists()
            remove_abandoned()
            assert own.exists()
    finally:
        for program in programs:
            program.kill()
            program.communicate()
    remove_abandoned()
    assert not living.exists()


def test_the_folder_of_a_program_that_was_killed_in_the_block_goes_with_it(temporary):
    with private_folder() as folder:
        program = subprocess.Popen([sys.executable, "-c", MAKE_ONE], stdout=subprocess.PIPE, text=True)
        within = Path(program.stdout.readline().strip())
        assert within.exists() and folder.exists()
        program.kill()
        program.communicate()
    assert list(temporary.iterdir()) == []


def test_a_process_id_that_another_program_has_got_since_protects_nothing(temporary):
    folder = abandoned(temporary, f"{os.getpid()} 1 {place()}")
    remove_abandoned()
    assert not folder.exists()


def test_what_cannot_be_known_to_be_an_abandoned_folder_of_ours_stays(temporary, tmp_path):
    gone = f"{GONE} {place()}"
    other_container = abandoned(temporary, f"{GONE} {place(namespace='pid:[1]')}", "grpo-container")
    open_to_all = abandoned(temporary, gone, "grpo-open", mode=0o777)
    strange = [
        abandoned(temporary, text, f"grpo-{n}")
        for n, text in enumerate(("", "x y z", "1 2", "x" + gone, gone + " 3"))
    ]
    without = temporary / "grpo-eval-none"
    without.mkdir(mode=0o700)
    elsewhere = abandoned(tmp_path, gone, "grpo-target")
    link = temporary / "grpo-link"
    link.symlink_to(elsewhere)
    kept = [other_container, open_to_all, *strange, without, elsewhere, link]
    if os.geteuid() == 0:
        kept.append(abandoned(temporary, gone, "grpo-foreign"))
        os.chown(kept[-1], NOBODY, NOBODY)
    really_gone = abandoned(temporary, gone)
    remove_abandoned()
    assert all(path.exists() for path in kept) and not really_gone.exists()


def test_the_folder_of_a_process_on_another_host_that_shares_the_directory_stays(temporary):
    """The name of the first process namespace is the same on every host."""
    other_boot = "00000000-0000-4000-8000-000000000000"
    kept = [
        abandoned(temporary, f"{GONE} {place(boot_id=other_boot)}", "grpo-other-boot"),
        abandoned(temporary, f"{GONE} {place(host='another')}", "grpo-other-name"),
    ]
    remove_abandoned()
    assert all(path.exists() for path in kept)


def test_a_folder_whose_owner_file_is_locked_stays_whatever_the_file_says(temporary):
    """So that of a process is safe whose host has the same ids and name as this one."""
    folder = abandoned(temporary, f"{GONE} {place()}")
    with (folder / OWNER_FILE).open("r+") as owner_file:
        fcntl.flock(owner_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_abandoned()
        assert folder.exists()
    remove_abandoned()
    assert not folder.exists()


def test_a_living_process_keeps_its_owner_file_locked():
    with (
        private_folder() as folder,
        (folder / OWNER_FILE).open("r+") as owner_file,
        pytest.raises(BlockingIOError),
    ):
        fcntl.flock(owner_file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_gets_nothing_of_what_lies_in_it_though_ray_opens_its_part_to_all(temporary):
    with private_folder() as folder:
        session = folder / "ray"
        session.mkdir()
        session.chmod(0o777)
        log = session / "log"
        log.write_text("what the run says")
        log.chmod(0o666)
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(session / "socket"))
            listening.listen()
            (session / "socket").chmod(0o777)
            shown = temporary / "shown"
            shown.write_text("readable, so that the intruder is known to look")
            order = {"uid": NOBODY, "targets": [], "files": [str(log), str(shown)]}
            order |= {"folders": [str(folder), str(session)], "sockets": [str(session / "socket")]}
            done = subprocess.run(
                [sys.executable, str(INTRUDER)],
                input=json.dumps(order),
                capture_output=True,
                text=True,
                timeout=60,
            )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen == {
        "ports": [],
        "read": [str(shown)],
        "written": [],
        "entered": [],
        "listed": [],
        "connected": [],
    }


def test_ray_s_folder_lies_inside_it_and_its_client_server_has_a_port_of_its_own(tmp_path):
    command = process_variables.ray_command("127.0.0.1:26000", tmp_path)
    options = dict(part.split("=", 1) for part in command if part.startswith("--") and "=" in part)
    assert Path(options["--temp-dir"]).parent == tmp_path
    assert options["--ray-client-server-port"] not in ("10001", "26000")
    assert options["--node-ip-address"] == "127.0.0.1"


def test_a_port_that_is_spoken_for_is_not_chosen_again(monkeypatch):
    monkeypatch.setattr(process_variables.random.Random, "sample", lambda *_: [26000, 26001])
    assert process_variables.free_port(apart_from=26000) == 26001


def test_a_name_is_too_long_for_ray_s_sockets_where_the_kernel_says_so():
    """The longest that is let through can be bound (it only has no folder), one more byte cannot."""
    room = 107 - len("/ray/" + process_variables.LONGEST_SOCKET)
    fits, too_long = Path("/" + "y" * (room - 1)), Path("/" + "y" * room)
    with socket.socket(socket.AF_UNIX) as probe:
        with pytest.raises(FileNotFoundError):
            probe.bind(str(process_variables.ray_folder(fits) / process_variables.LONGEST_SOCKET))
        with pytest.raises(OSError, match="too long"):
            probe.bind(str(process_variables.ray_folder(too_long) / process_variables.LONGEST_SOCKET))
    process_variables.check_socket_names(fits)
    with pytest.raises(ConfigurationError, match="108 bytes, 107 are possible: set TMPDIR"):
        process_variables.check_socket_names(too_long)


def test_temporary_files_go_into_a_folder_for_a_while_also_those_of_programs(tmp_path, temporary):
    code = "import tempfile; print(tempfile.gettempdir())"
    with temporary_files_in(tmp_path):
        assert tempfile.gettempdir() == str(tmp_path)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == str(tmp_path)
    assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(temporary)


def test_results_of_torch_compile_lie_in_the_user_s_cache_unless_told_otherwise(tmp_path):
    variables = compile_cache({"XDG_CACHE_HOME": str(tmp_path)})
    folder = Path(variables["TORCHINDUCTOR_CACHE_DIR"])
    assert folder.is_relative_to(tmp_path) and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert compile_cache({"TORCHINDUCTOR_CACHE_DIR": "/elsewhere"}) == {}
    default = {"TORCHINDUCTOR_CACHE_DIR": "/tmp/torchinductor_root"}  # as torch sets it when vLLM is imported
    assert compile_cache(default | {"XDG_CACHE_HOME": str(tmp_path)}) == variables
    assert compile_cache({"XDG_CACHE_HOME": str(tmp_path)}) == variables


def refused_cache(caches: str | Path, caplog) -> str:
    """Check that compiled code goes into a fresh private folder instead; returns the reason that the log names."""
    caplog.clear()
    _cache_of_this_process.cache_clear()
    folder = Path(compile_cache({"XDG_CACHE_HOME": str(caches)})["TORCHINDUCTOR_CACHE_DIR"])
    assert not folder.is_relative_to(caches)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and folder.stat().st_uid == os.geteuid()
    assert compile_cache({"XDG_CACHE_HOME": str(caches)}) == {"TORCHINDUCTOR_CACHE_DIR": str(folder)}
    return caplog.text


def test_without_a_home_results_of_torch_compile_lie_in_a_private_folder(caplog):
    assert "no folder can be made in the user's cache" in refused_cache("/proc/none", caplog)


@pytest.mark.parametrize("name", ["async-grpo", "async-grpo/torchinductor"])
def test_a_cache_that_others_can_write_to_is_not_used_for_code(tmp_path, caplog, name):
    (tmp_path / "async-grpo" / "torchinductor").mkdir(parents=True)
    (tmp_path / name).chmod(0o777)
    assert f"{tmp_path / name} can be written to by others" in refused_cache(tmp_path, caplog)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_cache_of_another_user_is_not_used_for_code(tmp_path, caplog):
    folder = tmp_path / "async-grpo" / "torchinductor"
    folder.mkdir(parents=True)
    os.chown(folder, NOBODY, NOBODY)
    assert f"{folder} belongs to user {NOBODY}" in refused_cache(tmp_path, caplog)


def test_programs_that_share_a_moment_do_not_remove_each_other_s_folders():
    folders = [make_private_folder() for _ in range(20)]
    assert all(folder.exists() for folder in folders) and len(set(folders)) == 20
