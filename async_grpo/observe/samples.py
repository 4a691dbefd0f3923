"""`async-grpo samples RUN -o samples.html`: write a page that shows a run's samples and needs no network."""

import base64
import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from safetensors import SafetensorError

from async_grpo.errors import ConfigurationError
from async_grpo.inference.char_ends import char_ends
from async_grpo.metrics.alarms import KEPT, alarm_kind
from async_grpo.metrics.writer import as_json
from async_grpo.observe.run_view import RunView
from async_grpo.observe.sample_images import images_of_samples
from async_grpo.options.fields import POSITIVE, Section, option, refuse, required
from async_grpo.training.record import record_folder, recorded_completions

# Limits of the page's size, because a browser keeps the whole page in memory
MAX_TOKENS = 500_000
MAX_CHARACTERS = 40_000_000
# Errors that can occur when the record or the tokenizer of an untrusted run is read. The page then shows no tokens
UNREADABLE = (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, SafetensorError)
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SamplesConfig(Section):
    """Options of `async-grpo samples`."""

    path: str = required("Folder of the run.", "Samples", argument=True)
    output: str = option("samples.html", "File for the page.", "Samples", aliases=("o",))
    limit: int = option(
        10_000, "Maximum number of samples on the page. The newest ones are shown.", "Samples", range=POSITIVE
    )
    evaluation: bool = option(False, "Show samples of evaluations instead of training samples.", "Samples")


def write_samples_page(config: SamplesConfig) -> None:
    """Write a page that shows the samples of a run.

    Raises:
        ConfigurationError: The folder contains no run, the run wrote no samples, or the page cannot be written.
    """
    text = samples_page(config)
    # A lone surrogate cannot be encoded in UTF-8, so it is written as an escape sequence of JSON
    try:
        Path(config.output).write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigurationError(f"--output {config.output} cannot be written: {error.strerror}") from error
    log.info("samples: %s", config.output)


def samples_page(config: SamplesConfig) -> str:
    """Return a page (HTML) with the newest samples, at most as many as a browser can show.

    Raises:
        ConfigurationError: The folder contains no run, or the run wrote no samples.
    """
    run = RunView(Path(config.path))
    rows = [] if config.evaluation else run.samples(config.limit)
    if rows:
        try:
            _add_tokens(rows, run)
        except UNREADABLE as error:
            log.warning("%s: the page shows no tokens, as the record cannot be read: %s", run.folder, error)
    else:
        rows = run.evaluation_samples(config.limit)
    cure = "they are written after the first step (--keep-sample-groups) or evaluation (--eval-data-path)"
    refuse(not rows, f"{run.folder}: there are no samples to look at: {cure}")
    rows = _newest_that_fit(rows)
    images = images_of_samples(rows, run.folder)
    return page(rows, f"{run.folder.name}: {len(rows)} samples", _alarms(run), images)


