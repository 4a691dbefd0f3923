"""A run with a judge of its own and rewards from a file, on real parts: every sample has both, and all ends in order."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from async_grpo.__main__ import main

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "sample-data"

PAGE = textwrap.dedent(
    """
    from async_grpo.rewards.judges import GenerativeRM

    class Tidy:
        def __init__(self, ledger=""):
            self.ledger, self.scored = ledger, 0

        def __call__(self, sample):
            self.scored += 1
            return {"reward": 0.5, "letters": len(sample["completion"])}

        def close(self):
            with open(self.ledger, "a") as file:
                file.write(f"{self.scored}\\n")

    likes = GenerativeRM(  # the tiny model knows signs, and hardly any words
        model="judge", yes_no=True, yes=("+",), no=("-",), min_mass=0.0,
        price_per_million_tokens=(1.0, 2.0),
    )
    """
)


@pytest.mark.exhaustive
def test_a_run_with_its_own_judge_scores_everything_and_ends_in_order(tmp_path, capsys):
    page, run, ledger, cache = (tmp_path / name for name in ("page.py", "run", "ledger", "verdicts.sqlite"))
    page.write_text(PAGE)
    options = {
        "output-dir": run,
        "run-name": "judged",
        "model-name-or-path": DATA / "tiny-model",
        "data-path": DATA / "countdown_train.jsonl",
        "reward-fns": f"{page}:Tidy,{page}:likes",
        "reward-combine": "sum",
        "reward-options": f"ledger={ledger}",
        "judge-model": DATA / "tiny-model",
        "judge-budget": 5,
        "verdict-cache": cache,
        "batch-size": 8,
        "samples-per-question": 4,
        "num-training-batches": 2,
        "max-generation-tokens": 24,
        "max-tokens-per-gpu": 1024,
        "verifiers-per-reward": 2,
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "async_grpo", "run", "--engine=fake", "--enforce-eager", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    lines = [json.loads(line) for line in (run / "training_metrics.jsonl").read_text().splitlines()]
    assert [line["num_reward_ok"] for line in lines] == [32, 32]
    assert all(0.5 < line["avg_reward"] < 1.5 and 0 < line["likes/reward"] < 1 for line in lines)
    assert all(line["Tidy/reward"] == 0.5 and line["Tidy/letters"] > 0 for line in lines)
    assert lines[-1]["judge_budget_spent"] > 0
    # Each of the class's two processes has closed. Equal completions were asked once.
    counts = [int(line) for line in ledger.read_text().splitlines()]
    # Before the start, a third one scored the first row
    assert len(counts) == 3 and sum(counts) > 32 and min(counts) < 8

    spent = [json.loads(line) for line in (run / "judge_budget.jsonl").read_text().splitlines()]
    assert sum(row["cost"] for row in spent) >= lines[-1]["judge_budget_spent"] - 1e-9
    with pytest.raises(SystemExit):
        main(["cache", str(cache)])
    shown = capsys.readouterr().out
    assert "likes" in shown and "Tidy" not in shown  # which is not declared cacheable
