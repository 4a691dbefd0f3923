"""What a run was trained on makes the same weights, bit for bit, without engines; and others under another loss."""

import json
from dataclasses import asdict, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from fake_chain import Chain, chain_config
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from async_grpo.__main__ import main
from async_grpo.config.run import write_params
from async_grpo.errors import ConfigurationError
from async_grpo.launch.replay import ReplayConfig, replay
from async_grpo.metrics.writer import METRICS_FILE, PARAMS_FILE


@pytest.fixture(scope="module", params=["grpo", "clip_cov"])
def run(request, tmp_path_factory):
    """A recorded run of six steps, one behind, with checkpoints on the way."""
    options = {"policy_loss": request.param, "record": True, "num_training_batches": 6}
    config = chain_config(**options, checkpoint_every_s=0.15, keep_checkpoints=100)
    chain = Chain(tmp_path_factory.mktemp("run"), config=config)
    chain.train()
    folder = chain.config.output_path
    settings = json.loads(json.dumps(asdict(chain.settings)))
    write_params(folder / PARAMS_FILE, replace(chain.config, reward_fns="countdown"), {"settings": settings})
    return folder, chain


def replayed(run, target, **changes):
    folder, chain = run
    given = asdict(chain.config) | {
        "recorded": str(folder),
        "output_dir": str(target),
        "reward_fns": "countdown",
    }
    replay(ReplayConfig(**given | changes))
    (model,) = (target / "hf_format").glob("samples_*")
    lines = [json.loads(line) for line in (target / METRICS_FILE).read_text().splitlines()]
    return load_file(model / "model.safetensors"), lines


def weights_of(run):
    (model,) = (run[0] / "hf_format").glob("samples_*")
    return load_file(model / "model.safetensors")


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(one[n].tobytes() == other[n].tobytes() for n in one)


def test_a_replay_makes_the_same_weights_bit_for_bit(run, tmp_path):
    found, lines = replayed(run, tmp_path / "again")
    assert same(found, weights_of(run))
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert not lines[0]["off_policy"] and lines[0]["replayed"] == str(run[0])
    assert [line["grad_norm"] for line in lines] == [line["grad_norm"] for line in run[1].lines]


def test_the_command_takes_the_options_of_the_run_but_for_those_that_are_given(run, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(run[0]), "--nonfinite-steps", "7"])
    assert ended.value.code == 0, capsys.readouterr().err
    (model,) = (run[0] / "replay" / "hf_format").glob("samples_*")
    assert same(load_file(model / "model.safetensors"), weights_of(run))
    line = json.loads((run[0] / "replay" / METRICS_FILE).read_text().splitlines()[0])
    assert line["replayed_with"] == ["--nonfinite-steps 7"]


def test_another_loss_makes_other_weights_and_the_metrics_say_that_it_is_off_policy(run, tmp_path):
    found, lines = replayed(run, tmp_path / "tried", policy_loss="cispo")
    assert not same(found, weights_of(run))
    assert lines[0]["off_policy"] and lines[0]["replayed_with"] == ["--policy-loss cispo"]


def test_what_was_not_recorded_is_refused(run, tmp_path):
    with pytest.raises(
        ConfigurationError, match=r"--from-step 99: there are checkpoints after the steps .*6"
    ):
        replayed(run, tmp_path / "none", from_step=99)
    with pytest.raises(ConfigurationError, match=r"step 6 was recorded not at all \(--record\)"):
        replayed(run, tmp_path / "end", from_step=6)


def test_the_record_has_the_trainers_log_probs_too_under_the_weights_that_a_step_starts_from(run):
    """By transformers' own forward, of the first step; of every later one as many as there are micro-batches."""
    folder, chain = run
    steps = sorted((folder / "record").iterdir())
    for step in steps:
        arrays = load_file(step / "rank_0.safetensors")
        of = {
            kind: {name.split(".")[0] for name in arrays if name.endswith(kind)}
            for kind in ("_ids", "trained_logprobs")
        }
        assert of["trained_logprobs"] == of["_ids"] and len(steps) == 6
    arrays = load_file(steps[0] / "rank_0.safetensors")
    model = AutoModelForCausalLM.from_pretrained(chain.folder, dtype=torch.float32)
    for number in {name.split(".")[0] for name in arrays}:
        ids, ends, mask, found = (
            arrays[f"{number}.{name}"]
            for name in ("input_ids", "cu_seqlens", "loss_mask", "trained_logprobs")
        )
        expected = np.zeros(len(ids), np.float32)
        for begin, end in pairwise(ends):
            row = torch.from_numpy(ids[begin:end]).long()
            with torch.no_grad():
                logprobs = model(row[None]).logits[0].log_softmax(-1)
            expected[begin + 1 : end] = logprobs[:-1].gather(1, row[1:, None])[:, 0].numpy()
        assert mask.any() and np.abs(np.where(mask, expected - found, 0)).max() < 1e-5
