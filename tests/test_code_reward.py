"""The code reward and its sandbox: right code passes, and no attack that we could think of does."""

import asyncio
import hashlib
import json
import os
import re
import signal
import socket
import textwrap
import time
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import date, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.adapters.code import code_of, same_output, score
from async_grpo.rewards.process import AdapterProcess
from async_grpo.rewards.sandbox import landlock, seccomp
from async_grpo.rewards.sandbox.confine import NETWORK_LEVELS
from async_grpo.rewards.sandbox.run import Run, Sandbox
from async_grpo.rewards.sandbox.wire import WireError, decode, encode
from async_grpo.rewards.source import RewardSource
from async_grpo.types import RewardStatus

ROOT = Path(__file__).parents[1]
SANDBOX = Sandbox(cpu_s=5, wall_s=20, memory_bytes=2**29)
IMPATIENT = Sandbox(cpu_s=5, wall_s=1.5, memory_bytes=2**29)  # for attacks that end by a time-out anyway
SYSTEM_PYTHON = "/usr/bin/python3.11"

try:
    STANDING = SANDBOX.run_program("", "").levels
except ConfigurationError:
    STANDING = frozenset()
needs_network_off = pytest.mark.skipif(not STANDING & NETWORK_LEVELS, reason="nothing blocks the network here")
needs_seccomp = pytest.mark.skipif("seccomp" not in STANDING, reason="no seccomp here")
needs_landlock = pytest.mark.skipif("landlock" not in STANDING, reason="no Landlock here")
pytestmark = needs_network_off


def program(code: str, stdin: str = "", sandbox: Sandbox = SANDBOX) -> Run:
    return sandbox.run_program(textwrap.dedent(code), stdin)


def passes(code: str, tests: str, sandbox: Sandbox = SANDBOX) -> bool:
    return sandbox.run_tests(textwrap.dedent(code), textwrap.dedent(tests)).ended_well


# The reward


def fenced(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\nDone."


DOUBLE = "print(2 * int(input()))"


def test_the_reward_is_the_share_of_tests_passed():
    tests = [{"input": "2", "output": "4"}, {"input": "3", "output": "7"}, {"input": "-1\n", "output": "-2\n\n"}]
    result = score({"completion": fenced(DOUBLE), "tests": tests})
    assert result["reward"] == pytest.approx(2 / 3)
    assert (result["passed"], result["total"], result["timed_out"]) == (2.0, 3.0, 0.0)
    assert result["network_blocked"] == 1.0 and result["files_hidden"] == float("landlock" in STANDING)


def test_all_or_nothing_gives_no_part():
    tests = [{"input": "2", "output": "4"}, {"input": "3", "output": "7"}]
    assert score({"completion": fenced(DOUBLE), "tests": tests}, all_or_nothing=True)["reward"] == 0.0
    assert score({"completion": fenced(DOUBLE), "tests": tests[:1]}, all_or_nothing=True)["reward"] == 1.0


def test_both_kinds_of_tests_mix():
    code = "def double(n):\n    return 2 * n\n\nif __name__ == '__main__':\n    print(double(int(input())))"
    tests = [{"input": "2", "output": "4"}, {"assert": "assert double(5) == 10"}, {"assert": "assert double(5) == 11"}]
    assert score({"completion": fenced(code), "tests": tests})["passed"] == 2.0


def test_the_prelude_goes_before_the_code():
    row = {"completion": fenced("def f(a: List[int]) -> int: return sum(a)"), "tests": [{"assert": "assert f([1, 2]) == 3"}]}
    assert score(row)["reward"] == 0.0
    assert score(row | {"prelude": "from typing import List"})["reward"] == 1.0


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("print(1)", "print(1)"),
        ("```python\na\n```\n```py\nb\n```", "b\n"),
        ("```python\na\n```\nwhich prints\n```\n7\n```", "a\n"),
        ("```\na\n```\n```text\nb\n```", "a\n"),
        ("  ```python\n  a\n  ```", "  a\n"),
        ("```python\nthought\n```</think>\n```python\na\n```", "a\n"),
        ("```python\nthought\n```</think> no", " no"),
        ("```python\nhalf", "```python\nhalf"),  # cut off: no code, and no Python either
        ("```python title=x.py\na\n```", "a\n"),
    ],
)
def test_the_code_is_the_last_python_block(text, code):
    assert code_of(text) == code


