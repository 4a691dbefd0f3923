"""Changes to single tensors, as they travel by NCCL, with vLLM's trainer engine played by a script (no GPU here)."""

import pytest
import torch
from scripted_engine import CANARY, TwoLayers, named
from scripted_nccl import Control, Scripted

from async_grpo.errors import WeightsDidNotLand
from async_grpo.weights.config import WeightConfig
from async_grpo.weights.delta_tensors import CHANGES, KEEP, ReceivedTensors, SentTensors
from async_grpo.weights.package import tensor_digest
from async_grpo.weights.traffic import Traffic

DELTAS = WeightConfig(weight_sync_deltas=True, canary_tolerance=1.0)


def flip_sign(model, row: int) -> None:
    with torch.no_grad():
        model.first.weight[row % 8, 0] *= -1


def sender_and_control(config=DELTAS, dtype=torch.bfloat16):
    control = Control({"g0": 1})
    return Scripted(control, named, CANARY, dtype, 0, config), control


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_after_a_hundred_steps_the_weights_are_those_of_the_trainer_bit_by_bit(dtype):
    sender, control = sender_and_control(dtype=dtype)
    model = TwoLayers()
    sender.publish(model, 0, self_test=True)()
    assert all(name.startswith(KEEP) for name in control.names_on_wire)
    for version in range(1, 101):
        flip_sign(model, version)
        metrics = sender.publish(model, version)()
        for name, weight in model.named_parameters():
            assert torch.equal(control.arrived[name], weight.detach().to(dtype)), name
        assert metrics["weight_sync_bytes"] == control.num_bytes
        assert all(name.startswith(CHANGES) for name in control.names_on_wire)
        assert metrics["weight_sync_changed_share"] == pytest.approx(1 / 117 / (dtype.itemsize / 2))


def test_a_tensor_that_changes_everywhere_travels_whole_beside_the_changes_of_others():
    sender, control = sender_and_control()
    model = TwoLayers()
    sender.publish(model, 0)()
    with torch.no_grad():
        model.second.weight += 0.5
    sender.publish(model, 1)()
    marks = {name: name.split(":")[0] + ":" for name in control.names_on_wire}
    assert sorted(marks.values()) == [CHANGES] * 3 + [KEEP]
    assert torch.equal(control.arrived["second.weight"], model.second.weight.detach().bfloat16())


def test_late_workers_and_self_tests_get_whole_tensors():
    sender, control = sender_and_control()
    model = TwoLayers()
    sender.publish(model, 0, self_test=True)()
    control.members, control.received_tensors = {"late": 1}, ReceivedTensors()
    sender.publish(model, 0, self_test=True)()
    assert all(name.startswith(KEEP) for name in control.names_on_wire)
    control.members = {"g0": 1, "late": 1}
    flip_sign(model, 1)
    sender.publish(model, 1)()
    assert control.log[-1] == "commit 1 g0,late" and control.names_on_wire[0].startswith(CHANGES)


def test_without_the_option_names_are_plain_and_nothing_is_kept():
    sender, control = sender_and_control(config=WeightConfig())
    model = TwoLayers()
    sizes = [sender.publish(model, version)()["weight_sync_bytes"] for version in range(2)]
    assert sizes[0] == sizes[1] == control.num_bytes
    assert control.names_on_wire == [name for name, _ in named(model)]
    assert not sender._source.sent_tensors._last and not control.received_tensors._last


def test_of_an_adapter_that_is_sent_alone_only_the_adapter_is_kept_and_travels_as_changes():
    control = Control({"g0": 1})
    model = TwoLayers()
    adapter = {"base_model.model.first.lora_A.weight": torch.ones(16, 64)}

    def named_all(model):
        return [*named(model), *adapter.items()]

    sender = Scripted(control, named_all, CANARY, torch.float32, 0, DELTAS, lambda model: adapter.items())
    sender.publish(model, 0, self_test=True)()
    assert [name for name in control.names_on_wire if name.startswith(KEEP)] == [
        KEEP + name for name in adapter
    ]
    assert len(control.names_on_wire) == 5
    for tensor in adapter.values():
        tensor[0, 0] = 2.0
    sender.publish(model, 1)()
    (name_on_wire,) = control.names_on_wire
    assert name_on_wire.startswith(CHANGES)
    for name, tensor in adapter.items():
        assert torch.equal(control.arrived[name], tensor)


