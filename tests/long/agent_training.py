"""Train a policy with the examples of all agent frameworks, on the real engine, in one run.

    python examples/agents/make_environments.py
    python -m tests.long.agent_training                                  # a tiny model, every framework: some minutes
    python -m tests.long.agent_training --model smollm2 --only openai,pydantic-ai

The steps together have two trajectories of each framework for each step; the rows are shuffled. The policy is on-policy,
so that in every step the trainer's log-probs of the sampled tokens must equal the engine's: a token in a wrong place, lost
or trained twice would show. All tokens that the engine sampled are trained on. The exit status is 1 if a framework's
agents fail, or tokens do not add up.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Annotated, Any

import typer
from chat_templates import TEMPLATES
from real_model import real_model

from examples.agents.make_environments import frameworks
from tests.long.agent_frameworks import PROGRAMS, ROOT, command_of
from tests.long.agent_scripts import EXAMPLE, ROW

TINY_CONTEXT = 32_768  # tokens; the tokenizer of the tiny model makes a token of almost each character
REAL_CONTEXT = 8192
LARGEST_MISMATCH = 1e-4  # of the step's mean KL between engine and trainer, in nats, float32
SAMPLES_PER_QUESTION = 2
# The proof that weights have landed in the engine samples a token after each of three texts
TOKENS_PER_PROOF = 3
PROOFS_BEFORE_FIRST_STEP = 3  # two of the self-test, and one of the weights


def tiny_model(folder: Path) -> Path:
    """Copy the tiny model that knows a tool into a folder, with a longer context."""
    shutil.copytree(ROOT / "sample-data" / "tools-model", folder)
    for name, key in (
        ("config.json", "max_position_embeddings"),
        ("tokenizer_config.json", "model_max_length"),
    ):
        settings = json.loads((folder / name).read_text(encoding="utf-8"))
        settings[key] = TINY_CONTEXT
        (folder / name).write_text(json.dumps(settings), encoding="utf-8")
    return folder


def options_of(model: str, folder: Path, num_frameworks: int, num_steps: int) -> dict[str, Any]:
    """Return the options of the run, without dashes."""
    is_tiny = model == "tiny"
    context = TINY_CONTEXT if is_tiny else REAL_CONTEXT
    return {
        "model-name-or-path": tiny_model(folder / "model") if is_tiny else real_model(),
        "data-path": folder / "rows.jsonl",
        "output-dir": folder / "run",
        "environment": f"agent:exec {sys.executable} {PROGRAMS / 'any_agent.py'}",
        "environment-processes": 3,
        "chat-template": folder / "template.jinja",  # the models' own templates do not show tools
        "reward-fns": f"environment,{PROGRAMS / 'varied_reward.py'}:varied",
        "num-training-batches": num_steps,
        "batch-size": num_frameworks,
        "samples-per-question": SAMPLES_PER_QUESTION,
        "max-staleness": 0,
        "max-tokens-per-gpu": context,
        "max-generation-tokens": context - 1024,
        "max-turn-tokens": 24 if is_tiny else 48,
        "max-turns": 5,
        "learning-rate": 1e-4,
        "dump-samples-filename": "samples.jsonl",
        "experience-timeout-s": 1200,
        "start-timeout-s": 400,
    }


def question(name: str) -> str:
    """Return the question for one framework, by which its samples are known again."""
    return f"{ROW['input']} Answer as an agent of {name}."


def train(names: list[str], model: str, folder: Path, environments: Path, num_steps: int) -> None:
    """Run the training, with as many rows of each framework as there are steps.

    Raises:
        SystemExit: The run failed.
    """
    rows = []
    for _ in range(num_steps):
        for name in names:
            command = command_of(name, EXAMPLE, environments)
            rows.append({"input": question(name), "answer": ROW["answer"], "command": command})
    (folder / "template.jinja").write_text(TEMPLATES["writes_calls_as_json"], encoding="utf-8")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    run_command = [sys.executable, "-m", "async_grpo", "run", "--no-mask-truncated", "--enforce-eager"]
    for option, value in options_of(model, folder, len(names), num_steps).items():
        run_command.append(f"--{option}={value}")
    log = folder / "run.log"
    with log.open("w") as output:
        result = subprocess.run(run_command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)
    if result.returncode:
        raise SystemExit(f"the run ended with exit status {result.returncode}:\n{log.read_text()[-4000:]}")


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def faults_of(names: list[str], folder: Path, num_steps: int) -> list[str]:
    """Return what is wrong with the run, and print what each framework's agents did."""
    faults = []
    steps = lines_of(folder / "run" / "training_metrics.jsonl")
    if len(steps) != num_steps:
        faults.append(f"{len(steps)} steps were taken, not {num_steps}")
    for number, step in enumerate(steps):
        num_trained = round(step["avg_output_tokens"] * step["samples_in_batch"])
        num_proofs = PROOFS_BEFORE_FIRST_STEP if number == 0 else 1
        num_sampled = step["tokens_generated"] - num_proofs * TOKENS_PER_PROOF
        tokens = f"{num_trained} of {num_sampled} sampled tokens are trained on"
        print(f"step {step['step']}: {tokens}, mismatch_kl {step['mismatch_kl']:.2g}")
        if num_trained != num_sampled:
            faults.append(f"step {step['step']}: {tokens}")
        if step["mismatch_kl"] > LARGEST_MISMATCH:
            faults.append(
                f"step {step['step']}: the log-probs of engine and trainer differ: {step['mismatch_kl']}"
            )
    samples: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for sample in lines_of(folder / "run" / "samples.jsonl"):
        samples[sample["input"]].append(sample)
    for name in names:
        statuses = Counter(sample["status"] for sample in samples[question(name)])
        num_turns = sum(len(sample.get("turns", ())) for sample in samples[question(name)])
        print(f"{name}: {dict(statuses)}, {num_turns} turns")
        reasons = {sample["reason"].strip()[-300:] for sample in samples[question(name)] if sample["reason"]}
        faults += [f"{name}: {reason}" for reason in sorted(reasons)]
        if statuses["ok"] != num_steps * SAMPLES_PER_QUESTION:
            faults.append(
                f"{name}: {num_steps * SAMPLES_PER_QUESTION} samples are expected, not {dict(statuses)}"
            )
    return faults


def main(
    only: Annotated[str, typer.Option(help="Frameworks, with commas between them; all by default.")] = "",
    model: Annotated[str, typer.Option(help="The policy: tiny or smollm2.")] = "tiny",
    steps: Annotated[int, typer.Option(help="Number of training steps.")] = 2,
    environments: Annotated[Path, typer.Option(help="Folder of the environments.")] = Path(".venv/agents"),
    keep: Annotated[
        Path | None, typer.Option(help="Keep the run in this folder, which must not exist.")
    ] = None,
) -> None:
    names = only.split(",") if only else [name for name in frameworks() if (environments / name).exists()]
    with tempfile.TemporaryDirectory() as temporary_folder:
        folder = keep or Path(temporary_folder)
        folder.mkdir(parents=True, exist_ok=keep is None)
        train(names, model, folder.absolute(), environments, steps)
        faults = faults_of(names, folder, steps)
    print("\n".join(faults))
    print(f"{len(names)} frameworks, {steps} steps: {len(faults)} faults")
    raise SystemExit(bool(faults))


if __name__ == "__main__":
    typer.run(main)
