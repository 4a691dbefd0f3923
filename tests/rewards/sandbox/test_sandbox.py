"""The sandbox for code that nobody has read: honest programs run, and no attack that we could think of gets out."""

import os
import re
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from sandboxes import STANDING, needs_landlock, needs_network_off, needs_seccomp, program

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.sandbox import run as sandbox_run
from async_grpo.rewards.sandbox import seccomp
from async_grpo.rewards.sandbox.confine import LEVELS, NETWORK_LEVELS, ruleset
from async_grpo.rewards.sandbox.run import Sandbox, SandboxError

ROOT = Path(__file__).parents[3]
SYSTEM_PYTHON = "/usr/bin/python3.11"
pytestmark = needs_network_off


# Programs that mean well


def test_a_program_reads_its_input_in_every_usual_way():
    code = """
        import os, sys
        first = input()
        rest = sys.stdin.read()
        size = os.fstat(0).st_size
        os.lseek(0, 0, os.SEEK_SET)
        print(first, rest.split(), size, os.read(0, size).decode().count("\\n"))
        """
    assert program(code, "a\nb c\n").output == b"a ['b', 'c'] 6 2\n"


def test_threads_asyncio_deep_recursion_and_the_standard_library_work():
    code = """
        import asyncio, hashlib, random, sys, threading, zlib
        found = []
        threading.stack_size(2**26)
        sys.setrecursionlimit(10**6)
        def depth(n): return n and 1 + depth(n - 1)
        thread = threading.Thread(target=lambda: found.append(depth(20000)))
        thread.start()
        thread.join()
        async def wait():
            await asyncio.sleep(0.001)
            return await asyncio.to_thread(len, "abc")
        print(found, asyncio.run(wait()), 0 <= random.random() < 1, __name__)
        """
    run = program(code)
    assert run.ended_well and run.output == b"[20000] 3 True __main__\n"


def test_the_same_program_prints_the_same_in_every_run_and_every_process():
    code = "print({str(n) for n in range(50)})"
    with ThreadPoolExecutor(1) as pool:  # each thread has a fork server of its own
        assert program(code).output == program(code).output == pool.submit(program, code).result().output


def test_an_exit_status_other_than_zero_is_no_success():
    assert program("print(1)\nraise SystemExit(0)").ended_well
    for code in ("print(1)\nraise SystemExit(3)", "print(1)\n1 / 0", "def", "import os\nos.abort()"):
        assert not program(code).ended_well


# Programs that do not


@pytest.mark.parametrize(
    ("code", "limits"),
    [
        ("while True: pass", Sandbox(cpu_s=60, wall_s=0.3)),
        ("import signal\nsignal.pause()", Sandbox(cpu_s=60, wall_s=0.3)),
        (
            "import signal\nsignal.signal(signal.SIGXCPU, lambda *_: 0)\nwhile True: pass",
            Sandbox(cpu_s=0.2, wall_s=120),
        ),
    ],
)
def test_what_does_not_end_is_ended_by_the_clock_or_the_kernel(code, limits):
    run = program(code, sandbox=limits)
    assert run.timed_out and not run.ended_well


@needs_seccomp
def test_a_fork_bomb_does_not_get_to_its_second_process():
    code = """
        import os
        try:
            while True:
                os.fork()
        except OSError as error:
            print(type(error).__name__)
        """
    assert program(code).output == b"PermissionError\n"


def test_memory_is_limited():
    run = program("print(1)\ntry:\n    x = bytearray(10**10)\nexcept MemoryError:\n    print('no')")
    assert run.output == b"1\nno\n"
    assert not program("x = []\nwhile True: x.append(' ' * 10**6 + str(len(x)))").ended_well


def test_threads_are_limited():
    code = """
        import threading, time
        threading.stack_size(2**16)
        threads = [threading.Thread(target=time.sleep, args=(0.5,)) for _ in range({})]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        """
    assert program(code.format(50)).ended_well
    assert not program(code.format(200)).ended_well


def test_output_beyond_the_limit_is_wrong_and_costs_nobody_memory():
    sandbox = Sandbox(output_bytes=10_000)
    run = program("print('x' * 9_999)", sandbox=sandbox)
    assert run.ended_well and len(run.output) == 10_000
    for code in ("print('x' * 10_000)", "while True: print('x' * 1000)"):
        run = program(code, sandbox=sandbox)
        assert not run.ended_well and not run.timed_out and not run.output


