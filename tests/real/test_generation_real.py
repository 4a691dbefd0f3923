"""`GenerationWorker` on a real vLLM engine: log-probs, versions, updates in flight, and the proof that they land."""

import asyncio
import functools
import itertools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from engine_thread import CANARY, MODEL, SETTINGS, EngineThread, hf_logprobs, send, weights
from long_tests import long_without_bfloat16
from safetensors.torch import save
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
from warm_servers import starting_as_usual
from watched_link import WatchedLink

from async_grpo.errors import ConfigurationError, WeightsDidNotLand, WorkerLost
from async_grpo.messages import Truncation
from async_grpo.modeling.load import load_causal_lm, torch_dtype
from async_grpo.modeling.policy import PolicyModel, named_weights
from async_grpo.protocols import Manifest, answer_canary
from async_grpo.training.sharding import canary_logprobs
from async_grpo.types import GREEDY, Completion, FinishReason, Sampling, Tokens
from async_grpo.weights.canary import Canary
from async_grpo.weights.config import WeightConfig
from async_grpo.weights.package import SELF_TEST
from async_grpo.weights.publisher import Publisher
from async_grpo.weights.self_test import MIN_TOLERANCE

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("engine_environment")]
ROOT = Path(__file__).resolve().parents[2]
SEEDS = itertools.count()


async def one(worker, prompt: np.ndarray, sampling: Sampling | None = None) -> Completion:
    """A single completion."""
    (completion,) = [completion async for completion in worker.complete(prompt, {0: next(SEEDS)}, sampling)]
    return completion


class SelfTest:
    """The publisher's self-test of one engine, by a policy on the same folder.

    Args:
        reads_back: Whether the trainer believes what the engine reads back; otherwise bfloat16 has a round per layer.
        watched, is_watched: Which tensors are lost in turn, see `WatchedLink`.
        canary_tokens: Of each text.
    """

    def __init__(
        self,
        engine: EngineThread,
        folder: Path,
        dtype: str,
        vocab_size: int = 256,
        reads_back: bool = True,
        watched: Collection[int] | None = None,
        is_watched: Callable[[str], bool] | None = None,
        canary_tokens: Sequence[int] = (16, 128),
    ) -> None:
        self.policy = PolicyModel(load_causal_lm(folder, dtype))

        def update(tensors: Mapping[str, torch.Tensor]) -> Manifest:
            manifest = engine.run(engine.worker.update(SELF_TEST, [memoryview(save(dict(tensors)))]))
            assert all(record.is_read_back for record in manifest.values())
            return {name: replace(record, is_read_back=reads_back) for name, record in manifest.items()}

        def canary(*texts: np.ndarray) -> np.ndarray:
            return engine.run(answer_canary(engine.worker, texts))

        weights = dict(named_weights(self.policy))
        update(weights)
        self.link = WatchedLink(update, canary, weights, watched, is_watched)
        text = Canary([Canary.text(vocab_size, n) for n in canary_tokens], canary_logprobs)
        self.publisher = Publisher(self.link, named_weights, text, torch_dtype(dtype), 0, WeightConfig())

    def run(self) -> float:
        return self.publisher.publish(self.policy, 0, self_test=True)()["canary_error"]


def test_log_probs_at_the_sampling_temperature_equal_transformers_before_and_after_a_sync(engine, model):
    prompt = CANARY[:12]
    for version in (0, 1):
        send(engine, weights(model), version)
        completion = engine.run(one(engine.worker, prompt))
        expected = hf_logprobs(model, np.concatenate([prompt, completion.token_ids]), temperature=0.7)[
            len(prompt) :
        ]
        assert np.abs(completion.logprobs - expected).max() < 1e-4
        assert set(completion.versions) == {version}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.05)


