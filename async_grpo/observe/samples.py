"""`async-grpo samples RUN -o samples.html`: look at what a run wrote, in one file that needs no network."""

import base64
import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from async_grpo.inference.char_ends import char_ends
from async_grpo.metrics.alarms import KEPT, alarm_kind
from async_grpo.metrics.writer import as_json
from async_grpo.observe.run_view import RunView
from async_grpo.options.fields import POSITIVE, Section, option, refuse, required
from async_grpo.training.record import record_folder, recorded_completions

TOKENS, CHARACTERS = 500_000, 40_000_000  # of the newest samples, at most: a browser holds the page in memory
# What a record, or a tokenizer, of somebody else's run may raise: the page then shows no tokens
UNREADABLE = (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, SafetensorError)
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SamplesConfig(Section):
    """Which samples, and where the page goes."""

    path: str = required("Folder of the run.", "Samples", argument=True)
    output: str = option("samples.html", "File that the page is written to.", "Samples", also=("o",))
    limit: int = option(10_000, "Number of newest samples on the page.", "Samples", range=POSITIVE)
    evaluation: bool = option(False, "Show samples of the evaluations instead of the training.", "Samples")


def write_samples_page(config: SamplesConfig) -> None:
    """Write the page. ConfigurationError: the run wrote no samples."""
    text = samples_page(config)
    # A lone surrogate as JSON writes it
    Path(config.output).write_text(text, encoding="utf-8", errors="backslashreplace")
    log.info("samples: %s", config.output)


def samples_page(config: SamplesConfig) -> str:
    """Return the newest samples that a browser can hold. ConfigurationError: there are none."""
    run = RunView(Path(config.path))
    rows = [] if config.evaluation else run.samples(config.limit)
    if rows:
        try:
            _add_tokens(rows, run)
        except UNREADABLE as error:
            log.warning("%s: the page shows no tokens, as the record cannot be read: %s", run.folder, error)
    else:
        rows = run.evaluation_samples(config.limit)
    what = "they are written after the first step (--keep-sample-groups) or evaluation (--eval-data-path)"
    refuse(not rows, f"{run.folder}: there are no samples to look at: {what}")
    sizes = accumulate(len(row["input"]) + len(row["completion"]) for row in reversed(rows))
    rows = rows[-max(1, sum(size <= CHARACTERS for size in sizes)) :]
    return page(rows, f"{run.folder.name}: {len(rows)} samples", _alarms(run))


def page(rows: Sequence[Mapping[str, Any]], title: str, alarms: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return the whole page. Rows are data: no text in them can end its element or become a script."""
    template = (resources.files("async_grpo.observe") / "samples.html").read_text(encoding="utf-8")
    data = as_json({"title": title, "alarms": alarms, "samples": rows}).replace("<", "\\u003c")
    policy = f'<meta http-equiv="Content-Security-Policy" content="{security_policy(template)}">'
    return template.replace("<head>", f"<head>\n{policy}", 1).replace("@DATA@", data, 1)


def security_policy(page: str) -> str:
    """By which a browser runs a page's own script and no other, and asks nobody."""
    found = re.search(r"<script>(.*?)</script>", page, re.DOTALL)
    assert found is not None
    digest = base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()
    return f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'"


def _alarms(run: RunView) -> list[dict[str, Any]]:
    """Return what the last steps warned of: the latest text of each kind, with its first and last step."""
    found: dict[str, dict[str, Any]] = {}
    for line in run.metrics(KEPT):
        for alarm in line.get("alarms") or ():
            kind = found.setdefault(alarm_kind(alarm), {"first": line["step"]})
            kind |= {"says": alarm, "last": line["step"]}
    return list(found.values())


def _add_tokens(rows: Sequence[dict[str, Any]], run: RunView) -> None:
    """Give the newest rows the tokens of their completions, as texts, and the numbers that the run's record has of each."""
    model = run.options.get("model_name_or_path")
    if not (run.folder / "record").is_dir() or not isinstance(model, str) or not Path(model).is_dir():
        return
    from async_grpo.modeling.load import load_tokenizer

    tokenizer, left = load_tokenizer(model), TOKENS
    for step, of_step in groupby(reversed(rows), key=itemgetter("step")):
        known: dict[tuple[int, str], list[Any]] = {}
        for group, ids, numbers in recorded_completions(record_folder(run.folder, step - 1)):
            ended = ids[-1] in run.options["settings"]["stop_token_ids"]
            text = tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False)
            known.setdefault((group, text), []).append((ids, numbers))
        for row in of_step:  # trajectories are shown by their turns
            if "turns" not in row and (same := known.get((row["group"], row["completion"]))):
                # Siblings of one text are told apart by their advantages
                same.sort(key=lambda one: -abs(one[1]["advantages"][-1] - (row["advantage"] or 0.0)))
                ids, numbers = same.pop()
                if (left := left - len(ids)) < 0:
                    return
                ends = pairwise([0, *char_ends(tokenizer, ids, row["completion"]).tolist()])
                tokens = [row["completion"][begin:end] for begin, end in ends]
                tokens[-1] = tokens[-1] or tokenizer.decode(ids[-1:])  # what ended it is no part of the text
                row.update(numbers, tokens=tokens)
