"""`async-grpo eval` on real parts: a checkpoint whose weights are known, engines, rewards and files; no trainer."""

import itertools
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from long_tests import long_test
from peft_adapters import new_adapter
from real_runs import DATA, left_behind
from transformers import AutoModelForCausalLM

from async_grpo.config.resume import as_options
from async_grpo.config.run import RunConfig
from async_grpo.modeling.load import load_causal_lm
from async_grpo.modeling.policy import PolicyModel
from async_grpo.training.checkpoint import Checkpointer
from async_grpo.training.checkpoint_folder import checkpoints_of
from async_grpo.training.config import OptimizerConfig
from async_grpo.training.distributed import distributed_run
from async_grpo.training.optimizer import build_policy_optimizer
from async_grpo.training.sharding import shard_policy

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]
SAMPLES = 4
RUNS = {
    "countdown": {"model_name_or_path": "tiny-model", "reward_fns": "countdown,format", "max_generation_tokens": 24},
    "guess": {"model_name_or_path": "guess-model", "environment": "guess", "max_generation_tokens": 100,
              "max_turn_tokens": 6},
}  # fmt: skip


def checkpoint_of(folder: Path, held_out: Path, name: str) -> Path:
    """Step 7 of a run of a tiny model, whose last norm is 0: every token is as likely as any other."""
    files = {"data_path": str(DATA / f"{name}_train.jsonl"), "eval_data_path": f"held={held_out}"}
    options = RUNS[name] | files
    options["model_name_or_path"] = str(DATA / options["model_name_or_path"])
    with distributed_run("cpu", timeout_s=60) as ranks:
        policy = shard_policy(PolicyModel(load_causal_lm(options["model_name_or_path"], "float32")), ranks)
        with torch.no_grad():
            dict(policy.named_parameters())["model.model.norm.weight"].zero_()
        _, scheduler = build_policy_optimizer(policy, OptimizerConfig(), 10)
        given = {"keep": 2, "timeout_s": 60.0, "inputs": {}, "options": as_options(RunConfig(**options))}
        checkpointer = Checkpointer(folder, ranks, policy, scheduler, **given)
        checkpointer.save(7, 56)
        assert checkpointer.wait()
    return checkpoints_of(folder)[0]


LONG = long_test("a minute")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "answered"),
    [
        pytest.param("countdown", "countdown/answer_reward", marks=LONG),
        ("guess", "environment/reward"),
    ],
)
def test_a_checkpoint_is_evaluated_with_its_own_weights_and_the_options_of_its_run(tmp_path, name, answered):
    held_out, results = tmp_path / "held_out.jsonl", tmp_path / "results"
    questions = (DATA / f"{name}_heldout.jsonl").read_text().splitlines(keepends=True)
    held_out.write_text("".join(questions[:24]))
    checkpoint = checkpoint_of(tmp_path / "run", held_out, name)
    command = [sys.executable, "-m", "async_grpo", "eval", str(checkpoint), f"--eval-samples={SAMPLES}"]
    command += [
        f"--output-dir={results}",
        "--enforce-eager",
    ]
    environment = {**os.environ, "RUN_MARK": str(results)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert left_behind(results) == []

    (line,) = [json.loads(text) for text in (results / "eval_results.jsonl").read_text().splitlines()]
    samples = [json.loads(text) for text in (results / "eval_samples_7_held.jsonl").read_text().splitlines()]
    assert (line["step"], line["file"], line["evaluated"]) == (7, "held", str(checkpoint))
    assert (line["eval_num_questions"], len(samples)) == (24, 24 * SAMPLES)
    assert (line["eval_version_min"], line["eval_version_max"]) == (7, 7) and line["seconds"] > 0
    groups = defaultdict(list)
    for sample in samples:
        groups[sample["group"]].append(sample["reward"])
    assert groups.keys() == set(range(24))  # numbers of the questions in the file
    passed = [[reward >= 1.0 for reward in group] for group in groups.values()]
    assert line["eval_avg_reward"] == pytest.approx(np.mean([np.mean(group) for group in groups.values()]))
    pairs = [[any(pair) for pair in itertools.combinations(group, 2)] for group in passed]
    assert line["eval_pass@2"] == pytest.approx(np.mean([np.mean(of) for of in pairs]))
    # The models that the runs began with answer a sixth of them, or a quarter
    assert line[f"eval_{answered}"] < 0.03
    assert [len(sample.get("turns", ())) for sample in samples] == [4 * (name == "guess")] * len(samples)
    assert len({sample["completion"] for sample in samples}) > 0.9 * len(samples)
    assert "held-out held at step 7" in done.stdout and f"{SAMPLES} x 24 completions" in done.stdout
    for word in ("mean reward", f"avg@{SAMPLES}", f"pass@{SAMPLES}", f"majority@{SAMPLES}", "96 of 96"):
        assert word in done.stdout, done.stdout
    logs = {path.name.split("-")[0] for path in (results / "logs").iterdir()}
    assert {"evaluator.log", "ray.log", "controller", "generation"} <= logs
    (engine,) = [path for path in (results / "logs").glob("generation-*") if "worker" not in path.name]
    assert "vllm" in engine.read_text().lower()


@pytest.mark.exhaustive
def test_adapters_are_compared_on_one_engine_in_one_table(tmp_path):
    """An adapter that changes nothing answers as the base does, and one of noise answers nothing."""
    base = DATA / "tiny-model"
    for name, size in (("nothing", 0.0), ("noise", 3.0)):
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        new_adapter(model, 4 if size else 2, 2.0, ("q_proj", "up_proj"), size=size).save_pretrained(
            tmp_path / "adapters" / name
        )
    held_out = tmp_path / "held_out.jsonl"
    questions = (DATA / "countdown_heldout.jsonl").read_text().splitlines(keepends=True)
    held_out.write_text("".join(questions[:16]))
    results = tmp_path / "results"
    command = [
        sys.executable,
        "-m",
        "async_grpo",
        "eval",
        str(base),
        f"--lora-adapters={tmp_path / 'adapters'}",
    ]
    command += [f"--data={held_out}", "--reward-fns=countdown,format", f"--eval-samples={SAMPLES}"]
    command += [f"--output-dir={results}", "--max-generation-tokens=24", "--enforce-eager"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(text) for text in (results / "eval_results.jsonl").read_text().splitlines()]
    assert [line["adapter"] for line in lines] == ["base", "noise", "nothing"]
    assert [Path(line["evaluated"]).name for line in lines] == ["tiny-model", "noise", "nothing"]
    answers = {}
    for name in ("base", "noise", "nothing"):
        texts = (results / f"eval_samples_0_{name}.jsonl").read_text().splitlines()
        samples = [json.loads(text) for text in texts]
        answers[name] = {(sample["group"], sample["member"]): sample["completion"] for sample in samples}
        assert len(answers[name]) == 16 * SAMPLES
    equal = [answers["nothing"][key] == text for key, text in answers["base"].items()]
    assert np.mean(equal) > 0.9  # the same seeds; what shares a batch may change a last bit
    equal = [answers["noise"][key] == text for key, text in answers["base"].items()]
    assert np.mean(equal) < 0.1
    rewards = {line["adapter"]: line["eval_avg_reward"] for line in lines}
    assert rewards["noise"] < rewards["base"]
    assert "the adapter nothing as with the base alone" in done.stdout + done.stderr
    for word in ("adapter", "base", "noise", "nothing", "64 of 64"):
        assert word in done.stdout, done.stdout
