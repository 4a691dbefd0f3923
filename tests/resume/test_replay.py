"""What a run was trained on makes the same weights, bit for bit, without engines; others under another loss; LoRA, too."""

import json
import shutil
from dataclasses import asdict, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from fake_chain import Chain, chain_config
from flow_chain import FlowChain, darkness
from safetensors.numpy import load_file
from tiny_flow import NEEDS_DIFFUSERS
from tiny_policy import save_tiny_model
from transformers import AutoModelForCausalLM

from async_grpo.__main__ import main
from async_grpo.config.base_weights import base_digest
from async_grpo.config.lora import lora_settings
from async_grpo.config.run import write_params
from async_grpo.errors import ConfigurationError
from async_grpo.inference.logprob_worker import LogprobWorker
from async_grpo.launch.export import ExportConfig, export
from async_grpo.launch.replay import ReplayConfig, replay
from async_grpo.metrics.writer import METRICS_FILE, PARAMS_FILE
from async_grpo.modeling.flow.folder import read_flow_folder
from async_grpo.testing import FakeVerification
from async_grpo.training.checkpoint_folder import checkpoints_of, read
from async_grpo.types import REFERENCE


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


@pytest.fixture(scope="module")
def run_with_adapter(tmp_path_factory):
    """A recorded run of three steps that trains a LoRA adapter on log-probs over the most probable tokens."""
    config = chain_config(
        record=True, lora_rank=4, top_p=0.9, top_k=50, checkpoint_every_s=0.15, keep_checkpoints=100
    )
    chain = Chain(tmp_path_factory.mktemp("adapter"), config=config)
    chain.digests_read = {"model_name_or_path": base_digest(str(chain.folder))}
    chain.settings = replace(chain.settings, lora=lora_settings(chain.config, str(chain.folder)))
    chain.train()
    folder = chain.config.output_path
    settings = json.loads(json.dumps(asdict(chain.settings)))
    write_params(folder / PARAMS_FILE, replace(chain.config, reward_fns="countdown"), {"settings": settings})
    return folder, chain


def replayed_adapter(run, target, **changes):
    options = asdict(run[1].config) | {"recorded": str(run[0]), "output_dir": str(target)}
    replay(ReplayConfig(**options | {"reward_fns": "countdown"} | changes))
    (model,) = (target / "hf_format").glob("samples_*")
    line = json.loads((target / METRICS_FILE).read_text().splitlines()[0])
    return load_file(model / "adapter_model.safetensors"), line["replayed_with"]


def test_a_replay_trains_the_recorded_adapter_bit_for_bit_or_the_one_that_the_options_name(
    run_with_adapter, tmp_path
):
    (model,) = (run_with_adapter[0] / "hf_format").glob("samples_*")
    adapter, changes = replayed_adapter(run_with_adapter, tmp_path / "again")
    assert same(adapter, load_file(model / "adapter_model.safetensors")) and changes == []
    adapter, changes = replayed_adapter(run_with_adapter, tmp_path / "smaller", lora_rank=2)
    assert changes == ["--lora-rank 2"]
    assert {min(tensor.shape) for tensor in adapter.values()} == {2}


def test_a_replay_over_other_tokens_makes_another_adapter(run_with_adapter, tmp_path):
    (model,) = (run_with_adapter[0] / "hf_format").glob("samples_*")
    adapter, changes = replayed_adapter(run_with_adapter, tmp_path / "all tokens", top_p=1.0)
    assert not same(adapter, load_file(model / "adapter_model.safetensors")) and changes == ["--top-p 1.0"]


def test_an_adapter_is_neither_replayed_nor_exported_on_another_base(run_with_adapter, tmp_path):
    folder, _ = run_with_adapter
    save_tiny_model(tmp_path / "base", seed=1)  # the same shapes with other weights
    step = max(read(checkpoint).step for checkpoint in checkpoints_of(folder))
    with pytest.raises(ConfigurationError, match="are not those of the base on which the adapter in"):
        replayed_adapter(
            run_with_adapter,
            tmp_path / "replay",
            model_name_or_path=str(tmp_path / "base"),
            from_step=step,
        )
    options = {"path": str(folder), "output_dir": str(tmp_path / "model"), "merged": True}
    with pytest.raises(ConfigurationError, match="give the folder of that model"):
        export(ExportConfig(**options, base=str(tmp_path / "base")))
    with pytest.raises(ConfigurationError, match="is not a folder"):
        export(ExportConfig(**options, base=str(tmp_path / "missing")))
    export(ExportConfig(**options))


def test_the_adapter_with_which_a_run_began_must_be_named(run_with_adapter, tmp_path):
    (adapter,) = (run_with_adapter[0] / "hf_format").glob("samples_*")
    folder = tmp_path / "run"
    shutil.copytree(run_with_adapter[0], folder)
    params = json.loads((folder / PARAMS_FILE).read_text())
    params["settings"]["lora"]["initial_folder"] = str(adapter)
    (folder / PARAMS_FILE).write_text(json.dumps(params))
    with pytest.raises(ConfigurationError, match="give --init-adapter with this folder"):
        replayed_adapter((folder, run_with_adapter[1]), tmp_path / "again")


