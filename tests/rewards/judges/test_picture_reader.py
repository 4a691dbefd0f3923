"""Rewards of texts that a reader found in pictures: the formula, a server that reads, and what breaks its protocol."""

import base64
import io
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from async_grpo.data.digit_rewards import read_text
from async_grpo.data.digits import gray_of, read_digits
from async_grpo.errors import ConfigurationError
from async_grpo.rewards.http.endpoint import BadReply
from async_grpo.rewards.http.http_client import EndpointClient
from async_grpo.rewards.http.rate_limiter import Limiter
from async_grpo.rewards.judges import PictureReader
from async_grpo.rewards.picture_text import edit_distance, text_reward

ROOT = Path(__file__).resolve().parents[3]
URL = "http://127.0.0.1:1"


def digit_picture(number: int) -> Image.Image:
    """A handwritten digit of the data set, in gray ink."""
    pictures, _ = read_digits()
    return Image.fromarray(np.round(127.5 * (gray_of(pictures[number]) + 1)).astype(np.uint8))


def as_sample(picture: Image.Image, **columns) -> dict:
    """A sample as judges get it, when the policy drew the picture."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    png = base64.b64encode(file.getvalue()).decode()
    return {"prompt": "draw", "completion": "", "drawn_pictures": [png], **columns}


def test_the_reward_is_the_share_of_letters_that_need_no_edit():
    # One of ten letters is wrong, one is missing, one is too many
    assert text_reward("open 24 haurs", "open 24 hours")["reward"] == pytest.approx(10 / 11)
    assert text_reward("open 24 hour", "open 24 hours")["reward"] == pytest.approx(10 / 11)
    assert text_reward("open 24 houurs", "open 24 hours")["reward"] == pytest.approx(10 / 11)
    assert text_reward("", "open") == {"reward": 0, "is_exact": 0}
    assert text_reward("xxxx", "open")["reward"] == 0


def test_spaces_capitals_and_other_texts_do_not_count_against_the_wanted_one():
    assert text_reward("O P E N\n24h", "open 24 H") == {"reward": 1, "is_exact": 1}
    assert text_reward("shop OPEN 24h daily", "open 24h") == {"reward": 1, "is_exact": 0}
    assert text_reward("STRASSE", "Straße") == {"reward": 1, "is_exact": 1}


def test_a_picture_full_of_letters_gets_nothing_and_costs_no_time():
    begin = time.perf_counter()
    assert text_reward("ab" * 500_000, "open " * 100)["reward"] == 0
    assert time.perf_counter() - begin < 1


def test_a_row_without_a_wanted_text_is_refused():
    with pytest.raises(ValueError, match="the wanted text is empty"):
        text_reward("open", "  ")


def test_the_number_of_edits_is_that_of_the_recursive_definition():
    @cache
    def by_definition(first: str, second: str) -> int:
        if not first or not second:
            return len(first) + len(second)
        replaced = by_definition(first[1:], second[1:]) + (first[0] != second[0])
        return min(replaced, by_definition(first[1:], second) + 1, by_definition(first, second[1:]) + 1)

    dice = random.Random(0)
    for _ in range(300):
        first, second = ("".join(dice.choices("abc", k=dice.randrange(7))) for _ in range(2))
        assert edit_distance(first, second) == by_definition(first, second), (first, second)


@pytest.fixture
def ocr_server() -> Iterator[str]:
    """The example's server with the reader of the demo's digits."""
    command = [sys.executable, str(ROOT / "examples" / "ocr_server.py"), "--port", "0"]
    command += ["--reader", "async_grpo.data.digit_rewards:read_text"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        yield process.stdout.readline().split()[-1]
        process.terminate()  # a shell lets programs in the background ignore SIGINT


async def test_the_example_server_reads_pictures_and_the_judge_compares_their_texts(ocr_server):
    judge = PictureReader(url=ocr_server)
    _, digits = read_digits()
    num_read = 0
    client = EndpointClient("reader", judge.endpoint(), Limiter())
    try:
        for number in range(20):
            picture = digit_picture(number)
            ink, digit = read_text(picture).split()
            num_read += (ink, digit) == ("gray", str(digits[number]))
            for text, reward in (
                (f"Gray {digit}", 1.0),
                (f"gray {(int(digit) + 1) % 10}", 4 / 5),
                (f"white {digit}", 1 / 6),
            ):
                sample = as_sample(picture, text=text)
                answer = await judge.score(sample, client, phase="train", deadline=time.monotonic() + 20)
                assert answer["reward"] == pytest.approx(reward), (text, answer)
                assert answer["is_exact"] == float(reward == 1)
        assert num_read >= 18  # the network reads one of them wrongly
        broken = as_sample(picture, text="gray 1") | {"drawn_pictures": ["AAAA"]}
        with pytest.raises(BadReply, match="the scorer failed: UnidentifiedImageError"):
            await judge.score(broken, client, phase="train", deadline=time.monotonic() + 20)
    finally:
        await client.close()


class Scripted:
    """A client with one reply."""

    def __init__(self, reply: dict) -> None:
        self.reply = reply

    async def post(self, *_, **__):
        return self.reply


@pytest.mark.parametrize(
    ("item", "columns", "error", "reason"),
    [
        ({"reward": 1.0}, {"text": "a"}, BadReply, "the reader's reply has no text in 'text'"),
        ({"text": 7}, {"text": "a"}, BadReply, "the reader's reply has no text in 'text'"),
        ({"error": "no GPU"}, {"text": "a"}, BadReply, "the scorer failed: no GPU"),
        ({"text": "a"}, {}, ConfigurationError, "{text}, but the sample has only the columns"),
        ({"text": "a"}, {"text": " "}, ConfigurationError, "the column 'text' of a row: the wanted text is empty"),
    ],
)  # fmt: skip
async def test_a_reply_or_row_without_a_text_is_refused_by_name(item, columns, error, reason):
    sample = as_sample(digit_picture(0), **columns)
    client = Scripted({"protocol": 1, "scores": [item]})
    with pytest.raises(error, match=reason):
        await PictureReader(url=URL).score(sample, client, phase="train", deadline=time.monotonic() + 5)


def test_settings_without_a_column_are_refused():
    with pytest.raises(ConfigurationError, match="target is empty"):
        PictureReader(url=URL, target="")
    with pytest.raises(ConfigurationError, match="images is None"):
        PictureReader(url=URL, images=None)