@pytest.mark.parametrize(
    "rule",
    [Truncation(top_p=0.9), Truncation(top_k=20), Truncation(min_p=0.05), Truncation(0.95, 50, 0.01)],
    ids=str,
)
def test_log_probs_over_the_most_probable_tokens_equal_those_of_the_trainer(engine, model, monkeypatch, rule):
    monkeypatch.setattr(engine.worker, "settings", replace(SETTINGS, truncation=rule))
    prompt = CANARY[:12]

    async def sample() -> list[Completion]:
        seeds = {member: next(SEEDS) for member in range(32)}
        results = [result async for result in engine.worker.complete(prompt, seeds)]
        return [result for result in results if isinstance(result, Completion)]

    send(engine, weights(model), 0)
    completions = engine.run(sample())
    ids = [np.concatenate([prompt, completion.token_ids]) for completion in completions]
    bounds = torch.tensor([0, *map(len, ids)]).cumsum(0)
    arguments = (torch.tensor(np.concatenate(ids)).long(), bounds, torch.ones(int(bounds[-1])).bool(), 0.7)
    policy = PolicyModel(model)
    with torch.no_grad():
        logprobs, _, is_outside = policy(*arguments, truncation=rule)
        plain_logprobs, _ = policy(*arguments)
    is_sampled = torch.cat([torch.arange(len(sequence)) >= len(prompt) for sequence in ids])
    engine_logprobs = torch.tensor(np.concatenate([completion.logprobs for completion in completions]))
    differences = (logprobs[is_sampled] - engine_logprobs).abs()
    assert len(differences) > 250 and not is_outside[is_sampled].any()
    # A sum of probabilities may reach top-p within rounding, and the two sides then keep one token more or less
    assert differences.sort().values[-2] < 1e-4 and differences.mean() < 1e-5
    assert abs(differences.exp().mean() - 1) < 1e-4
    distance_to_plain = (engine_logprobs - plain_logprobs[is_sampled]).mean()
    assert distance_to_plain > 100 * differences.mean(), "the engine samples among all tokens"


def test_a_healthy_engine_passes_the_self_test_and_each_single_tensor_that_it_loses_is_seen(engine, model):
    test = SelfTest(engine, MODEL, "float32")
    assert test.run() < 1e-4
    unchanged, changed, after = test.link.tolerances
    # Of the weights as they are and with noise: many times what flipped last bits move the trainer's own log-probs by,
    # which depends on the weights. Of the syncs that follow: what engine and trainer were measured to differ by
    assert MIN_TOLERANCE <= unchanged < 2e-4 and changed < 0.002 and after == MIN_TOLERANCE
    (healthy,) = test.link.healthy
    assert healthy < 0.05  # a 20th of what is allowed
    assert set(test.link.lost) == set(weights(model)) and min(test.link.lost.values()) > 10


def test_tokens_carry_the_version_that_made_them_across_an_update_in_flight(engine, model):
    from async_grpo.inference.requests import EngineRequest, tokens_of

    stopless = EngineRequest.of(SETTINGS, CANARY[:4], 0, 0).params
    stopless.stop_token_ids, stopless.ignore_eos = [], True

    async def generate_across_an_update() -> tuple[np.ndarray, int]:
        prompt = {"prompt_token_ids": CANARY[:4].tolist()}
        request = asyncio.ensure_future(engine.worker._last_output(prompt, stopless, "across"))
        await asyncio.sleep(0.15)
        await engine.worker.update(11, [memoryview(save(weights(model)))])
        tokens = tokens_of((await request).outputs[0])
        return tokens.versions, len(tokens)

    engine.run(engine.worker.update(10, [memoryview(save(weights(model)))]))
    versions, length = engine.run(generate_across_an_update())
    assert length == 200 and set(versions) == {10, 11} and list(versions) == sorted(versions)