def _newest_that_fit(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the newest rows, at least one, whose texts together have at most `MAX_CHARACTERS` characters."""
    num_characters = 0
    num_rows = 0
    for row in reversed(rows):
        num_characters += len(row["input"]) + len(row["completion"])
        num_characters += len(str(row.get("picture", "")))
        if num_characters > MAX_CHARACTERS:
            break
        num_rows += 1
    return rows[-max(1, num_rows) :]


def page(
    rows: Sequence[Mapping[str, Any]],
    title: str,
    alarms: Sequence[Mapping[str, Any]] = (),
    images: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return a page (HTML) that shows samples.

    The rows are embedded as JSON data. No text in them can end the script element around them, or run as a script.

    Args:
        rows: The samples.
        title: Title of the page.
        alarms: Alarms of the run, each with its text (`says`) and its first and last step (`first`, `last`).
        images: Data URLs of the images of the samples, by digest.
    """
    template = (resources.files("async_grpo.observe") / "samples.html").read_text(encoding="utf-8")
    data = as_json({"title": title, "alarms": alarms, "images": dict(images), "samples": rows}).replace(
        "<", "\\u003c"
    )
    policy = (
        f'<meta http-equiv="Content-Security-Policy" content="{security_policy(template)}; img-src data:">'
    )
    return template.replace("<head>", f"<head>\n{policy}", 1).replace("@DATA@", data, 1)


def security_policy(page: str) -> str:
    """Return a Content-Security-Policy that allows only the page's own script, and no connections."""
    match = re.search(r"<script>(.*?)</script>", page, re.DOTALL)
    assert match is not None
    digest = base64.b64encode(hashlib.sha256(match[1].encode()).digest()).decode()
    return f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'"


def _alarms(run: RunView) -> list[dict[str, Any]]:
    """Return the alarms of the last steps: for each kind its latest text, its first step and its last step."""
    alarms_by_kind: dict[str, dict[str, Any]] = {}
    for line in run.metrics(KEPT):
        for text in line.get("alarms") or ():
            alarm = alarms_by_kind.setdefault(alarm_kind(text), {"first": line["step"]})
            alarm["says"] = text
            alarm["last"] = line["step"]
    return list(alarms_by_kind.values())


class RecordedCompletion(NamedTuple):
    """A completion in the record of a run."""

    token_ids: list[int]
    numbers: dict[str, list[Any]]  # recorded numbers by name; each list has one number per token


def _add_tokens(rows: Sequence[dict[str, Any]], run: RunView) -> None:
    """Add to the newest rows the text of each token of the completion, and the numbers that the run recorded per token.

    Nothing is added if the run has no record, or if its model is not on this machine. Trajectories are skipped, because
    the page shows their turns instead.
    """
    model = run.options.get("model_name_or_path")
    if not (run.folder / "record").is_dir() or not isinstance(model, str) or not Path(model).is_dir():
        return
    from async_grpo.modeling.load import load_tokenizer

    tokenizer = load_tokenizer(model)
    num_tokens = 0
    for step, step_rows in groupby(reversed(rows), key=itemgetter("step")):
        completions_by_text = _recorded_completions(run, step, tokenizer)
        for row in step_rows:
            if "turns" in row:
                continue
            completions = completions_by_text.get((row["group"], row["completion"]))
            if not completions:
                continue
            completion = _pop_nearest(completions, row["advantage"] or 0.0)
            num_tokens += len(completion.token_ids)
            if num_tokens > MAX_TOKENS:
                return
            tokens = _token_texts(tokenizer, completion.token_ids, row["completion"])
            row.update(completion.numbers, tokens=tokens)


def _recorded_completions(
    run: RunView, step: int, tokenizer: Any
) -> dict[tuple[int, str], list[RecordedCompletion]]:
    """Return the recorded completions of a step, by their group and their text without the stop token."""
    completions_by_text: dict[tuple[int, str], list[RecordedCompletion]] = {}
    for group, token_ids, numbers in recorded_completions(record_folder(run.folder, step - 1)):
        has_stop_token = token_ids[-1] in run.options["settings"]["stop_token_ids"]
        text_ids = token_ids[:-1] if has_stop_token else token_ids
        text = tokenizer.decode(text_ids, skip_special_tokens=False)
        completion = RecordedCompletion(token_ids, numbers)
        completions_by_text.setdefault((group, text), []).append(completion)
    return completions_by_text


def _pop_nearest(completions: list[RecordedCompletion], advantage: float) -> RecordedCompletion:
    """Remove and return the completion whose advantage is nearest to the given one.

    All completions in the list are of one group and have the same text, so only their advantages differ.
    """

    def distance(completion: RecordedCompletion) -> float:
        return abs(completion.numbers["advantages"][-1] - advantage)

    completions.sort(key=distance, reverse=True)
    return completions.pop()


def _token_texts(tokenizer: Any, token_ids: list[int], text: str) -> list[str]:
    """Return for each token its part of the completion's text."""
    ends = char_ends(tokenizer, token_ids, text).tolist()
    texts = [text[begin:end] for begin, end in pairwise([0, *ends])]
    if not texts[-1]:  # the stop token is not part of the text, so it is decoded here
        texts[-1] = tokenizer.decode(token_ids[-1:])
    return texts