def sent(*versions: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return what travels of a tensor, for each of its versions."""
    sender = SentTensors(Traffic())
    sender.keep("w", versions[0], tensor_digest(versions[0]))
    changes = [sender.encode("w", version, tensor_digest(version)) for version in versions[1:]]
    return [(KEEP + "w", versions[0]), *changes]


def versions_of_a_tensor() -> list[torch.Tensor]:
    versions = [torch.arange(40.0).bfloat16()]
    for number in range(3):
        versions.append(versions[-1].clone())
        versions[-1][number] = -7.0
    return versions


def test_an_engine_that_missed_a_version_or_has_none_refuses_the_changes_by_the_tensor_s_name():
    first, _, third, fourth = sent(*versions_of_a_tensor())
    engine = ReceivedTensors()
    with pytest.raises(WeightsDidNotLand, match="changes of w apply to .* this engine has None"):
        list(engine.restore([third]))
    list(engine.restore([first]))
    with pytest.raises(WeightsDidNotLand, match="changes of w apply to .* missed a version"):
        list(engine.restore([third]))
    with pytest.raises(
        WeightsDidNotLand, match="this engine has None"
    ):  # nothing is left that could be wrong
        list(engine.restore([fourth]))


def test_changes_that_were_cut_off_leave_no_tensor_to_which_later_ones_could_apply():
    first, (name, payload), third, _ = sent(*versions_of_a_tensor())
    engine = ReceivedTensors()
    list(engine.restore([first]))
    with pytest.raises(WeightsDidNotLand, match="damaged"):
        list(engine.restore([(name, payload[:-4])]))
    with pytest.raises(WeightsDidNotLand, match="this engine has None"):
        list(engine.restore([third]))


def test_a_kept_tensor_that_was_damaged_shows_in_the_digest_of_the_whole():
    versions = versions_of_a_tensor()
    first, second, *_ = sent(*versions)
    engine = ReceivedTensors()
    list(engine.restore([first]))
    engine._last["w"][1][30] = 5.0
    ((_, restored),) = engine.restore([second])
    assert tensor_digest(restored) != tensor_digest(versions[1])


def test_a_later_version_does_not_change_tensors_that_an_engine_still_holds():
    first, second, third, _ = sent(*versions_of_a_tensor())
    engine = ReceivedTensors()
    list(engine.restore([first]))
    ((_, held),) = engine.restore([second])
    before = held.clone()
    list(engine.restore([third]))
    assert torch.equal(held, before)


def test_vllm_packs_and_unpacks_changes_beside_whole_float32_tensors():
    """It reads float32 tensors at their place in one buffer of bytes, which must be a multiple of 4."""
    packed_tensor = pytest.importorskip("vllm.distributed.weight_transfer.packed_tensor")
    base, new = torch.zeros(5), torch.zeros(5)
    new[0] = 1.0
    whole = (KEEP + "v", torch.arange(3.0))
    travelling = [*sent(base, new)[1:], whole, *sent(base + 1, base + 2)[1:], whole]
    chunk = packed_tensor.pack_tensors(iter(travelling), lambda item: item[1], 1 << 20)
    arrived = packed_tensor.unpack_tensor(
        chunk.packed_tensor, chunk.names, chunk.shapes, chunk.dtypes, chunk.tensor_sizes
    )
    engine = ReceivedTensors()
    list(engine.restore([(KEEP + "w", base)]))
    restored = list(engine.restore(arrived[:2]))
    assert torch.equal(restored[0][1], new) and torch.equal(restored[1][1], whole[1])
