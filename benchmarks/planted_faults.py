"""Plant small faults in a copy of the checkout, one at a time, and show which of them the tests catch.

    python -m benchmarks.planted_faults                 all of them, which takes some minutes
    python -m benchmarks.planted_faults gspo schedules  those whose names or tests contain one of these texts
    python -m benchmarks.planted_faults --check         only check that each fault can still be planted

`planted_faults.toml` lists the faults. A fault is caught if one of its tests fails with it. `scripts/test` shows that
the tests pass without it. The copy is in a temporary folder, and tests import it from there. The checkout and installed
packages do not change.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 400.0  # seconds for the tests of one fault, which may make them wait


@dataclass(frozen=True)
class Fault:
    """A fault; `planted_faults.toml` explains its fields."""

    name: str
    file: str
    old: str
    new: str
    tests: str


FAULTS = [
    Fault(**fields) for fields in tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["fault"]
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", help="only faults whose names or tests contain one of these texts"
    )
    parser.add_argument(
        "--check", action="store_true", help="only check that each fault can still be planted"
    )
    arguments = parser.parse_args()
    chosen = [
        fault for fault in FAULTS if any(n in f"{fault.name} {fault.tests}" for n in arguments.names or [""])
    ]
    misplaced = [fault.name for fault in chosen if source_of(ROOT, fault).read_text().count(fault.old) != 1]
    if misplaced:
        sys.exit(f"the source has moved on from {len(misplaced)} faults: {'; '.join(misplaced)}")
    if arguments.check:
        return
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = copied(Path(folder))
        missed = [fault.name for fault in chosen if not is_caught(copy, fault)]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} faults are caught", *missed, sep="\n  missed: ")
    sys.exit(bool(missed))


def source_of(root: Path, fault: Fault) -> Path:
    return root / "async_grpo" / fault.file


def copied(folder: Path) -> Path:
    """Copy the files of the checkout that git knows, in their present state, and return the folder of the copy."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink() or source.is_file():
            shutil.copy2(source, target, follow_symlinks=False)
    return folder


def is_caught(copy: Path, fault: Fault) -> bool:
    """Plant the fault, run its tests, and remove it again. Return whether a test failed."""
    path = source_of(copy, fault)
    text = path.read_text()
    path.write_text(text.replace(fault.old, fault.new))
    started = time.monotonic()
    try:
        told = run_tests(copy, fault.tests)
    finally:
        path.write_text(text)
    word = "MISSED" if told is None else "caught"
    print(f"{time.monotonic() - started:6.1f} s  {word}  {fault.name}{of_schedule(told or '')}", flush=True)
    return told is not None


def of_schedule(told: str) -> str:
    """Return a text that names the random schedule that caught the fault, or "".

    Random schedules are run in the order of their seeds.
    """
    seed = re.search(r"by Schedule\(seed=(\d+)", told)
    return f" (schedule {seed[1]}, after {int(seed[1])} that held)" if seed else ""


def run_tests(copy: Path, tests: str) -> str | None:
    """Run tests, and return the output if one of them fails, else None.

    Raises:
        RuntimeError: No test was run.
    """
    command = f"{sys.executable} -m pytest -q -x -p no:cacheprovider {tests}"
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, shell=True, cwd=copy, env=environment, timeout=TIMEOUT_S, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired:
        return "they waited for what does not come"
    if done.returncode not in (0, 1):
        raise RuntimeError(f"the tests did not run: {command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout if done.returncode else None


if __name__ == "__main__":
    main()
