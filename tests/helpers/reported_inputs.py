"""The inputs made after public bug reports, which lie beside a checkout of the repository."""

import json
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
_PLACES = [REPOSITORY / "shared", REPOSITORY.parent / "shared"]
REPORTS = next(
    (place / "data" / "reports" for place in _PLACES if place.exists()), _PLACES[-1] / "data" / "reports"
)
needs_reports = pytest.mark.skipif(not REPORTS.exists(), reason=f"{REPORTS} is not here")


def reported_rows(name: str) -> list[dict[str, Any]]:
    """Return the rows of a JSONL file of reports, or no rows if the reports are not here."""
    path = REPORTS / name
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