@pytest.mark.parametrize(
    "tests",
    [None, [], "assert f() == 1", [{}], [{"input": "1"}], [{"assert": 1}], [{"assert": "a", "input": "", "output": ""}], ["x"]],
)
def test_a_row_without_usable_tests_raises_so_that_the_sample_fails(tests):
    with pytest.raises(ValueError, match="tests|test must"):
        score({"completion": "print(1)", "tests": tests})


@pytest.mark.parametrize("test", ["assert f(1=2", "assert len([1]) == 1", "assert f(lambda x: x)", "class A: pass\nassert f(A())"])
def test_tests_that_cannot_be_run_are_the_fault_of_the_row(test):
    with pytest.raises(ValueError, match="cannot be run"):
        score({"completion": "def f(x): return x", "tests": [{"assert": test}]})


def test_the_comparison_forgives_white_space_at_ends_only():
    assert same_output("1 \r\n2\n\n", "1\n2")
    assert not same_output("1\n\n2", "1\n2") and not same_output(" 1", "1") and not same_output("1\x0b2", "1\n2")


def test_a_text_beyond_the_limit_is_wrong():
    assert score({"completion": "#" * 100_001, "tests": [{"input": "", "output": ""}]})["reward"] == 0.0


def test_time_that_is_used_up_makes_the_remaining_tests_time_outs():
    row = {"completion": "while True: pass", "tests": [{"input": "", "output": ""}] * 50}
    started = time.monotonic()
    result = score(row, total_seconds=0.5)
    assert time.monotonic() - started < 10
    assert (result["reward"], result["timed_out"]) == (0.0, 50.0)


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


def test_the_same_program_prints_the_same_in_every_run():
    code = "print({str(n) for n in range(50)})"
    assert program(code).output == program(code).output


def test_an_exit_status_other_than_zero_is_no_success():
    assert program("print(1)\nraise SystemExit(0)").ended_well
    for code in ("print(1)\nraise SystemExit(3)", "print(1)\n1 / 0", "def", "import os\nos.abort()"):
        assert not program(code).ended_well


# Programs that do not


@pytest.mark.parametrize("code", ["while True: pass", "import time\ntime.sleep(100)", "import signal\nsignal.pause()"])
def test_what_does_not_end_is_ended_on_the_clock(code):
    started = time.monotonic()
    run = program(code, sandbox=Sandbox(cpu_s=60, wall_s=0.3))
    assert run.timed_out and not run.ended_well and time.monotonic() - started < 10


