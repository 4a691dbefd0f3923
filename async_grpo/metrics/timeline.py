"""The timeline of a run (`metrics.spans`) as a picture: a lane for each process."""

import math
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_grpo.errors import ConfigurationError
from async_grpo.metrics.figures import picture
from async_grpo.metrics.tail import last_records, spread_records
from async_grpo.metrics.writer import TIMELINE_FILE
from async_grpo.options.fields import refuse

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = dict(  # of Okabe and Ito; they are those of the page as well
    generate="#009e73", score="#e69f00", logprobs="#56b4e9", train="#0072b2",
    sync="#d55e00", save="#cc79a7", evaluate="#f0e442", wait="#c4c9d4",
)  # fmt: skip
LAST_STEPS, LAST_LINES = 10, 5000  # where no steps are named


def draw_timeline(path: Path, steps: str, output: Path | None) -> None:
    """Draw what the processes of a run did: in the steps "A:B", both included, or in the last ten. `path`: see `OneRun`.

    Raises:
        ConfigurationError: there are none, `steps` is no such range, or see `picture`.
    """
    file = (path.parent if path.is_file() else path) / TIMELINE_FILE
    words = re.fullmatch(r"(\d*):(\d*)", steps)
    if not steps:
        spans = last_records(file, LAST_LINES)
        spans = [span for span in spans if span["step"] > spans[-1]["step"] - LAST_STEPS]
    elif words:
        first, last = int(words[1] or 0), int(words[2] or sys.maxsize)
        spans = [s for s, _ in spread_records(file, 0, sys.maxsize) if first <= s["step"] <= last]
    else:
        raise ConfigurationError(f"--steps {steps!r} is not A:B, as 5:20, 5: or :20")
    refuse(not spans, f"{file} holds no spans{' of these steps' if steps else ''}")
    picture(output, lambda figure: fill(figure, spans))


def fill(figure: "Figure", spans: Sequence[dict[str, Any]]) -> None:
    """A row for each lane, a bar for each span, and a line where a step of the trainer ends."""
    lanes = sorted({span["lane"] for span in spans})
    zero = min(span["begin"] for span in spans)
    figure.set_size_inches(12.0, 1.6 + 0.4 * len(lanes))
    figure.set_layout_engine("constrained")
    ax = figure.subplots()
    for what, colour in COLOURS.items():
        if found := [span for span in spans if span["what"] == what]:
            rows = [lanes.index(span["lane"]) for span in found]
            seconds = [span["end"] - span["begin"] for span in found]
            ax.barh(rows, seconds, 0.8, [span["begin"] - zero for span in found], color=colour, label=what)
    ends: dict[int, float] = {}
    for span in spans:
        if span["lane"].startswith("trainer"):
            ends[span["step"]] = max(ends.get(span["step"], 0.0), span["end"] - zero)
    for step, end in ends.items():
        ax.axvline(end, color="0.35", linewidth=0.8)
        if step % math.ceil(len(ends) / 25) == 0:
            ax.annotate(str(step), (end, 1.0), xycoords=("data", "axes fraction"), ha="right", va="bottom")
    ax.set_yticks(range(len(lanes)), lanes)
    begun = datetime.fromtimestamp(zero, UTC)
    ax.set_xlabel(f"seconds since {begun:%Y-%m-%d %H:%M:%S} UTC; above: the steps that end there")
    ax.set(ylim=(len(lanes) - 0.5, -0.5), axisbelow=True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.margins(x=0.0)
    figure.legend(loc="outside lower center", ncols=len(COLOURS), frameon=False)
