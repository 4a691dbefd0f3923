"""Beside the newest checkpoints the one stays that evaluations like best, and none goes before it has been evaluated."""

import json
import os

import pytest
from fake_chain import Chain, chain_config
from saved_checkpoints import save_checkpoint

from async_grpo.config.run import RunConfig
from async_grpo.errors import ConfigurationError
from async_grpo.training.best_checkpoint import keep_best
from async_grpo.training.checkpoint_folder import checkpoints_of, prune, verify_checkpoint


def evaluated(folder, rewards, file="held"):
    with (folder / "eval_metrics.jsonl").open("a") as lines:
        for step, reward in rewards.items():
            line = {"step": step, "eval_avg_reward": reward} | ({"file": file} if file else {})
            lines.write(json.dumps(line) + "\n")


def steps_of(folder):
    return sorted(verify_checkpoint(path).step for path in checkpoints_of(folder))


def names(*steps):
    return {f"step_{step:09d}" for step in steps}


def tens(step):
    return step % 10 == 0


def test_the_best_stays_however_old_and_the_link_leads_to_it(tmp_path):
    for step in (10, 20, 25, 30, 31):
        save_checkpoint(tmp_path, step)
    evaluated(tmp_path, {0: 0.9, 10: 0.5, 20: 0.25, 30: 0.375})  # of the start there is no checkpoint
    evaluated(tmp_path, {20: 1.0}, file="other")
    stay = keep_best(tmp_path, "held", tens)
    assert stay == names(10)
    prune(tmp_path, 1, stay)
    assert steps_of(tmp_path) == [10, 31]
    assert os.readlink(tmp_path / "checkpoints" / "best") == "step_000000010"
    assert verify_checkpoint(tmp_path / "checkpoints" / "best").step == 10


def test_of_equal_ones_the_newest_and_what_could_not_be_scored_is_never_the_best(tmp_path):
    for step in (10, 20, 30):
        save_checkpoint(tmp_path, step)
    evaluated(tmp_path, {10: 0.5, 20: 0.5, 30: None}, file="")
    assert keep_best(tmp_path, "", tens) == names(20)


def test_a_line_without_a_reward_or_with_an_odd_one_is_passed_over(tmp_path):
    for step in (10, 20, 30):
        save_checkpoint(tmp_path, step)
    evaluated(tmp_path, {10: 0.5, 20: "much", 30: 1.7e308})
    with (tmp_path / "eval_metrics.jsonl").open("a") as lines:
        lines.write('{"step": 10, "file": "held"}\n{"file": "held", "eval_avg_reward": 1}\n')
        lines.write('{"step": [], "file": "held", "eval_avg_reward": 1}\n')
        lines.write('{"step": 30, "file": "held", "eval_avg_reward": {"a": 1}}\n')
    assert keep_best(tmp_path, "held", tens) == names(10, 20, 30)
    assert os.readlink(tmp_path / "checkpoints" / "best") == "step_000000010"


def test_what_is_yet_to_be_evaluated_stays_and_what_never_will_be_does_not(tmp_path):
    for step in (10, 15, 20, 25, 30):
        save_checkpoint(tmp_path, step)
    assert keep_best(tmp_path, "held", tens) == names(10, 20, 30)
    assert not (tmp_path / "checkpoints" / "best").exists()
    evaluated(tmp_path, {10: 0.5})
    assert keep_best(tmp_path, "held", tens) == names(10, 20, 30)
    evaluated(tmp_path, {30: 0.75})  # that of step 20 was left out
    assert keep_best(tmp_path, "held", tens) == names(30)


@pytest.mark.parametrize("staleness", [0, 1])
def test_every_step_that_is_evaluated_is_saved_and_the_best_is_there_at_the_end(tmp_path, staleness):
    options = {"keep_best": "held", "eval_data_path": "held=x", "eval_every": 2, "keep_checkpoints": 1}
    config = chain_config(
        **options, num_training_batches=6, max_staleness=staleness, checkpoint_every_s=600.0
    )
    chain, rewards, seen = Chain(tmp_path, config=config), {2: 0.25, 4: 0.75, 6: 0.5}, set()

    class Lines(list):
        """What rank 0 writes; the evaluations of the evaluated steps end with their lines."""

        def append(self, line):
            super().append(line)
            if line["step"] in rewards:
                chain.trainer.checkpointer.wait()
                seen.update(steps_of(chain.config.output_path))
                evaluated(chain.config.output_path, {line["step"]: rewards[line["step"]]})

    chain.lines = Lines()
    lines = chain.train()
    assert len(lines) == 6
    assert seen == {2, 4}  # step 6 is the end, and is saved after its line
    assert steps_of(chain.config.output_path) == [4, 6]
    assert verify_checkpoint(chain.config.output_path / "checkpoints" / "best").step == 4


@pytest.mark.parametrize(
    "options",
    [
        {"keep_best": "held"},
        {"keep_best": "held", "eval_data_path": "held=x"},
        {"keep_best": "hold", "eval_data_path": "held=x", "eval_every": 5},
        {"keep_best": "held", "eval_data_path": "x", "eval_every": 5},
    ],
)
def test_a_file_that_is_not_evaluated_on_cannot_say_what_is_best(options):
    with pytest.raises(ConfigurationError, match=r"--keep-best .* do not fit: name a file"):
        RunConfig(model_name_or_path="m", data_path="d", **options)


def test_of_a_step_that_was_saved_twice_the_newer_checkpoint_stays(tmp_path):
    save_checkpoint(tmp_path, 10)
    again = save_checkpoint(tmp_path, 10)
    evaluated(tmp_path, {10: 0.5})
    assert keep_best(tmp_path, "held", tens) == {again.name}