def test_what_an_unfinished_completion_has_is_told_and_another_engine_goes_on_as_this_one_would_have(
    engine, model, monkeypatch
):
    """With the same draws: the completion is the same, token by token, though its prefix now is part of the prompt."""
    from async_grpo.inference import generation_worker

    monkeypatch.setattr(generation_worker, "PARTIAL_RESULTS_EVERY_S", 0.01)
    prompt, seeds = CANARY[:8], {member: 100 + member for member in range(16)}

    async def all_of(begun=None) -> tuple[dict[int, Completion], dict[int, list[Tokens]]]:
        completions, parts = {}, {member: [] for member in seeds}
        async for one in engine.worker.complete(prompt, seeds, Sampling(max_tokens=120), begun):
            if isinstance(one, Completion):
                completions[one.member] = one
            else:
                for member, tokens in one.items():
                    parts[member].append(tokens)
        return completions, parts

    send(engine, weights(model), 30)
    # On a loaded machine a short completion may end before this process is told of a part of it
    for _ in range(20):
        whole, parts = engine.run(all_of())
        told = {member: several for member, several in parts.items() if len(several) > 1}
        if len(told) > 2:
            break
    assert len(told) > 2, "too quick to be told of"
    begun = {member: functools.reduce(operator.add, several[:-1]) for member, several in told.items()}
    send(engine, weights(model), 31)
    continued, _ = engine.run(all_of(begun))
    for member, first in begun.items():
        then, length = continued[member], len(first)
        assert then.token_ids.tolist() == whole[member].token_ids.tolist() and then.text == whole[member].text
        assert then.versions.tolist() == [30] * length + [31] * (len(then) - length)
        assert then.char_ends[-1] == len(then.text) and then.finish_reason is whole[member].finish_reason
        expected = hf_logprobs(model, np.concatenate([prompt, then.token_ids]), temperature=0.7)[
            len(prompt) :
        ]
        assert np.abs(then.logprobs - expected).max() < 1e-4


def test_every_stop_id_of_the_model_ends_a_completion_as_stop(engine):
    from async_grpo.inference.completions import finished_completion
    from async_grpo.inference.requests import EngineRequest

    ids = SETTINGS.stop_token_ids
    assert len(ids) == 2  # <|im_end|> and <|endoftext|>
    for stop, sampling in itertools.product(ids, (None, Sampling(stop=(">",)))):  # of its spelling, too
        params = EngineRequest.of(SETTINGS, CANARY[:4], 0, 0, sampling).params
        params.allowed_token_ids = [stop]
        prompt = {"prompt_token_ids": CANARY[:4].tolist()}
        output = engine.run(engine.worker._last_output(prompt, params, f"stop-{stop}")).outputs[0]
        completion = finished_completion(output, 0, engine.worker.tokenizer, engine.worker.settings)
        assert completion.token_ids.tolist() == [stop] and completion.finish_reason is FinishReason.STOP
        assert completion.text == ""  # the end token is no part of the answer


def test_a_completion_is_marked_as_truncated_if_it_runs_out_of_room_and_says_where_each_token_ends(engine):
    for completion in [engine.run(one(engine.worker, CANARY[:16])) for _ in range(2)]:
        stopped = int(completion.token_ids[-1]) in SETTINGS.stop_token_ids
        assert completion.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        ends, text = completion.char_ends, completion.text
        assert ends.dtype == np.int32 and ends.shape == completion.token_ids.shape and ends[-1] == len(text)


