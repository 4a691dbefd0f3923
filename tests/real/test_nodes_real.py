"""A run over three nodes (Ray, fake engines) loses one and gets another: `tests/long/nodes.py --short` tells of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from long_tests import long_test

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(300),
    long_test("two minutes"),
]
ROOT = Path(__file__).resolve().parents[2]
NAMESPACES = ["unshare", "--user", "--map-root-user", "--net", "--pid", "--mount-proc", "--fork"]


@pytest.fixture(scope="module")
def seen() -> dict[str, dict]:
    """What was seen, by its words."""
    allowed = subprocess.run([*NAMESPACES, *"ip link add bridge type bridge".split()], capture_output=True)
    if allowed.returncode:
        pytest.skip(f"no namespaces of one's own here: {allowed.stderr.decode().strip()}")
    command = [sys.executable, "-m", "tests.long.nodes", "--short"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return {line.pop("what"): line for line in map(json.loads, done.stdout.splitlines())}


def test_both_engines_and_the_rewards_work_on_nodes_of_their_own(seen):
    """The rewards' file is on the trainer's node alone, and its folder on no other."""
    assert len(seen["training"]["engines"]) == 2
    assert len(seen["training"]["rewards_ran_on"]) > 1


def test_the_run_goes_on_without_a_node_that_is_cut_off_and_with_the_one_that_takes_its_place(seen):
    (left,) = seen["the run went on"]["engines"]
    assert left in seen["training"]["engines"] and seen["the run went on"]["four_steps_s"] < 60
    (joined,) = set(seen["node 3 has healed"]["engines"]) - {left}
    assert joined not in seen["training"]["engines"]


def test_no_prompt_is_lost_or_trained_twice_and_the_run_ends_in_order(seen):
    end = seen["the run was told to end"]
    assert end["exit_code"] == 75 and end["each_prompt_once"] and end["samples_failed"] == 0
    assert end["canary_error"] < 1e-4
