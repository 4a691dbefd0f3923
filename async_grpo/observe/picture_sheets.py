"""Sheets of the pictures that a policy drew in its first and its last evaluation."""

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from async_grpo.experience.plain_values import data_url
from async_grpo.observe.run_view import RunView

MAX_ROWS = 20
MAX_COLUMNS = 16
CELL = 40  # width and height of a picture on a sheet, in pixels
GAP = 4
BACKGROUND = 255
MAX_SAMPLES = 100_000
MAX_PICTURE_CHARACTERS = 4 << 20
PNG_PREFIX = data_url(b"", "image/png")


def write_picture_sheets(folder: Path) -> list[Path]:
    """Write `before.png` and `after.png` into a run's folder: a row of pictures for each prompt.

    Returns:
        The files. There are none if the evaluations have no pictures.
    """
    samples = [sample for sample in RunView(folder).evaluation_samples(MAX_SAMPLES) if _picture_text(sample)]
    if not samples:
        return []
    steps = [sample["step"] for sample in samples]
    files = []
    for name, step in (("before.png", min(steps)), ("after.png", max(steps))):
        sheet = picture_sheet([sample for sample in samples if sample["step"] == step])
        sheet.save(folder / name)
        files.append(folder / name)
    return files


def picture_sheet(samples: Sequence[Mapping[str, Any]]) -> Image.Image:
    """Return a sheet with a row for each prompt, in the order of the samples.

    Args:
        samples: Samples with a picture.
    """
    rows: dict[Any, list[Image.Image]] = {}
    for sample in samples:
        row = rows.setdefault(sample["group"], [])
        if len(row) < MAX_COLUMNS:
            row.append(_decoded(_picture_text(sample)))
    shown_rows = list(rows.values())[:MAX_ROWS]
    width = max(map(len, shown_rows)) * (CELL + GAP) + GAP
    sheet = Image.new("RGB", (width, len(shown_rows) * (CELL + GAP) + GAP), (BACKGROUND,) * 3)
    for row_number, row in enumerate(shown_rows):
        for column, picture in enumerate(row):
            enlarged = picture.convert("RGB").resize((CELL, CELL), Image.Resampling.NEAREST)
            sheet.paste(enlarged, (GAP + column * (CELL + GAP), GAP + row_number * (CELL + GAP)))
    return sheet


def _picture_text(sample: Mapping[str, Any]) -> str:
    """Return the base64 text of a sample's picture; "" if it has none, or one that is too large."""
    address = sample.get("picture")
    if not isinstance(address, str) or not address.startswith(PNG_PREFIX):
        return ""
    return address.removeprefix(PNG_PREFIX) if len(address) <= MAX_PICTURE_CHARACTERS else ""


def _decoded(text: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(text)), formats=["PNG"])
