"""The logprob server: packing, deadlines, and what an error may touch. A tiny model or a fake."""

import asyncio
import copy
import threading
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from grammar_masks import masks_of, random_table
from safetensors.torch import save
from supports import in_support
from tiny_policy import SETTINGS, VOCAB, save_tiny_model, tiny_model
from vision_model import save_vision_model, vision_model
from vision_prompts import logprobs_alone, picture_row, question, seeded_picture

from async_grpo.errors import ConfigurationError, OutOfMemory, WeightsDidNotLand, WorkerLost
from async_grpo.inference.logprob_config import LogprobConfig
from async_grpo.inference.logprob_worker import LogprobWorker
from async_grpo.messages import LoraSettings, Truncation
from async_grpo.modeling.image_models import ImageReader
from async_grpo.modeling.load import load_causal_lm, load_config
from async_grpo.modeling.policy import PolicyModel, named_full_tensors
from async_grpo.training.sharding import canary_logprobs

DEADLINE_S = 20


class FakePolicy(torch.nn.Module):
    """Answers each token with its own id; remembers what it was asked; can be held up, and can fail."""

    device = torch.device("cpu")

    def __init__(self, held_up=False, poison=None, error=None):
        super().__init__()
        self.error = error
        self.batches, self.free, self.poison = [], threading.Event(), poison
        if not held_up:
            self.free.set()

    def forward(self, input_ids, cu_seqlens, loss_mask, temperature):
        assert self.free.wait(DEADLINE_S)
        self.batches.append(np.diff(cu_seqlens.numpy()).tolist())
        if self.poison in input_ids.tolist():
            raise self.error or RuntimeError(f"met token {self.poison}")
        return torch.where(loss_mask, input_ids, 0).float(), torch.zeros(len(input_ids))


@asynccontextmanager
async def serving(policy, temperature=1.0, truncation=None, **options):
    """With a deadline: a server that forgets an answer must fail, not hang, the test."""
    config = LogprobConfig(**{"max_tokens_per_gpu": 100, "max_wait_s": 0.01} | options)
    server = LogprobWorker(policy, config, temperature, truncation)
    async with asyncio.timeout(DEADLINE_S):
        yield server
        server.close()


def sequence(length, token=5):
    return np.full(length, token, np.int32)


def images(named_tensors):
    """What an update is made of."""
    return [save(dict(named_tensors))]


def asking(server, *lengths):
    return asyncio.create_task(server.logprobs([sequence(n) for n in lengths], [1] * len(lengths)))


async def settled(*calls):
    """Their answers or exceptions."""
    return await asyncio.gather(*calls, return_exceptions=True)


async def test_answers_are_the_completions_logprobs_at_the_temperature_whatever_is_packed_together():
    model = tiny_model()
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, VOCAB, length).astype(np.int32) for length in rng.integers(2, 40, 30)]
    prompts = [int(rng.integers(1, len(ids) + 1)) for ids in sequences]
    async with serving(PolicyModel(model), temperature=0.7) as server:
        cuts = [(0, 1), (1, 9), (9, 30)]
        answers = await asyncio.gather(*(server.logprobs(sequences[a:b], prompts[a:b]) for a, b in cuts))
    rows = [row for answer in answers for row in answer]
    for ids, prompt, got in zip(sequences, prompts, rows, strict=True):
        with torch.no_grad():
            logits = eager(torch.tensor(ids[None], dtype=torch.int64)).logits[0, :-1] / 0.7
        expected = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:, None], dtype=torch.int64))[:, 0]
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, expected.numpy()[prompt - 1 :], atol=1e-5)


async def test_the_most_probable_tokens_are_those_of_the_model_beside_the_sampled_one():
    model = tiny_model()
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    ids = np.random.default_rng(0).integers(0, VOCAB, 12).astype(np.int32)
    async with serving(PolicyModel(model, chunk_tokens=3), temperature=0.7) as server:
        plain, (rows, short) = await asyncio.gather(
            server.logprobs([ids], [4]), server.logprobs_with_top([ids, ids[:5]], [4, 4], 3)
        )
    assert rows.shape == (8, 2, 4) and short.shape == (1, 2, 4)
    assert rows[:, 0, 0].tolist() == ids[4:].tolist()
    np.testing.assert_allclose(rows[:, 1, 0], plain[0], atol=1e-6)
    expected = (eager(torch.tensor(ids[None]).long()).logits[0, 3:-1] / 0.7).log_softmax(-1).topk(3, dim=1)
    assert rows[:, 0, 1:].tolist() == expected.indices.tolist()
    np.testing.assert_allclose(rows[:, 1, 1:], expected.values.detach().numpy(), atol=1e-5)


