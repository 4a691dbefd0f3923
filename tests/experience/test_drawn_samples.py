"""Pictures on their way: packed with their states, given to rewards and pages, saved and restored."""

import base64
import io
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from async_grpo.experience.packing import Packer, pack
from async_grpo.experience.rollouts import reward_sample
from async_grpo.experience.state import ExperienceState
from async_grpo.experience.step_metrics import readable_samples
from async_grpo.rewards.adapter.pictures import with_decoded_picture
from async_grpo.rewards.isolation.child import Reward, run_plain
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
