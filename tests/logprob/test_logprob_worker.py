"""The logprob server: packing, deadlines, and what an error may touch. A tiny model or a fake."""

import asyncio
import copy
import threading
import time

import numpy as np
import pytest
import torch
from tiny_policy import VOCAB, save_tiny_model, tiny_model

from async_grpo.errors import ConfigurationError, WeightsDidNotLand, WorkerLost
from async_grpo.logprob.logprob_worker import LogprobWorker
from async_grpo.modeling.policy import PolicyModel, named_full_tensors
from async_grpo.training.sharding import canary_logprobs

DEADLINE_S = 20


class FakePolicy(torch.nn.Module):
    """Answers each token with its own id; remembers what it was asked; can be held up, and can fail."""

    device = torch.device("cpu")

    def __init__(self):
        super().__init__()
        self.batches, self.free, self.poison = [], threading.Event(), None
        self.free.set()

    def forward(self, input_ids, cu_seqlens, loss_mask, temperature):
        assert self.free.wait(DEADLINE_S)
        self.batches.append(np.diff(cu_seqlens.numpy()).tolist())
        if self.poison in input_ids.tolist():
            raise RuntimeError(f"met token {self.poison}")
        return torch.where(loss_mask, input_ids, 0).float(), torch.zeros(len(input_ids))


def run(scenario):
    """Run `scenario` with a deadline: a server that forgets an answer must fail, not hang, the test."""
    return asyncio.run(asyncio.wait_for(scenario, DEADLINE_S))


def sequence(length, token=5):
    return np.full(length, token, np.int32)


async def settled(server, sequences, prompt_lengths):
    """The answer or the exception."""
    return (await asyncio.gather(server.logprobs(sequences, prompt_lengths), return_exceptions=True))[0]


def test_answers_are_the_completions_logprobs_at_the_temperature_whatever_is_packed_together():
    model = tiny_model()
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, VOCAB, length).astype(np.int32) for length in rng.integers(2, 40, 30)]
    prompts = [int(rng.integers(1, len(ids) + 1)) for ids in sequences]

    async def scenario():
        server = LogprobWorker(PolicyModel(model), max_tokens=100, max_wait_s=0.01, temperature=0.7)
        cuts = [(0, 1), (1, 9), (9, 30)]
        answers = await asyncio.gather(*(server.logprobs(sequences[a:b], prompts[a:b]) for a, b in cuts))
        await server.close()
        return [row for answer in answers for row in answer]

    for ids, prompt, got in zip(sequences, prompts, run(scenario()), strict=True):
        with torch.no_grad():
            logits = eager(torch.tensor(ids[None], dtype=torch.int64)).logits[0, :-1] / 0.7
        expected = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:, None], dtype=torch.int64))[:, 0]
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, expected.numpy()[prompt - 1 :], atol=1e-5)


def test_a_batch_leaves_when_the_next_sequence_does_not_fit_and_none_exceeds_the_budget():
    policy = FakePolicy()

    async def scenario():
        server = LogprobWorker(policy, max_tokens=10, max_wait_s=0.01)
        answers = await server.logprobs([sequence(n) for n in (4, 4, 4, 6, 10, 3)], [1] * 6)
        await server.close()
        return answers

    assert [len(row) for row in run(scenario())] == [3, 3, 3, 5, 9, 2]
    assert policy.batches == [[4, 4], [4, 6], [10], [3]]


def test_a_full_batch_does_not_wait():
    async def scenario():
        server = LogprobWorker(FakePolicy(), max_tokens=8, max_wait_s=3600)
        await server.logprobs([sequence(4), sequence(4)], [1, 1])
        await server.close()

    run(scenario())


