"""Make a separate Python environment for each agent framework in frameworks.toml.

    python examples/agents/make_environments.py                       # all of them: about 3 GB
    python examples/agents/make_environments.py openai pydantic-ai    # these alone
    python examples/agents/make_environments.py --update openai       # the newest releases, and their pins

An environment whose pins have not changed is not touched. Packages come from PyPI as wheels, by `uv` if it is installed
and by pip otherwise. The client for Node comes from npm.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
FRAMEWORKS_FILE = HERE / "frameworks.toml"
STAMP_NAME = ".pins"  # file in an environment with the digest of the pins that were installed


def frameworks() -> dict[str, dict[str, list[str]]]:
    """Return the pinned packages of each framework, by its name."""
    return tomllib.loads(FRAMEWORKS_FILE.read_text(encoding="utf-8"))


def constraints_file(name: str) -> Path:
    """Return the file with the versions of all packages in a framework's environment."""
    return HERE / "constraints" / f"{name}.txt"


def digest(name: str) -> str:
    """Return a digest of everything that decides which packages are installed."""
    parts = [json.dumps(frameworks()[name]), sys.version]
    if constraints_file(name).exists():
        parts.append(constraints_file(name).read_text(encoding="utf-8"))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def run(*command: str | Path) -> str:
    """Run a command, and return what it printed.

    Raises:
        SystemExit: The command failed.
    """
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if result.returncode:
        words = (result.stderr or result.stdout)[-2000:]
        raise SystemExit(
            f"{' '.join(map(str, command))}\nended with exit status {result.returncode}:\n{words}"
        )
    return result.stdout


def make_python(name: str, folder: Path, is_update: bool) -> None:
    """Make a virtual environment, and install a framework's packages into it."""
    packages = list(frameworks()[name]["packages"])
    if is_update:
        packages = [package.partition("==")[0] for package in packages]
    elif constraints_file(name).exists():
        packages += ["--constraint", str(constraints_file(name))]
    python = folder / "bin" / "python"
    if shutil.which("uv"):
        run("uv", "venv", "--quiet", "--python", sys.executable, folder)
        run("uv", "pip", "install", "--only-binary", ":all:", "--python", python, *packages)
        installed = run("uv", "pip", "freeze", "--python", python)
    else:
        run(sys.executable, "-m", "venv", folder)
        run(python, "-m", "pip", "install", "--only-binary", ":all:", *packages)
        installed = run(python, "-m", "pip", "freeze")
    if is_update:
        constraints_file(name).parent.mkdir(exist_ok=True)
        constraints_file(name).write_text(installed, encoding="utf-8")
        show_update(name, packages, installed)


def show_update(name: str, packages: Sequence[str], installed: str) -> None:
    """Print the line with the new pins for frameworks.toml."""
    versions = dict(line.split("==") for line in installed.splitlines() if "==" in line)
    pins = [f"{package}=={versions[package.partition('[')[0]]}" for package in packages]
    print(f"{name}: for {FRAMEWORKS_FILE.name}: packages = {json.dumps(pins)}")


def make_node(name: str, folder: Path, is_update: bool) -> None:
    """Install packages of npm into a folder."""
    packages = frameworks()[name]["npm"]
    if is_update:
        packages = [package.rpartition("@")[0] for package in packages]
    folder.mkdir(parents=True)
    run("npm", "install", "--prefix", folder, "--ignore-scripts", "--no-audit", "--no-fund", *packages)
    if is_update:
        print(f"{name}: for {FRAMEWORKS_FILE.name}: see the versions in {folder / 'package.json'}")


def make(name: str, folder: Path, is_update: bool = False) -> str:
    """Make a framework's environment, unless it exists and its pins have not changed. Return what was done, as a text."""
    stamp = folder / STAMP_NAME
    if not is_update and stamp.exists() and stamp.read_text() == digest(name):
        return "is up to date"
    is_node = "npm" in frameworks()[name]
    if is_node and not shutil.which("npm"):
        return "is left out: there is no npm here"
    shutil.rmtree(folder, ignore_errors=True)
    make_environment = make_node if is_node else make_python
    make_environment(name, folder, is_update)
    stamp.write_text(digest(name))
    return f"is made in {folder}"


def main() -> None:
    """Make the environments that the command line names."""
    names = list(frameworks())
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"frameworks, all by default: {', '.join(names)}"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path(".venv/agents"), help="folder of the environments"
    )
    parser.add_argument(
        "--update", action="store_true", help="install the newest releases, and write their pins"
    )
    options = parser.parse_args()
    for name in options.names or names:
        if name not in names:
            parser.error(f"there is no framework {name}: choose from {', '.join(names)}")
    for name in options.names or names:
        outcome = make(name, options.folder.absolute() / name, options.update)
        print(f"{name} {outcome}", flush=True)


if __name__ == "__main__":
    main()