def test_processor_time_is_counted_by_the_kernel():
    code = "import signal\nsignal.signal(signal.SIGXCPU, lambda *_: None)\nwhile True: pass"
    run = program(code, sandbox=Sandbox(cpu_s=0.2, wall_s=60))
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
        for _ in range({}):
            threading.Thread(target=time.sleep, args=(0.2,)).start()
        """
    assert program(code.format(50)).ended_well
    assert not program(code.format(10**6)).ended_well


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


@pytest.mark.parametrize("levels", [("seccomp",), ("namespaces",), ("uid", "namespaces", "landlock", "seccomp")])
def test_code_cannot_connect_to_a_listener_on_this_machine(listener, levels):
    if not set(levels) & NETWORK_LEVELS & STANDING:
        pytest.skip(f"no {levels} here")
    run = program(CONNECT.format(port=listener.getsockname()[1]), sandbox=Sandbox(levels=levels))
    assert run.output == b"no network\n"
    with pytest.raises(TimeoutError):
        listener.accept()


def test_without_a_level_that_blocks_the_network_nothing_is_run_unless_allowed(listener):
    code = CONNECT.format(port=listener.getsockname()[1])
    with pytest.raises(ConfigurationError, match="allow_unsandboxed"):
        program(code, sandbox=Sandbox(levels=("uid",)))
    with pytest.raises(TimeoutError):
        listener.accept()
    run = program(code, sandbox=Sandbox(levels=(), allow_unsandboxed=True))
    assert run.output == b"connected\n" and run.levels == frozenset()  # so the listener is one that can be reached


def test_the_metrics_say_when_the_network_was_open(monkeypatch):
    monkeypatch.setattr("async_grpo.rewards.adapters.code.Sandbox", lambda **limits: Sandbox(**limits, levels=()))
    row = {"completion": DOUBLE, "tests": [{"input": "1", "output": "2"}]}
    with pytest.raises(ConfigurationError, match="allow_unsandboxed"):
        score(row)
    assert score(row, allow_unsandboxed=True)["network_blocked"] == 0.0


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
        attempts = [
            lambda: open({str(victim)!r}, "w"), lambda: open({str(victim)!r}, "r+"), lambda: open({str(tmp_path / "new")!r}, "x"),
            lambda: os.truncate({str(victim)!r}, 0), lambda: os.unlink({str(victim)!r}), lambda: os.mkdir({str(tmp_path / "d")!r}),
            lambda: os.rename({str(victim)!r}, {str(victim) + "2"!r}), lambda: os.symlink("/", {str(tmp_path / "l")!r}),
            lambda: os.link({str(victim)!r}, {str(tmp_path / "h")!r}), lambda: os.mkfifo({str(tmp_path / "q")!r}),
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


@pytest.mark.skipif(os.geteuid() != 0 or not os.path.exists(SYSTEM_PYTHON), reason="needs root and a system Python")
def test_root_becomes_a_user_of_its_own_where_that_user_can_read_the_interpreter(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("sesame")
    secret.chmod(0o600)
    code = f"import os\nprint(os.getuid() > 60000)\nopen({str(secret)!r})"
    run = program(code, sandbox=Sandbox(levels=("uid",), allow_unsandboxed=True, python=SYSTEM_PYTHON))
    assert run.levels == {"uid"} and run.output == b"True\n" and not run.ended_well


def test_a_dead_forker_is_replaced():
    before = program("import os\nprint(os.getppid())")
    os.kill(int(before.output), signal.SIGKILL)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            after = program("import os\nprint(os.getppid())")
            break
        except RuntimeError:  # it was not seen to be dead yet
            continue
    assert after.ended_well and after.output != before.output


# Tests: right code


RIGHT = [
    ("def f(x): return x + 1", "assert f(1) == 2\nassert f(-1) == 0"),
    ("def f(a, *, k=2): return [k * x for x in a]", "assert f([1, 2], k=3) == [3, 6]"),
    ("def f(a): a.sort()", "a = [3, 1]\nassert f(a) is None\nassert a == [1, 3]"),
    ("def f(m): m[:] = [list(r) for r in zip(*m[::-1])]", "m = [[1, 2], [3, 4]]\nf(m)\nassert m == [[3, 1], [4, 2]]"),
    ("def f(d): d['a'] = d.get('a', 0) + 1", "from collections import defaultdict\nd = defaultdict(int)\nf(d)\nassert d['a'] == 1"),
    ("def f(n):\n    for i in range(n): yield i", "assert list(f(3)) == [0, 1, 2]\nassert next(f(1)) == 0\nassert 2 in f(3)"),
    ("def f(n): return lambda x: x + n", "assert f(2)(3) == 5"),
    ("def f(g, x): return g(x)", "assert f(len, 'abc') == 3 and f(str, 3) == '3'"),
    ("def f(x): return 10 ** x", "assert f(9999) == 10 ** 9999"),
    ("def f(x): return x / 3", "import math\nassert math.isclose(f(1), 0.3333333333333333)\nassert abs(f(2) - 2 / 3) < 1e-9"),
    ("def f(x): return (x,) * 2, {x}, b'x', None, {1: {2: [x]}}", "assert f('y') == (('y', 'y'), {'y'}, b'x', None, {1: {2: ['y']}})"),
    ("import math\ndef f(x): return math.inf", "assert f(1) == float('inf')"),
    ("def f(x):\n    if x < 0: raise ValueError('negative')", "try:\n    f(-1)\nexcept ValueError as error:\n    assert 'neg' in str(error)\nelse:\n    assert False"),
    ("class E(KeyError): pass\ndef f(x): raise E(x)", "try:\n    f(1)\nexcept KeyError:\n    pass\nelse:\n    raise AssertionError"),
    ("def f(x): return x", "def check(candidate):\n    assert candidate(1) == 1\n    assert [candidate(i) for i in (1, 2)] == [1, 2]\ncheck(f)"),
    ("class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n    def pop(self): return self.items.pop()\n    def __len__(self): return len(self.items)",
     "s = Stack()\ns.push(1)\ns.push([2])\nassert len(s) == 2 and s.pop() == [2] and s.items == [1]\nassert isinstance(s, Stack) and not isinstance(1, Stack)"),
    ("class Node:\n    def __init__(self, value, next=None): self.value, self.next = value, next\ndef last(n):\n    while n.next: n = n.next\n    return n",
     "n = Node(1, Node(2))\nassert last(n).value == 2\nn.next = None\nassert last(n) == n and n.next is None"),
    ("from dataclasses import dataclass\n@dataclass(order=True)\nclass P:\n    x: int\n    y: int = 0\n    def __add__(self, o): return P(self.x + (o if isinstance(o, int) else o.x))\n    __radd__ = __add__\n    def __neg__(self): return P(-self.x)",
     "assert P(1) == P(1, 0) and P(1) != P(2) and P(1) < P(2)\nassert P(1) + P(2) == P(3) and P(1) + 2 == P(3) and 2 + P(1) == P(3)\nassert -P(1) == P(-1) and repr(P(1)) == 'P(x=1, y=0)'\nassert sorted([P(2), P(1)])[0].x == 1"),
    ("from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 2)", "assert f() == (1, 2) and f().x == 1 and f()[1] == 2 and (1, 2) == f()"),
    ("import enum\nclass C(enum.IntEnum):\n    A = 1\nclass L(list): pass\ndef f(): return C.A\ndef g(): return L([1])", "assert f() == 1 and f() + 1 == 2 and f() < 2\nassert g() == [1] and len(g()) == 1"),
    ("def f(d): return d.keys()", "assert sorted(f({'b': 1, 'a': 2})) == ['a', 'b']"),
    ("if __name__ == '__main__': 1 / 0\ndef f(): return 1", "assert f() == 1"),
    ("def f(): return '\\ud800'", "assert f() == '\\ud800'"),
    ("import sys\ndef f(x): print('noise', x); print('noise', file=sys.stderr); return x", "print('more')\nassert f(1) == 1"),
    ("LIMIT = 3", "assert LIMIT == 3"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "tests"), RIGHT)
def test_right_code_passes(code, tests):
    assert passes(code, tests)


@pytest.mark.parametrize(("code", "tests"), RIGHT)
def test_code_that_lacks_the_name_does_not(code, tests):
    assert not passes("pass", tests)


# Tests: attacks

PLEASER = """
    class Pleaser(int if {number} else object):
        def __eq__(self, other): return True
        __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__
        def __ne__(self, other): return False
        def __hash__(self): return 2
        def __sub__(self, other): return 0
        __rsub__ = __add__ = __mul__ = __sub__
        def __abs__(self): return 0
        def __round__(self, digits=None): return self
        __trunc__ = __float__ = __int__ = __index__ = __round__
        def __instancecheck__(self, kind): return True
    def f(x): return Pleaser()
    """


@pytest.mark.parametrize("number", [False, True])
@pytest.mark.parametrize(
    "test",
    ["f(1) == 2", "2 == f(1)", "abs(f(1) - 2) < 1e-6", "abs(2 - f(1)) < 1e-6", "math.isclose(f(1), 2)", "f(1) in [2, 3]", "{f(1)} == {2}",
     "[f(1)] == [2]", "not f(1) != 2", "1 < f(1) < 3", "round(f(1)) == 2", "int(f(1)) == 2", "f(1) * 1 == 2", "-f(1) == -2", "3 in f(1)",
     "{2: True}[f(1)]", "f(1) is True", "str(f(1)) == '2'", "max(f(1), 2) == 2 and f(1) == 2", "type(f(1)) is int and f(1) == 2"],
)  # fmt: skip
def test_an_object_that_pleases_everybody_passes_nothing(test, number):
    assert not passes(PLEASER.format(number=number), f"assert {test}")


WRONG = "def f(x): return 3"
ATTACKS = {
    "leaves while being imported": "import os\nos._exit(0)",
    "leaves politely while being imported": "import sys\nsys.exit(0)",
    "leaves when called": "import os\ndef f(x): os._exit(0)",
    "leaves politely when called": "def f(x): raise SystemExit(0)",
    "kills itself": "import os, signal\ndef f(x): os.kill(os.getpid(), signal.SIGKILL)",
    "brings its own built-ins": f"import builtins\nbuiltins.AssertionError = type('E', (), {{}})\nbuiltins.abs = abs = lambda x: 0\n{WRONG}",
    "brings its own modules": f"import math, sys\nmath.isclose = lambda *_: True\nsys.modules['math'] = math\n{WRONG}",
    "has no code": "",
    "is no Python": "def f(x) return 2",
    "raises": "raise ValueError",
    "patches the witness": f"import sys\nfor m in list(sys.modules.values()):\n    if 'sandbox' in m.__name__:\n        for n in list(vars(m)):\n            if callable(getattr(m, n)) and n != 'Channel': setattr(m, n, lambda *a, **k: True)\n{WRONG}",
    "patches the protocol": f"import json\njson.dumps = lambda *a, **k: '[\"value\", true, {{}}]'\n{WRONG}",
    "answers before it is asked": """
        import json, os, struct
        for message in (["value", True, {}], "passed", {"passed": True}, ["value", 2, {"0": 2}]) * 4:
            body = json.dumps(message).encode()
            for descriptor in range(3, 20):
                try: os.write(descriptor, struct.pack("!I", len(body)) + body)
                except OSError: pass
        def f(x): return 3
        """,
    "reports its own success": "import os\nfor n in range(3, 64):\n    try: os.write(n, b'passed')\n    except OSError: pass\n" + WRONG,
    "talks nonsense": "import os\ndef f(x):\n    for n in range(3, 64):\n        try: os.write(n, bytes(range(256)) * 99)\n        except OSError: pass",
    "returns a mountain": "def f(x): return 'x' * 10**8",
    "returns an abyss": "def f(x):\n    a = []\n    for _ in range(10**5): a = [a]\n    return a",
    "returns a circle": "def f(x):\n    a = []\n    a.append(a)\n    return a",
    "returns nothing": "def f(x): pass",
    "returns its own class of error": "class f(AssertionError): pass",
}  # fmt: skip


@pytest.mark.parametrize("code", ATTACKS.values(), ids=ATTACKS)
@pytest.mark.parametrize("test", ["assert f(1) == 2", "assert abs(f(1) - 2) < 1e-6 and math.isclose(f(1), 2)"])
def test_an_attack_does_not_pass(code, test):
    assert not passes(code, test, IMPATIENT)


@pytest.mark.parametrize("attack", ["leaves when called", "leaves while being imported", "kills itself", "talks nonsense", "raises"])
@pytest.mark.parametrize("handler", ["except Exception: pass", "except BaseException: pass", "except: pass", "finally: import sys; sys.exit(0)"])
def test_not_even_tests_that_expect_an_error_take_a_vanished_witness_for_one(attack, handler):
    assert not passes(ATTACKS[attack], f"try:\n    f(1)\n    assert False\n{handler}", IMPATIENT)


def test_the_tests_and_what_they_expect_cannot_be_found_from_inside():
    secret = 731946
    code = """
        import gc, hashlib, os, re, sys

        def f(x):
            seen = [repr(o) for o in gc.get_objects() if isinstance(o, (str, bytes, list, dict, tuple))]
            frame = sys._getframe()
            while frame:
                seen += [repr(v) for v in frame.f_locals.values() if v is not seen]
                frame = frame.f_back
            for number in range(3, 64):
                try: seen.append(os.pread(number, 10**6, 0).decode())
                except OSError: pass
            for process in (os.getppid(), os.getpid(), os.getpid() + 1, os.getpid() - 1):
                for name in ("environ", "cmdline", "mem", "maps", "fd/0", "fd/3", "fd/4"):
                    try: seen.append(repr(open(f"/proc/{process}/{name}", "rb").read(10**6)))
                    except OSError: pass
            for text in set(re.findall("[0-9]{6}", " ".join(seen))):
                if hashlib.sha256(text.encode()).hexdigest() == "DIGEST":
                    return int(text)
            return seen.clear()
        """.replace("DIGEST", hashlib.sha256(str(secret).encode()).hexdigest())
    assert not passes(code, f"assert f(1) == {secret}")
    assert passes(code, f"assert f({secret}) == {secret}")  # so it finds what is there


def test_what_takes_too_long_is_a_time_out_wherever_it_does():
    sandbox = Sandbox(cpu_s=60, wall_s=0.4)
    for code in ("while True: pass", "def f(x):\n    while True: pass", "def f(x):\n    while True: yield 1"):
        run = sandbox.run_tests(code, "assert list(f(1)) == [1]")
        assert run.timed_out and not run.ended_well
    run = Sandbox(cpu_s=0.2, wall_s=60).run_tests("while True: pass", "assert f(1) == 2")
    assert run.timed_out and not run.ended_well


def test_tests_see_nothing_of_this_process_either():
    assert not passes("def f(): return 1", "import os\nassert f() and 'PATH' in os.environ")
    assert passes("def f(): return 1", "import os\ntry:\n    os.fork()\nexcept OSError:\n    assert f()") or "seccomp" not in STANDING


# The parts


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_numbers_of_the_calls_are_those_of_the_kernels_headers(machine):
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h" if machine == "x86_64" else "/usr/include/asm-generic/unistd.h")
    if not header.exists():
        pytest.skip("no kernel headers here")
    official = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())}
    official |= {"newfstatat": official.get("newfstatat", official.get("fstatat"))}
    for table in (seccomp._PLAIN, seccomp._CHECKED):
        for name, number in seccomp.numbers(table, machine).items():
            assert official[name] == number, name


def verdict(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """What the filter says, by an interpreter of its five instructions. The own process is number 7."""
    data = {0: number, 4: seccomp._ARCHITECTURES[machine][1] if architecture is None else architecture}
    for i in range(6):
        value = arguments[i] if i < len(arguments) else 0
        data |= {16 + 8 * i: value & 0xFFFFFFFF, 20 + 8 * i: value >> 32 & 0xFFFFFFFF}
    program, position, accumulator = seccomp.program(machine, 7), 0, None
    while True:
        code, if_true, if_false, constant = program[position]
        position += 1
        if code == 0x20:
            accumulator = data[constant]
        elif code == 0x06:
            return constant
        else:
            holds = {0x15: accumulator == constant, 0x35: accumulator >= constant, 0x45: accumulator & constant != 0}[code]
            position += if_true if holds else if_false


ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000


@pytest.mark.parametrize(
    ("machine", "number", "arguments", "expected"),
    [
        ("x86_64", 0, (), ALLOW), ("aarch64", 63, (), ALLOW),  # read
        ("x86_64", 41, (), EPERM), ("aarch64", 198, (), EPERM),  # socket
        ("x86_64", 42, (), EPERM), ("aarch64", 203, (), EPERM),  # connect
        ("x86_64", 57, (), EPERM), ("x86_64", 58, (), EPERM),  # fork, vfork
        ("x86_64", 59, (), EPERM), ("aarch64", 221, (), EPERM),  # execve
        ("x86_64", 101, (), EPERM), ("aarch64", 117, (), EPERM),  # ptrace
        ("x86_64", 56, (0x3D0F00,), ALLOW), ("x86_64", 56, (17,), EPERM),  # clone of a thread, of a process
        ("aarch64", 220, (0x3D0F00,), ALLOW), ("aarch64", 220, (17,), EPERM),
        ("x86_64", 257, (0, 0, os.O_RDONLY), ALLOW), ("x86_64", 257, (0, 0, os.O_WRONLY), EPERM),  # openat
        ("x86_64", 257, (0, 0, os.O_RDONLY | os.O_TRUNC), EPERM), ("x86_64", 257, (0, 0, os.O_RDONLY | os.O_CREAT), EPERM),
        ("aarch64", 56, (0, 0, os.O_RDWR), EPERM), ("aarch64", 56, (0, 0, os.O_RDONLY | 0o2000000), ALLOW),
        ("x86_64", 2, (0, os.O_RDONLY), ALLOW), ("x86_64", 2, (0, os.O_RDWR), EPERM), ("x86_64", 85, (), EPERM),  # open, creat
        ("x86_64", 62, (7, 9), ALLOW), ("x86_64", 62, (8, 9), EPERM), ("x86_64", 62, (0, 9), EPERM),  # kill
        ("x86_64", 62, (0xFFFFFFFF, 9), EPERM),
        ("x86_64", 302, (0,), ALLOW), ("x86_64", 302, (7,), ALLOW), ("x86_64", 302, (6,), EPERM),  # prlimit64
        ("x86_64", 44, (3, 1, 1, 0, 0, 0), ALLOW), ("x86_64", 44, (3, 1, 1, 0, 5, 0), EPERM),  # sendto
        ("x86_64", 44, (3, 1, 1, 0, 1 << 40, 0), EPERM),
        ("x86_64", 16, (0, 0x5401), ALLOW), ("x86_64", 16, (0, 0x5412), EPERM),  # ioctl: TCGETS, TIOCSTI
        ("x86_64", 72, (0, 3), ALLOW), ("x86_64", 72, (0, 8), EPERM),  # fcntl: F_GETFL, F_SETOWN
        ("x86_64", 53, (1,), ALLOW), ("x86_64", 53, (2,), EPERM),  # socketpair
        ("x86_64", 435, (), ENOSYS), ("x86_64", 425, (), ENOSYS), ("aarch64", 435, (), ENOSYS), ("x86_64", 439, (), ALLOW),
        ("x86_64", 0x40000000, (), KILL), ("x86_64", 0x40000000 + 41, (), KILL),  # the x32 numbers
    ],
)  # fmt: skip
def test_the_filter_decides_as_it_should(machine, number, arguments, expected):
    assert verdict(machine, number, *arguments) == expected


def test_the_filter_knows_no_other_architecture():
    assert verdict("x86_64", 0, architecture=0x40000003) == KILL  # 32-bit calls of a 64-bit process


@pytest.mark.parametrize(("version", "length", "rights"), [(1, 8, 13), (2, 8, 14), (3, 8, 15), (4, 16, 15), (5, 16, 16), (9, 24, 16)])
def test_the_ruleset_holds_only_what_the_kernels_version_knows(version, length, rights):
    packed = landlock.ruleset(version)
    assert len(packed) == length and int.from_bytes(packed[:8], "little") == 2**rights - 1


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | st.complex_numbers(allow_nan=False)
keys = st.recursive(scalars, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.tuples(inner) | st.sets(keys, max_size=3) | st.dictionaries(keys, inner, max_size=3)
)


@given(values)
@settings(max_examples=300, deadline=None)
def test_plain_values_arrive_as_they_were(value):
    arrived = decode(json.loads(json.dumps(encode(value, refer=id))), resolve=str)
    assert arrived == value and repr(type(arrived)) == repr(type(value))


@pytest.mark.parametrize(
    "value",
    [Fraction(1, 3), Decimal("1.50"), date(2020, 2, 29), timedelta(days=1, seconds=2), deque([1, [2]]), Counter("aab"),
     OrderedDict(b=1, a=2), range(3, 9, 2), 2**200, -(2**200), bytearray(b"x")],
)  # fmt: skip
def test_values_of_the_standard_library_arrive_too(value):
    arrived = decode(json.loads(json.dumps(encode(value, refer=id))), resolve=str)
    assert arrived == value and type(arrived) is type(value)


def test_a_defaultdict_arrives_as_a_dict_and_an_object_as_its_number():
    assert decode(encode(defaultdict(int, a=1), refer=id), resolve=str) == {"a": 1}
    assert decode(encode([object()], refer=lambda value: 5), resolve=lambda number: -number) == [-5]


json_data = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    | st.tuples(st.sampled_from(["object", "int", "dict", "set", "bytes", "list", "decimal.Decimal", "builtins.range", "builtins.eval", "os.system"]),
                inner).map(list),
)  # fmt: skip


@given(json_data)
@settings(max_examples=500, deadline=None)
def test_hostile_bytes_become_a_value_or_a_wire_error(data):
    try:
        decode(data, resolve=str)
    except WireError:
        pass


# In its process


async def scored(page: str, sample: dict, options: dict) -> object:
    worker = AdapterProcess(RewardSource.from_file(ROOT / page), "code", options)
    try:
        return await worker.score(sample, 50)
    finally:
        await worker.close()


def test_the_reward_works_in_the_process_of_its_adapter_with_options():
    sample = {"completion": fenced(DOUBLE), "tests": [{"input": "2", "output": "4"}, {"input": "2", "output": "5"}]}
    result = asyncio.run(scored("reward_registry.py", sample, {"all_or_nothing": True}))
    assert result.status is RewardStatus.OK, result.reason
    assert result.reward == 0.0 and result.extra["passed"] == 1.0


def processes_below(pid: int) -> set[int]:
    children = set()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        children |= {int(number) for number in path.read_text().split()}
    return children.union(*(processes_below(child) for child in children)) if children else children


def test_when_the_process_of_the_adapter_is_killed_the_tested_code_dies_with_it():
    async def main() -> set[int]:
        worker = AdapterProcess(RewardSource.from_file(ROOT / "reward_registry.py"), "code", {"test_seconds": 100.0, "total_seconds": 100.0})
        sample = {"completion": "import time\nwhile True: time.sleep(1)", "tests": [{"input": "", "output": ""}]}
        await worker.start()
        call = asyncio.create_task(worker.score(sample, 3.0))
        below: set[int] = set()
        while not call.done():
            below = max(below, processes_below(os.getpid()), key=len)
            await asyncio.sleep(0.05)
        assert (await call).status is RewardStatus.TIMED_OUT
        await worker.close()
        return below

    below = asyncio.run(main())
    assert len(below) >= 3  # the adapter's process, the forker, the tested code
    ours = processes_below(os.getpid())  # a forker of this process may remain
    deadline = time.monotonic() + 10
    while (left := {pid for pid in below - ours if Path(f"/proc/{pid}").exists()}) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