def test_the_wait_is_a_deadline_of_the_oldest_and_not_a_debounce():
    policy = FakePolicy()

    async def scenario():
        server = LogprobWorker(policy, max_tokens=10**6, max_wait_s=0.2)
        begun = time.monotonic()
        first = asyncio.create_task(server.logprobs([sequence(2)], [1]))
        trickle = []
        while not first.done():  # a new request every 20 ms: a debounce of 200 ms would never end
            trickle.append(asyncio.create_task(server.logprobs([sequence(2)], [1])))
            await asyncio.sleep(0.02)
        assert time.monotonic() - begun >= 0.2
        await asyncio.gather(*trickle)
        await server.close()

    run(scenario())
    assert len(policy.batches[0]) > 1, "those that came in time went along"


def test_a_sequence_over_the_budget_fails_its_own_request_only():
    async def scenario():
        server = LogprobWorker(FakePolicy(), max_tokens=10, max_wait_s=0.01)
        answers = await asyncio.gather(
            settled(server, [sequence(3)], [1]),
            settled(server, [sequence(3), sequence(11)], [1, 1]),
            settled(server, [sequence(10)], [9]),
        )
        await server.close()
        return answers

    fine, too_long, largest = run(scenario())
    assert fine[0].tolist() == [5, 5] and largest[0].tolist() == [5]
    assert isinstance(too_long, ConfigurationError) and "11 tokens exceeds the budget of 10" in str(too_long)


def test_an_error_of_a_forward_fails_exactly_its_batch_and_the_server_lives_on():
    policy = FakePolicy()
    policy.poison = 66

    async def scenario():
        server = LogprobWorker(policy, max_tokens=6, max_wait_s=0.01)
        requests = [[sequence(3)], [sequence(3, 66)], [sequence(6)], [sequence(2), sequence(4)]]
        answers = await asyncio.gather(*(settled(server, r, [1] * len(r)) for r in requests))
        later = await server.logprobs([sequence(2)], [1])
        await server.close()
        return answers, later

    (beside, poisoned, other, last), later = run(scenario())
    assert policy.batches[0] == [3, 3]  # the poisoned one and its neighbour
    assert str(beside) == str(poisoned) == "met token 66"
    assert len(other[0]) == 5 and len(last) == 2 and len(later[0]) == 1


def test_the_loop_stays_responsive_during_a_forward():
    policy = FakePolicy()
    policy.free.clear()

    async def scenario():
        server = LogprobWorker(policy, max_tokens=10, max_wait_s=0.0)
        request = asyncio.create_task(server.logprobs([sequence(2)], [1]))
        for _ in range(20):
            await asyncio.sleep(0.005)
        assert not request.done()
        policy.free.set()
        await request
        await server.close()

    run(scenario())


def test_a_caller_that_gives_up_is_not_computed_for():
    policy = FakePolicy()
    policy.free.clear()

    async def scenario():
        server = LogprobWorker(policy, max_tokens=4, max_wait_s=0.0)
        first = asyncio.create_task(server.logprobs([sequence(4)], [1]))
        await asyncio.sleep(0.05)
        gone = asyncio.create_task(server.logprobs([sequence(3)], [1]))
        stays = asyncio.create_task(server.logprobs([sequence(2)], [1]))
        await asyncio.sleep(0.05)
        gone.cancel()
        policy.free.set()
        await asyncio.gather(first, stays)
        await server.close()

    run(scenario())
    assert policy.batches == [[4], [2]]


def test_new_weights_are_loaded_between_batches_and_change_the_answers():
    old, new = tiny_model(seed=1), tiny_model(seed=2)
    ids = np.arange(1, 20, dtype=np.int32)

    async def scenario():
        server = LogprobWorker(PolicyModel(old), max_tokens=100, max_wait_s=0.0)
        before = (await server.logprobs([ids], [1]))[0]
        await server.load_weights(named_full_tensors(PolicyModel(new)))
        after = (await server.logprobs([ids], [1]))[0]
        await server.close()
        return before, after

    async def fresh():
        server = LogprobWorker(PolicyModel(tiny_model(seed=2)), max_tokens=100)
        answer = (await server.logprobs([ids], [1]))[0]
        await server.close()
        return answer

    before, after = run(scenario())
    assert np.abs(before - after).max() > 0.1
    np.testing.assert_allclose(after, run(fresh()), atol=1e-6)


