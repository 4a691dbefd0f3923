"""Answers made after public bug reports of other libraries: each earns 1 if its label is true, and 0 if it is false."""

import json
from pathlib import Path

import pytest

from async_grpo.rewards.builtin import math_verify, mathd, sympy, text

REPORTS = Path(__file__).resolve().parents[4] / "shared" / "data" / "reports" / "math.jsonl"
REWARDS = {"math_verify": math_verify.score, "mathd": mathd.score, "sympy": sympy.score, "exact": text.exact}


def reported_rows() -> list:
    if not REPORTS.exists():
        return []
    rows = [json.loads(line) for line in REPORTS.read_text(encoding="utf-8").splitlines()]
    return [pytest.param(row, id=row["id"]) for row in rows]


@pytest.mark.skipif(
    not REPORTS.exists(), reason="the shared folder with the reports is not beside this checkout"
)
@pytest.mark.parametrize("row", reported_rows())
def test_a_reported_answer_gets_the_reward_of_its_label(row, monkeypatch):
    if row["kind"] == "endless work":
        monkeypatch.setattr(math_verify, "SECONDS", 0.5)
    sample = {"completion": row["completion"], "answer": row["answer"]}
    try:
        reward = REWARDS[row["adapter"]](sample)["reward"]
    except (ValueError, TimeoutError):
        # A gold answer that would take for ever cannot be compared with anything
        assert row["kind"] == "endless work" and not row["label"]
        return
    assert reward == float(row["label"])