async def test_sequences_of_different_calls_share_no_forward_pass_if_the_bits_must_not_depend_on_it():
    policy = FakePolicy()
    config = LogprobConfig(max_tokens_per_gpu=100, max_wait_s=0.01)
    server = LogprobWorker(policy, config, joins_calls=False)
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(asking(server, 10, 11), asking(server, 12, 13, 14))
    server.close()
    assert policy.batches == [[10, 11], [12, 13, 14]]


async def test_log_probs_of_a_completion_with_a_grammar_are_those_over_the_allowed_tokens():
    model = tiny_model()
    random = np.random.default_rng(1)
    sequences = [random.integers(0, VOCAB, length).astype(np.int32) for length in (9, 5, 7)]
    tables = [random_table(random, ids.tolist(), VOCAB) for ids in sequences]
    tables[1][:] = True
    allowed = [masks_of(tables[0]), None, masks_of(tables[2])]
    async with serving(PolicyModel(copy.deepcopy(model)), temperature=0.7) as server:
        rows = await server.logprobs(sequences, [2, 1, 3], allowed)
    model.set_attn_implementation("eager")
    for ids, table, begin, row in zip(sequences, tables, (2, 1, 3), rows, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor(ids[None], dtype=torch.int64)).logits[0, :-1].double() / 0.7
        logits[~torch.tensor(table[1:])] = -torch.inf
        expected = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:, None], dtype=torch.int64))[:, 0]
        np.testing.assert_allclose(row, expected.numpy()[begin - 1 :], atol=1e-5)


async def test_log_probs_are_those_over_the_tokens_that_a_truncation_keeps_but_for_the_canary():
    model = tiny_model()
    ids = np.random.default_rng(2).integers(0, VOCAB, 30).astype(np.int32)
    async with serving(PolicyModel(copy.deepcopy(model)), 0.7, truncation=Truncation(top_k=40)) as server:
        (row,) = await server.logprobs([ids], [5])
        canary = await server.canary(ids)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(torch.tensor(ids[None], dtype=torch.int64)).logits[0, :-1].double()
    targets = torch.tensor(ids[1:, None], dtype=torch.int64)
    is_kept = in_support(logits, targets[:, 0], top_k=40)
    assert 5 < (is_kept.sum(-1) == 41).sum() < 25, "some tokens are outside of the support"
    expected = (logits / 0.7).masked_fill(~is_kept, -torch.inf).log_softmax(-1).gather(1, targets)[:, 0]
    np.testing.assert_allclose(row, expected.numpy()[4:], atol=1e-5)
    np.testing.assert_allclose(canary[1:], logits.log_softmax(-1).gather(1, targets)[:, 0], atol=1e-5)


async def test_a_batch_leaves_when_the_next_sequence_does_not_fit_and_none_exceeds_the_budget():
    """The last one leaves without a wait, too: it is full."""
    policy = FakePolicy()
    async with serving(policy, max_tokens_per_gpu=10, max_wait_s=3600) as server:
        answers = await asking(server, 4, 4, 4, 6, 10, 3, 7)
    assert [len(row) for row in answers] == [3, 3, 3, 5, 9, 2, 6]
    assert policy.batches == [[4, 4], [4, 6], [10], [3, 7]]


async def test_the_wait_is_a_deadline_of_the_oldest_and_not_a_debounce():
    policy = FakePolicy()
    async with serving(policy, max_tokens_per_gpu=10**6, max_wait_s=0.2) as server:
        begun, first, trickle = time.monotonic(), asking(server, 2), []
        while not first.done():  # a new request every 20 ms: a debounce of 200 ms would never end
            trickle.append(asking(server, 2))
            await asyncio.sleep(0.02)
        assert time.monotonic() - begun >= 0.2
        await asyncio.gather(*trickle)
    assert len(policy.batches[0]) > 1, "those that came in time went along"


async def test_a_sequence_over_the_budget_fails_its_own_request_only():
    async with serving(FakePolicy(), max_tokens_per_gpu=10) as server:
        fine, too_long, largest = await settled(*(asking(server, *n) for n in ((3,), (3, 11), (10,))))
    assert fine[0].tolist() == [5, 5] and len(largest[0]) == 9
    assert isinstance(too_long, ConfigurationError) and "11 tokens exceeds the budget of 10" in str(too_long)


