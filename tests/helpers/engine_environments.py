"""Stand-ins for the Python of another environment: scripts that print the versions that they are told."""

import json
import platform
from importlib.metadata import version
from pathlib import Path

from async_grpo.options.source_file import library_version


def fitting_versions() -> dict[str, str]:
    """Return versions that fit this process."""
    return {
        "python": platform.python_version(),
        "ray": version("ray"),
        "vllm": "0.31.0",
        "torch": "2.12.1",
        "transformers": "5.17.0",
        "async-grpo": library_version(),
    }


def stand_in(folder: Path, problem: str = "", **changes: str | None) -> Path:
    """Write a stand-in, and return its path.

    Args:
        folder: Folder of the script.
        problem: The error that it tells.
        changes: Versions that differ from those that fit; None leaves a package out. `async_grpo` is the library's.
    """
    renamed = {name.replace("_", "-"): value for name, value in changes.items()}
    versions = {name: value for name, value in (fitting_versions() | renamed).items() if value is not None}
    answer = {
        "versions": versions,
        "needs": ["torch==2.12.1", "torchvision==0.27.1"],
        "problem": problem,
        "folder": "/opt/engines/async_grpo" if "async-grpo" in versions else "",
    }
    path = folder / "python"
    path.write_text(f"#!/bin/sh\necho 'a line of a start-up file'\ncat <<'END'\n{json.dumps(answer)}\nEND\n")
    path.chmod(0o755)
    return path
