"""Pictures on their way: packed with their states, given to rewards and pages, saved and restored."""

import base64
import io
import struct
import zlib
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file

from async_grpo.experience.evaluation import evaluation_stats
from async_grpo.experience.packing import Packer, pack
from async_grpo.experience.rollouts import reward_sample
from async_grpo.experience.state import ExperienceState
from async_grpo.experience.step_metrics import readable_samples
from async_grpo.messages import StepEnd
from async_grpo.rewards.adapter.pictures import with_decoded_picture
from async_grpo.rewards.isolation.child import Reward, run_plain
from async_grpo.training.record import Recorder, Recording
from async_grpo.types import Completion, FinishReason, Group, Prompt, RewardStatus, Sample, Verdict

PIXELS = np.arange(20, dtype=np.uint8).reshape(4, 5)


def png():
    file = io.BytesIO()
    Image.fromarray(PIXELS).save(file, "PNG")
    return file.getvalue()


def drawn(member, num_steps=3):
    random = np.random.default_rng(member)
    return Completion(
        token_ids=np.arange(2, 2 + num_steps, dtype=np.int32),
        logprobs=random.normal(size=num_steps).astype(np.float32),
        versions=np.full(num_steps, 4, np.int32),
        finish_reason=FinishReason.STOP,
        text="",
        member=member,
        latents=random.normal(size=(num_steps, 2, 1, 4, 5)).astype(np.float32),
        picture_png=png(),
    )


def sample(member, num_steps=3):
    prompt = Prompt(9, np.array([7], np.int32), {"input": "7", "answer": "7"}, question=0)
    trained = {"advantages": np.ones(num_steps, np.float32), "loss_mask": np.ones(num_steps, bool)}
    return Sample(prompt, drawn(member, num_steps), Verdict(RewardStatus.OK, 0.5), **trained)


def test_the_states_of_a_step_lie_at_its_token():
    samples = [sample(0), sample(1, num_steps=2)]
    batch = pack(samples)
    assert batch.input_ids.tolist() == [7, 2, 3, 4, 7, 2, 3]
    assert batch.latents.shape == (7, 2, 1, 4, 5) and batch.latents.dtype == np.float32
    assert np.array_equal(batch.latents[1:4], samples[0].completion.latents)
    assert np.array_equal(batch.latents[5:], samples[1].completion.latents)
    assert not batch.latents[[0, 4]].any()


def test_a_dummy_and_a_text_have_no_states():
    packer = Packer(num_ranks=2, max_tokens=8)
    packer.add(sample(0))
    ((batch, dummy),) = packer.flush()
    assert batch.latents is not None and dummy.latents is None
    text = replace(sample(0), completion=replace(drawn(0), latents=None))
    assert pack([text]).latents is None


def test_a_reward_gets_the_picture_as_an_image_and_a_scorer_as_base64():
    told = reward_sample(sample(0).prompt, drawn(0))
    assert told["drawn_pictures"] == [base64.b64encode(png()).decode()]
    answers = run_plain(
        Reward(lambda sample: {"reward": float(np.asarray(sample["picture"])[1, 2])}, {}).replies(
            [{"sample": told}]
        )
    )
    assert answers[0][0]["reward"] == PIXELS[1, 2]


@pytest.mark.parametrize("pictures", [["no base64"], "text", [3], [], ["aGVsbG8="]])
def test_a_column_of_the_row_with_the_same_name_stays_as_it_is(pictures):
    assert with_decoded_picture({"drawn_pictures": pictures}) == {"drawn_pictures": pictures}