def test_a_text_that_ends_a_completion_ends_it_at_the_token_that_completes_the_text(engine):
    """Be it of several tokens, or the spelling of a special one. What is sampled stays as it was without."""
    from async_grpo.inference.completions import finished_completion
    from async_grpo.inference.requests import EngineRequest, new_name

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    allowed = tokenizer.encode("ab </answer><|im_start|>", add_special_tokens=False)

    def sampled(*stop: str) -> Completion:
        params = EngineRequest.of(SETTINGS, CANARY[:8], 0, 7, Sampling(temperature=2.0, stop=stop)).params
        params.allowed_token_ids, params.frequency_penalty = allowed, 2.0  # all of them, in a mix
        prompt = {"prompt_token_ids": CANARY[:8].tolist()}
        output = engine.run(engine.worker._last_output(prompt, params, new_name())).outputs[0]
        return finished_completion(output, 0, engine.worker.tokenizer, engine.worker.settings)

    whole = sampled()
    assert len(whole) == 200 and whole.finish_reason is FinishReason.LENGTH
    for stop in ("ab", "a ", "b</answer>", "answer", "<|im_start|>", "start|>a"):
        end = whole.text.index(stop) + len(stop)
        one, length = sampled("nowhere", stop), int((whole.char_ends >= end).argmax()) + 1
        assert one.token_ids.tolist() == whole.token_ids[:length].tolist()
        assert np.abs(one.logprobs - whole.logprobs[:length]).max() < 1e-4
        assert one.finish_reason is FinishReason.STOP
        assert one.text == whole.text[: whole.char_ends[length - 1]]


def test_a_prompt_without_room_for_an_answer_is_refused(engine):
    with pytest.raises(ConfigurationError, match="256 tokens leaves no room"):
        engine.run(one(engine.worker, np.ones(256, np.int32)))


def test_a_greedy_completion_is_the_same_every_time_and_the_likeliest_token_at_every_place(engine, model):
    send(engine, weights(model), 20)
    prompt = CANARY[:8]
    first, second = (engine.run(one(engine.worker, prompt, GREEDY)) for _ in range(2))
    assert first.token_ids.tolist() == second.token_ids.tolist()
    sampled = {tuple(engine.run(one(engine.worker, prompt)).token_ids) for _ in range(4)}
    assert len(sampled) > 1
    ids = torch.tensor(np.concatenate([prompt, first.token_ids]), dtype=torch.int64)
    with torch.no_grad():
        logits = model(ids[None]).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(-1, torch.tensor(first.token_ids, dtype=torch.int64)[:, None])[:, 0]
    assert (logits.max(-1).values - chosen).max() < 1e-3  # up to ties


def test_a_cancelled_call_is_aborted_in_the_engine(engine):
    async def cancel_one() -> int:
        call = asyncio.ensure_future(one(engine.worker, CANARY[:8]))
        await asyncio.sleep(0.02)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await asyncio.sleep(0.2)
        return engine.worker.engine.get_num_unfinished_requests()

    assert engine.run(cancel_one()) == 0


def test_the_timeline_counts_every_generated_token(engine):
    engine.worker.progress()
    completions = [engine.run(one(engine.worker, CANARY[:8])) for _ in range(3)]
    timeline = engine.worker.progress()["token_timeline"]
    assert sum(tokens for _, tokens in timeline) == sum(map(len, completions))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.exhaustive)])
def test_what_an_engine_received_and_does_not_compute_with_is_named_however_little_it_changed(model, dtype):
    """By 1e-6: no canary would show it among the roundings of bfloat16."""
    with closing(EngineThread(extension="lossy_extension.Lossy", dtype=dtype)) as lossy:

        def not_in_use(version: int, *lost: str) -> set[str]:
            with torch.no_grad():
                for weight in model.parameters():
                    weight.add_(1e-6)
            tensors = {name: weight.to(torch_dtype(dtype)) for name, weight in weights(model).items()}
            lossy.run(lossy.worker.engine.collective_rpc("lose", args=(lost,)))
            return {name for name, one in send(lossy, tensors, version)[0].items() if not one.in_use}

        key = "model.layers.1.self_attn.k_proj.weight"
        assert not_in_use(0) == set() and not lossy.worker._received.read_back._unreadable
        # On a processor without instructions for bfloat16, vLLM has no kernel that packs weights of that dtype: the head
        # then computes with the very numbers of the embedding, and there is no copy that could stay behind
        (has_packed_head,) = lossy.run(lossy.worker.engine.collective_rpc("has_packed_head"))
        assert has_packed_head or dtype == "bfloat16"
        stale = {"model.embed_tokens.weight"} if has_packed_head else set()
        assert not_in_use(1, "tied head") == stale
        # Named with what the engine fuses it with
        assert key in (found := not_in_use(2, key)) and all("layers.1.self_attn" in name for name in found)
        assert not_in_use(3) == set()
        assert not_in_use(4, "everything") > {"model.embed_tokens.weight", key}

        # Without the fix for tied heads, the proof refuses
        if dtype == "float32":
            lossy.run(lossy.worker.engine.collective_rpc("lose", args=(["tied head"],)))
            refusal = "received, yet not in use: model.embed_tokens.weight"
            with pytest.raises(WeightsDidNotLand, match=refusal):
                SelfTest(lossy, MODEL, "float32").run()


