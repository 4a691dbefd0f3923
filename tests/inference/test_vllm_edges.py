"""Whether this vLLM still needs the edges that stand in the processes of its model, and has what they hold on to.

A test that fails with "vLLM now ...: remove ..." is good news: the edge can go. `test_vllm_edges_of_the_worker.py` has the
others.
"""

import ast
import inspect
import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.config import CUDAGraphMode, DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as experts_module
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.models.utils import WeightsMapper
from vllm.platforms import current_platform
from vllm.v1.sample import sampler
from vllm.v1.sample.ops.logprobs import batched_count_greater_than
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
from vllm_edge import assert_needed, source_of

from async_grpo.inference import vllm_edges
from async_grpo.inference.vllm_edges import (
    continued_draws,
    cpu_generators,
    experts,
    receive_weights,
    weights_in_use,
)
from async_grpo.inference.vllm_edges.part_names import by_received_names
from async_grpo.inference.vllm_edges.tied_heads import repack_tied_heads
from async_grpo.inference.vllm_edges.uncompiled_ranks import install_uncompiled_ranks
from async_grpo.inference.vllm_edges.worker_extension import WORKER_EXTENSION

EDGES = Path(vllm_edges.__file__).parent
on_the_cpu = pytest.mark.skipif(not current_platform.is_cpu(), reason="an edge of the CPU alone")


# -- the folder itself


def test_every_edge_says_what_it_is_for_which_vllm_and_until_when_and_stands_in_the_list():
    listed = re.findall(r"^    `(\w+)`", vllm_edges.__doc__, re.MULTILINE)
    modules = {path.stem: path for path in EDGES.glob("*.py") if path.stem != "__init__"}
    assert sorted(listed) == sorted(modules)
    for name, path in modules.items():
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        assert re.search(r"^Written for vLLM 0\.\d+", docstring, re.MULTILINE), name
        assert re.search(r"^Not needed any more when ", docstring, re.MULTILINE), name


# Parts of vLLM that only the edges may import, and an attribute of its engine that only they may name
PRIVATE_PACKAGES = (
    "vllm.model_executor",
    "vllm.v1.sample",
    "vllm.v1.worker",
    "vllm.v1.engine.output_processor",
)
PRIVATE_ATTRIBUTE = "output_processor"


@pytest.mark.parametrize(
    "path",
    [path for path in EDGES.parents[1].rglob("*.py") if "vllm" in path.read_text() and path.parent != EDGES],
)
def test_no_other_file_reaches_behind_the_public_interface_of_vllm(path):
    """Nor assigns to an attribute of something that it imports from vLLM."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    assert not any((node.module or "").startswith(PRIVATE_PACKAGES) for node in imports)
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    assert not any(node.attr == PRIVATE_ATTRIBUTE for node in attributes)
    of_vllm = [node for node in imports if (node.module or "").split(".")[0] == "vllm"]
    names = {alias.asname or alias.name for node in of_vllm for alias in node.names}
    changed = [node for node in attributes if isinstance(node.ctx, ast.Store)]
    assert not any(ast.unparse(node).split(".")[0] in names for node in changed)


# -- experts


class Method(SimpleNamespace):
    """In place of `UnquantizedFusedMoEMethod`: its kernel notes how often its experts are packed."""

    unquantized_backend = experts_cls = None

    def __init__(self) -> None:
        super().__init__(moe_kernel=None)
        self.packed_layers: list[object] = []

    def _init_moe_kernel(self, layer: object) -> None:
        kernel = SimpleNamespace(process_weights_after_loading=self.packed_layers.append)
        self.moe_kernel = SimpleNamespace(fused_experts=kernel)


@pytest.fixture
def layer(monkeypatch):
    monkeypatch.setattr(
        experts_module,
        "convert_to_unquantized_kernel_format",
        lambda *_, w13_weight, w2_weight, **__: (w13_weight, w2_weight),
    )
    monkeypatch.setattr(experts_module, "replace_parameter", lambda *_, **__: None)
    return SimpleNamespace(moe_config=None)


def test_experts_are_packed_once_at_every_load(layer):
    method = Method()
    for load in range(1, 4):
        experts.set_up_and_pack_experts(method, layer, None, None)
        assert method.packed_layers == [layer] * load


def test_this_vllm_still_packs_experts_at_the_first_load_alone(layer):
    method = Method()
    for _ in range(3):
        experts._set_up_experts(method, layer, None, None)
    assert_needed(method.packed_layers == [layer], "packs experts at every load itself", "experts.py")


@on_the_cpu
def test_the_replacement_for_experts_is_in_place_on_the_cpu():
    replaced = experts_module.UnquantizedFusedMoEMethod._setup_kernel
    assert replaced is experts.set_up_and_pack_experts


# -- tied heads, and weights in use


class TinyModel(torch.nn.Module):
    """An embedding, a head tied to it, and a linear layer, as an engine holds them after its first load."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = VocabParallelEmbedding(64, 32, params_dtype=torch.float32)
        self.head = ParallelLMHead(64, 32, params_dtype=torch.float32).tie_weights(self.embed)
        self.linear = ReplicatedLinear(32, 64, bias=False, params_dtype=torch.float32)
        record_metadata_for_reloading(self)
        for weight in (self.embed.weight, self.linear.weight):
            torch.nn.init.normal_(weight)
        for module in (self.embed, self.head, self.linear):
            module.quant_method.process_weights_after_loading(module)

    def load_again(self) -> torch.Tensor:
        """Load new weights layer by layer, and return those of the embedding."""
        new_embedding = torch.randn(64, 32)
        initialize_layerwise_reload(self)
        self.embed.weight.weight_loader(self.embed.weight, new_embedding)
        self.linear.weight.weight_loader(self.linear.weight, torch.randn(64, 32))
        finalize_layerwise_reload(self, SimpleNamespace(dtype=torch.float32))
        return new_embedding

    def head_weight(self) -> torch.Tensor:
        """The weight that the head computes with."""
        return self.head.quant_method.apply(self.head, torch.eye(32)).T


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    """Made in a process group of one, as vLLM's layers ask for."""
    store = tmp_path_factory.mktemp("group") / "store"
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        yield TinyModel()
        cleanup_dist_env_and_memory()


