"""Programs that live and die together: real processes, real signals."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from async_grpo.errors import ConfigurationError, DeadlineExceeded, WorkerLost
from async_grpo.processes import process_tree
from async_grpo.processes import supervisor as supervisor_module
from async_grpo.processes.supervisor import Supervisor

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def supervisor(tmp_path, monkeypatch) -> Iterator[Supervisor]:
    for name in ("TERM_GRACE_S", "KILL_GRACE_S", "ECHO_S"):
        monkeypatch.setattr(supervisor_module, name, 1.0)
    made = Supervisor(tmp_path / "logs")
    yield made
    made.stop()


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


SLEEP = python("import time; time.sleep(600)")


@pytest.mark.parametrize(
    ("other", "main", "code"),
    [
        ("import time; time.sleep(600)", "raise SystemExit(7)", 7),
        ("pass", "import time; time.sleep(1)", 0),  # a program that ends well was told to
    ],
)
def test_the_end_of_the_main_program_is_the_end(supervisor, other, main, code):
    supervisor.start("other", python(other), os.environ)
    assert supervisor.wait(supervisor.start("main", python(main), os.environ)) == code


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        ("exit('error: out of luck')", WorkerLost, r"ended with exit code 1\n    \| error: out"),
        ("import os; os.kill(os.getpid(), 9)", WorkerLost, "other was killed by SIGKILL"),
        ("raise SystemExit(2)", ConfigurationError, "other ended with exit code 2"),  # the user's mistake
    ],
)
def test_the_death_of_another_program_is_reported_with_how_it_ended(supervisor, code, error, message):
    main = supervisor.start("main", SLEEP, os.environ)
    supervisor.start("other", python(code), os.environ)
    with pytest.raises(error, match=message):
        supervisor.wait(main)


def test_a_wait_for_a_word_has_a_deadline(supervisor):
    silent = supervisor.start("silent", SLEEP, os.environ)
    with pytest.raises(DeadlineExceeded, match="silent did not say 'ready' in 0 s"):
        supervisor.wait_for_text(silent, "ready", deadline_s=0.3)


def test_stop_ends_grandchildren_orphans_and_those_that_ignore_sigterm(supervisor):
    earlier = set(psutil.Process().children(recursive=True))  # of other tests
    ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    stubborn = f"{ignore}; print('deaf', flush=True); time.sleep(600)"
    orphan_maker = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {stubborn!r}], start_new_session=True)"
    supervisor.start("orphan maker", python(orphan_maker), os.environ)
    deaf = supervisor.start("deaf", python(stubborn), os.environ)
    supervisor.wait_for_text(deaf, "deaf", 30)
    time.sleep(1)
    supervisor.stop()
    assert set(psutil.Process().children(recursive=True)) <= earlier
    subreaper = ctypes.c_int()
    ctypes.CDLL(None).prctl(37, ctypes.byref(subreaper))  # PR_GET_CHILD_SUBREAPER
    assert not subreaper.value  # or whatever is orphaned from now on would stay with this process as a zombie


def test_everything_dies_with_a_supervisor_that_is_killed_or_interrupted_twice(tmp_path):
    code = f"""
import os, signal, sys
from pathlib import Path
from async_grpo.processes.supervisor import Supervisor
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
supervisor = Supervisor(Path({str(tmp_path)!r}))
program = supervisor.start("sleeper", [sys.executable, "-c", "import time; time.sleep(600)"], os.environ)
print(program.process.pid, flush=True)
try:
    supervisor.wait(program)
finally:
    supervisor.stop()
"""
    for signals in ([signal.SIGKILL], [signal.SIGINT, signal.SIGINT]):
        run = subprocess.Popen(
            python(code), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
        )
        child = psutil.Process(int(run.stdout.readline()))
        for number in signals:
            run.send_signal(number)
            time.sleep(0.2)
        run.wait(30)
        _, alive = psutil.wait_procs([child], timeout=10)
        assert not alive, signals


def test_what_survives_sigkill_is_named(monkeypatch):
    monkeypatch.setattr(process_tree, "_signal_all", lambda number, spared: None)
    earlier = frozenset(process_tree.descendants(os.getpid()))  # of other tests
    with subprocess.Popen(python("import time; time.sleep(5)")) as started:
        with pytest.raises(TimeoutError, match=rf"processes \[{started.pid}\] survive SIGKILL"):
            process_tree.end_descendants(deadline_s=0.05, spared=earlier)
        started.kill()


def test_children_that_were_there_before_are_left_alone():
    with subprocess.Popen(python("import time; time.sleep(600)")) as earlier:
        spared = frozenset(process_tree.descendants(os.getpid()))
        later = subprocess.Popen(python("import time; time.sleep(600)"))
        try:
            codes = process_tree.end_descendants(deadline_s=10.0, spared=spared)
            assert codes == {later.pid: -signal.SIGKILL} and earlier.poll() is None
        finally:
            later.kill()
            earlier.kill()


def test_an_orphan_that_is_adopted_after_children_were_listed_is_ended_too(monkeypatch, tmp_path):
    """Its parent ends between the list of children and the collection of their exit codes."""
    list_children = process_tree.children
    with subprocess.Popen(python("import time; time.sleep(600)")) as earlier:
        supervisor = Supervisor(tmp_path)
        start_another = f"import subprocess; print(subprocess.Popen({SLEEP!r}).pid, flush=True)"
        parent = supervisor.start(
            "parent", python(start_another + "; import time; time.sleep(600)"), os.environ
        )
        supervisor.wait_for_text(parent, "\n", 30)
        orphan = psutil.Process(int(parent.output.read_text()))

        def list_before_the_parent_dies(pid: int) -> list[int]:
            listed = list_children(pid)
            if pid == os.getpid() and parent.process.pid in listed:
                parent.process.kill()
                while orphan.ppid() != os.getpid():
                    time.sleep(0.01)
            return listed

        monkeypatch.setattr(process_tree, "children", list_before_the_parent_dies)
        try:
            supervisor.stop(at_once=True)
            assert orphan.pid not in list_children(os.getpid())
        finally:
            earlier.kill()


def test_a_supervisor_ends_what_it_started_and_spares_what_was_there_before(tmp_path):
    with subprocess.Popen(python("import time; time.sleep(600)")) as earlier:
        supervisor = Supervisor(tmp_path)
        program = supervisor.start("sleeper", python("import time; time.sleep(600)"), os.environ)
        supervisor.stop()
        assert program.process.poll() is not None and earlier.poll() is None
        earlier.kill()


def test_signals_are_handled_in_the_main_thread_alone():
    before, seen = signal.getsignal(signal.SIGUSR1), []

    def look() -> None:
        with supervisor_module.handling(signal.SIG_IGN, signal.SIGUSR1):
            seen.append(signal.getsignal(signal.SIGUSR1))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join(10)
    look()
    assert seen == [before, signal.SIG_IGN] and signal.getsignal(signal.SIGUSR1) == before