def test_several_passes_are_replayed_bit_for_bit(tmp_path):
    """Two passes over two minibatches: what is recorded is the first pass alone."""
    passes = {"passes_per_batch": 2, "train_minibatch_size": 4, "max_staleness": 7, "old_policy": "current"}
    config = chain_config(record=True, checkpoint_every_s=0.1, keep_checkpoints=100, **passes)
    chain = Chain(tmp_path / "run", config=config)
    chain.train()
    assert [line["pass"] for line in chain.lines] == [1, 1, 2, 2] * 3
    assert [version for version in chain.link.delivered if version >= 0] == [0, 4, 8, 12]
    folder = chain.config.output_path
    settings = json.loads(json.dumps(asdict(chain.settings)))
    write_params(folder / PARAMS_FILE, replace(chain.config, reward_fns="countdown"), {"settings": settings})
    assert len(list((folder / "record").iterdir())) == 6
    found, lines = replayed((folder, chain), tmp_path / "again")
    assert same(found, weights_of((folder, chain)))
    assert [line["grad_norm"] for line in lines] == [line["grad_norm"] for line in chain.lines]
    steps = {read(checkpoint).step for checkpoint in checkpoints_of(folder)}
    assert steps and all(step % 4 == 0 for step in steps)
    with pytest.raises(
        ConfigurationError, match="--from-step 4: in the run, 2 passes were made over each batch"
    ):
        replayed((folder, chain), tmp_path / "other", from_step=4, passes_per_batch=1)
    if 4 in steps:
        found, lines = replayed((folder, chain), tmp_path / "later", from_step=4)
        assert same(found, weights_of((folder, chain))) and [line["step"] for line in lines] == [
            *range(5, 13)
        ]


def replayed_chain(chain, target):
    """(weights of the run, weights of its replay, lines of its replay)."""
    folder = chain.config.output_path
    settings = json.loads(json.dumps(asdict(chain.settings)))
    write_params(folder / PARAMS_FILE, replace(chain.config, reward_fns="countdown"), {"settings": settings})
    replay_weights, lines = replayed((folder, chain), target, critic_model=chain.config.critic_model)
    return weights_of((folder, chain)), replay_weights, lines


def test_a_reference_that_moves_is_replayed_bit_for_bit_over_several_passes(tmp_path):
    """The samples bring the log-probs of the reference, so the replay needs no worker for it."""
    config = chain_config(
        record=True,
        kl_coef=0.5,
        unbiased_kl=True,
        ref_update_steps=2,
        ref_mix=1.0,
        ref_reset_optimizer=True,
        passes_per_batch=2,
        max_staleness=3,
        old_policy="current",
        log_ratio_coef=0.1,
        top_entropy_quantile=0.5,
    )
    chain = Chain(tmp_path / "run", config=config, logprob_roles=(REFERENCE,), moves_reference=True)
    chain.join("r0", LogprobWorker, REFERENCE)
    chain.train()
    trained, found, lines = replayed_chain(chain, tmp_path / "again")
    assert same(found, trained)
    assert max(line["avg_kl_div"] for line in lines) > 1e-6
    assert [line["avg_kl_div"] for line in lines] == [line["avg_kl_div"] for line in chain.lines]


def test_a_critic_of_its_own_with_one_sample_per_question_is_replayed_bit_for_bit(tmp_path):
    config = chain_config(
        record=True,
        samples_per_question=1,
        batch_size=8,
        advantage_estimator="decoupled_gae",
        critic_model="same",
        critic_warmup_steps=1,
        critic_learning_rate=1e-3,
    )
    chain = Chain(tmp_path / "run", config=config)
    chain.train()
    trained, found, lines = replayed_chain(chain, tmp_path / "again")
    assert same(found, trained)
    assert [line["value_loss"] for line in lines] == [line["value_loss"] for line in chain.lines]
    assert [line["grad_norm"] > 0 for line in lines] == [False, True, True]


@NEEDS_DIFFUSERS
def test_a_run_that_draws_is_replayed_bit_for_bit_and_its_checkpoint_exported(tmp_path, capsys):
    chain = FlowChain(tmp_path, steps=3, record=True, checkpoint_every_s=0.01, keep_checkpoints=100)
    chain.train(lambda: FakeVerification(darkness))
    folder = chain.config.output_path
    settings = json.loads(json.dumps(asdict(chain.settings)))
    write_params(folder / PARAMS_FILE, replace(chain.config, reward_fns="countdown"), {"settings": settings})
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(folder)])
    assert ended.value.code == 0, capsys.readouterr().err
    file = "transformer/diffusion_pytorch_model.safetensors"
    (trained,) = (folder / "hf_format").glob(f"samples_*/{file}")
    (replayed,) = (folder / "replay" / "hf_format").glob(f"samples_*/{file}")
    assert same(load_file(replayed), load_file(trained))
    target = tmp_path / "exported"
    export(ExportConfig(path=str(folder), output_dir=str(target), dtype="float32"))
    assert same(load_file(target / file), load_file(trained))
    assert read_flow_folder(target).fingerprint == read_flow_folder(tmp_path / "model").fingerprint
