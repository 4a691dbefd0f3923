"""Kill any one process of a run with SIGKILL, at a random moment, and watch how the command ends.

    python -m tests.long.kill_anything                     every kind of process once
    python -m tests.long.kill_anything --victim raylet --repeat 3 --seed 5
    python -m tests.long.kill_anything --victim supervisor --signal SIGINT          a Ctrl-C

The command must end within 60 s with a non-zero code and a message that names what died, or go on to a correct end, with
exactly one reward per sample; what only scores (verifier, adapter, judge) must let it go on. No process may be left.
Prints one row per kill and exits with 1 if one of them broke the rule.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60.0
MARK = "KILL_ANYTHING_RUN"

# name -> words that must all be in the command line (or the process title) of the victim
VICTIMS = {
    "supervisor": ["async_grpo run"],
    "trainer rank 0": ["async_grpo.launch.trainer", "@RANK=0"],
    "trainer rank 1": ["async_grpo.launch.trainer", "@RANK=1"],
    "torchrun": ["torch.distributed.run"],
    "generation dispatcher": ["async_grpo.launch.worker", "--mode=generation"],
    "logprob dispatcher": ["async_grpo.launch.worker", "--mode=logprob"],
    "generation worker": ["ray::GenerationActor"],
    "vLLM engine core": ["EngineCore"],
    "logprob worker": ["ray::LogprobActor"],
    "controller": ["ray::RunController"],
    "verifier worker": ["ray::VerifierActor"],
    "adapter process": ["async_grpo.rewards.isolation.child"],
    "judge server": ["vllm.entrypoints.openai.api_server", "!keep("],  # its keeper has the same words
    "ray start": ["async_grpo.cluster.ray_head start"],
    "raylet": ["/raylet/raylet"],
    "gcs server": ["/gcs_server"],
}


MUST_GO_ON = ("verifier worker", "adapter process", "judge server")
PAGE = """
from async_grpo.rewards.judges import GenerativeRM

likes = GenerativeRM(model="judge", yes_no=True, yes=("+",), no=("-",), min_mass=0.0)
"""


def command(folder: Path, steps: int, judged: bool) -> list[str]:
    data = ROOT / "sample-data"
    rewards, judge = "countdown,format", []
    if judged:
        (page := folder / "page.py").write_text(PAGE)
        rewards, judge = f"countdown,{page}:likes", [f"--judge-model={data / 'tiny-model'}"]
        judge.append("--reward-timeout-s=120")  # its only server needs half a minute to be back
    return [
        *[sys.executable, "-m", "async_grpo", "run", f"--output-dir={folder}", f"--run-name={folder.name}"],
        *[f"--model-name-or-path={data / 'tiny-model'}", f"--data-path={data / 'countdown_train.jsonl'}"],
        *[
            f"--reward-fns={rewards}",
            "--verifiers=countdown=4",  # else it would have no process to kill
            "--batch-size=8",
            "--samples-per-question=8",
            "--nproc-per-node=2",
        ],
        *[f"--num-training-batches={steps}", "--max-tokens-per-gpu=1024", "--max-generation-tokens=24"],
        *[*judge, "--kl-coef=0.001", "--enforce-eager", "--learning-rate=1e-4", "--worker-grace-s=10"],
    ]


def processes_of(mark: str) -> list[psutil.Process]:
    """Every live process of the run: the mark is in their environment, adapters are children of marked ones."""
    marked = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                marked.append(process)
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    children = []
    for process in marked:
        try:
            children += process.children(recursive=True)
        except psutil.NoSuchProcess:
            continue
    return [p for p in {*marked, *children} if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def matches(process: psutil.Process, words: list[str]) -> bool:
    try:
        text, environment = " ".join(process.cmdline()) + " " + process.name(), process.environ()
    except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
        return False
    named = [word.removeprefix("@").partition("=") for word in words if word.startswith("@")]
    plain = [word for word in words if not word.startswith("@")]
    return all((w.removeprefix("!") in text) != w.startswith("!") for w in plain) and all(
        environment.get(k) == v for k, _, v in named
    )


def kill_one(
    victim: str, draw: random.Random, steps: int, at_start: bool, number: signal.Signals
) -> tuple[bool, str]:
    """One run and one kill; (within the rules, a row for the table)."""
    folder = Path(tempfile.mkdtemp(prefix="kill-"))
    environment = {**os.environ, MARK: str(folder), "PYTHONPATH": str(ROOT)}
    with (folder / "console.txt").open("w") as console:
        run = subprocess.Popen(
            command(folder, steps, victim == "judge server"),
            stdout=console,
            stderr=console,
            env=environment,
            cwd=ROOT,
        )
    metrics = folder / "training_metrics.jsonl"
    target, waited = None, time.monotonic()
    while target is None or not (at_start or (metrics.exists() and metrics.read_text().count("\n") >= 2)):
        if run.poll() is not None or time.monotonic() - waited > 240:
            run.kill()
            return (
                False,
                f"the run ended before there was a {victim}: {(folder / 'console.txt').read_text()[-300:]}",
            )
        time.sleep(0.2)
        found = [p for p in processes_of(str(folder)) if matches(p, VICTIMS[victim])]
        target = draw.choice(found) if found else None
    time.sleep(draw.uniform(0, 3))
    try:
        target.send_signal(number)
    except psutil.NoSuchProcess:
        run.kill()
        return False, f"the {victim} was gone before it could be killed"
    killed = time.monotonic()
    try:
        code = run.wait(LIMIT_S + 120)
    except subprocess.TimeoutExpired:
        code = None
        run.kill()
    seconds = time.monotonic() - killed
    time.sleep(
        1.0 if victim != "supervisor" else 20.0
    )  # fate sharing takes a moment when nobody is left to wait
    left = processes_of(str(folder))
    words = [
        line
        for line in (folder / "console.txt").read_text().splitlines()
        if "error" in line or line.startswith("    |")
    ]
    message = " ".join(words)[:160] or "(no message)"
    finished = code == 0 and exact_rewards(metrics, steps)
    ended_well = finished or (
        victim not in MUST_GO_ON
        and code not in (0, None)
        and seconds <= LIMIT_S
        and (victim == "supervisor" or "error" in message)
    )
    for process in left:
        process.kill()
    outcome = "went on to the end" if finished else f"code {code} after {seconds:.0f} s: {message}"
    names = [" ".join(p.cmdline())[:40] if p.is_running() else "?" for p in left[:3]] if left else ""
    return ended_well and not left, f"{outcome} | left: {len(left)} {names}"


def exact_rewards(metrics: Path, steps: int) -> bool:
    """Whether every step is there, and every sample of it has exactly one reward."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return len(lines) == steps and all(
        line["num_reward_ok"] == line["samples_in_batch"] == 64 for line in lines
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--victim", choices=VICTIMS, action="append", help="default: all of them")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40, help="length of the run that is killed")
    parser.add_argument("--signal", default="SIGKILL", help="SIGINT to the supervisor is a Ctrl-C")
    parser.add_argument("--at-start", action="store_true", help="kill as soon as the victim exists")
    options = parser.parse_args()
    draw, failures = random.Random(options.seed), 0
    for victim in options.victim or VICTIMS:
        for _ in range(options.repeat):
            fine, row = kill_one(
                victim, draw, options.steps, options.at_start, signal.Signals[options.signal]
            )
            failures += not fine
            print(f"{'ok  ' if fine else 'FAIL'} {victim:22} {row}", flush=True)
    print(f"{failures} failures")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