@on_the_cpu
def test_this_vllm_still_leaves_a_tied_head_with_its_old_weight(tiny_model):
    old = tiny_model.head_weight().clone()
    new = tiny_model.load_again()
    assert_needed(
        torch.equal(tiny_model.head_weight(), old), "packs tied heads after an update itself", "tied_heads.py"
    )
    repack_tied_heads(tiny_model)
    assert torch.equal(tiny_model.head_weight(), new)


@on_the_cpu
def test_the_checksums_of_this_vllm_still_see_nothing_of_a_packed_layer(tiny_model):
    fingerprints = [weights_in_use.fingerprints_in_use(tiny_model)["linear"]]
    digest = getattr(gpu_worker, "compute_tensor_digests", lambda model: {"linear.weight": "none in 0.31"})
    checksum = digest(tiny_model)["linear.weight"]
    tiny_model.load_again()
    fingerprints.append(weights_in_use.fingerprints_in_use(tiny_model)["linear"])
    assert fingerprints[0] != fingerprints[1]
    assert_needed(
        digest(tiny_model)["linear.weight"] == checksum,
        "sees packed layers in compute_weight_checksums",
        "weights_in_use.py",
    )


# -- part_names


def test_this_vllm_still_gives_other_names_to_the_parts_of_models_that_read_images():
    names = [
        "model.language_model.layers.0.mlp.up_proj.weight",
        "model.visual.merger.ln_q.weight",
        "lm_head.weight",
    ]
    prefixes = {
        "model.language_model.": "language_model.model.",
        "model.visual.": "visual.",
        "lm_head.": "language_model.lm_head.",
    }
    model: Any = SimpleNamespace(
        hf_to_vllm_mapper=WeightsMapper(orig_to_new_prefix=prefixes), supports_multimodal=True
    )
    used = {"language_model.model.layers.0.mlp": 1, "visual.merger": 2, "language_model": 3, "other": 4}
    assert by_received_names(model, used, names) == {
        "model.language_model.layers.0.mlp": 1,
        "model.visual.merger": 2,
        "lm_head": 3,
        "other": 4,
    }
    model.supports_multimodal = False  # a model of texts is named as in transformers
    assert by_received_names(model, used, names) == used


# -- addresses


