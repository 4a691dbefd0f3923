"""Rows with images: the forms in which people write them, their limits, and what is refused by name."""

import base64
import hashlib
import json
from pathlib import Path

import pytest
from vision_model import encoded, picture, save_vision_model, vision_tokenizer
from vision_prompts import image_prompts, picture_row, question, url

from async_grpo.errors import ConfigurationError
from async_grpo.experience import row_images
from async_grpo.experience.data_files import read_rows
from async_grpo.experience.dataset import questions_of
from async_grpo.experience.plain_values import plain
from async_grpo.experience.row_images import image_content, image_row
from async_grpo.launch.python_rows import row_file
from async_grpo.processes import image_files
from async_grpo.processes.image_files import decoded_image, image_size

TOKENIZER = vision_tokenizer()
IMAGE = picture()
CONTENT = encoded(IMAGE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture
def made(folder, tmp_path):
    """The question of a row whose data file is in `tmp_path`."""
    (tmp_path / "shape.png").write_bytes(CONTENT)
    return lambda row: question(folder, tmp_path / "run" / "images", row, tmp_path)


def user(*parts, **columns):
    return {"messages": [{"role": "user", "content": list(parts)}], **columns}


TEXT = {"type": "text", "text": "What is this?"}


@pytest.mark.parametrize(
    "row",
    [
        user({"type": "image", "image": "shape.png"}, TEXT),
        user({"type": "image", "path": "shape.png"}, TEXT),
        user({"type": "image", "url": url(IMAGE)}, TEXT),
        user({"type": "image", "base64": base64.b64encode(CONTENT).decode()}, TEXT),
        user({"type": "image", "image": {"bytes": url(IMAGE), "path": None}}, TEXT),
        user({"type": "image_url", "image_url": {"url": url(IMAGE)}}, TEXT),
        user({"type": "image_url", "image_url": url(IMAGE)}, TEXT),
        user({"type": "image"}, TEXT, images=["shape.png"]),
        user({"type": "image"}, TEXT, image={"bytes": None, "path": "shape.png"}),
        user(TEXT, images=["shape.png"]),
        {"messages": [{"role": "user", "content": "What is this?"}], "images": [url(IMAGE)]},
        {"prompt": [{"role": "user", "content": "<image>What is this?"}], "images": [url(IMAGE)]},
    ],
)
def test_every_form_of_an_image_gives_the_same_prompt(made, row):
    question_here = made(row)
    (image,) = question_here.images
    assert image.digest == hashlib.sha256(CONTENT).hexdigest()
    assert Path(image.path).read_bytes() == CONTENT
    # 84 x 112 pixels are 3 x 4 tokens of 28 x 28
    assert image.num_tokens == 12
    text = TOKENIZER.decode(question_here.token_ids)
    assert text.count("<|image_pad|>") == 12
    assert question_here.row["input"] == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What is this?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_several_images_keep_their_order_and_none_is_stored_twice(made, tmp_path):
    several = made(picture_row([1, 0, 1]))
    first, second, third = several.images
    assert first == third != second
    assert len(list((tmp_path / "run" / "images").iterdir())) == 2


def test_a_row_without_images_has_none_and_writes_nothing(made, tmp_path):
    assert made({"messages": [{"role": "user", "content": "3 + 4?"}]}).images == ()
    assert not (tmp_path / "run").exists()


def test_a_question_may_be_an_image_alone(made):
    assert len(made(user({"type": "image", "image": "shape.png"})).images) == 1


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (
            user({"type": "image", "image": "https://example.org/cat.png"}),
            "image 1 of 1: the image 'https://example.org/cat.png' is at a remote address, which is never fetched",
        ),
        (user({"type": "image", "image": "s3://bucket/cat.png"}), "is at a remote address"),
        (user({"type": "image", "image": "lost.png"}), "image 1 of 1: there is no image .*lost.png"),
        (user({"type": "image"}, TEXT), "an image part names no image"),
        (user({"type": "image", "image": 7}, TEXT), "an image must be a path, a data URL, or an object"),
        (user({"type": "image", "url": "data:image/png,abc"}), "is not in base64"),
        (user({"type": "image", "url": "data:image/png;base64,a*b"}), "is not in base64"),
        (user({"type": "image", "base64": "aGVsbG8="}), "the image cannot be decoded"),
        (
            user({"type": "image"}, TEXT, images=["shape.png", "shape.png"]),
            "the row has 2 images in the column images, and the messages have places for 1",
        ),
        (
            {"messages": [{"role": "user", "content": "<image><image>?"}], "images": ["shape.png"]},
            "the messages have <image> 2 times, and the row has 1 images",
        ),
        ({"prompt": "What is this?", "images": ["shape.png"]}, "its prompt is a text or token ids"),
        ({"input_token_ids": [1, 2], "images": ["shape.png"]}, "its prompt is a text or token ids"),
        (
            {"messages": [{"role": "system", "content": [{"type": "image", "image": "shape.png"}]}]},
            "message 1 of 1 has the role 'system' and an image",
        ),
        (
            {"messages": [{"role": "user", "content": "What is <|image_pad|>?"}]},
            "the prompt spells the token that stands for an image",
        ),
        (
            user(
                {"type": "image", "image": "shape.png"},
                {"type": "text", "text": "<|image_pad|>"},
            ),
            "the chat template writes 2 image tokens for 1 images",
        ),
        (user(*[{"type": "image", "image": "shape.png"}] * 65), "65 images; at most 64"),
        (user(*[{"type": "image", "image": "shape.png"}] * 60), "60 images of 720 tokens"),
        (
            user({"type": "audio", "audio": "a.wav"}, {"type": "image", "image": "shape.png"}, TEXT),
            "a part of the type 'audio'",
        ),
    ],
)
def test_a_wrong_image_is_refused_by_name_with_its_row(made, row, problem):
    with pytest.raises(ConfigurationError, match=rf"^here:1: .*{problem}"):
        made(row)


