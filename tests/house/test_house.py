"""The house stands: each room imports only what it may (checked in a fresh process), and the loops fit on a screen."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"ray", "vllm", "torch", "transformers", "typer", "matplotlib"}

# room -> heavy packages that it may bring in
ALLOWED = {
    "async_grpo.types": set(),
    "async_grpo.config.run": set(),
    "async_grpo.algorithm.config": set(),
    "async_grpo.rewards.config": set(),
    "async_grpo.config.recipes": set(),
    "async_grpo.errors": set(),
    "async_grpo.testing": set(),
    "async_grpo.metrics.writer": set(),
    "async_grpo.processes.supervisor": set(),
    "async_grpo.metrics.figures": set(),
    "async_grpo.metrics.reader": set(),
    "async_grpo.options.command_line": {"typer"},
    "async_grpo.algorithm.advantages": {"torch"},
    "async_grpo.algorithm.losses": {"torch"},
    "async_grpo.algorithm.aggregation": {"torch"},
    "async_grpo.algorithm.kl": {"torch"},
    "async_grpo.algorithm.off_policy": {"torch"},
    "async_grpo.algorithm.covariance": {"torch"},
    "async_grpo.experience.batcher": {"torch"},
    "async_grpo.experience.worker_registry": set(),
    "async_grpo.experience.dataset": set(),
    "async_grpo.rewards.pool": set(),
    "async_grpo.rewards.isolation.adapter_process": set(),
    "async_grpo.rewards.isolation.child": set(),
    "async_grpo.rewards.adapter.result": set(),
    "async_grpo.rewards.cache.verdicts": set(),
    "async_grpo.rewards.budget": set(),
    "async_grpo.rewards.bench.completions": set(),
    "async_grpo.generation.char_ends": set(),
    "async_grpo.weights.publisher": {"torch"},
    "async_grpo.modeling.policy": {"torch", "transformers"},
    "async_grpo.training.trainer": {"torch", "transformers"},
    "async_grpo.training.sharding": {"torch", "transformers"},
    "async_grpo.logprob.logprob_worker": {"torch", "transformers"},
    "async_grpo.config.compatibility": set(),
    "async_grpo.config.rewards": set(),
    "async_grpo.config.preflight": {"torch", "transformers"},
    "async_grpo.weights.nccl": {"torch"},
    "async_grpo.launch.local_run": {"torch", "transformers"},
    "async_grpo.launch.demo": {"torch", "transformers"},
    "async_grpo.__main__": {"typer"},
    "async_grpo.programs.verify": set(),
    "async_grpo.programs.cache": set(),
    "async_grpo.cluster.channel": {"ray"},
    "async_grpo.cluster.trainer_rank": {"torch", "transformers", "ray"},
    "async_grpo.cluster.worker_program": {"torch", "transformers", "ray"},
    "async_grpo.programs.trainer": {"typer"},
    "async_grpo.programs.worker": {"typer"},
    "async_grpo.programs.plot": {"typer"},
    "async_grpo.data": set(),
    "async_grpo": set(),
    "reward_registry": set(),
    "trainer_core": {"typer"},
    "worker_dispatcher": {"typer"},
    "plot": {"typer"},
}


IMPORT_ALL = """
import importlib, json, sys
found, before = {}, set()
for module in sys.argv[1:]:
    importlib.import_module(module)
    now = {name.split(".")[0] for name in sys.modules}
    found[module] = sorted(now - before)
    before = now
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    "allowed", sorted({tuple(sorted(packages)) for packages in ALLOWED.values()}), ids=str
)
def test_a_room_brings_in_only_what_it_may(allowed):
    """One process for all rooms that may bring in the same packages: none of them may bring in another."""
    rooms = [room for room, packages in ALLOWED.items() if packages == set(allowed)]
    command = [sys.executable, "-c", IMPORT_ALL, *rooms]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    brought = json.loads(done.stdout.splitlines()[-1])
    assert {room: set(brought[room]) & HEAVY <= set(allowed) for room in rooms} == dict.fromkeys(rooms, True)


def imports_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


# Lower rooms first. A room may import the rooms above its own line in this list, and those on its line never.
FLOORS = [
    {"types", "errors", "protocols", "data", "options", "processes", "metrics"},
    {"algorithm"},
    {"modeling"},
    {"experience", "rewards", "weights", "logprob", "training"},
    {"generation", "testing"},
    {"config"},
    {"cluster"},
    {"launch", "programs", "__main__"},
]


def room_of(path: Path) -> str:
    return path.relative_to(ROOT / "async_grpo").parts[0].removesuffix(".py")


def test_arrows_point_down_and_never_sideways():
    """The lowest rooms and the highest ones know each other; no other two rooms of a floor do."""
    floors = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    for path in sorted((ROOT / "async_grpo").rglob("*.py")):
        if (room := room_of(path)) == "__init__":
            continue
        others = {name.split(".")[1] for name in imports_of(path) if name.startswith("async_grpo.")} - {room}
        friends = floors[room] in (0, len(FLOORS) - 1)
        upward = {
            o for o in others if floors[o] > floors[room] or (floors[o] == floors[room] and not friends)
        }
        assert not upward, f"{path} imports {upward}"


@pytest.mark.parametrize(
    ("package", "rooms"),
    [
        ("ray", {"cluster"}),
        ("vllm", {"generation", "weights"}),
        ("typer", {"options", "programs", "__main__"}),
    ],
)
def test_each_heavy_package_has_its_own_room(package, rooms):
    for path in (ROOT / "async_grpo").rglob("*.py"):
        if any(name.split(".")[0] == package for name in imports_of(path)):
            assert room_of(path) in rooms, f"{path} imports {package}"


@pytest.mark.parametrize(
    ("path", "functions"),
    [
        ("async_grpo/experience/batcher.py", {"rollout_loop", "rollout", "_generate_and_score"}),
        ("async_grpo/training/trainer.py", {"run", "_accumulate_until_step_end", "_take_step"}),
    ],
)
def test_the_two_loops_fit_on_a_screen(path, functions):
    tree = ast.parse((ROOT / path).read_text())
    sizes = {
        node.name: node.end_lineno - node.lineno + 1
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in functions
    }
    assert sizes.keys() == functions and sum(sizes.values()) <= 50, sizes
