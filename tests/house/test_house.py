"""The house stands: rooms import downward alone and bring in no heavy package, and the loops fit on a screen."""

import ast
import importlib
import json
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"ray", "vllm", "torch", "transformers", "typer", "matplotlib"}

# The heavy packages that modules of the package may bring in; nothing else of HEAVY
ALLOWED = {
    (): (
        ".types .messages .environments.config .environments.host "
        ".config.run .algorithm.config .rewards.config .config.recipes .errors .testing "
        ".metrics.writer .processes.supervisor .observe.figures .observe.reader "
        ".experience.worker_registry .experience.dataset .rewards.pool .rewards.isolation.adapter_process "
        ".rewards.isolation.child .rewards.adapter.result .rewards.cache.verdicts .rewards.middleware "
        ".rewards.bench.completions .inference.char_ends .config.compatibility .config.rewards "
        ".launch.plan .launch.doctor .launch.evaluate .metrics.console .options.redaction .training.checkpoint_folder "
        ".launch.verify .launch.cache .launch.local_run .launch.from_python .launch.demo .data . reward_registry"
    ),
    ("typer",): (
        ".options.command_line .__main__ .launch.trainer .launch.worker .observe.plot "
        "trainer_core worker_dispatcher plot"
    ),
    ("torch",): (
        ".algorithm.advantages .algorithm.losses .algorithm.aggregation .algorithm.kl "
        ".algorithm.off_policy .algorithm.covariance .experience.batcher .weights.publisher .weights.nccl"
    ),
    ("torch", "transformers"): (
        ".modeling.policy .training.trainer .training.sharding .inference.logprob_worker .config.preflight"
    ),
    ("ray",): ".cluster.channel .cluster.worker_program",
    ("ray", "torch", "transformers"): ".cluster.trainer_rank",
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


@pytest.mark.parametrize("alone", [(), ("typer",), ("ray",)], ids=str)
def test_a_room_brings_in_only_what_it_may(alone):
    """In one process, rooms that may bring in more after those that may bring in less: what is new is theirs."""
    groups = (
        [alone] if alone else [(), ("torch",), ("torch", "transformers"), ("ray", "torch", "transformers")]
    )
    names = {name: group for group in groups for name in ALLOWED[group].split()}
    rooms = {f"async_grpo{n}".rstrip(".") if n[0] == "." else n: group for n, group in names.items()}
    command = [sys.executable, "-c", IMPORT_ALL, *rooms]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    brought = json.loads(done.stdout.splitlines()[-1])
    assert {room: set(brought[room]) & HEAVY - set(group) for room, group in rooms.items()} == {
        room: set() for room in rooms
    }


def test_every_module_can_be_imported():
    """Also one that no test imports. Those of `ecosystem` need packages of environments, and have tests of their own."""
    pytest.importorskip("vllm")
    pytest.importorskip("ray")
    for path in sorted((ROOT / "async_grpo").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if ".ecosystem." not in name:
            importlib.import_module(name.removesuffix(".__init__"))


def imports_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


# Lower rooms first: a room imports only rooms before it in this list. Names without a folder are modules of the root.
ROOMS = [
    "allowed_tokens",
    "types",
    "errors",
    "messages",
    "protocols",
    "processes",
    "options",
    "metrics",
    "algorithm",
    "modeling",
    "weights",
    "rewards",
    "data",
    "experience",
    "training",
    "inference",
    "environments",
    "testing",
    "config",
    "cluster",
    "observe",
    "launch",
    "__main__",
    "__init__",
]
PACKAGE = ROOT / "async_grpo"


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


# `async_grpo/data` is a link, which rglob does not follow
MODULES = {
    module_name(path): path for path in sorted([*PACKAGE.rglob("*.py"), *(PACKAGE / "data").glob("*.py")])
}


def modules_imported_by(path: Path) -> set[str]:
    """Return the package's modules that a file imports anywhere, also in functions and for type checkers alone."""
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import, which this test does not resolve"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                imported.add(name if name in MODULES else node.module or "")
        elif isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
    imported = {"async_grpo.__init__" if name == "async_grpo" else name for name in imported}
    return imported & MODULES.keys()


# Names that several modules may define, and why
SHARED_NAMES = {
    "main": "the entry of a program",
    "run": "what a program does with its options",
    "score": "the rule of a shipped reward, found by its module's name",
    "check_row": "the check of a row for a shipped reward, beside its `score`",
    "grpo": "an estimator and a loss of one paper",
    "gpg": "an estimator and a loss of one paper",
}


def test_a_class_or_public_function_has_a_name_of_its_own():
    """Rewards of `data` are excepted: a registry file wraps rules under their own names."""
    places = defaultdict(list)
    for module, path in MODULES.items():
        for node in ast.parse(path.read_text()).body if room_of(path) != "data" else ():
            is_class = isinstance(node, ast.ClassDef)
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if is_class or (is_function and not node.name.startswith("_")):
                places[node.name].append(module)
    used_twice = {name: modules for name, modules in places.items() if len(modules) > 1}
    assert used_twice.keys() == SHARED_NAMES.keys(), used_twice


def test_every_folder_and_module_of_the_package_is_a_room_in_order_and_17_are_folders():
    assert len(ROOMS) == len(set(ROOMS))
    assert {room_of(path) for path in MODULES.values()} == set(ROOMS)
    assert sum((PACKAGE / room).is_dir() for room in ROOMS) <= 17


def test_a_room_imports_only_rooms_below_it():
    upward = []
    for name, path in MODULES.items():
        room = room_of(path)
        for imported in modules_imported_by(path):
            other = room_of(MODULES[imported])
            if other != room and ROOMS.index(other) > ROOMS.index(room):
                upward.append(f"{name} imports {imported}")
    assert not upward


def test_no_file_imports_itself_through_others():
    """The message of graphlib names the files of a circle in their order."""
    TopologicalSorter({name: modules_imported_by(path) for name, path in MODULES.items()}).prepare()


@pytest.mark.parametrize(
    ("package", "rooms"),
    [
        ("ray", {"cluster"}),
        ("vllm", {"inference", "weights"}),
        ("typer", {"options", "observe", "__main__"}),
    ],
)
def test_each_heavy_package_has_its_own_room(package, rooms):
    for path in (ROOT / "async_grpo").rglob("*.py"):
        if any(name.split(".")[0] == package for name in imports_of(path)):
            assert room_of(path) in rooms, f"{path} imports {package}"


@pytest.mark.parametrize(
    ("path", "functions"),
    [
        ("async_grpo/experience/batcher.py", {"rollout_loop", "rollout"}),
        ("async_grpo/experience/rollouts.py", {"group", "_scored"}),
        ("async_grpo/training/trainer.py", {"run", "_accumulate_until_step_end"}),
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


def test_every_package_that_is_imported_is_declared():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split(r"[<>=\[]", line)[0].lower().replace("-", "_") for line in declared}
    sources = [*(ROOT / "async_grpo").rglob("*.py"), *(ROOT / "sample-data").glob("*.py")]
    imported = {name.split(".")[0] for path in sources for name in imports_of(path)}
    imported = imported - {"PIL"} | {"pillow"}  # a package whose module has another name
    optional = {
        "vllm",
        "xgrammar",  # a dependency of vLLM
        "flash_attn",
        "datasets",
        "gguf",
        "diffusers",
        "PIL",  # a dependency of diffusers
    }  # extras, and one that is asked for where it is used
    optional |= {"reasoning_gym", "textarena", "openenv", "verifiers", "httpx"}
    assert imported - set(sys.stdlib_module_names) - names - optional == {"async_grpo"}
