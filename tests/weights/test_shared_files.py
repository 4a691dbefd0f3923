"""Weights as files of a folder that all nodes share: whole files under new names, gone once they are loaded."""

import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scripted_engine import FakeLink, TwoLayers, publisher

from async_grpo.cluster.worker_actors import _mapped
from async_grpo.errors import WeightsDidNotLand, WorkerLost
from async_grpo.weights.config import WeightConfig
from async_grpo.weights.package import pack_weights
from async_grpo.weights.received_chunks import ReceivedChunks
from async_grpo.weights.shared_files import SharedFilesPublisher


class Reader(FakeLink):
    """Its engine reads the chunks as a worker does."""

    def deliver(self, package):
        assert all(path.suffix == ".safetensors" for path in package.chunks)
        self.log.append([path.name for path in package.chunks])
        return super().deliver(replace(package, chunks=[_mapped(path) for path in package.chunks]))


def sender(link, folder: Path) -> SharedFilesPublisher:
    config = WeightConfig(weight_transport="shared_files", weight_folder=str(folder))
    return publisher(link, kind=SharedFilesPublisher, config=config)


def test_weights_land_through_files_whose_names_are_new_and_which_are_gone_afterwards(tmp_path):
    link, model = Reader(), TwoLayers()
    sending = sender(link, tmp_path / "weights")
    sending.publish(model, 0, self_test=True)()
    with torch.no_grad():
        model.first.weight.add_(0.5)
    sending.publish(model, 1)()
    assert torch.equal(link.engine.first.weight, model.first.weight)
    names = [name for entry in link.log if isinstance(entry, list) for name in entry]
    assert len(set(names)) == len(names) == 3  # self-test: changed; versions 0 and 1
    assert list((tmp_path / "weights").iterdir()) == []


def test_files_do_not_stay_when_their_delivery_fails_and_a_worker_that_does_not_see_them_says_so(tmp_path):
    class Blind(Reader):
        def deliver(self, package):
            raise WorkerLost("gone")

    with pytest.raises(WorkerLost, match="gone"):
        sender(Blind(), tmp_path).publish(TwoLayers(), 0)()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(
        WeightsDidNotLand, match="nowhere.safetensors cannot be read on .* that all nodes share"
    ):
        _mapped(tmp_path / "nowhere.safetensors")


def test_a_full_disk_is_named_with_what_is_free_and_nothing_half_written_stays(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    sending = sender(Reader(), tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(
            WeightsDidNotLand,
            match=r"cannot be written \(.*; 0.00 GB, .* GB are free\): give --weight-folder",
        ):
            sending.publish(TwoLayers(), 0)()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("num_bytes", [0, 5, 8, 40, -1])
def test_a_file_that_was_cut_off_is_refused_by_its_sizes_before_an_engine_reads_it(tmp_path, num_bytes):
    """An engine that begins to read it holds a mixture of two policies, and its own error names neither file nor size."""
    image, _ = pack_weights({"first.weight": torch.ones(4, 4)}, torch.float32)
    path = tmp_path / "weights.safetensors"
    path.write_bytes(image.tobytes())
    assert ReceivedChunks().restore([_mapped(path)], [None]) == [image.tobytes()]
    path.write_bytes(image[:num_bytes].tobytes())
    problem = (
        r"cannot be read on .* \(cannot mmap an empty file\)"
        if num_bytes == 0
        else "chunk 1 of 1 .* was cut off"
    )
    with pytest.raises(WeightsDidNotLand, match=problem):
        ReceivedChunks().restore([_mapped(path)], [None])


@pytest.mark.parametrize("header", [b"{}", b"[]", b"\xff\xff", b'{"a": 1}', b"{" * 100_000])
def test_a_header_that_is_no_description_of_tensors_is_refused_by_name(header):
    image = len(header).to_bytes(8, "little") + header
    with pytest.raises(WeightsDidNotLand, match="chunk 1 of 1"):
        ReceivedChunks().restore([memoryview(image)], [None])
