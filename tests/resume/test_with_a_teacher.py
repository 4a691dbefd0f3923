"""A run with a teacher goes on from a checkpoint, and is replayed, bit for bit."""

import json
import shutil
from dataclasses import asdict, fields, replace

import pytest
from fake_chain import Chain, chain_config
from safetensors.numpy import load_file
from tiny_policy import save_tiny_model

from async_grpo.config.run import write_params
from async_grpo.launch.replay import ReplayConfig, replay
from async_grpo.metrics.writer import PARAMS_FILE
from async_grpo.training.checkpoint_folder import checkpoints_of, read

STEPS = 10


def taught_config(teacher):
    return chain_config(
        advantage_estimator="teacher",
        teacher=str(teacher),
        num_training_batches=STEPS,
        mask_truncated=False,
        deterministic=True,
        record=True,
        checkpoint_every_s=0.05,
        keep_checkpoints=100,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A recorded run with a teacher, and checkpoints on the way."""
    folder = tmp_path_factory.mktemp("taught")
    teacher = save_tiny_model(folder / "teacher", seed=1)
    chain = Chain(folder / "run", config=taught_config(teacher), teacher=teacher)
    chain.train()
    return folder, chain


def weights(output):
    (model,) = (output / "hf_format").glob(f"samples_{STEPS * 8}")
    return {name: tensor.tobytes() for name, tensor in load_file(model / "model.safetensors").items()}


def test_its_lines_tell_the_distance_to_the_teacher_and_it_is_trained_without_rewards(run):
    _, chain = run
    assert len(chain.lines) == STEPS and all(line["grad_norm"] > 0 for line in chain.lines)
    assert all(line["teacher_covered"] == 1.0 and line["teacher_failures"] == 0 for line in chain.lines)
    assert all(line["teacher_kl"] > 0 for line in chain.lines)
    assert chain.lines[-1]["samples_trained"] == 8


def test_it_goes_on_from_a_checkpoint_with_groups_alive_bit_for_bit(run, tmp_path):
    folder, chain = run
    copied = tmp_path / "run"
    shutil.copytree(chain.folder.parent, copied)
    output = copied / "model" / "out"
    expected = weights(output)
    shutil.rmtree(output / "hf_format")
    steps = {read(path).step: path for path in checkpoints_of(output)}
    middle = max(step for step in steps if step < STEPS)
    for step, path in steps.items():
        if step > middle:
            shutil.rmtree(path)
    assert middle > 0
    states = json.loads((steps[middle] / "experience.json").read_text())
    assert states["groups"]
    again = Chain(copied, config=taught_config(folder / "teacher"), teacher=folder / "teacher")
    again.train()
    assert [line["step"] for line in again.lines] == list(range(middle + 1, STEPS + 1))
    assert weights(output) == expected


def test_its_replay_makes_the_same_weights_bit_for_bit_without_the_teacher(run, tmp_path):
    _, chain = run
    output = chain.config.output_path
    settings = json.loads(json.dumps(asdict(chain.settings)))
    write_params(output / PARAMS_FILE, replace(chain.config, reward_fns="unscored"), {"settings": settings})
    options = asdict(chain.config) | {"recorded": str(output), "output_dir": str(tmp_path / "again")}
    replay(ReplayConfig(**options | {"teacher": None, "record": False}))
    assert weights(tmp_path / "again") == weights(output)


def test_a_replay_takes_the_weight_of_the_teacher_from_the_run_because_the_loss_contains_it(tmp_path):
    config = chain_config(teacher="folder", teacher_top_k=4, teacher_coef=0.25, output_dir=str(tmp_path))
    write_params(tmp_path / PARAMS_FILE, replace(config, reward_fns="countdown"), {})
    defaults = {field.name: field.default for field in fields(ReplayConfig)}
    inherited = ReplayConfig.from_options(defaults | {"recorded": str(tmp_path)}, {"recorded"})
    assert (inherited.teacher_coef, inherited.teacher_top_k, inherited.teacher) == (0.25, 4, None)