def chunk(kind, content):
    """Return a chunk of a PNG file."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def test_a_png_file_with_wrong_chunks_stays_as_it_is():
    # Pillow raises SyntaxError for an animation whose frames do not begin with the number 0
    frame = struct.pack(">IIIIIHHBB", 7, 1, 1, 0, 0, 1, 1, 0, 0)
    file = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0))
    file += chunk(b"IDAT", zlib.compress(b"\0\0")) + chunk(b"fcTL", frame) + chunk(b"IEND", b"")
    column = {"drawn_pictures": [base64.b64encode(file).decode()]}
    assert with_decoded_picture(column) == column


def test_only_png_files_are_decoded():
    file = io.BytesIO()
    Image.fromarray(PIXELS).save(file, "BMP")
    column = {"drawn_pictures": [base64.b64encode(file.getvalue()).decode()]}
    assert with_decoded_picture(column) == column


def test_the_samples_page_gets_the_picture():
    group = Group(sample(0).prompt, (sample(0),), 0, 0)
    (row,) = readable_samples([group])
    assert row["picture"] == "data:image/png;base64," + base64.b64encode(png()).decode()


def test_a_restored_group_has_its_states_and_pictures(tmp_path):
    prompt = sample(0).prompt
    samples = (sample(0), sample(1, num_steps=2))
    group = Group(prompt, samples, 3, 5)
    ExperienceState(2, 6, {}, {5: group}).save(tmp_path)
    restored = ExperienceState.load(tmp_path, lambda ordinal, question: prompt).alive[5]
    for before, after in zip(samples, restored.samples, strict=True):
        assert np.array_equal(before.completion.latents, after.completion.latents)
        assert before.completion.picture_png == after.completion.picture_png


def with_text(sample_of_picture):
    """Return the sample as one of a text, whose prompt is many bytes long."""
    condition = (np.arange(12, dtype=np.float32).reshape(3, 4), np.ones(2, np.float32))
    prompt = replace(sample_of_picture.prompt, token_ids=np.arange(50, dtype=np.int32))
    completion = replace(sample_of_picture.completion, condition=condition)
    return replace(sample_of_picture, prompt=prompt, completion=completion)


def test_a_text_takes_one_place_in_a_batch_and_its_embeddings_are_there_once():
    samples = [with_text(sample(0)), with_text(sample(1))]
    batch = pack(samples)
    assert batch.cu_seqlens.tolist() == [0, 4, 8] and samples[0].num_tokens == 4
    assert batch.conditions[0] is batch.conditions[1]
    assert pack([sample(0)]).conditions == ()


def test_a_restored_group_has_the_embeddings_of_its_prompt(tmp_path):
    samples = (with_text(sample(0)), with_text(sample(1, num_steps=2)))
    group = Group(samples[0].prompt, samples, 3, 5)
    labels = Group(sample(0).prompt, (sample(0),), 3, 6)
    ExperienceState(2, 7, {}, {5: group, 6: labels}).save(tmp_path)
    state = ExperienceState.load(tmp_path, lambda ordinal, question: samples[0].prompt)
    for restored in state.alive[5].samples:
        pairs = zip(restored.completion.condition, samples[0].completion.condition, strict=True)
        assert all(np.array_equal(*pair) for pair in pairs)
    assert state.alive[6].samples[0].completion.condition == ()


@pytest.mark.parametrize(("pass_reward", "are_shown"), [(1.0, False), (0.4, True)])
def test_pictures_have_a_mean_reward_and_pass_only_by_a_reward_that_is_set(pass_reward, are_shown):
    group = Group(sample(0).prompt, (sample(0), sample(1)), 0, 0)
    stats = evaluation_stats([group], pass_reward)
    assert stats["avg_reward"] == 0.5
    assert ("avg@2" in stats) == ("pass@1" in stats) == are_shown


def test_a_record_has_the_embeddings_of_each_group_once(tmp_path):
    batch = pack([with_text(sample(0)), with_text(sample(1))])
    end = StepEnd(0, 1, 2, {})
    source = Mock()
    source.next_message.side_effect = [batch, end]
    recorder = Recorder(source, tmp_path, 1, {})
    recorder.next_message(0)
    recorder.keep_logprobs(torch.zeros(1, 8))
    recorder.next_message(0)
    (file,) = (tmp_path / "record" / "step_000000000").glob("*.safetensors")
    assert sum(".condition." in name for name in load_file(file)) == 2
    restored = Recording(tmp_path, 1).next_message(0)
    assert restored.conditions[0] is restored.conditions[1]
    for before, after in zip(batch.conditions[0], restored.conditions[0], strict=True):
        assert np.array_equal(before, after)
