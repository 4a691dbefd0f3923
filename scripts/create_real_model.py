"""Make the Hugging Face folder of a small real model, SmolLM2-135M-Instruct, for tests, the demo and measurements.

    python scripts/create_real_model.py                      # once per machine, into the user's cache
    python scripts/create_real_model.py --output smollm2     # into a folder
    python scripts/create_real_model.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf   # without a download

This is `async-grpo data model` for a checkout. That command also converts other GGUF files. The package `gguf`, which
reads such files, is in a separate folder, into which `scripts/setup_extras` installs it.
"""

import sys

import typer

from async_grpo.data.create_model import main

sys.path.append(f"{sys.prefix}/gguf")  # the folder into which scripts/setup_extras installs the package gguf

if __name__ == "__main__":
    typer.run(main)
