"""Sheets of the pictures that a policy drew in its first and its last evaluation."""

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image, ImageDraw, ImageFont

from async_grpo.experience.plain_values import data_url
from async_grpo.observe.run_view import EVALUATION_SAMPLES, RunView

MAX_ROWS = 20  # for each evaluation file
MAX_COLUMNS = 16
CELL = 40  # width and height of a picture on a sheet, in pixels
GAP = 4
TEXT_WIDTH = 120  # width of the column of prompts, in pixels
TEXT_SIZE = 14
HEADING_HEIGHT = 24
MAX_TEXT_CHARACTERS = 15  # more would reach into the pictures
BACKGROUND = "white"
INK = "black"
MAX_SAMPLES = 100_000
MAX_PICTURE_CHARACTERS = 4 << 20
PNG_PREFIX = data_url(b"", "image/png")


class SheetRow(NamedTuple):
    """The prompt of a row of pictures, and the pictures."""

    prompt: str
    pictures: list[Image.Image]


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
    """Return a sheet with a row for each prompt, in the order of the samples, and the prompt before its pictures.

    Evaluation files with names get their names as headings, so that held-out prompts can be told from others.

    Args:
        samples: Samples with a picture.
    """
    rows_by_file = _rows_by_file(samples)
    all_rows = [row for rows in rows_by_file.values() for row in rows]
    num_columns = max(len(row.pictures) for row in all_rows)
    num_headings = sum(1 for name in rows_by_file if name)
    width = TEXT_WIDTH + num_columns * (CELL + GAP)
    height = num_headings * HEADING_HEIGHT + len(all_rows) * (CELL + GAP) + GAP
    sheet = Image.new("RGB", (width, height), BACKGROUND)
    canvas = ImageDraw.Draw(sheet)
    top = GAP
    for name, rows in rows_by_file.items():
        if name:
            _write(canvas, name, top + HEADING_HEIGHT // 2)
            top += HEADING_HEIGHT
        for row in rows:
            _write(canvas, row.prompt, top + CELL // 2)
            for column, picture in enumerate(row.pictures):
                enlarged = picture.convert("RGB").resize((CELL, CELL), Image.Resampling.NEAREST)
                sheet.paste(enlarged, (TEXT_WIDTH + column * (CELL + GAP), top))
            top += CELL + GAP
    return sheet


def _rows_by_file(samples: Sequence[Mapping[str, Any]]) -> dict[str, list[SheetRow]]:
    """Return the first rows of each evaluation file, by the name of the file."""
    rows_by_file: dict[str, dict[Any, SheetRow]] = {}
    for sample in samples:
        rows = rows_by_file.setdefault(_file_name(sample), {})
        if sample["group"] not in rows and len(rows) == MAX_ROWS:
            continue
        row = rows.setdefault(sample["group"], SheetRow(str(sample["input"]), []))
        if len(row.pictures) < MAX_COLUMNS:
            row.pictures.append(_decoded(_picture_text(sample)))
    return {name: list(rows.values()) for name, rows in rows_by_file.items()}


def _write(canvas: ImageDraw.ImageDraw, text: str, middle: int) -> None:
    """Write a text into the column of prompts, around the height `middle`."""
    shown_text = text[:MAX_TEXT_CHARACTERS]
    canvas.text((GAP, middle), shown_text, fill=INK, anchor="lm", font=ImageFont.load_default(TEXT_SIZE))


def _file_name(sample: Mapping[str, Any]) -> str:
    """Return the name that `--eval-data-path` gives to the file of an evaluation's sample; "" if it gives none."""
    match = EVALUATION_SAMPLES.fullmatch(str(sample.get("file", "")))
    suffix = match[2] if match else None
    return suffix.removeprefix("_") if suffix else ""


def _picture_text(sample: Mapping[str, Any]) -> str:
    """Return the base64 text of a sample's picture; "" if it has none, or one that is too large."""
    address = sample.get("picture")
    if not isinstance(address, str) or not address.startswith(PNG_PREFIX):
        return ""
    return address.removeprefix(PNG_PREFIX) if len(address) <= MAX_PICTURE_CHARACTERS else ""


def _decoded(text: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(text)), formats=["PNG"])
