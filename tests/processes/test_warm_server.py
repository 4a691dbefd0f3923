"""Processes that are forked from a warm server behave as `python` does, and end with their client."""

import contextlib
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from async_grpo.processes.look import look, request_look
from async_grpo.processes.warm_client import DIES_WITH_STARTER
from async_grpo.processes.warm_server import Stage, listen, write_executable

# Prints what a program sees of its surroundings
SURROUNDINGS = """
import json, os, resource, sys
print(json.dumps({
    "argv": sys.argv[1:], "name": __name__, "folder": os.getcwd(), "first_path": sys.path[0],
    "mark": os.environ.get("MARK"),
    "umask": os.umask(0), "files": resource.getrlimit(resource.RLIMIT_NOFILE), "input": sys.stdin.read(),
    "cores": sorted(os.sched_getaffinity(0)), "executable": sys.executable,
    "open": sorted(int(fd) for fd in os.listdir("/proc/self/fd") if os.path.lexists("/proc/self/fd/" + fd)),
}))
"""
IS_WARM = "import sys; print('decimal' in sys.modules, 'colorsys' in sys.modules)"


class Servers:
    """Servers of two stages: `decimal`, then also `colorsys`."""

    def __init__(
        self,
        folder: Path,
        modules: tuple[list[str], ...],
        preexec_fn: Any = None,
        own_modules: Sequence[str] = (),
        **variables: str,
    ) -> None:
        self.log = folder / "server.log"
        self.executables = []
        stages = []
        listeners = []
        for number, names in enumerate(modules):
            listener = listen(folder / f"{number}.socket")
            executable = write_executable(folder / str(number), folder / f"{number}.socket")
            listeners.append(listener)
            self.executables.append(str(executable))
            # Only the first stage has modules of its own
            own_names = [] if number else own_modules
            stages.append(Stage(listener.fileno(), executable, names, own_names).as_json())
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "async_grpo.processes.warm_server", json.dumps(stages)],
                pass_fds=[listener.fileno() for listener in listeners],
                stderr=log,
                env=os.environ | variables,
                preexec_fn=preexec_fn,
            )
        for listener in listeners:
            listener.close()

    def run(self, *arguments: str, stage: int = 0, **options) -> subprocess.CompletedProcess:
        """Run Python with these arguments by the executable of a stage."""
        options = {"input": "", "env": os.environ} | options
        command = [self.executables[stage], *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, **options)


@pytest.fixture
def servers(tmp_path):
    """Two servers that end with the test."""
    servers = Servers(tmp_path, (["decimal"], ["colorsys"]))
    yield servers
    servers.process.kill()
    servers.process.wait()


@pytest.fixture
def program(tmp_path):
    """A program and a module that print what they see."""
    file = tmp_path / "surroundings.py"
    file.write_text(SURROUNDINGS)
    return file


@pytest.mark.parametrize("form", ["-c", "-m", "file"])
def test_a_process_sees_what_a_process_of_python_sees(servers, program, form, tmp_path):
    arguments = {
        "-c": ["-B", "-c", SURROUNDINGS, "one", "--two"],
        "-m": ["-m", "surroundings", "one", "--two"],
        "file": ["-u", str(program), "one", "--two"],
    }[form]
    options = {"cwd": tmp_path, "env": os.environ | {"MARK": "here"}, "input": "some text", "umask": 0o027}
    usual = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=30, **options
    )
    forked = servers.run(*arguments, **options)
    assert json.loads(forked.stdout) == json.loads(usual.stdout)
    assert json.loads(forked.stdout)["input"] == "some text"


def test_each_stage_has_imported_its_modules_and_those_before(servers):
    assert servers.run("-c", IS_WARM, stage=0).stdout.split() == ["True", "False"]
    assert servers.run("-c", IS_WARM, stage=1).stdout.split() == ["True", "True"]