def test_the_environment_is_empty(monkeypatch):
    monkeypatch.setenv("SECRET", "sesame")
    run = program("import os\nprint(dict(os.environ), os.getenv('SECRET'), len(os.listdir('.')))")
    assert run.output == b"{} None 0\n" if "landlock" in run.levels else b"sesame" not in run.output


CONNECT = """
    import socket
    try:
        socket.create_connection(("127.0.0.1", {port}), 5).sendall(b"hello")
        print("connected")
    except OSError:
        print("no network")
    """


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        yield server


@pytest.mark.parametrize("levels", [("seccomp",), ("namespaces",), LEVELS])
def test_code_cannot_connect_to_a_listener_on_this_machine(listener, levels):
    if not set(levels) & NETWORK_LEVELS & STANDING:
        pytest.skip(f"no {levels} here")
    run = program(CONNECT.format(port=listener.getsockname()[1]), sandbox=Sandbox(levels=levels))
    assert run.output == b"no network\n"
    with pytest.raises(TimeoutError):
        listener.accept()


def test_without_a_level_that_blocks_the_network_nothing_is_run_unless_allowed(listener, monkeypatch):
    def slowly(*args, **kwargs):
        result = receive(*args, **kwargs)
        time.sleep(0.5)  # in which code that was not stopped where it runs would get out
        return result

    receive = sandbox_run._receive
    monkeypatch.setattr(sandbox_run, "_receive", slowly)
    code = CONNECT.format(port=listener.getsockname()[1])
    with pytest.raises(ConfigurationError, match="allow_unsandboxed"):
        program(code, sandbox=Sandbox(levels=("uid",)))
    with pytest.raises(TimeoutError):
        listener.accept()
    done = program(code, sandbox=Sandbox(levels=(), allow_unsandboxed=True))
    assert done.output == b"connected\n" and done.levels == frozenset()  # so the listener can be reached


@pytest.mark.parametrize("levels", [("seccomp",), ("landlock", "namespaces"), ("landlock", "seccomp")])
def test_code_cannot_change_a_file_outside_its_folder(levels, tmp_path):
    if not set(levels) <= STANDING:
        pytest.skip(f"no {levels} here")
    tmp_path.chmod(0o777)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    victim.chmod(0o666)
    code = f"""
        import os
        victim = {str(victim)!r}
        attempts = [
            lambda: open(victim, "w"), lambda: open(victim, "r+"), lambda: open(victim + "2", "x"),
            lambda: os.truncate(victim, 0), lambda: os.unlink(victim), lambda: os.mkdir(victim + "3"),
            lambda: os.rename(victim, victim + "4"), lambda: os.symlink("/", victim + "5"),
            lambda: os.link(victim, victim + "6"), lambda: os.mkfifo(victim + "7"),
        ]
        for number, attempt in enumerate(attempts):
            try:
                attempt()
                print("done", number)
            except OSError:
                pass
        """
    assert program(code, sandbox=Sandbox(levels=levels)).output == b""
    assert victim.read_text() == "precious" and os.listdir(tmp_path) == ["victim"]


@needs_landlock
def test_code_cannot_read_what_is_none_of_its_business():
    code = f"""
        import os
        for path in ("/etc/passwd", {__file__!r}, "/proc/self/environ", "/proc/{os.getpid()}/environ",
                     f"/proc/{{os.getppid()}}/mem", "/dev/mem"):
            try:
                print(path, open(path, "rb").read(1))
            except OSError:
                pass
        for path in ("/", "/tmp", {str(ROOT)!r}, "/proc"):
            try:
                print(path, os.listdir(path))
            except OSError:
                pass
        """
    assert program(code).output == b""


