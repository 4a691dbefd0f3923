"""The pages for a beginning: their programs run, their options exist, their figures are what their formulas give."""

import contextlib
import dataclasses
import io
import json
import re
import sys
import types
from pathlib import Path

import pytest

from async_grpo.__main__ import main
from async_grpo.data import FOLDER, TINY_MODEL
from async_grpo.experience.data_files import read_rows
from async_grpo.experience.dataset import questions_of
from async_grpo.launch.commands import COMMANDS, config_class

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
DATA_PAGE, GPU_PAGE = ((DOCS / f"{name}.md").read_text() for name in ("your-data", "first-gpu-run"))
# Of other programs: hf download, torchrun, ray start, sbatch, and the makers of our own data
# Options of other programs, and those of our own that only one program has
FOREIGN = {
    *(
        "local-dir",
        "repo-type",
        "shutdown-timeout",
        "num-gpus",
        "signal",
        "input",
        "tokenizer",
        "output",
        "deps",
    ),
    *("generate", "head", "address", "nproc", "nnodes", "help", "config", "mode", "model", "reward"),
}
QWEN = {  # hidden size, intermediate size, layers, heads, key-value heads, vocabulary, tied: the models' own config.json
    "0.5B": (896, 4864, 24, 14, 2, 151_936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151_936, True),
    "3B": (2048, 11_008, 36, 16, 2, 151_936, True),
    "7B": (3584, 18_944, 28, 28, 4, 152_064, False),
    "14B": (5120, 13_824, 48, 40, 8, 152_064, False),
    "32B": (5120, 27_648, 64, 40, 8, 152_064, False),
}


def run_page(page: str, name: str, *argv: object) -> str:
    """Run the program of that name on a page; what it prints."""
    (text,) = re.findall(rf"```python\n(# {name}: .*?)```", page, re.DOTALL)
    before, sys.argv = sys.argv, [name, *map(str, argv)]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(text, {"__name__": "__main__"})
    finally:
        sys.argv = before
    return printed.getvalue()


def verified(file: Path, output: Path, *options: str) -> list[dict]:
    """The result of `async-grpo verify` for every row; its exit code must be 0."""
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(file), f"--output={output}", *options])
    assert ended.value.code == 0
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_the_page_shows_what_the_model_is_given():
    said = run_page(DATA_PAGE, "look.py", TINY_MODEL, ROOT / "examples" / "code.jsonl")
    first, second = said.splitlines()
    assert (
        first.startswith("'<|im_start|>user\\nWrite a Python function `run_lengths") and "assistant" in first
    )
    assert second.startswith("12 questions, the longest of ")


def test_rows_of_the_hub_become_questions(tmp_path, monkeypatch):
    hub = types.ModuleType("datasets")
    rows = [
        {"problem": "1+1?", "answer": 2, "solution": "s"},
        {"problem": "Halve 1.", "answer": r"\frac{1}{2}"},
    ]
    hub.load_dataset = lambda name, split: {("some/data", "train"): rows}[name, split]
    monkeypatch.setitem(sys.modules, "datasets", hub)
    run_page(DATA_PAGE, "rows.py", "some/data", "train", tmp_path / "rows.jsonl")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    first, second = questions_of(read_rows(tmp_path / "rows.jsonl"), tokenizer, 1000, len(tokenizer))
    assert first.row["answer"] == "2" and second.row["answer"] == r"\frac{1}{2}"
    assert (
        "final answer within \\boxed{}" in first.row["input"]
        and first.row["input"].count("<|im_start|>") == 2
    )


def test_right_answers_earn_one_and_wrong_ones_nothing(tmp_path):
    made = tmp_path / "completions.jsonl"
    run_page(DATA_PAGE, "completions.py", FOLDER / "gsm8k_sample.jsonl", made)
    lines = verified(made, tmp_path / "results.jsonl", "--reward-fns=math_verify", "--repeat=2", "--check")
    assert len(lines) == 3 * 64 and all(line["reward"] == line["label"] for line in lines)