async def test_an_error_of_a_forward_fails_exactly_its_batch_and_the_server_lives_on():
    policy = FakePolicy(poison=66)
    async with serving(policy, max_tokens_per_gpu=6) as server:
        poisoned = asyncio.create_task(server.logprobs([sequence(3, 66)], [1]))
        asked = [poisoned, *(asking(server, *lengths) for lengths in ((3,), (6,), (2, 4)))]
        poisoned, beside, other, last = await settled(*asked)
        assert len((await asking(server, 2))[0]) == 1
    assert policy.batches[0] == [3, 3]  # the poisoned one and its neighbour
    assert str(beside) == str(poisoned) == "met token 66"
    assert len(other[0]) == 5 and len(last) == 2


async def test_a_caller_that_gives_up_is_not_computed_for_and_the_loop_stays_responsive():
    policy = FakePolicy(held_up=True)
    async with serving(policy, max_tokens_per_gpu=4, max_wait_s=0.0) as server:
        first = asking(server, 4)
        await asyncio.sleep(0.05)
        gone, stays = asking(server, 3), asking(server, 2)
        await asyncio.sleep(0.05)
        gone.cancel()
        assert not first.done()
        policy.free.set()
        await asyncio.gather(first, stays)
    assert policy.batches == [[4], [2]]


async def test_new_weights_change_the_answers():
    ids, new = np.arange(1, 20, dtype=np.int32), PolicyModel(tiny_model(seed=2))
    async with serving(PolicyModel(tiny_model(seed=1))) as server:
        before = await server.canary(ids)
        await server.update(0, images(named_full_tensors(new)))
        after = await server.canary(ids)
    assert np.abs(before - after).max() > 0.1
    np.testing.assert_allclose(after, canary_logprobs(new, ids), atol=1e-6)


async def test_weights_wait_for_the_forward_under_way():
    policy = FakePolicy(held_up=True)
    policy.model = torch.nn.Module()
    async with serving(policy, max_wait_s=0.0) as server:
        request = asking(server, 2)
        await asyncio.sleep(0.05)
        update = asyncio.create_task(server.update(0, []))
        await asyncio.sleep(0.05)
        assert not update.done()
        policy.free.set()
        await asyncio.gather(request, update)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.norm.weight"])
async def test_weights_that_are_not_the_models_are_refused(name):
    async with serving(PolicyModel(tiny_model())) as server:
        with pytest.raises(WeightsDidNotLand, match=name):  # there is none; it has another shape
            await server.update(0, images([(name, torch.zeros(3))]))


async def test_tensors_that_are_not_sent_keep_their_values():
    """A self-test sends a few at a time; whether all came that were sent, the receipt proves."""
    policy, new = PolicyModel(tiny_model()), dict(named_full_tensors(PolicyModel(tiny_model(seed=2))))
    old = {name: tensor.clone() for name, tensor in named_full_tensors(policy)}
    async with serving(policy) as server:
        await server.update(0, images([("model.norm.weight", new["model.norm.weight"])]))
    for name, tensor in named_full_tensors(policy):
        assert torch.equal(tensor, (new if name == "model.norm.weight" else old)[name])


async def test_the_receipt_says_which_tensors_the_model_computes_with(monkeypatch):
    """So a proximal worker needs no round per layer in a bfloat16 self-test."""
    new = dict(named_full_tensors(PolicyModel(tiny_model(seed=2))))
    lost = "model.layers.1.self_attn.k_proj.weight"
    copy_ = torch.Tensor.copy_

    def copy_but_for_the_lost(weight, tensor):
        return weight if torch.equal(tensor, new[lost]) else copy_(weight, tensor)

    monkeypatch.setattr(torch.Tensor, "copy_", copy_but_for_the_lost)
    async with serving(PolicyModel(tiny_model())) as server:
        manifest = await server.update(0, images(new.items()))
    assert all(record.is_read_back for record in manifest.values())
    assert {name for name, record in manifest.items() if not record.in_use} == {lost}


async def test_closing_fails_those_in_the_forward_and_in_the_queue_and_takes_no_more():
    policy = FakePolicy(held_up=True)
    async with serving(policy, max_tokens_per_gpu=4, max_wait_s=3600) as server:
        waiting = [asking(server, 4), asking(server, 4), asking(server, 2)]
        await asyncio.sleep(0.05)
        server.close()
        policy.free.set()
        assert {type(answer) for answer in await settled(*waiting, asking(server, 1))} == {WorkerLost}