class Engine(receive_weights.Receipts):
    """The engine's side of an update, for a model in this process."""

    def __init__(self, model: TinyModel, device_type: str, mode: CUDAGraphMode) -> None:
        self.model = model
        self.model_config = SimpleNamespace(dtype=torch.float32)
        self.vllm_config = SimpleNamespace(
            device_config=SimpleNamespace(device_type=device_type),
            compilation_config=SimpleNamespace(cudagraph_mode=mode),
        )

    def update(self) -> None:
        self.start_weight_update()
        # While weights are loaded, `model` is this object
        for layer in (self._model.embed, self._model.linear):
            layer.weight.weight_loader(layer.weight, torch.randn(64, 32))
        self.finish_weight_update()


@pytest.mark.parametrize(
    ("device_type", "mode", "is_refused"),
    [
        ("cuda", CUDAGraphMode.FULL, True),
        ("cuda", CUDAGraphMode.PIECEWISE, True),
        ("cuda", CUDAGraphMode.NONE, False),
        ("cpu", CUDAGraphMode.FULL, False),
    ],
)
@on_the_cpu
def test_an_update_that_moves_what_graphs_read_is_refused(
    monkeypatch, tiny_model, device_type, mode, is_refused
):
    """As MLA does, the layer derives a tensor from its weight, and binds a new one at each load (vllm#48312)."""
    method = type(tiny_model.linear.quant_method)
    # The kernels of the CPU pack weights, which moves them all
    monkeypatch.setattr(method, "process_weights_after_loading", lambda self, layer: None)
    tiny_model = TinyModel()
    Engine(tiny_model, "cuda", CUDAGraphMode.FULL).update()  # healthy: copied to the old places

    def derive(self, layer):
        layer.derived = layer.weight.detach().T.clone()

    monkeypatch.setattr(method, "process_weights_after_loading", derive)
    tiny_model.linear.derived = tiny_model.linear.weight.detach().T.clone()
    engine = Engine(tiny_model, device_type, mode)
    if not is_refused:
        engine.update()
        return
    with pytest.raises(
        RuntimeError, match=r"moved 1 of \d tensors of the engine \(linear.derived\).*--enforce-eager"
    ):
        engine.update()


# -- draws


def batch_of_one(*, seed: int, num_drawn: int = 0) -> tuple[InputBatch, CachedRequestState]:
    """A batch without requests, and a seeded request for it."""
    arguments = {
        "max_num_reqs": 2,
        "max_model_len": 64,
        "max_num_batched_tokens": 64,
        "device": torch.device("cpu"),
        "vocab_size": 32,
        "block_sizes": [16],
        "max_num_blocks_per_req": [4],
    }
    if "kernel_block_sizes" in inspect.signature(cpu_generators._initialize).parameters:
        arguments["kernel_block_sizes"] = [16]
    batch = InputBatch(**arguments)
    extra = {continued_draws.DRAWN: num_drawn}
    request = CachedRequestState(
        req_id="one",
        prompt_token_ids=[1, 2, 3],
        mm_features=[],
        sampling_params=SamplingParams(temperature=1.0, seed=seed, extra_args=extra),
        generator=torch.Generator().manual_seed(seed),
        block_ids=([0],),
        num_computed_tokens=0,
        output_token_ids=[],
    )
    return batch, request


def draws(generator: torch.Generator, count: int) -> list[int]:
    sampler = TopKTopPSampler("processed_logprobs")
    return [int(sampler(torch.zeros(1, 32), {0: generator}, None, None)[0]) for _ in range(count)]


@on_the_cpu
def test_a_continued_request_makes_the_draws_that_come_next():
    whole = draws(torch.Generator().manual_seed(5), 8)
    batch, request = batch_of_one(seed=5, num_drawn=3)
    batch.add_request(request)
    assert draws(request.generator, 5) == whole[3:] and len(set(whole)) > 2


def test_a_request_of_this_vllm_still_cannot_say_where_its_seed_begins():
    names = {
        field for field in SamplingParams.__struct_fields__ if re.search("draw|offset|skip|begin", field)
    }
    known = {"skip_special_tokens", "skip_clone", "skip_reading_prefix_cache", "_watermarking_skipped"}
    news = f"has {names - known} in SamplingParams. If that says how many draws a seed begins after"
    assert_needed(names <= known, news, "continued_draws.py")
    arguments = list(inspect.signature(continued_draws._add_request).parameters)
    assert arguments == ["self", "request"], "vLLM calls what continued_draws.py replaces in another way"


