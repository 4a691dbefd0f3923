"""Trajectories on the real engine and the real chain: log-probs of each turn, syncs between turns, killed environments."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial

import numpy as np
import psutil
import pytest
import torch
from engine_thread import MODEL, SETTINGS, EngineThread, hf_logprobs, send, weights
from openai import AsyncOpenAI
from real_runs import left_behind

from async_grpo.algorithm.config import AlgorithmConfig
from async_grpo.data import COUNTDOWN_TRAIN as DATA
from async_grpo.environments.call_reader import CallReader
from async_grpo.environments.chat import Chat
from async_grpo.environments.config import TrajectoryLimits
from async_grpo.environments.openai_server.endpoint import AgentEndpoint
from async_grpo.environments.played import Played
from async_grpo.environments.trajectory import TrajectoryRecorder
from async_grpo.environments.trajectory_client import TrajectoryClient
from async_grpo.environments.typed_output import TypedOutput
from async_grpo.errors import RequestRefused
from async_grpo.experience.packing import pack
from async_grpo.messages import Truncation
from async_grpo.modeling.load import load_tokenizer
from async_grpo.modeling.policy import PolicyModel
from async_grpo.training.batch_tensors import BatchTensors
from async_grpo.training.objective import Objective
from async_grpo.training.observations import observation_mask
from async_grpo.types import Prompt, RewardStatus, Sample, Sampling, Tokens, Verdict

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def engine(engine_environment) -> Iterator[EngineThread]:
    """One engine of the sample model that can enforce grammars, as in runs with an environment."""
    with closing(EngineThread(has_grammars=True)) as thread:
        yield thread


class Direct:
    """A `Generation` by one engine, in its own event loop."""

    def __init__(self, worker) -> None:
        self._worker, self.seen = worker, []

    async def generate(self, prompt, count, sampling=None, session=None):
        self.seen.append(prompt.token_ids)
        session.turn += 1
        async for one in self._worker.complete(prompt.token_ids, {session.member: session.turn}, sampling):
            yield one


def test_log_probs_of_one_to_ten_turns_are_the_trainer_s_also_across_a_sync_between_two_turns(engine, model):
    chat, dice = Chat(load_tokenizer(MODEL)), random.Random(5)
    models = {}
    for version in (40, 41):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.03)
        models[version] = {name: tensor.clone() for name, tensor in weights(model).items()}
    num_observed = 0
    for turns in range(1, 11):
        send(engine, models[40], 40)
        direct, sync_after = Direct(engine.worker), dice.randrange(turns)

        async def program(prompt, policy, turns=turns, sync_after=sync_after):
            messages = []
            for turn in range(turns):
                messages.append({"role": "user", "content": f"{dice.randrange(100)} ✓"})
                reply = await policy.complete(messages, max_tokens=8)
                messages.append(reply.message)
                if turn == sync_after:
                    from safetensors.torch import save

                    await engine.worker.update(41, [memoryview(save(models[41]))])
            return policy.trajectory(1.0)

        prompt = Prompt(0, np.empty(0, np.int32), {})
        limits = TrajectoryLimits(20, SETTINGS.max_total_tokens, None, 60)
        played = Played(direct, program, chat, limits)

        async def one(played=played, prompt=prompt):
            (found,) = [one async for one in played.generate(prompt, 1)]
            return found

        completion = engine.run(one())
        assert not completion.outcome.failure and len(completion.turns) == turns
        sample = Sample(prompt, completion, Verdict(RewardStatus.OK, 1.0))
        seen = 0
        for sequence in sample.sequences:
            ids, own = sequence.token_ids, sequence.completion
            by_version = {}
            for version, tensors in models.items():
                model.load_state_dict(tensors, strict=False)
                by_version[version] = sequence.sampled(
                    hf_logprobs(model, ids, temperature=SETTINGS.temperature)
                )
            expected = np.where(own.versions == 40, by_version[40], by_version[41])
            assert np.abs(own.logprobs - expected).max() < 1e-4
            length = 0
            for before, place in sequence.pieces:
                length += len(before)
                np.testing.assert_array_equal(direct.seen[seen], ids[:length])
                length += place.stop - place.start
                seen += 1
            trained = replace(
                sequence, loss_mask=np.ones(len(own), bool), advantages=np.zeros(len(own), np.float32)
            )
            batch = pack([trained])
            observed = batch.input_ids[observation_mask(batch, batch.loss_mask)]
            later_texts = [before for before, _ in list(sequence.pieces)[1:]]
            np.testing.assert_array_equal(observed, np.concatenate([np.empty(0, np.int32), *later_texts]))
            num_observed += len(observed)
        ends = np.cumsum([turn.num_tokens for turn in completion.turns])
        assert seen == turns and sorted(set(completion.versions)) == (
            [40, 41] if sync_after < turns - 1 else [40]
        )
        assert (completion.versions[: ends[sync_after]] == 40).all()
    assert num_observed > 100


def test_the_responses_api_continues_the_tokens_of_the_real_engine(engine, model):
    """An answer and its continuation by `previous_response_id` are one sequence, streamed or not."""
    send(engine, weights(model), 50)
    direct = Direct(engine.worker)
    limits = TrajectoryLimits(20, SETTINGS.max_total_tokens, None, 60)
    prompt = Prompt(0, np.empty(0, np.int32), {})
    recorder = TrajectoryRecorder(Chat(load_tokenizer(MODEL)))
    policy = TrajectoryClient(direct, recorder, prompt, 0, limits)

    async def story():
        endpoint = AgentEndpoint()
        await endpoint.start()
        key, _ = endpoint.open(policy)
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=key) as client:
            create = partial(client.responses.create, model="policy", max_output_tokens=8)
            first = await create(input="3+4?")
            events = [
                event async for event in await create(input="5", previous_response_id=first.id, stream=True)
            ]
        await endpoint.close()
        return first, events[-1].response

    answers = engine.run(story())
    completion = policy.trajectory(1.0)
    (sequence,) = Sample(prompt, completion, Verdict(RewardStatus.OK, 1.0)).sequences
    sampled = [turn.num_tokens for turn in completion.turns]
    assert [answer.usage.output_tokens for answer in answers] == sampled
    np.testing.assert_array_equal(direct.seen[1], sequence.token_ids[: -sampled[1]])
    np.testing.assert_array_equal(direct.seen[0], direct.seen[1][: len(direct.seen[0])])


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"enum": ["yes", "no"]}},
    "required": ["ok"],
    "additionalProperties": False,
}


def test_under_a_json_schema_the_trainer_s_log_probs_are_the_engine_s(engine, model, monkeypatch):
    """Typed turns, with a free one and one that ends too early between them, and a weight sync, at a temperature of 0.7.

    All are sampled among the ten most probable of the allowed tokens.
    """
    truncation = Truncation(top_k=10)
    monkeypatch.setattr(engine.worker, "settings", replace(engine.worker.settings, truncation=truncation))
    send(engine, weights(model), 50)
    chat = Chat(load_tokenizer(MODEL), make_reader=partial(CallReader, model_path=str(MODEL)))
    typed = TypedOutput(schema=json.dumps(SCHEMA))
    numbers = TypedOutput(schema='{"type": "array", "items": {"type": "integer"}, "minItems": 30}')
    bad = TypedOutput(schema='{"type": "nonsense"}')
    texts = []

    async def program(prompt, policy):
        for turn in range(6):
            message = {"role": "user", "content": f"{turn}?"}
            with pytest.raises(RequestRefused, match="Unsupported type"):
                await policy.complete([message], typed=bad)
            if turn == 3:
                from safetensors.torch import save

                await engine.worker.update(51, [memoryview(save(weights(model)))])
            form = {1: None, 2: numbers}.get(turn, typed)
            reply = await policy.complete([message], typed=form, max_tokens=60 if form is numbers else 200)
            assert reply.completion.truncated or form is not numbers
            if form is typed:
                texts.append(reply.text)
        return policy.trajectory(1.0)

    prompt = Prompt(0, np.empty(0, np.int32), {})
    played = Played(Direct(engine.worker), program, chat, TrajectoryLimits(20, 256, None, 120, 300))

    async def one():
        try:
            (completion,) = [one async for one in played.generate(prompt, 1)]
            return completion
        finally:
            await played.close()

    completion = engine.run(one(), 120)
    assert not completion.failure, completion.failure
    answers = [json.loads(text) for text in texts]
    assert len(answers) == 4 and all(answer["ok"] in ("yes", "no") for answer in answers)
    ones = np.ones(len(completion))
    sample = Sample(
        prompt, completion, Verdict(RewardStatus.OK, 1.0), ones.astype(np.float32), ones.astype(bool)
    )
    batch = pack(sample.sequences)
    policy = PolicyModel(model, chunk_tokens=50)
    objective = Objective(AlgorithmConfig(temperature=SETTINGS.temperature, top_k=10))
    rows = BatchTensors(batch, torch.device("cpu"))
    with torch.no_grad():
        logprobs, entropies, is_outside = objective.forward(policy, rows)
        free_logprobs, *_ = objective.forward(
            policy, BatchTensors(replace(batch, allowed=None), policy.device)
        )
    differences = (logprobs - rows.behaviour_logprobs)[rows.mask].abs()
    assert len(differences) == len(completion) and differences.max() < 1e-4
    assert entropies.isfinite().all() and entropies.max() <= np.log(10) + 1e-5 and not is_outside.any()
    assert (free_logprobs - rows.behaviour_logprobs)[rows.mask].abs().max() > 1, "the masks make a difference"


def test_a_request_with_a_grammar_begins_again_after_a_lost_engine_and_a_bad_one_leaves_the_engine_alive(
    engine,
):
    grammar = json.dumps({"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SCHEMA}})
    question = np.arange(4, dtype=np.int32)

    async def complete(grammar, begun=None):
        sampling = Sampling(grammar=grammar, max_tokens=40)
        (completion,) = [one async for one in engine.worker.complete(question, {0: 9}, sampling, begun)]
        return completion

    first = engine.run(complete(grammar))
    begun = {0: Tokens(first.token_ids[:5], first.logprobs[:5], first.versions[:5])}
    again = engine.run(complete(grammar, begun))
    np.testing.assert_array_equal(again.token_ids, first.token_ids)
    np.testing.assert_array_equal(again.allowed.indices, first.allowed.indices)
    for bad in ("no JSON", "{}", grammar.replace("object", "nonsense")):
        with pytest.raises(RequestRefused, match="the engine refuses the form of the answer"):
            engine.run(complete(bad))
    no_answer = {"type": "json_schema", "json_schema": {"$ref": "#"}}
    with pytest.raises(RequestRefused, match="or no token may follow"):
        engine.run(complete(json.dumps({"type": "structural_tag", "format": no_answer})))
    np.testing.assert_array_equal(engine.run(complete(grammar)).token_ids, first.token_ids)


def environments_of(run: subprocess.Popen) -> list[psutil.Process]:
    """The first process of each: their parent is the run's controller, a descendant of the run."""
    environments = []
    for parent in psutil.Process(run.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "ray::RunController" in str(parent.cmdline()):
                environments += [one for one in parent.children() if "isolation.child" in str(one.cmdline())]
    return environments


@pytest.mark.exhaustive
def test_a_run_with_an_environment_outlives_its_killed_processes_and_says_what_failed(tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"input": "1-16", "seed": seed}) + "\n" for seed in range(64)))
    options = {
        "run-name": tmp_path.name,
        "model-name-or-path": MODEL,
        "data-path": data,
        "output-dir": tmp_path / "run",
        "environment": "guess",
        "environment-processes": 4,
        "num-training-batches": 30,
        "batch-size": 4,
        "samples-per-question": 4,
        "max-tokens-per-gpu": 512,
        "max-generation-tokens": 80,
        "max-turn-tokens": 4,
        "dump-samples-filename": "samples.jsonl",
        "failure-alarm": 1.0,
        "reward-fns": "environment_turns",  # the turns' rewards, and states, on the real chain
        "advantage-estimator": "gigpo",
        "engine": "fake",  # it is processes of environments that are killed; agents below play with vLLM
    }
    command = [sys.executable, "-m", "async_grpo", "run"]
    run = subprocess.Popen(
        [*command, *(f"--{name}={value}" for name, value in options.items())],
        env=os.environ | {"RUN_MARK": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    metrics, killed = tmp_path / "run" / "training_metrics.jsonl", 0
    give_up = time.monotonic() + 120
    while run.poll() is None and time.monotonic() < give_up:
        time.sleep(0.3)
        done = metrics.read_text().count("\n") if metrics.exists() else 0
        if killed < 3 and done > 3 + 6 * killed:  # never all of one step's
            for process in environments_of(run)[:1]:
                process.send_signal(signal.SIGKILL)
                killed += 1
    output = run.communicate(timeout=60)[0]
    assert run.returncode == 0, output[-3000:]
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert len(lines) == 30 and killed == 3
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 30 * 16
    failed = [sample for sample in samples if sample["status"] != "ok"]
    assert len(failed) == sum(line["environment_failures"] for line in lines)
    assert all(sample["advantage"] is None and sample["reward"] is None for sample in failed)
    assert {line["turns"] for line in lines} and all(1 <= line["turns"] <= 4 for line in lines)
    give_up = time.monotonic() + 20
    while (left := left_behind(tmp_path)) and time.monotonic() < give_up:
        time.sleep(0.5)
    assert left == []


AGENT = """
import json, os, sys
from openai import OpenAI

row, client = json.load(sys.stdin), OpenAI()
tool = {"type": "function", "function": {"name": "add", "description": "a + b", "parameters": {"type": "object"}}}
messages, told = [{"role": "user", "content": row["input"]}], []
for turn in range(3):
    asked = dict(model="policy", messages=messages, tools=[tool], max_tokens=20)
    if turn == 1:
        text, usage = "", None
        for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
            usage = chunk.usage or usage
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
    else:
        if turn == 2:
            asked |= {"tools": [], "response_format": {"type": "json_object"}}
        answer = client.chat.completions.create(**asked)
        text, usage = answer.choices[0].message.content or "", answer.usage
    told.append(usage.completion_tokens)
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "and now?"}]
with open(sys.argv[1], "a") as file:
    file.write(json.dumps(told) + "\\n")
sys.exit(0 if len(text) % 2 else 100)
"""


@pytest.mark.exhaustive
def test_a_script_with_the_official_client_is_trained_and_loses_no_token_with_a_killed_engine(tmp_path):
    """Four steps of an unmodified script with tools, streaming and typed output; the only engine dies on the way."""
    (tmp_path / "agent.py").write_text(AGENT)
    rows = [json.loads(line) for line in DATA.read_text().splitlines()[:64]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {
        "run-name": tmp_path.name,
        "model-name-or-path": MODEL,
        "data-path": tmp_path / "rows.jsonl",
        "output-dir": tmp_path / "run",
        "environment": f"agent:exec {sys.executable} {tmp_path / 'agent.py'} {tmp_path / 'told.jsonl'}",
        "environment-processes": 3,
        "tool-parser": "hermes",
        "reward-fns": "environment,format",
        "num-training-batches": 4,
        "batch-size": 1,
        "samples-per-question": 2,
        "max-tokens-per-gpu": 2048,
        "max-generation-tokens": 200,
        "engine-restarts": 2,
    }
    command = [sys.executable, "-m", "async_grpo", "run", "--enforce-eager", "--no-mask-truncated"]
    run = subprocess.Popen(
        [*command, *(f"--{name}={value}" for name, value in options.items())],
        env=os.environ | {"RUN_MARK": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    metrics, killed = tmp_path / "run" / "training_metrics.jsonl", False
    give_up = time.monotonic() + 400
    while run.poll() is None and time.monotonic() < give_up:
        time.sleep(0.1)
        if not killed and metrics.exists() and metrics.read_text().count("\n") >= 1:
            family = psutil.Process(run.pid).children(recursive=True)
            (engine,) = [one for one in family if "ray::GenerationActor" in " ".join(one.cmdline())]
            engine.send_signal(signal.SIGKILL)
            killed = True
    output = run.communicate(timeout=60)[0]
    assert run.returncode == 0, output[-3000:]
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert (
        len(lines) == 4
        and killed
        and "was lost" in output
        and "ALARM generation worker generation-" in output
    )
    dispatcher = (tmp_path / "run" / "logs" / "generation-worker-0.log").read_text()
    assert "it is started again in 5 s (1 of --engine-restarts 2)" in dispatcher
    assert all(line["samples_in_batch"] == 2 and not line["environment_failures"] for line in lines)
    told = [json.loads(line) for line in (tmp_path / "told.jsonl").read_text().splitlines()]
    assert len(told) == 8 and all(len(turns) == 3 for turns in told)
    assert abs(lines[0]["mismatch_k1"]) < 1e-4, "the trainer's softmax has the masks of the engine's"
    trained = sum(line["avg_output_tokens"] * line["samples_in_batch"] for line in lines)
    # Every token that a client was told of, and no other
    assert trained == pytest.approx(sum(map(sum, told)))
    assert all(0 <= line["environment/reward"] <= 1 and "format/reward" in line for line in lines)
    give_up = time.monotonic() + 20
    while (left := left_behind(tmp_path)) and time.monotonic() < give_up:
        time.sleep(0.5)
    assert left == []
