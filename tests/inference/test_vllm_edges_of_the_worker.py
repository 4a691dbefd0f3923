"""Whether this vLLM still needs the edges that stand in the process of the generation worker; see `test_vllm_edges.py`.

Also what other rooms know of vLLM by name.
"""

import importlib.metadata
import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

import vllm
from vllm import SamplingParams, envs
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.output_processor import OutputProcessor, RequestState
from vllm_edge import OLDEST_KNOWN, assert_needed, source_of

from async_grpo.cluster import ray_session, worker_actors
from async_grpo.inference.vllm_edges import (
    model_inspection,
    one_process,
    stop_texts,
    transfer_group,
    unfinished_tokens,
    weight_versions,
)
from async_grpo.processes import look
from async_grpo.rewards.judges import server

# -- outputs and their versions


def request_state() -> RequestState:
    """An unfinished request with three tokens."""
    detokenizer = SimpleNamespace(
        output_token_ids=[7, 8, 9],
        num_output_tokens=lambda: 3,
        get_next_output_text=lambda finished, delta: "",
    )
    arguments = dict.fromkeys(inspect.signature(RequestState.__init__).parameters)
    del arguments["self"]
    arguments.update(
        request_id="inner",
        external_req_id="outer",
        request_index=0,
        output_kind=RequestOutputKind.CUMULATIVE,
        prompt_token_ids=[1],
        logprobs_processor=SimpleNamespace(logprobs=None, cumulative_logprob=None, prompt_logprobs=None),
        detokenizer=detokenizer,
        arrival_time=0.0,
        log_stats=False,
        stream_interval=1,
        stream_input=False,
    )
    return RequestState(**arguments)


def engine_around(state: RequestState) -> SimpleNamespace:
    """In place of `AsyncLLM`: its output processor holds one request; the calls of `process_outputs` are noted."""
    calls = []

    async def update_weight_version(version: str) -> None:
        calls.append(version)

    processor = SimpleNamespace(
        external_req_ids={state.external_req_id: [state.request_id]},
        request_states={state.request_id: state},
        process_outputs=lambda outputs, made_at, stats: calls.append((len(outputs), made_at, stats)),
    )
    return SimpleNamespace(
        output_processor=processor, update_weight_version=update_weight_version, calls=calls
    )


def test_an_unfinished_output_has_the_tokens_so_far(monkeypatch):
    monkeypatch.setattr(unfinished_tokens, "version_spans", lambda state: ["spans"])
    engine = engine_around(request_state())
    output = unfinished_tokens.unfinished_output(engine, "outer", 2)
    assert list(output.token_ids) == [7, 8, 9] and output.weight_versions == ["spans"]
    assert unfinished_tokens.unfinished_output(engine, "outer", 3) is None
    assert unfinished_tokens.unfinished_output(engine, "unknown", 0) is None


def test_this_vllm_still_tells_no_weight_versions_of_unfinished_outputs():
    state = request_state()
    if weight_versions.TELLS_VERSIONS:
        state.track_weight_version("7")
    output = weight_versions._new_completion_output(state, [], None, None)
    is_needed = getattr(output, "weight_versions", None) is None
    assert_needed(is_needed, "tells weight versions of unfinished outputs", "unfinished_tokens.py")
    attributes = vars(OutputProcessor(None, log_stats=False))
    assert {"external_req_ids", "request_states", "tokenizer"} <= attributes.keys()


async def test_tokens_have_the_version_of_the_step_that_made_them_where_vllm_tells_none(monkeypatch):
    monkeypatch.setattr(weight_versions, "TELLS_VERSIONS", False)
    monkeypatch.setattr(RequestState, "_new_completion_output", weight_versions._new_completion_output)
    now = 100.0
    monkeypatch.setattr(weight_versions.time, "monotonic", lambda: now)
    state = request_state()
    token_ids = state.detokenizer.output_token_ids
    token_ids.clear()
    state.detokenizer.num_output_tokens = lambda: len(token_ids)
    engine = engine_around(state)
    weight_versions.note_versions(engine)

    def step(made_at: float, request_id: str = "inner", *new_token_ids: int) -> None:
        output = SimpleNamespace(request_id=request_id, new_token_ids=list(new_token_ids))
        engine.output_processor.process_outputs([output], made_at, None)
        token_ids.extend(new_token_ids)

    assert weight_versions.version_spans(state) is None
    step(99.0, "inner", 1, 2)
    await engine.update_weight_version("4")
    step(99.5, "inner", 3)  # made before the update, and processed after it
    now = 200.0
    step(101.0, "gone", 9)
    token_ids.remove(9)
    step(101.0, "inner")  # without a token
    step(102.0, "inner", 4, 5)
    await engine.update_weight_version("5")
    step(200.0, "inner", 6)
    output = state._new_completion_output([], None, None)
    assert output.weight_versions == [("default", 0, 3), ("4", 3, 5), ("5", 5, 6)]
    assert engine.calls[:3] == [(1, 99.0, None), "4", (1, 99.5, None)] and "5" in engine.calls


def test_a_known_vllm_still_tells_no_weight_versions_and_the_newer_ones_do():
    is_needed = OLDEST_KNOWN.startswith("0.31")
    assert_needed(
        is_needed, "is at least 0.32, which tells them", "weight_versions.py (but for version_spans)"
    )
    is_new = not vllm.__version__.startswith("0.31")
    assert weight_versions.TELLS_VERSIONS is is_new
    assert hasattr(RequestState, "_weight_version_spans") is is_new
    arguments = list(inspect.signature(OutputProcessor.process_outputs).parameters)
    assert arguments[1:4] == ["engine_core_outputs", "engine_core_timestamp", "iteration_stats"]