def test_a_model_of_texts_refuses_rows_with_images_by_name():
    with pytest.raises(
        ConfigurationError,
        match=r"^here:1: a message has a part of the type 'image', and the model reads no images",
    ):
        questions_of([("here:1", picture_row([0]))], TOKENIZER, 512, len(TOKENIZER))


def test_limits_are_checked_before_an_image_is_decoded(monkeypatch, tmp_path):
    monkeypatch.setattr(image_files, "MAX_IMAGE_PIXELS", 84 * 112 - 1)
    with pytest.raises(ConfigurationError, match="84 x 112 pixels; at most"):
        image_size(CONTENT)
    monkeypatch.setattr(image_files, "MAX_IMAGE_BYTES", len(CONTENT) - 1)
    with pytest.raises(ConfigurationError, match="bytes; at most"):
        image_size(CONTENT)
    monkeypatch.setattr(row_images, "MAX_IMAGE_BYTES", len(CONTENT) - 1)
    (tmp_path / "large.png").write_bytes(CONTENT)
    with pytest.raises(ConfigurationError, match=r"large.png cannot be read .* at most"):
        image_content("large.png", tmp_path)
    monkeypatch.setattr(row_images, "MAX_BASE64_CHARACTERS", 100)
    with pytest.raises(ConfigurationError, match="characters of base64; at most"):
        image_content(url(IMAGE), tmp_path)


def test_a_truncated_image_is_refused_when_it_is_decoded():
    broken = encoded(picture(0, 400, 400))[:-1000]
    assert image_size(broken) == (400, 400)
    with pytest.raises(ConfigurationError, match="the image cannot be decoded"):
        decoded_image(broken)


def test_a_photo_is_turned_as_its_camera_was_held():
    photo = picture(0, 100, 60)
    exif = photo.getexif()
    exif[0x0112] = 6
    buffer = encoded_with_exif(photo, exif)
    assert image_size(buffer) == (60, 100)
    assert decoded_image(buffer).size == (60, 100)


def encoded_with_exif(image, exif) -> bytes:
    import io

    buffer = io.BytesIO()
    image.save(buffer, "JPEG", exif=exif)
    return buffer.getvalue()


def test_images_of_pillow_and_of_data_sets_become_data_urls(tmp_path):
    row = {
        "messages": [{"role": "user", "content": [{"type": "image"}, TEXT]}],
        "images": [IMAGE],
        "other": {"bytes": CONTENT, "path": "shape.png"},
    }
    file = row_file([row], tmp_path, "rows")
    (written,) = [json.loads(line) for line in Path(file.path).read_text().splitlines()]
    assert decoded_image(image_content(written["images"][0], tmp_path)).tobytes() == IMAGE.tobytes()
    assert image_content(written["other"], tmp_path) == CONTENT
    with pytest.raises(TypeError, match="a bytes"):
        plain({"sound": b"no image"})


def test_places_of_images_in_texts_are_refused_only_for_models_of_texts(tmp_path):
    row = {"messages": [{"role": "user", "content": "<image>?"}], "images": ["shape.png"]}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigurationError, match="only texts are given to the model"):
        list(read_rows(path))
    ((_, read),) = read_rows(path, reads_images=True)
    assert image_row(read).sources == ["shape.png"]


def test_an_image_is_linked_where_it_can_be_and_a_changed_file_is_seen(made, folder, tmp_path):
    question_here = made(user({"type": "image", "image": "shape.png"}, TEXT))
    stored = Path(question_here.images[0].path)
    assert stored.samefile(tmp_path / "shape.png")
    prompts = image_prompts(folder, tmp_path / "elsewhere")
    prompt = prompts.prompt(user({"type": "image", "image": "shape.png"}, TEXT), 512, "here:1", tmp_path)
    (tmp_path / "shape.png").unlink()
    with pytest.raises(ConfigurationError, match="shape.png cannot be written to the run's folder"):
        prompts.store([image.digest for image in prompt.images])
