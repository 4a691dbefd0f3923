"""bitsandbytes, the reference of weights in 4 bits, in a process of its own: transformers and peft change with it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

PACKAGES = Path(sys.prefix) / "bits_and_bytes"  # scripts/setup_extras installs it there
needs_bits_and_bytes = pytest.mark.skipif(
    not PACKAGES.is_dir() and not os.environ.get("REQUIRE_EXTRAS"),
    reason="scripts/setup_extras installs bitsandbytes there",
)
LIMIT_S = 120.0


def of_bits_and_bytes(program: str, folder: Path) -> Any:
    """Return what a program, run in the folder with bitsandbytes on its path, saves as found.pt."""
    environment = {**os.environ, "PYTHONPATH": f"{PACKAGES}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return torch.load(folder / "found.pt")
