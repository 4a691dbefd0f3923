"""The house stands: each room imports only what it may (checked in a fresh process), and the loops fit on a screen."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = {"ray", "vllm", "torch", "transformers", "typer", "matplotlib"}

# room -> heavy packages that it may bring in
ALLOWED = {
    "async_grpo.types": set(),
    "async_grpo.config": set(),
    "async_grpo.algorithm_config": set(),
    "async_grpo.reward_config": set(),
    "async_grpo.recipes": set(),
    "async_grpo.errors": set(),
    "async_grpo.fakes": set(),
    "async_grpo.metrics": set(),
    "async_grpo.processes": set(),
    "async_grpo.plotting": set(),
    "async_grpo.metrics_files": set(),
    "async_grpo.cli": {"typer"},
    "async_grpo.algorithm.advantages": {"torch"},
    "async_grpo.algorithm.losses": {"torch"},
    "async_grpo.algorithm.aggregation": {"torch"},
    "async_grpo.algorithm.kl": {"torch"},
    "async_grpo.algorithm.off_policy": {"torch"},
    "async_grpo.algorithm.diagnostics": {"torch"},
    "async_grpo.algorithm.covariance": {"torch"},
    "async_grpo.algorithm.value_loss": {"torch"},
    "async_grpo.experience.batcher": {"torch"},
    "async_grpo.experience.registry": set(),
    "async_grpo.experience.prompts": set(),
    "async_grpo.rewards.pool": set(),
    "async_grpo.rewards.isolation.process": set(),
    "async_grpo.rewards.isolation.child": set(),
    "async_grpo.rewards.steps": set(),
    "async_grpo.rewards.cache.verdicts": set(),
    "async_grpo.rewards.budget": set(),
    "async_grpo.rewards.bench": set(),
    "async_grpo.generation.char_ends": set(),
    "async_grpo.weights.publisher": {"torch"},
    "async_grpo.modeling.policy": {"torch", "transformers"},
    "async_grpo.training.trainer": {"torch", "transformers"},
    "async_grpo.training.canary": {"torch", "transformers"},
    "async_grpo.logprob.worker": {"torch", "transformers"},
    "async_grpo.plans": {"torch", "transformers"},
    "async_grpo.preparation": {"torch", "transformers"},
    "async_grpo.weights.nccl": {"torch"},
    "async_grpo.local": {"torch", "transformers"},
    "async_grpo.demo": {"torch", "transformers"},
    "async_grpo.__main__": {"typer"},
    "async_grpo.verify": set(),
    "async_grpo.cache_command": set(),
    "async_grpo.cluster.channel": {"ray"},
    "async_grpo.cluster.workers": {"torch", "ray"},
    "async_grpo.cluster.train": {"torch", "transformers", "ray"},
    "async_grpo.cluster.dispatch": {"torch", "transformers", "ray"},
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
VOCABULARY = "types errors config algorithm_config reward_config recipes metrics fakes cli processes plotting metrics_files"
FLOORS = [
    set(VOCABULARY.split()),
    {"algorithm"},
    {"modeling"},
    {"experience", "rewards", "weights", "logprob", "training"},
    {"generation"},
    {"refusals"},
    {"reward_plans"},
    {"plans"},
    {"preparation"},
    {"cluster"},
    {"local", "local_judge", "demo", "verify", "verify_tables", "cache_command", "__main__"},
]


def room_of(path: Path) -> str:
    return path.relative_to(ROOT / "async_grpo").parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", sorted((ROOT / "async_grpo").rglob("*.py")), ids=lambda p: str(p.name))
def test_arrows_point_down_and_never_sideways(path):
    room = room_of(path)
    if room == "__init__":
        return
    floor = next(i for i, rooms in enumerate(FLOORS) if room in rooms)
    for name in imports_of(path):
        if name.startswith("async_grpo."):
            other = name.split(".")[1]
            other_floor = next(i for i, rooms in enumerate(FLOORS) if other in rooms)
            same_line = (
                floor == 0 or floor == len(FLOORS) - 1
            )  # the vocabulary and the launchers know each other
            assert other == room or other_floor < floor or (same_line and other_floor == floor), (
                f"{path} imports {name}"
            )


@pytest.mark.parametrize(
    ("package", "rooms"),
    [("ray", {"cluster"}), ("vllm", {"generation", "weights"}), ("typer", {"cli", "__main__"})],
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