@needs_seccomp
def test_code_cannot_touch_other_processes_or_become_others():
    code = f"""
        import ctypes, os, signal
        libc = ctypes.CDLL(None, use_errno=True)
        calls = [
            lambda: os.kill({os.getpid()}, 0), lambda: os.kill(os.getppid(), signal.SIGKILL), lambda: os.kill(-1, 0),
            lambda: os.kill(0, 0), lambda: os.setsid(), lambda: os.setpgid(0, 0), lambda: os.execv("/bin/true", ["true"]),
            lambda: os.posix_spawn("/bin/true", ["true"], {{}}), lambda: os.setuid(0), lambda: os.chroot("/"),
            lambda: os.memfd_create("x"), lambda: os.sched_setaffinity(0, {{0}}), lambda: os.pidfd_open(os.getpid()),
        ]
        for number, call in enumerate(calls):
            try:
                call()
                print("done", number)
            except OSError:
                pass
        raw = [("ptrace", 16, os.getppid(), 0, 0), ("unshare", 0x10000000), ("mount", b"x", b"/tmp", b"tmpfs", 0, 0),
               ("prctl", 1, 0, 0, 0, 0), ("process_vm_readv", os.getppid(), 0, 0, 0, 0, 0)]
        for name, *arguments in raw:
            if getattr(libc, name)(*arguments) != -1:
                print("done", name)
        for number in (425, 321, 323, 272):  # io_uring_setup, and on x86-64: bpf, userfaultfd, unshare
            if libc.syscall(number, 0, 0, 0) != -1:
                print("done", number)
        """
    run = program(code)
    assert run.ended_well and run.output == b""


def test_only_its_own_three_descriptors_are_open():
    code = """
        import os
        for number in range(200):
            try:
                os.fstat(number)
                print(number, end=" ")
            except OSError:
                pass
        """
    assert program(code).output == b"0 1 2 "


@pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists(SYSTEM_PYTHON), reason="needs root and a system Python"
)
def test_root_becomes_a_user_of_its_own_where_that_user_can_read_the_interpreter(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", SYSTEM_PYTHON)
    secret = tmp_path / "secret"
    secret.write_text("sesame")
    secret.chmod(0o600)
    code = f"import os\nprint(os.getuid() > 60000)\nopen({str(secret)!r})"
    sandbox = Sandbox(levels=("uid",), allow_unsandboxed=True)
    with ThreadPoolExecutor(1) as pool:  # with a fork server of its own
        run = pool.submit(program, code, sandbox=sandbox).result()
    assert run.levels == {"uid"} and run.output == b"True\n" and not run.ended_well


def wait_until(condition, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_when_the_fork_server_dies_what_it_forked_dies_too_and_the_next_run_gets_another():
    this = psutil.Process()
    others = set(this.children())
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(program, "import time\ntime.sleep(60)", sandbox=Sandbox(wall_s=60))
        wait_until(lambda: set(this.children()) - others)
        (server,) = set(this.children()) - others
        wait_until(lambda: len(server.children(recursive=True)) == 2)
        guardian_and_tested = server.children(recursive=True)
        server.kill()
        assert not psutil.wait_procs(guardian_and_tested, timeout=20)[1]
        with pytest.raises(SandboxError):
            running.result()
        wait_until(lambda: pool.submit(program, "print(1)").result().output == b"1\n")


def test_what_code_starts_where_no_filter_forbids_it_ends_with_it():
    code = """
        import os, time
        if not os.fork():
            os.setsid()
            if not os.fork():
                os.setsid()
                time.sleep(60)
            os._exit(0)
        print("started")
        """
    this = psutil.Process()
    before = set(this.children(recursive=True))
    sandbox = Sandbox(levels=(), allow_unsandboxed=True)
    # RLIMIT_NPROC stops it unless it is root's
    assert program(code, sandbox=sandbox).output in (b"started\n", b"")
    servers = set(this.children())
    assert set(this.children(recursive=True)) - before <= servers  # not even where it left its session


# The levels, apart


HEADERS = {"x86_64": "x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "asm-generic/unistd.h"}


@pytest.mark.parametrize(("machine", "header"), HEADERS.items())
def test_the_numbers_of_the_calls_are_those_of_the_kernels_headers(machine, header):
    path = Path("/usr/include", header)
    if not path.exists():
        pytest.skip("no kernel headers here")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", path.read_text())
    official = {name: int(number) for name, number in found}
    official |= {"newfstatat": official.get("newfstatat", official.get("fstatat"))}
    for table in (seccomp._PLAIN, seccomp._CHECKED):
        for name, number in seccomp.numbers(table, machine).items():
            assert official[name] == number, name


def verdict(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """What the filter says, by an interpreter of its five instructions. The own process is number 7."""
    data = {0: number, 4: seccomp._ARCHITECTURES[machine][1] if architecture is None else architecture}
    data |= {16 + 8 * i: value & 0xFFFFFFFF for i, value in enumerate((*arguments, *[0] * 6))}
    program, position, accumulator = seccomp.program(machine, 7), 0, 0
    while True:
        code, if_true, if_false, constant = program[position]
        position += 1
        if code == 0x20:
            accumulator = data[constant]
        elif code == 0x06:
            return constant
        else:
            equal, at_least, any_bit = (
                accumulator == constant,
                accumulator >= constant,
                accumulator & constant,
            )
            position += if_true if {0x15: equal, 0x35: at_least, 0x45: any_bit}[code] else if_false


ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000


@pytest.mark.parametrize(
    ("machine", "number", "arguments", "expected"),
    [
        ("x86_64", 0, (), ALLOW), ("aarch64", 63, (), ALLOW),  # read
        ("x86_64", 41, (), EPERM), ("aarch64", 198, (), EPERM),  # socket
        ("x86_64", 57, (), EPERM), ("x86_64", 59, (), EPERM),  # fork, execve
        ("x86_64", 56, (0x3D0F00,), ALLOW), ("x86_64", 56, (17,), EPERM),  # clone of a thread, of a process
        ("aarch64", 220, (0x3D0F00,), ALLOW), ("aarch64", 220, (17,), EPERM),
        ("x86_64", 257, (0, 0, os.O_RDONLY), ALLOW), ("x86_64", 257, (0, 0, os.O_WRONLY), EPERM),  # openat
        ("x86_64", 257, (0, 0, os.O_RDONLY | os.O_TRUNC), EPERM), ("x86_64", 257, (0, 0, os.O_RDONLY | os.O_CREAT), EPERM),
        ("aarch64", 56, (0, 0, os.O_RDWR), EPERM), ("aarch64", 56, (0, 0, os.O_RDONLY | 0o2000000), ALLOW),
        ("x86_64", 2, (0, os.O_RDONLY), ALLOW), ("x86_64", 2, (0, os.O_RDWR), EPERM),
        ("x86_64", 62, (7, 9), ALLOW), ("x86_64", 62, (8, 9), EPERM), ("x86_64", 62, (0, 9), EPERM),  # kill
        ("x86_64", 62, (0xFFFFFFFF, 9), EPERM),
        ("x86_64", 302, (0,), ALLOW), ("x86_64", 302, (7,), ALLOW), ("x86_64", 302, (6,), EPERM),  # prlimit64
        ("x86_64", 44, (3, 1, 1, 0, 0, 0), ALLOW), ("x86_64", 44, (3, 1, 1, 0, 5, 16), EPERM),  # sendto
        ("x86_64", 16, (0, 0x5401), ALLOW), ("x86_64", 16, (0, 0x5412), EPERM),  # ioctl: TCGETS, TIOCSTI
        ("x86_64", 72, (0, 3), ALLOW), ("x86_64", 72, (0, 8), EPERM),  # fcntl: F_GETFL, F_SETOWN
        ("x86_64", 53, (1,), ALLOW), ("x86_64", 53, (2,), EPERM),  # socketpair
        ("x86_64", 435, (), ENOSYS), ("x86_64", 425, (), ENOSYS), ("aarch64", 435, (), ENOSYS), ("x86_64", 439, (), ALLOW),
        ("x86_64", 0x40000000, (), ENOSYS), ("x86_64", 0x40000000 + 41, (), ENOSYS),  # the x32 numbers
    ],
)  # fmt: skip
def test_the_filter_decides_as_it_should(machine, number, arguments, expected):
    assert verdict(machine, number, *arguments) == expected


def test_the_filter_knows_no_other_architecture():
    assert verdict("x86_64", 0, architecture=0x40000003) == KILL  # 32-bit calls of a 64-bit process


@pytest.mark.parametrize(("version", "length", "rights"), [(1, 8, 13), (3, 8, 15), (4, 16, 15), (9, 24, 16)])
def test_the_ruleset_holds_only_what_the_kernels_version_knows(version, length, rights):
    packed = ruleset(version)
    assert len(packed) == length and int.from_bytes(packed[:8], "little") == 2**rights - 1