@on_the_cpu
def test_the_runner_of_an_engine_is_known_because_only_one_of_them_uses_the_batch():
    """V2, which GPUs use, draws by a hash of seed and position, and never sees `InputBatch`."""
    assert continued_draws.model_runner(VllmConfig(device_config=DeviceConfig("cpu"))) == "V1"
    assert continued_draws.model_runner(SimpleNamespace(use_v2_model_runner=True)) == "V2"
    assert continued_draws.model_runner(SimpleNamespace()) == "V1"  # vLLM 0.31
    assert "def murmur3_hash32(seed, pos, offset" in source_of("vllm.v1.worker.gpu.sample.gumbel")


@on_the_cpu
def test_the_draw_of_an_unfinished_prefill_can_be_taken_back_on_the_cpu():
    batch, request = batch_of_one(seed=7)
    index = batch.add_request(request)
    first = draws(request.generator, 1)
    # The very words of vLLM's model runner
    gen = batch.generators.get(int(index))
    gen.set_offset(gen.get_offset() - 4)
    assert draws(request.generator, 1) == first
    assert isinstance(batch.generators, cpu_generators.CpuGenerators)


@on_the_cpu
def test_a_preempted_request_keeps_its_place_in_its_seed_when_its_tokens_are_computed_again():
    """In parts: each part makes a draw that is taken back, and must not lead back to the first draw of all."""
    whole = draws(torch.Generator().manual_seed(5), 8)
    batch, request = batch_of_one(seed=5, num_drawn=0)
    batch.add_request(request)
    assert draws(request.generator, 3) == whole[:3]
    batch.remove_request("one")
    index = batch.add_request(request)
    for _ in range(2):  # parts of its tokens
        draws(request.generator, 1)
        gen = batch.generators.get(index)
        gen.set_offset(gen.get_offset() - 4)
    assert draws(request.generator, 5) == whole[3:]


def test_this_vllm_still_takes_draws_back_by_an_offset_that_generators_of_the_cpu_lack():
    with pytest.raises(Exception, match="offset|implemented"):
        torch.Generator().get_offset()
    runner = source_of("vllm.v1.worker.gpu_model_runner")
    line = "gen.set_offset(gen.get_offset() - 4)"
    assert_needed(line in runner, f"takes draws back without `{line}`", "cpu_generators.py")


@on_the_cpu
def test_this_vllm_still_compiles_the_count_of_more_probable_tokens():
    is_needed = inspect.unwrap(batched_count_greater_than) is not batched_count_greater_than
    assert_needed(is_needed, "does not compile the function", "uncompiled_ranks.py")
    install_uncompiled_ranks()
    assert sampler.batched_count_greater_than is not batched_count_greater_than
    logprobs = torch.tensor([[-1.0, -3.0, -2.0], [-1.0, -3.0, -2.0]])
    assert sampler.batched_count_greater_than(logprobs, torch.tensor([[-1.0], [-3.0]])).tolist() == [1, 3]


# -- transports


def test_an_update_of_this_vllm_still_returns_no_receipt():
    for name in ("start_weight_update", "receive_weights", "finish_weight_update"):
        returned = inspect.signature(getattr(WeightTransferEngine, name)).return_annotation
        is_needed = returned in (None, "None")
        assert_needed(is_needed, f"returns {returned} from {name}. If it is a receipt", "receive_weights.py")
    # A transport still calls the reload itself
    nccl = source_of("vllm.distributed.weight_transfer.nccl_engine")
    assert "initialize_layerwise_reload(self.model)" in nccl
    assert "finalize_layerwise_reload(self.model, self.model_config)" in nccl
    warns = '"%s: Failed to load weights"' in source_of("vllm.model_executor.model_loader.reload.layerwise")
    assert_needed(
        warns, "does not warn of layers that an update leaves out", "receive_weights.py (the logger)"
    )


def test_an_engine_can_still_be_given_methods_and_has_the_attribute_that_they_read():
    assert "worker_extension_cls" in {field.name for field in fields(AsyncEngineArgs)}
    assert WORKER_EXTENSION == "async_grpo.inference.vllm_edges.worker_extension.WeightReceipts"
    assert "self.weight_transfer_engine" in source_of("vllm.v1.worker.gpu_worker")