def test_on_the_cpu_an_engine_has_one_process_whose_standstill_and_death_are_noticed():
    """vLLM would run the model in a further process: a second import of everything, and a queue that is polled."""
    before = psutil.Process().children(recursive=True)
    with starting_as_usual(), closing(EngineThread()) as thread:
        own = [process for process in psutil.Process().children(recursive=True) if process not in before]
        (core,) = [process for process in own if "resource_tracker" not in " ".join(process.cmdline())]
        core.suspend()
        thread.worker.stall_s = 1.0
        asking = asyncio.run_coroutine_threadsafe(thread.worker.canary(CANARY), thread.loop)
        assert "made no token for" in thread.run(thread.worker.until_failure(0.1))
        asking.cancel()
        core.resume()
        core.kill()
        assert thread.run(thread.worker.until_failure(0.1)) == "the vLLM engine's processes died"
        with pytest.raises(WorkerLost):
            thread.run(one(thread.worker, CANARY[:8]))


@pytest.fixture
def wide_folder(tmp_path) -> Path:
    """A fresh Qwen2 of 2 layers x 3,584 in bfloat16, its vocabulary and tokenizer those of the sample model."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 28, "num_key_value_heads": 4}
    config = Qwen2Config(
        vocab_size=300, hidden_size=3584, intermediate_size=3584, num_hidden_layers=2, **heads
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(tmp_path)
    return tmp_path


# One of each kind: a wide matrix, a narrow one, a bias, a norm; and what lies outside the layers
LOST_OF_WIDE_ENGINE = {
    "model.embed_tokens.weight",
    "model.norm.weight",
    "lm_head.weight",
    "model.layers.1.input_layernorm.weight",
    "model.layers.1.self_attn.k_proj.weight",
    "model.layers.1.self_attn.k_proj.bias",
    "model.layers.1.self_attn.o_proj.weight",
    "model.layers.1.mlp.down_proj.weight",
}


@long_without_bfloat16
@pytest.mark.exhaustive  # tests/weights/test_self_test.py loses tensors of a small engine in bfloat16
@pytest.mark.timeout(600)
def test_a_wide_bfloat16_engine_starts_and_each_kind_of_tensor_that_it_loses_is_seen(wide_folder):
    """It was refused: all tensors changed by at least 0.1 made rounding as large as what a lost one makes.

    `tests/long/landing_proof.py` loses every tensor, of wide engines and of deep ones.
    """
    with closing(EngineThread(wide_folder, dtype="bfloat16")) as wide:
        test = SelfTest(
            wide,
            wide_folder,
            "bfloat16",
            reads_back=False,
            watched=[0, 2],  # the rounds of what lies outside the layers, and of layer 1
            is_watched=LOST_OF_WIDE_ENGINE.__contains__,
            canary_tokens=(16, 48),
        )
        test.run()
        assert max(test.link.healthy) < 0.75
        assert test.link.lost.keys() == LOST_OF_WIDE_ENGINE and min(test.link.lost.values()) > 1.5
        assert test.link.tolerances[-1] < 0.1  # of every sync after the start; it was 0.3
