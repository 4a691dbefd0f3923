"""Measure time and memory of the views of a run with 100,000 steps and 10,000 samples: status, page, samples, timeline.

    python -m benchmarks.big_run_views               # about a minute, 600 MB of disk

Each view runs in a separate process, and is measured from its first import to its last byte. The page answers once, and
ten times more, after each new step. The limits are 2 s and 500 MB.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

VIEWS = {
    "status": "from async_grpo.observe.status import view; view(RunView(run))",
    "page, first data": "from async_grpo.observe import watch; watch.as_json(watch.data(RunView(run), 0))",
    "page, and ten steps": (
        "from async_grpo.observe import watch\n"
        "since = watch.data(RunView(run), 0)['next']\n"
        "line = json.loads((run / 'training_metrics.jsonl').open().readline())\n"
        "for step in range(10):\n"
        "    with (run / 'training_metrics.jsonl').open('a') as end:\n"
        "        end.write(json.dumps(line | {'step': 100_001 + step}) + chr(10))\n"
        "    watch.as_json(watch.data(RunView(run), since))"
    ),
    "page, samples": (
        "from async_grpo.observe.samples import SamplesConfig, samples_page\n"
        "samples_page(SamplesConfig(path=str(run), limit=2000))"
    ),
    "samples, 10,000": (
        "from async_grpo.observe.samples import SamplesConfig, write_samples_page\n"
        "write_samples_page(SamplesConfig(path=str(run), output=str(run / 'samples.html')))"
    ),
    "timeline": ("from async_grpo.observe.plot import timeline\ntimeline(run, '', run / 'timeline.svg')"),
}
MEASURED = """
import json, resource, sys, time
from pathlib import Path
from async_grpo.observe.run_view import RunView
run, begun = Path(sys.argv[1]), time.perf_counter()
{code}
print(json.dumps([time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))
"""


def make_run(folder: Path, steps: int, samples: int) -> None:
    """Write the files of a run, with about the keys and lengths that a real run has."""
    chance = random.Random(0)
    options = {"samples_per_question": 8, "batch_size": 8, "num_training_batches": 200_000}
    options["dump_samples_filename"] = "samples.jsonl"
    (folder / "training_params.json").write_text(json.dumps(options))
    counts = {"ok": 60, "failed": 2, "timed_out": 1, "abstained": 1, "latency_p50_s": 0.123, "queue_depth": 3}
    now = time.time() - 2.0 * steps
    with (
        (folder / "training_metrics.jsonl").open("w") as metrics,
        (folder / "timeline.jsonl").open("w") as timeline,
    ):
        for step in range(1, steps + 1):
            line = {f"key_{number}": chance.random() for number in range(70)}
            line |= {
                "step": step,
                "time_per_batch": 1.0,
                "timestamp": now + 2.0 * step,
                "avg_reward": chance.random(),
                "alarms": [],
            }
            line["staleness_tokens"] = {"0": 900, "1": 100}
            line["verifiers"] = {"math": counts, "judge": counts}
            metrics.write(json.dumps(line) + "\n")
            if step > steps - 5000:
                for lane, what in (
                    ("trainer 0", "train"),
                    ("trainer 0", "wait"),
                    ("engine g0", "generate"),
                ) * 6:
                    begin = round(line["timestamp"] + chance.random(), 3)
                    span = {"step": step, "lane": lane, "what": what, "begin": begin, "end": begin + 0.1}
                    timeline.write(json.dumps(span) + "\n")
    with (folder / "samples.jsonl").open("w") as rows:
        for number in range(samples):
            row = {"step": number // 64, "group": number // 8, "member": number % 8, "input": "why? " * 60}
            row |= {"completion": "because it is so " * 200, "answer": "42", "reward": chance.random()}
            row |= {"status": "ok", "components": {"math": {"reward": 1.0}}, "finish_reason": "stop"}
            rows.write(json.dumps(row | {"advantage": chance.random(), "oldest_version": 1}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--samples", type=int, default=10_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_run(folder, given.steps, given.samples)
        for file in sorted(folder.glob("*.jsonl")):
            print(f"{file.name}: {file.stat().st_size / 2**20:.0f} MB")
        print(f"{'view':<22}{'seconds':>9}{'MB':>8}")
        for view, code in VIEWS.items():
            command = [sys.executable, "-c", MEASURED.format(code=code), str(folder)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600, check=True)
            seconds, memory = json.loads(done.stdout.splitlines()[-1])
            print(f"{view:<22}{seconds:>9.2f}{memory:>8.0f}", flush=True)


if __name__ == "__main__":
    main()