async def test_an_engine_leaves_its_transfer_group_by_the_call_that_it_has(monkeypatch):
    is_needed = OLDEST_KNOWN.startswith("0.31")
    assert_needed(is_needed, "is at least 0.32, which has the call", "transfer_group.py")
    assert hasattr(AsyncLLM, "shutdown_weight_transfer_engine") is transfer_group.HAS_PUBLIC_CALL
    calls = []

    async def note(*names: str) -> None:
        calls.append(names)

    engine = SimpleNamespace(shutdown_weight_transfer_engine=note, collective_rpc=note)
    for has_public_call in (True, False):
        monkeypatch.setattr(transfer_group, "HAS_PUBLIC_CALL", has_public_call)
        await transfer_group.leave_transfer_group(engine)
    assert calls == [(), ("leave_transfer_group",)]


# -- start


def test_this_vllm_still_takes_no_tokenizer_and_looks_for_no_stop_text_without_one():
    for call in (AsyncLLM.__init__, AsyncLLM.from_engine_args):
        is_needed = "tokenizer" not in inspect.signature(call).parameters
        assert_needed(is_needed, f"takes a tokenizer in {call.__qualname__}", "stop_texts.py")
    request = SimpleNamespace(sampling_params=SamplingParams(stop=["x"]), prompt_token_ids=[1])
    plain = IncrementalDetokenizer.from_new_request(None, request)
    assert_needed(
        type(plain) is IncrementalDetokenizer, "finds stop texts without a tokenizer", "stop_texts.py"
    )
    engine = SimpleNamespace(output_processor=OutputProcessor(None, log_stats=False))
    stop_texts.use_tokenizer(engine, "a tokenizer")
    assert engine.output_processor.tokenizer == "a tokenizer"


def test_this_vllm_still_gives_the_model_a_process_of_its_own_on_the_cpu_unless_a_variable_is_0(monkeypatch):
    platform = source_of("vllm.platforms.cpu")
    pattern = r'os\.environ\.get\("VLLM_ENABLE_V1_MULTIPROCESSING", "1"\) == "1"\s+and [^\n]* == "uni"'
    is_needed = re.search(pattern, platform) is not None
    assert_needed(is_needed, 'accepts "uni" on the CPU, or asks another variable', "one_process.py")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    one_process.run_model_in_engine_process()
    assert one_process.os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"


@pytest.mark.skipif(not current_platform.is_cpu(), reason="an edge of the CPU alone")
def test_this_vllm_still_looks_at_a_model_in_a_process_of_its_own(monkeypatch):
    is_needed = inspect.getsource(registry._LazyRegisteredModel).count("_run_in_subprocess(") == 1
    assert_needed(is_needed, "does not start a process to look at a model", "model_inspection.py")
    monkeypatch.setattr(registry, "_run_in_subprocess", registry._run_in_subprocess)
    monkeypatch.setattr("subprocess.run", None)
    model = registry._LazyRegisteredModel("vllm.model_executor.models.qwen2", "Qwen2ForCausalLM")
    monkeypatch.setattr(type(model), "_load_modelinfo_from_cache", lambda self, module_hash: None)
    monkeypatch.setattr(type(model), "_save_modelinfo_to_cache", lambda self, info, module_hash: None)
    model_inspection.inspect_models_here()
    assert model.inspect_model_cls().architecture == "Qwen2ForCausalLM"


@pytest.mark.skipif(not current_platform.is_cpu(), reason="of the CPU's kernels alone")
def test_drafts_at_a_temperature_are_still_wrong_in_this_vllm_on_the_cpu():
    """The reason of the refusal: numbers that are no integers do not arrive."""
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl

    current_platform.import_kernels()
    temperatures, ends = torch.tensor([0.7, 1.3]), torch.tensor([2, 5])
    expanded = torch.full((5,), -1.0)
    _expand_kernel_impl(expanded, temperatures, ends, 0, 1)
    assert_needed(expanded.tolist() == [-1.0] * 5, "expands temperatures on the CPU", "cpu_drafts.py")


# -- what other rooms know of vLLM by name


def test_the_variables_that_are_passed_on_or_set_are_known_to_this_vllm():
    sources = [Path(module.__file__).read_text() for module in (ray_session, worker_actors, server)]
    names = {name for source in sources for name in re.findall(r"\bVLLM_[A-Z_]+[A-Z]\b", source)}
    assert {"VLLM_CPU_KVCACHE_SPACE", "VLLM_NO_USAGE_STATS", "VLLM_SERVER_DEV_MODE"} <= names
    known = {*envs.environment_variables, "VLLM_CPU"}  # the last is a prefix
    assert names <= known, f"vLLM {vllm.__version__} does not read {names - known} any more"


def test_the_program_of_this_vllm_still_does_not_start_with_the_build_for_the_cpu():
    """So `rewards/judges/server.py` starts the module instead."""
    line = 'importlib.metadata.version("vllm")'
    is_asked = line in source_of("vllm.entrypoints.cli.main")
    assert is_asked, (
        f"vLLM {vllm.__version__} now starts without `{line}`: JudgeServer may start the program `vllm`"
    )
    if any(importlib.metadata.distributions(name="vllm-cpu")):
        with pytest.raises(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version("vllm")


def test_processes_of_an_engine_are_still_named_as_observers_look_for_them():
    assert f"{envs.VLLM_PROCESS_NAME_PREFIX}::" in look.ROLES
    assert 'f"{prefix}::{name}"' in source_of("vllm.utils.system_utils")