def test_weights_wait_for_the_forward_under_way():
    policy = FakePolicy()
    policy.free.clear()

    async def scenario():
        server = LogprobWorker(policy, max_tokens=10, max_wait_s=0.0)
        request = asyncio.create_task(server.logprobs([sequence(2)], [1]))
        await asyncio.sleep(0.05)
        policy.model = torch.nn.Module()
        update = asyncio.create_task(server.load_weights([]))
        await asyncio.sleep(0.05)
        assert not update.done()
        policy.free.set()
        await asyncio.gather(request, update)
        await server.close()

    run(scenario())


@pytest.mark.parametrize("fault", ["unknown", "misshapen"])
def test_weights_that_are_not_the_models_are_refused(fault):
    tensors = dict(named_full_tensors(PolicyModel(tiny_model(seed=2))))
    if fault == "unknown":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    else:
        tensors["model.norm.weight"] = torch.zeros(3)

    async def scenario():
        server = LogprobWorker(PolicyModel(tiny_model()), max_tokens=10)
        try:
            await server.load_weights(tensors.items())
        finally:
            await server.close()

    with pytest.raises(
        WeightsDidNotLand, match="lm_head.weight" if fault == "unknown" else "model.norm.weight"
    ):
        run(scenario())


def test_tensors_that_are_not_sent_keep_their_values():
    """A self-test sends a few at a time; whether all came that were sent, the receipt proves."""
    policy, new = PolicyModel(tiny_model()), dict(named_full_tensors(PolicyModel(tiny_model(seed=2))))
    old = {name: tensor.clone() for name, tensor in named_full_tensors(policy)}

    async def scenario():
        server = LogprobWorker(policy, max_tokens=10)
        await server.load_weights([("model.norm.weight", new["model.norm.weight"])])
        await server.close()

    run(scenario())
    for name, tensor in named_full_tensors(policy):
        assert torch.equal(tensor, (new if name == "model.norm.weight" else old)[name])


def test_closing_fails_those_in_the_forward_and_in_the_queue_and_takes_no_more():
    policy = FakePolicy()
    policy.free.clear()

    async def scenario():
        server = LogprobWorker(policy, max_tokens=4, max_wait_s=0.0)
        waiting = [asyncio.create_task(settled(server, [sequence(4)], [1])) for _ in range(3)]
        await asyncio.sleep(0.05)
        await server.close()
        policy.free.set()
        return await asyncio.gather(*waiting), await settled(server, [sequence(1)], [1])

    waiting, late = run(scenario())
    assert all(isinstance(answer, WorkerLost) for answer in [*waiting, late])


def test_closing_fails_a_batch_that_still_waits_for_company():
    async def scenario():
        server = LogprobWorker(FakePolicy(), max_tokens=100, max_wait_s=3600)
        waiting = asyncio.create_task(settled(server, [sequence(4)], [1]))
        await asyncio.sleep(0.05)
        await server.close()
        return await waiting

    assert isinstance(run(scenario()), WorkerLost)


def test_a_server_starts_from_a_model_folder(tmp_path):
    save_tiny_model(tmp_path)

    async def scenario():
        server = LogprobWorker.from_folder(tmp_path, dtype="float32", max_tokens=100, max_wait_s=0.0)
        answer = await server.logprobs([np.arange(5, dtype=np.int32)], [2])
        await server.close()
        return answer

    assert run(scenario())[0].shape == (3,)


def test_a_landing_check_is_answered_at_temperature_1_whatever_the_server_samples_at():
    ids = np.arange(1, 12, dtype=np.int32)

    async def scenario():
        server = LogprobWorker(PolicyModel(tiny_model()), max_tokens=10**6, temperature=0.3)
        answer = await server.prompt_logprobs(ids)
        await server.close()
        return answer

    np.testing.assert_allclose(run(scenario()), canary_logprobs(PolicyModel(tiny_model()), ids), atol=1e-6)
