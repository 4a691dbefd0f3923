"""The tiny model: its tokenizer, its folder, its warm-up, and the plain GRPO loop that judges it."""

import importlib
import json
import random
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
SAMPLE_DATA = ROOT / "sample-data"
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "scripts")]
tiny_model = importlib.import_module("create_tiny_model")
plain_grpo = importlib.import_module("plain_grpo")

TOKENIZER = tiny_model.build_tokenizer(1024)
SMALL = ["--num-layers=1", "--hidden-size=64", "--num-heads=2", "--num-kv-heads=1", "--intermediate-size=64"]
SMALL += ["--warmup-steps=3", "--batch-size=4", f"--train={SAMPLE_DATA / 'countdown_train.jsonl'}"]


def build_small(outputs: dict[int, Path]):
    """By seed, in a process of its own: determinism and the thread count are settings of the whole process."""
    runs = [[*SMALL, f"--output={output}", f"--seed={seed}"] for seed, output in outputs.items()]
    code = "import create_tiny_model, typer; app = typer.Typer(); app.command()(create_tiny_model.main); "
    code += f"[app(arguments, standalone_mode=False) for arguments in {runs}]"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT / "scripts", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "model"
    build_small({0: folder})
    return folder


@pytest.fixture(scope="module")
def small(small_folder: Path) -> tuple[Any, Any]:
    """The model and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(small_folder)
    return model, AutoTokenizer.from_pretrained(small_folder)


@pytest.mark.exhaustive
def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(small_folder, tmp_path):
    build_small({0: tmp_path / "again", 1: tmp_path / "other"})
    folders = (small_folder, tmp_path / "again", tmp_path / "other")
    first, again, other = ((folder / "model.safetensors").read_bytes() for folder in folders)
    assert first == again and first != other


@pytest.mark.parametrize("folder", ["small", "shipped"])
def test_the_folder_loads_as_a_tied_float32_chat_model(folder, small_folder):
    path = small_folder if folder == "small" else SAMPLE_DATA / "tiny-model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    assert model.config.architectures == ["Qwen2ForCausalLM"]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert model.config.hidden_size // model.config.num_attention_heads >= 32
    assert model.config.max_position_embeddings >= 512
    assert model.num_parameters() <= (100_000 if folder == "small" else 2_000_000)
    ends = GenerationConfig.from_pretrained(path).eos_token_id
    assert tokenizer.convert_ids_to_tokens(ends) == ["<|im_end|>", "<|endoftext|>"]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert len(tokenizer) == model.config.vocab_size


@settings(max_examples=50, deadline=None)
@given(st.text())
def test_any_text_survives_encoding_and_decoding(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_format_tags_are_single_tokens_that_decoding_keeps():
    tags = ["<think>", "</think>", "<answer>", "</answer>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    assert all(len(TOKENIZER.encode(tag)) == 1 for tag in tags) and len(TOKENIZER.encode("4096")) == 4
    text = "</think>\n<answer>1+2</answer>"
    assert TOKENIZER.decode(TOKENIZER.encode(text + "<|im_end|>"), skip_special_tokens=True) == text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-heads", "4"], "at least 32"),
        (["--num-kv-heads", "3"], "no multiple"),
        (["--train", "missing.jsonl"], "missing.jsonl does not exist"),
        (["--operators", "+"], "has no solution with the operators '+'"),
    ],
)
def test_an_impossible_model_ends_with_code_2_and_says_why(options, message, tmp_path):
    app = typer.Typer()
    app.command()(tiny_model.main)
    given = [f"--output={tmp_path / 'model'}", *SMALL, *options]
    result = CliRunner().invoke(app, given, env={"COLUMNS": "1000"})
    assert result.exit_code == 2 and message in re.sub(r"[\s│]+", " ", result.output)


NUMS = st.lists(st.integers(1, 9), min_size=2, max_size=3).map(tuple)


@settings(max_examples=30, deadline=None)
@given(nums=NUMS, operators=st.sampled_from(["+-", "+-*", "+-*/"]), seed=st.integers(0, 99))
def test_warmup_expressions_use_each_number_once_and_mean_what_they_claim(nums, operators, seed):
    expressions = tiny_model.all_expressions(tuple(sorted(nums)), operators)
    text = random.Random(seed).choice(list(expressions))
    assert sorted(map(int, re.findall(r"\d+", text))) == sorted(nums)
    # An independent reading of the text: Python's own parser, each integer made an exact fraction.
    exact = re.sub(r"\d+", lambda number: f"Fraction({number[0]})", text)
    assert eval(exact, {"Fraction": Fraction}) == expressions[text]
    assert set(text) <= set("0123456789()") | set(operators)


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("</think> <answer>3*4+1</answer>", (1.0, 0.0)),
        ("no answer", (0.0, 0.0)),
        ("</think>\n<answer>3*4+1</answer>", (1.0, 1.0)),
        *(
            (f"</think>\n<answer>{wrong}</answer>", (0.0, 1.0))
            for wrong in ("4*3-1", "13", "3**4*1", "3*4+1*1", "__import__('os')", "(3*4")
        ),
    ],
)
def test_the_plain_reward_knows_correct_from_well_formed(completion, expected):
    assert plain_grpo.score(completion, {"nums": [1, 3, 4], "target": 13}) == expected


def unpadded_logprobs(model: Any, row: dict[str, Any], rollout: Any, index: int) -> torch.Tensor:
    completion = rollout.token_ids[index, -rollout.mask.shape[1] :][rollout.mask[index]]
    prompt = torch.tensor(row["input_token_ids"])
    logits = model(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, completion[:, None]).squeeze(1)


def test_sampled_logprobs_and_the_gradient_of_a_fresh_batch_are_those_of_unpadded_forwards(small):
    """With old = new log-probs the clipped objective's gradient is REINFORCE's: -sum(A * grad logp) / tokens."""
    model, tokenizer = small
    texts, advantages = ("1 2 3=6", "a much longer prompt: 7 8 9=24"), (1.5, -0.5)
    rows = [{"input_token_ids": tokenizer.encode(text)} for text in texts]
    torch.manual_seed(0)
    rollout = plain_grpo.sample(model, tokenizer, rows, max_new_tokens=6)
    model.zero_grad()
    plain_grpo.policy_loss(model, rollout, torch.tensor(advantages)).backward()
    actual = model.model.embed_tokens.weight.grad.clone()
    model.zero_grad()
    total = torch.zeros(())
    for index, (row, advantage) in enumerate(zip(rows, advantages, strict=True)):
        expected = unpadded_logprobs(model, row, rollout, index)
        torch.testing.assert_close(
            rollout.logprobs[index][rollout.mask[index]], expected, atol=1e-5, rtol=1e-5
        )
        total = total - advantage * expected.sum()
    (total / rollout.mask.sum()).backward()
    torch.testing.assert_close(actual, model.model.embed_tokens.weight.grad, atol=1e-5, rtol=1e-4)


class ScriptedModel:
    """Says the given token of each row at each step, whatever it reads."""

    def __init__(self, like: Any, steps: list[list[int]]):
        self.config, self.generation_config, self.steps = like.config, like.generation_config, iter(steps)

    def __call__(self, *args: Any, **kwargs: Any) -> SimpleNamespace:
        tokens = torch.tensor(next(self.steps))
        logits = torch.nn.functional.one_hot(tokens, self.config.vocab_size) * 1e4
        return SimpleNamespace(logits=logits[:, None])


def test_a_completion_ends_at_its_first_end_token_and_that_token_counts(small):
    model, tokenizer = small
    end, other_end = model.generation_config.eos_token_id
    one, two = tokenizer.encode("12")
    scripted = ScriptedModel(model, [[one, one], [end, two], [two, other_end], [two, two]])
    rollout = plain_grpo.sample(scripted, tokenizer, [{"input_token_ids": [one]}] * 2, max_new_tokens=9)
    assert rollout.mask.tolist() == [[True, True, False], [True, True, True]]
    pad = tokenizer.pad_token_id
    assert rollout.token_ids[:, 1:].tolist() == [[one, end, pad], [one, two, other_end]]
    assert rollout.texts == ["1", "12"]


def test_group_advantages_are_standardised_within_each_group():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.5, 0.5, 0.5, 0.5])
    # mean 1/4, ddof-1 deviation sqrt((9/16 + 3/16) / 3) = 1/2
    expected = torch.tensor([1.5, -0.5, -0.5, -0.5, 0, 0, 0, 0])
    torch.testing.assert_close(plain_grpo.group_advantages(rewards, 4), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_plain_loop_trains_and_logs_every_step(staleness, small_folder, tmp_path):
    rows = (SAMPLE_DATA / "countdown_heldout.jsonl").read_text("utf-8").splitlines()[:8]
    data, output = tmp_path / "data.jsonl", tmp_path / "log.jsonl"
    data.write_text("\n".join(rows) + "\n", "utf-8")
    plain_grpo.main(
        small_folder, data, data, output, steps=3, prompts_per_step=2, group_size=4, max_new_tokens=4,
        staleness=staleness, eval_every=3, eval_repeats=1,
    )  # fmt: skip
    records = [json.loads(line) for line in output.read_text("utf-8").splitlines()]
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    assert ["heldout_accuracy" in record for record in records] == [True, False, False, True]
    assert all(0 <= record["accuracy"] <= 1 and record["seconds"] > 0 for record in records[1:])