async def test_a_run_s_server_starts_from_a_folder_and_closing_fails_a_batch_that_waits_for_company(tmp_path):
    config = SimpleNamespace(model_path=save_tiny_model(tmp_path), max_tokens_per_gpu=10, max_wait_s=3600)
    server = LogprobWorker.start(config, SETTINGS)
    assert (await asking(server, 10))[0].shape == (9,)
    waiting = asking(server, 4)
    await asyncio.sleep(0.05)
    server.close()
    assert isinstance((await settled(waiting))[0], WorkerLost)


async def test_a_landing_check_is_answered_at_temperature_1_whatever_the_server_samples_at():
    ids = np.arange(1, 12, dtype=np.int32)
    async with serving(PolicyModel(tiny_model()), temperature=0.3) as server:
        answer = await server.canary(ids)
    np.testing.assert_allclose(answer, canary_logprobs(PolicyModel(tiny_model()), ids), atol=1e-6)


@pytest.mark.parametrize(
    ("mode", "role", "has_adapter"),
    [("logprob", "proximal", True), ("logprob", "reference", False), ("generation", "reference", True)],
)
async def test_a_worker_that_receives_an_adapter_computes_with_it_and_its_base_with_the_base(
    tmp_path, mode, role, has_adapter
):
    """Mode generation is that of the engine for tests, which keeps its weights in such a worker."""
    save_tiny_model(tmp_path)
    policy = PolicyModel(tiny_model())
    layers = ("model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj")
    settings = replace(SETTINGS, lora=LoraSettings(rank=2, scaling=3.0, layers=layers, sync="adapter"))
    config = SimpleNamespace(
        model_path=str(tmp_path), mode=mode, role=role, max_tokens_per_gpu=100, max_wait_s=0.01
    )
    worker = LogprobWorker.start(config, settings)
    text = np.arange(12, dtype=np.int32) % VOCAB
    before = await worker.canary(text)
    tensors, expected = {}, dict(policy.model.named_parameters())
    for layer in layers:
        weight = expected[f"{layer}.weight"]
        a, b = torch.randn(2, weight.shape[1]), torch.randn(weight.shape[0], 2)
        tensors |= {
            f"base_model.model.{layer}.lora_A.weight": a,
            f"base_model.model.{layer}.lora_B.weight": b,
        }
        with torch.no_grad():
            weight.add_(3.0 * b @ a)
    if not has_adapter:
        with pytest.raises(WeightsDidNotLand, match="no such tensor"):
            await worker.update(1, images(tensors))
        return
    manifest = await worker.update(1, images(tensors))
    assert manifest.keys() == tensors.keys() and all(one.in_use for one in manifest.values())
    after = await worker.canary(text)
    assert np.abs(after - canary_logprobs(policy, text)).max() < 1e-4 < np.abs(after - before).max()


def test_logprobs_of_prompts_with_images_are_those_of_each_sequence_alone(tmp_path):
    folder = save_vision_model(tmp_path / "model")
    policy = PolicyModel(load_causal_lm(folder, "float32"))
    policy.image_reader = ImageReader.load(folder, load_config(folder))
    seeds = [(), (0,), (1, 0)]
    questions = [question(folder, tmp_path / "images", picture_row(several)) for several in seeds]
    completion = np.array([3, 77, 12], np.int32)
    sequences = [np.concatenate([asked.token_ids, completion]) for asked in questions]

    async def ask() -> list[np.ndarray]:
        worker = LogprobWorker(policy, LogprobConfig(max_tokens_per_gpu=512))
        lengths = [len(asked.token_ids) for asked in questions]
        try:
            return await worker.logprobs(sequences, lengths, None, [asked.images for asked in questions])
        finally:
            worker.close()

    for several, sequence, ours in zip(seeds, sequences, asyncio.run(ask()), strict=True):
        pictures = [seeded_picture(seed) for seed in several]
        alone = logprobs_alone(vision_model(), folder, sequence, pictures)
        np.testing.assert_allclose(ours, alone[-len(completion) :], atol=2e-5)


async def test_a_lack_of_memory_names_the_size_of_the_forward_pass_and_the_next_one_is_served():
    lack = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    async with serving(FakePolicy(poison=9, error=lack)) as server:
        failing = server.logprobs([sequence(40, token=9), sequence(20)], [1, 1])
        with pytest.raises(
            OutOfMemory,
            match=r"in a logprob worker's forward pass of 60 tokens in 2 sequences: lower --max-tokens-per-gpu of the "
            r"worker \(100 now\) .*Tried to allocate 2.00 GiB",
        ):
            await failing
        (answer,) = await server.logprobs([sequence(5)], [1])
        assert len(answer) == 4