@pytest.mark.parametrize(
    "code, exit_code",
    [
        ("pass", 0),
        ("raise SystemExit(7)", 7),
        ("raise SystemExit", 0),
        ("raise SystemExit('out of luck')", 1),
        ("raise SystemExit(258)", 2),
        ("1 / 0", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import os, signal; os.kill(os.getpid(), signal.SIGABRT)", -signal.SIGABRT),
    ],
)
def test_a_process_ends_as_python_ends(servers, code, exit_code):
    done = servers.run("-c", code)
    assert done.returncode == exit_code
    assert ("ZeroDivisionError" in done.stderr) == (code == "1 / 0")
    assert ("out of luck" in done.stderr) == ("out of luck" in code)


def test_a_process_waits_for_its_threads_and_does_what_it_registered_for_its_end(servers):
    code = """
import atexit, concurrent.futures, threading, time
def later(text, seconds):
    time.sleep(seconds)
    print(text)
threading.Thread(target=later, args=("thread", 0.3)).start()
concurrent.futures.ThreadPoolExecutor().submit(later, "pool", 0.6)
threading.Thread(target=later, args=("daemon", 20), daemon=True).start()
atexit.register(print, "end")
print("main", end=" ")
"""
    assert servers.run("-c", code).stdout.split() == ["main", "thread", "pool", "end"]


def test_a_server_imports_modules_of_its_own_after_the_next_one_was_forked(tmp_path):
    servers = Servers(tmp_path, (["decimal"], []), own_modules=["colorsys"])
    assert servers.run("-c", IS_WARM, stage=0).stdout.split() == ["True", "True"]
    assert servers.run("-c", IS_WARM, stage=1).stdout.split() == ["True", "False"]
    servers.process.kill()


def test_temporary_files_and_times_follow_the_variables_of_the_client(tmp_path):
    (tmp_path / "asks.py").write_text("import tempfile, time; tempfile.gettempdir(); time.localtime()")
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    servers = Servers(tmp_path, (["asks", "decimal"],), PYTHONPATH=path)
    own = tmp_path / "own"
    own.mkdir()
    code = (
        "import sys, tempfile, time; print('asks' in sys.modules, tempfile.gettempdir(), time.strftime('%Z'))"
    )
    variables = os.environ | {"PYTHONPATH": path, "TMPDIR": str(own), "TZ": "Asia/Tokyo"}
    done = servers.run("-c", code, env=variables)
    servers.process.kill()
    assert done.stdout.split() == ["True", str(own), "JST"]


def test_random_numbers_of_two_processes_differ(tmp_path):
    servers = Servers(tmp_path, (["numpy", "random"],))
    code = "import random, numpy; print(random.random(), numpy.random.rand())"
    outputs = {servers.run("-c", code).stdout for _ in range(3)}
    servers.process.kill()
    assert len(outputs) == 3


def test_open_files_keep_their_numbers(servers):
    reading, writing = os.pipe()
    # The lowest free number from 300. A number that this process uses, for Ray's library perhaps, would be taken from it
    moved = fcntl.fcntl(writing, fcntl.F_DUPFD, 300)
    code = f"import os; os.write({moved}, b'through'); print(os.path.lexists('/proc/self/fd/{moved + 1}'))"
    done = servers.run("-c", code, pass_fds=[moved])
    os.close(writing)
    os.close(moved)
    assert done.stdout.split() == ["False"] and os.read(reading, 100) == b"through"
    # The client has closed its copies, or this would wait for it
    assert os.read(reading, 100) == b""
    os.close(reading)


def test_a_process_that_closes_a_pipe_is_noticed_though_its_client_lives(servers):
    reading, writing = os.pipe()
    code = f"import os, time; os.close({writing}); time.sleep(60)"
    with subprocess.Popen([servers.executables[0], "-c", code], pass_fds=[writing]) as client:
        os.close(writing)
        assert os.read(reading, 1) == b"" and client.poll() is None
        client.kill()
    os.close(reading)


@contextlib.contextmanager
def sleeping(servers: Servers):
    """Yield a client and the id of its process, which handles SIGTERM."""
    code = (
        "import os, signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); "
        "print(os.getpid(), flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [servers.executables[1], "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as client:
        yield client, int(client.stdout.readline())
        client.kill()


def has_ended(pid: int) -> bool:
    """Wait until a process has ended, for at most 10 s."""
    deadline = time.monotonic() + 10
    # The process may end between two questions about it
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
    return True


def test_the_list_of_processes_shows_what_a_process_runs(servers):
    with sleeping(servers) as (_, pid):
        command = " ".join(psutil.Process(pid).cmdline())
        assert command.startswith(f"{sys.executable} -c") and "warm_server" not in command
        assert psutil.Process(servers.process.pid).cmdline()[2] == "async_grpo.processes.warm_server"


def test_the_name_of_a_rank_says_its_number_and_its_stack_is_found(servers):
    code = "import time\ndef nap():\n    print('up', flush=True)\n    time.sleep(60)\nnap()"
    with subprocess.Popen(
        [servers.executables[0], "-c", code], env=os.environ | {"RANK": "3"}, stdout=subprocess.PIPE
    ) as client:
        client.stdout.readline()
        states = {state.role: state for state in look([servers.process.pid, client.pid])}
        client.kill()
    assert "nap (" in " ".join(states["rank 3"].frames)


def test_a_look_is_asked_of_the_process_and_not_of_its_client(servers):
    code = (
        "import signal, sys, time\nsignal.signal(signal.SIGUSR1, lambda *_: sys.exit(9))\n"
        "print('up', flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([servers.executables[0], "-c", code], stdout=subprocess.PIPE) as client:
        client.stdout.readline()
        assert not request_look(client.pid)
        assert not request_look(os.getpid(), "no such program")
        assert request_look(os.getpid(), "time.sleep(60)")
        assert client.wait(10) == 9


def test_a_process_knows_who_started_it(servers):
    code = "from async_grpo.processes.process_tree import pid_of_starter; print(pid_of_starter())"
    assert int(servers.run("-c", code).stdout) == os.getpid()


@pytest.mark.parametrize("dies", [True, False])
def test_a_process_dies_with_its_starter_if_it_shall(servers, tmp_path, dies):
    program = tmp_path / "starter.py"
    program.write_text(
        "import os, subprocess, sys, time\n"
        "code = 'import os, time; print(os.getpid(), flush=True); time.sleep(60)'\n"
        f"subprocess.Popen([{servers.executables[0]!r}, '-c', code])\ntime.sleep(60)\n"
    )
    variables = os.environ | ({DIES_WITH_STARTER: "1"} if dies else {})
    with subprocess.Popen(
        [sys.executable, program], env=variables, stdout=subprocess.PIPE, text=True
    ) as starter:
        pid = int(starter.stdout.readline())
        starter.kill()
    if dies:
        assert has_ended(pid)
    else:
        time.sleep(0.5)
        os.kill(pid, signal.SIGKILL)


def test_a_process_may_name_itself(servers):
    code = (
        "import setproctitle; setproctitle.setproctitle('VLLM::EngineCore'); "
        "print(open('/proc/self/cmdline').read())"
    )
    assert servers.run("-c", code).stdout.strip().strip("\0") == "VLLM::EngineCore"


def test_signals_reach_the_process(servers):
    with sleeping(servers) as (client, pid):
        client.terminate()
        assert client.wait(10) == 5 and has_ended(pid)


def test_a_signal_that_comes_before_the_server_has_answered_waits_and_reaches_the_process(servers):
    servers.run("-c", "pass")  # the server is up
    servers.process.send_signal(signal.SIGSTOP)
    with subprocess.Popen([servers.executables[0], "-c", "import time; time.sleep(60)"]) as client:
        # The client reads from its socket, so it has sent its request
        while "unix_stream" not in Path(f"/proc/{client.pid}/wchan").read_text():
            time.sleep(0.01)
        client.terminate()
        time.sleep(0.2)
        assert client.poll() is None
        servers.process.send_signal(signal.SIGCONT)
        assert client.wait(10) == -signal.SIGTERM


def test_the_process_of_a_killed_client_is_killed_even_if_it_is_stopped(servers):
    with sleeping(servers) as (client, pid):
        os.kill(pid, signal.SIGSTOP)
        client.kill()
        assert has_ended(pid)


def test_the_processes_of_a_killed_server_end_and_their_clients_say_so(servers):
    with sleeping(servers) as (client, pid):
        servers.process.kill()
        assert client.wait(10) == 70 and has_ended(pid)
        assert "the warm server ended" in client.stderr.read()


def test_without_a_server_python_starts_as_usual(servers):
    servers.process.kill()
    servers.process.wait()
    assert servers.run("-c", IS_WARM).stdout.split() == ["False", "False"]


@pytest.mark.parametrize("name", ["PYTHONHASHSEED", "HF_HUB_OFFLINE", "LD_LIBRARY_PATH", "TORCHINDUCTOR_X"])
def test_another_value_of_a_variable_that_imports_read_starts_python_as_usual(servers, name):
    done = servers.run("-c", IS_WARM, env=os.environ | {name: "7"})
    assert done.stdout.split() == ["False", "False"]
    assert f"{name} differs from that of the warm server" in servers.log.read_text()


def test_a_process_may_have_a_folder_of_its_own_for_compiled_code(servers):
    """Torch reads this variable when it compiles."""
    code = f"{IS_WARM}; import os; print(os.environ['TORCHINDUCTOR_CACHE_DIR'])"
    done = servers.run("-c", code, env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": "/a/folder"})
    is_warm, _, folder = done.stdout.split()
    assert (is_warm, folder) == ("True", "/a/folder")


def test_a_library_that_is_not_preloaded_in_the_server_starts_python_as_usual(servers):
    done = servers.run("-c", IS_WARM, env=os.environ | {"LD_PRELOAD": "/nowhere/libx.so"})
    assert done.stdout.split() == ["False", "False"]
    assert "/nowhere/libx.so" in servers.log.read_text()


def test_a_client_with_higher_limits_than_the_server_starts_python_as_usual(tmp_path):
    def lower_limit():
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

    servers = Servers(tmp_path, (["decimal"],), preexec_fn=lower_limit)
    done = servers.run("-c", IS_WARM)
    servers.process.kill()
    assert done.stdout.split() == ["False", "False"]
    assert "its RLIMIT_NOFILE is higher than that of the warm server" in servers.log.read_text()


def test_a_lower_limit_of_the_client_is_taken_over(servers):
    code = "import resource, sys; print(resource.getrlimit(resource.RLIMIT_NOFILE), 'decimal' in sys.modules)"
    done = servers.run("-c", code, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (99, 100)))
    assert done.stdout.strip() == "(99, 100) True"


def test_a_variable_that_imports_set_keeps_the_value_of_a_client_with_one_of_its_own(tmp_path):
    (tmp_path / "sets.py").write_text("import os\nos.environ['SET_BY_IMPORT'] = 'by the import'\n")
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    servers = Servers(tmp_path, (["sets"],), PYTHONPATH=path)
    code = "import os; print(os.environ['SET_BY_IMPORT'])"
    variables = os.environ | {"PYTHONPATH": path}
    assert servers.run("-c", code, env=variables).stdout == "by the import\n"
    assert servers.run("-c", code, env=variables | {"SET_BY_IMPORT": "own"}).stdout == "own\n"
    servers.process.kill()


def test_a_client_and_a_process_that_end_at_the_same_time_leave_the_server_alive(servers):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with subprocess.Popen([servers.executables[0], "-c", code], stdout=subprocess.PIPE, text=True) as client:
        pid = int(client.stdout.readline())
        # Both have ended when the stopped server looks again
        servers.process.send_signal(signal.SIGSTOP)
        os.kill(pid, signal.SIGKILL)
        assert has_ended(pid)
        client.kill()
        client.wait(10)
        servers.process.send_signal(signal.SIGCONT)
    assert servers.run("-c", IS_WARM).stdout.split() == ["True", "False"]
    assert servers.process.poll() is None


def test_options_of_the_interpreter_start_python_as_usual(servers):
    assert servers.run("-X", "utf8", "-c", IS_WARM).stdout.split() == ["False", "False"]


def test_ray_cannot_be_imported_by_a_server(tmp_path):
    module = tmp_path / "wants_ray.py"
    module.write_text("try:\n    import ray\nexcept ImportError:\n    ray = None\n")
    servers = Servers(tmp_path, (["wants_ray"],), PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    code = (
        "import wants_ray, sys; print(wants_ray.ray, 'ray' in sys.modules); import ray; print(ray.__name__)"
    )
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    done = servers.run("-c", code, env=os.environ | {"PYTHONPATH": path})
    servers.process.kill()
    assert done.stdout.split() == ["None", "False", "ray"]


def test_modules_that_start_threads_are_not_forked(tmp_path):
    (tmp_path / "with_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=[60], daemon=True).start()\n"
    )
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    servers = Servers(tmp_path, (["decimal", "with_thread"],), PYTHONPATH=path)
    done = servers.run("-c", IS_WARM, env=os.environ | {"PYTHONPATH": path})
    assert done.stdout.split() == ["False", "False"]
    servers.process.wait(10)
    assert "started 1 threads" in servers.log.read_text()


def test_what_multiprocessing_starts_is_forked_as_well(servers, tmp_path):
    program = tmp_path / "parent.py"
    program.write_text(
        "import multiprocessing, sys\n"
        "def child(queue):\n    queue.put('colorsys' in sys.modules)\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n    queue = context.Queue()\n"
        "    process = context.Process(target=child, args=[queue])\n    process.start()\n"
        "    print(queue.get(timeout=20))\n    process.join()\n    print(process.exitcode)\n"
    )
    assert servers.run(str(program), stage=1).stdout.split() == ["True", "0"]


def test_a_client_that_says_nothing_does_not_stop_the_server(servers, tmp_path):
    import socket

    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(tmp_path / "0.socket"))
        silent.sendall(b"\x00")
    assert servers.run("-c", IS_WARM).stdout.split() == ["True", "False"]
