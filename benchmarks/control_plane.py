"""Measure the CPU milliseconds per sample of each kind of process, in a run like the demo's after its first steps.

    python benchmarks/control_plane.py                        the real engine, 20 steps after 5 that are not measured
    python benchmarks/control_plane.py --engine fake          no tokens are computed: only the transport of samples is left

The control plane is everything except the engine, the trainer and the reward functions: the controller, the verifier
actors and the generation actor. `--engine fake` shows the generation actor without vLLM's front end. Processes of
rewards exist only with options such as `--verifiers=countdown=4,format=4`; they mostly run the reward functions. The
CPU time (user and system) is read from /proc.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
MARK = "CONTROL_PLANE_RUN"
# Kind of process -> a word in its command line or title
CLASSES = {
    "controller": "ray::RunController",
    "verifier actors": "ray::VerifierActor",
    "reward processes": "async_grpo.rewards.isolation",
    "generation actor": "ray::GenerationActor",
    "engine core": "EngineCore",
    "engine worker": "VLLM::Worker",
    "logprob worker": "ray::LogprobActor",
    "trainer": "launch.trainer",
    "raylet": "raylet/raylet",
    "gcs": "gcs_server",
}
CONTROL_PLANE = ("controller", "verifier actors", "reward processes", "generation actor")


def command(folder: Path, steps: int, engine: str, further: list[str]) -> list[str]:
    """Return the command of a run with the demo's settings, one rank and no reference."""
    data = ROOT / "sample-data"
    return [
        *[sys.executable, "-m", "async_grpo", "run", f"--output-dir={folder}", f"--run-name={folder.name}"],
        *[f"--model-name-or-path={data / 'tiny-model'}", f"--data-path={data / 'countdown_train.jsonl'}"],
        *[
            "--reward-fns=countdown,format",
            "--batch-size=32",
            "--samples-per-question=8",
            "--nproc-per-node=1",
        ],
        *[f"--num-training-batches={steps}", "--max-tokens-per-gpu=4096", "--max-generation-tokens=24"],
        *["--enforce-eager", "--learning-rate=2e-4"],
        *([] if engine == "vllm" else [f"--engine={engine}"]),
        *further,
    ]


def cpu_seconds(mark: str) -> dict[tuple[int, str], float]:
    """Return for each process of the run, as (pid, kind), the CPU seconds (user and system) that it has used so far."""
    found = {}
    for process in processes_of(mark):
        try:
            words, times = " ".join([*process.cmdline(), process.name()]), process.cpu_times()
        except psutil.Error:
            continue
        kind = next((name for name, word in CLASSES.items() if word in words), "other")
        found[process.pid, kind] = times.user + times.system
    return found


def processes_of(mark: str) -> Iterator[psutil.Process]:
    """Yield the processes of the run: those with `mark` in their environment, and their descendants.

    Descendants are needed because processes of rewards get a clean environment.
    """
    seen = set()
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                for one in (process, *process.children(recursive=True)):
                    if one.pid not in seen:
                        seen.add(one.pid)
                        yield one
        except psutil.Error:
            continue


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def measure(options: argparse.Namespace, further: list[str]) -> dict[str, float]:
    """Return the CPU milliseconds per sample by kind of process.

    They are measured between the end of the warm-up and the end of the last step but one.
    """
    folder = Path(tempfile.mkdtemp(prefix="control-plane-"))
    environment = {**os.environ, MARK: folder.name, "PYTHONPATH": str(ROOT)}
    steps = options.warm_up + options.steps + 1
    metrics, before, first = folder / "training_metrics.jsonl", {}, 0
    with (folder / "console.txt").open("w") as console:
        started = command(folder, steps, options.engine, further)
        run = subprocess.Popen(started, stdout=console, stderr=console, env=environment, cwd=ROOT)
    try:
        while run.poll() is None and len(lines(metrics)) < options.warm_up:
            time.sleep(0.2)
        before, first = cpu_seconds(folder.name), len(lines(metrics))
        begun = time.time()
        while run.poll() is None and len(lines(metrics)) < options.warm_up + options.steps:
            time.sleep(0.05)
        after, last = cpu_seconds(folder.name), len(lines(metrics))
        seconds = time.time() - begun
        run.wait(120)
    finally:
        run.kill()
    if run.returncode or last <= first:
        raise SystemExit(
            f"the run ended with code {run.returncode}: {(folder / 'console.txt').read_text()[-800:]}"
        )
    samples = sum(line["samples_in_batch"] for line in lines(metrics)[first:last])
    print(f"{last - first} steps, {samples} samples, {samples / seconds:.0f} samples/s ({folder})")
    by_class: dict[str, float] = {}
    for (pid, kind), total in after.items():
        spent = total - before.get((pid, kind), 0.0)
        by_class[kind] = by_class.get(kind, 0.0) + 1000 * spent / samples
    return by_class


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=5)
    options, further = parser.parse_known_args()  # unknown options are passed to `async-grpo run`
    by_class = measure(options, further)
    for kind in [*CLASSES, "other"]:
        if kind in by_class:
            print(f"{kind:18} {by_class[kind]:6.3f} ms per sample")
    print(f"{'control plane':18} {sum(by_class.get(kind, 0.0) for kind in CONTROL_PLANE):6.3f} ms per sample")


if __name__ == "__main__":
    main()
