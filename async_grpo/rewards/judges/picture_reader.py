"""`PictureReader` has a server read the text in a picture (OCR), and compares it with the text that was wanted.

    PictureReader(url="http://127.0.0.1:8080", target="text")

The server implements the protocol of `HTTPScorer` (in `scorers`), with the text that it read in place of a reward:

    {"protocol": 1, "id": "9f86d081884c7d65", "scores": [{"text": "open 24 hours"} | {"error": "why"}]}

`examples/ocr_server.py` is such a server.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.adapter.pictures import PICTURES_KEY
from async_grpo.rewards.http.endpoint import BadReply, require_all
from async_grpo.rewards.judges.judge_prompts import column
from async_grpo.rewards.judges.judge_replies import quote
from async_grpo.rewards.judges.scorers import HTTPScorer, item_of
from async_grpo.rewards.picture_text import text_reward

TEXT = "text"  # field of the reply with the text


@dataclass(frozen=True, kw_only=True)
class PictureReader(HTTPScorer):
    """A judge whose reward says how much of the wanted text a server read in the picture. See `text_reward`.

    Args:
        target: Name of the column with the text that the picture should have.
    """

    target: str = TEXT
    images: str | None = PICTURES_KEY

    def __post_init__(self) -> None:
        super().__post_init__()
        require_all(
            (bool(self.target), "target is empty: it must be the name of a column"),
            (self.images is not None, "images is None, but a reader of texts needs pictures"),
        )

    def _answer_of(self, reply: Mapping[str, Any], sample: Mapping[str, Any]) -> dict[str, Any]:
        read = item_of(reply).get(TEXT)
        if not isinstance(read, str):
            raise BadReply(f"the reader's reply has no text in {TEXT!r}: {quote(reply)}")
        try:
            return text_reward(read, str(column(sample, self.target)))
        except ValueError as error:
            raise ConfigurationError(f"the column {self.target!r} of a row: {error}") from error
