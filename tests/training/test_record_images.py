"""The images of micro-batches in the record of a run, which names digests and no paths."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from async_grpo.errors import ConfigurationError
from async_grpo.experience.packing import pack
from async_grpo.messages import StepEnd
from async_grpo.training.record import Recorder, Recording
from async_grpo.types import Completion, FinishReason, ImageReference, Prompt, RewardStatus, Sample, Verdict

DIGEST = "0123456789abcdef" * 4


def sample(ordinal: int, images: tuple[ImageReference, ...]) -> Sample:
    completion = Completion(
        token_ids=np.array([4, 5], np.int32),
        logprobs=np.zeros(2, np.float32),
        versions=np.zeros(2, np.int32),
        finish_reason=FinishReason.STOP,
        text="",
    )
    return Sample(
        Prompt(ordinal, np.array([1, 9, 9], np.int32), {"input": ""}, ordinal, images),
        completion,
        Verdict(RewardStatus.OK, 1.0),
        advantages=np.ones(2, np.float32),
        loss_mask=np.ones(2, bool),
        group_tokens=2,
    )


@pytest.fixture
def record(tmp_path):
    """The record of a step with one micro-batch: a sequence with an image, and one without."""
    image = ImageReference(str(tmp_path / "images" / DIGEST), DIGEST, 2)
    batch = pack([sample(0, (image,)), sample(1, ())])
    messages = iter([batch, StepEnd(0, 1, 2, {})])
    source = SimpleNamespace(next_message=lambda rank: next(messages), start=lambda: None)
    recorder = Recorder(source, tmp_path, 1, {})
    recorder.next_message(0)
    recorder.keep_logprobs(torch.zeros(1, len(batch.input_ids)))
    recorder.next_message(0)
    return batch


def test_the_images_of_a_micro_batch_are_those_of_its_record(record, tmp_path):
    replayed = Recording(tmp_path, 1).next_message(0)
    assert replayed.images == record.images
    assert replayed.images[0][0].path == str(tmp_path / "images" / DIGEST) and replayed.images[1] == ()


@pytest.mark.parametrize("digest", ["../../secret", 7, DIGEST[:-1], None])
def test_a_record_that_names_something_else_than_an_image_of_the_run_is_refused(record, tmp_path, digest):
    (file,) = tmp_path.glob("record/*/rank_0.json")
    content = json.loads(file.read_text())
    content["images"][0][0][0][0] = digest
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigurationError, match="describe no image"):
        Recording(tmp_path, 1).next_message(0)
