"""What the tests of the sandbox share: sandboxes, and which levels of confinement stand on this machine."""

import textwrap

import pytest

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.sandbox.confine import NETWORK_LEVELS
from async_grpo.rewards.sandbox.run import Sandbox, SandboxRun

SANDBOX = Sandbox(cpu_s=5, wall_s=20, memory_bytes=2**29)
IMPATIENT = Sandbox(cpu_s=5, wall_s=1.5, memory_bytes=2**29)  # for attacks that end by a time-out anyway

try:
    STANDING = SANDBOX.run_program("", "").levels
except ConfigurationError:
    STANDING = frozenset()
needs_network_off = pytest.mark.skipif(
    not STANDING & NETWORK_LEVELS, reason="nothing blocks the network here"
)
needs_seccomp = pytest.mark.skipif("seccomp" not in STANDING, reason="no seccomp here")
needs_landlock = pytest.mark.skipif("landlock" not in STANDING, reason="no Landlock here")


def program(code: str, stdin: str = "", sandbox: Sandbox = SANDBOX) -> SandboxRun:
    return sandbox.run_program(textwrap.dedent(code), stdin)


def passes(code: str, tests: str, sandbox: Sandbox = SANDBOX) -> bool:
    return sandbox.run_tests(textwrap.dedent(code), textwrap.dedent(tests)).ended_well
