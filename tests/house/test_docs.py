"""What the pages show is what one gets: the code of docs/rewards.md runs as it stands there."""

import json
import re
from pathlib import Path

import pytest

from async_grpo.__main__ import main
from async_grpo.rewards.adapter.registry_source import RewardRegistrySource
from async_grpo.rewards.isolation.adapter_process import AdapterProcess

ROOT = Path(__file__).resolve().parents[2]


def code_under(heading: str) -> str:
    """The first Python block of a section, with the page's dots for "what is there already" taken out."""
    section = (ROOT / "docs" / "rewards.md").read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    return re.search(r"```python\n(.*?)```", section, re.DOTALL)[1].replace("...,", "")


def verified(folder: Path, rows: list[dict], *options: str) -> list[dict]:
    """What `async-grpo verify` says of the rows."""
    given, results = folder / "rows.jsonl", folder / "results.jsonl"
    given.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(given), *options, f"--output={results}"])
    assert ended.value.code == 0
    return [json.loads(line) for line in results.read_text().splitlines()]


def test_the_first_reward_works_on_the_page_and_from_a_file(tmp_path):
    page = tmp_path / "page.py"
    page.write_text("from enum import Enum\n\n\n" + code_under("Your first reward, in ten lines"))
    rows = [{"completion": text, "answer": ""} for text in ("HELLO", "Hello you")]
    for name in (["--reward-fns=shout", f"--reward-registry={page}"], [f"--reward-fns={page}:shout"]):
        assert [line["reward"] for line in verified(tmp_path, rows, *name)] == [1.0, 0.0]


def test_the_decorators_are_imported_and_used_as_the_page_says(tmp_path):
    section = (ROOT / "docs" / "rewards.md").read_text().split("The three decorators")[1]
    page = tmp_path / "page.py"
    page.write_text(re.search(r"```python\n(.*?)```", section, re.DOTALL)[1])
    rows = [{"completion": text, "group_id": 1} for text in ("a" * 100, "a" * 300)]
    lines = verified(tmp_path, rows, f"--reward-fns={page}:lengths,{page}:shortness")
    rewards = {name: [line["results"][name][0]["reward"] for line in lines] for name in lines[0]["results"]}
    assert rewards == {"lengths": [0.1, 0.3], "shortness": [1.0, 0.0]}


def test_the_first_judge_is_one():
    registry = {}
    exec(code_under("Your first judge").replace("RewardType.JUDGE", "'judge'"), registry)
    judge = registry["REWARD_ADAPTERS"]["judge"]
    endpoint = judge.endpoint()
    assert "api.example.com" in str(endpoint) and judge.price_per_million_tokens == (0.15, 0.60)


async def test_the_process_reward_pays_its_sentences():
    source = RewardRegistrySource(
        "page", code_under("Process rewards") + "\nREWARD_ADAPTERS = {'sentences': sentences}\n"
    )
    text = "First 2 apples. Then none. So 2."
    sample = {"completion": text, "completion_token_ids": list(range(len(text)))}
    sample["completion_char_ends"] = list(range(1, len(text) + 1))
    worker = AdapterProcess(source, "sentences")
    try:
        result = await worker.score(sample, 30)
    finally:
        await worker.close()
    assert result.steps == ((14, 0.1), (25, 0.0), (31, 0.1)) and result.reward == pytest.approx(0.2)


def test_the_memory_of_a_cluster_is_what_the_formulas_say():
    from benchmarks.memory_table import table

    page = (ROOT / "docs" / "clusters.md").read_text()
    assert f"\n{table()}\n" in page, "python -m benchmarks.memory_table makes the table of docs/clusters.md"


def test_the_memory_of_lora_on_one_gpu_is_what_the_formulas_say():
    from benchmarks.lora_memory import table

    page = (ROOT / "docs" / "lora.md").read_text()
    assert f"\n{table()}\n" in page, "python -m benchmarks.lora_memory makes the table of docs/lora.md"