def test_the_solutions_of_the_code_example_earn_one(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (program,) = re.findall(r"python -c '\n(.*?)' > solutions.jsonl", DATA_PAGE, re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(program, {})
    (tmp_path / "solutions.jsonl").write_text(printed.getvalue())
    lines = verified(tmp_path / "solutions.jsonl", tmp_path / "results.jsonl", "--reward-fns=code")
    assert [line["reward"] for line in lines] == [1.0] * 12


def parameters(shape: tuple) -> tuple[int, float]:
    """Of transformers' own model of that shape, without memory: all of them, and bytes of KV cache for a token."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    hidden, inner, layers, heads, kv_heads, vocabulary, tied = shape
    with torch.device("meta"):
        model = Qwen2ForCausalLM(
            Qwen2Config(
                hidden_size=hidden,
                intermediate_size=inner,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=kv_heads,
                vocab_size=vocabulary,
                tie_word_embeddings=tied,
            )
        )
    keys = model.model.layers[0].self_attn.k_proj.out_features
    return sum(parameter.numel() for parameter in model.parameters()), layers * 2 * keys * 2


def test_the_table_of_memory_is_what_the_formulas_give():
    assert "(4 + 4 + 8 + 4) P / R" in GPU_PAGE and "4 L K" in GPU_PAGE
    table = dict(re.findall(r"^\| ([\d.]+B) \| (.*) \|$", GPU_PAGE, re.MULTILINE))
    assert set(table) == set(QWEN)
    for name, shape in QWEN.items():
        count, kv_bytes = parameters(shape)
        giga = [count, 20 * count, 20 * count / 4, 20 * count / 8, 2 * count]
        numbers = [f"{giga[0] / 1e9:.2f}", *(f"{size / 1e9:.1f}" for size in giga[1:])]
        assert table[name].split(" | ") == [*numbers, f"{kv_bytes / 1e3:.1f}", f"{12 * count / 1e9:.1f}"], (
            name
        )


def test_the_worked_example_is_what_the_formulas_give():
    hidden, inner, layers, heads, kv_heads, vocabulary, _ = QWEN["1.5B"]
    tokens, chunk = 16_384, 1_024
    assert "about (2 H L + 32 H + 8 I + 8 K) T" in GPU_PAGE and "12 V C; 4 V H" in GPU_PAGE
    keys = kv_heads * hidden // heads
    activations = (2 * hidden * layers + 32 * hidden + 8 * inner + 8 * keys) * tokens
    logits, head = 12 * vocabulary * chunk, 4 * vocabulary * hidden
    total = 20 * parameters(QWEN["1.5B"])[0] + activations + logits + head
    said = re.findall(r"adds ([\d.]+) GB of .*? ([\d.]+) GB of .*? ([\d.]+) GB of .*? ([\d.]+) GB", GPU_PAGE)
    assert said == [tuple(f"{size / 1e9:.1f}" for size in (activations, logits, head, total))]


@pytest.mark.parametrize("page", ["your-data", "first-gpu-run", "continue-a-run"])
def test_the_pages_name_options_that_there_are_and_files_that_exist(page):
    text = (DOCS / f"{page}.md").read_text()
    classes = [config_class(name) for name, command in COMMANDS.items() if command.config]
    known = {field.name.replace("_", "-") for one in classes for field in dataclasses.fields(one)} | FOREIGN
    named = set(re.findall(r"(?<![\w-])--([a-z][a-z0-9-]*[a-z0-9])", text))
    assert len(named) > 5 and {name.removeprefix("no-") for name in named} - known == set()
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert (DOCS / target).exists(), target
    for file in re.findall(r"`(examples/[\w./]+)`", text):
        assert (ROOT / file).exists(), file


def test_the_tests_of_what_would_go_wrong_on_a_gpu_exist():
    section = (ROOT / "docs" / "first-gpu-run.md").read_text().split("## Found before the first run")[1]
    file = ""
    num_tests = 0
    for path, name in re.findall(r"`(tests/[\w/]+\.py)?(?:::(test_\w+))?`", section):
        file = path or file
        if name:
            num_tests += 1
            assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE), name
    rows = [line for line in section.splitlines() if re.match(r"\| (\d+ )?\| ", line)]
    assert num_tests >= len(rows) == 23
    without_tests = [row for row in rows if "tests/" not in row]
    assert all("answered" in row for row in without_tests)


def test_the_names_beside_those_of_other_libraries_are_options():
    table = [line for line in (DOCS / "coming-from.md").read_text().splitlines() if line.startswith("| ")]
    ours = [line.split(" | ")[-1] for line in table[1:]]
    named = {name for cell in ours for name in re.findall(r"--([a-z0-9-]+)", cell)}
    assert len(named) > 30
    known = set()
    for field in dataclasses.fields(config_class("run")):
        known.update(name.replace("_", "-") for name in (field.name, *field.metadata["aliases"]))
    assert named <= known


def test_the_metrics_to_watch_are_written():
    sources = "".join(path.read_text() for path in (ROOT / "async_grpo").rglob("*.py"))
    tables = GPU_PAGE.split("## What to watch")[1]
    keys = re.findall(r"^\| `(\w+)`", tables, re.MULTILINE)
    assert len(keys) > 12
    for key in keys:
        written = [
            key,
            key.removeprefix("num_reward_"),
            key.removeprefix("seconds_"),
            key.removeprefix("eval_"),
        ]
        assert any(f'"{name}"' in sources for name in written), key
