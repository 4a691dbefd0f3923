"""The page of `async-grpo watch` in a real browser: it draws a run that goes on, obeys keys, and runs nothing of it.

`pytest tests/observe/test_watch_page.py --basetemp DIR` leaves the pictures in DIR.
"""

import json
import math
import random
import re
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.real
Browser = pytest.importorskip("browser").Browser

HOSTILE = "</script><script>document.title = 'it ran'; alert('it ran')</script><img src=x onerror=alert(1)>"
DEADLINE_S = 30.0


def metrics_line(step: int) -> str:
    chance = random.Random(step)
    line = {
        "step": step,
        "timestamp": time.time() - 2 * (60 - step),
        "avg_reward": 1 - math.exp(-step / 20) + chance.gauss(0, 0.08),
        "avg_output_tokens": 40 + step + chance.gauss(0, 5),
        "avg_loss": chance.gauss(0, 0.01),
        "avg_kl_div": 0.0,
        "mismatch_kl": 1e-5 * chance.random(),
        "entropy": 2.0 - step / 60,
        "grad_norm": 0.5 + chance.random(),
        "staleness_mean": 0.9 + 0.1 * chance.random(),
        "time_per_batch": 2 + chance.random(),
        "samples_per_second": 30 + chance.random(),
        "staleness_tokens": {"0": 100, "1": 900},
        "verifiers": {"countdown": {"ok": 28, "failed": 3, "timed_out": 1}, HOSTILE: {"ok": 32}},
        "alarms": [HOSTILE],
    }
    return json.dumps(line) + "\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Sixty steps of a run whose verifier, alarm and lane have names that are scripts."""
    folder = tmp_path_factory.mktemp("run")
    options = {"samples_per_question": 8, "batch_size": 4, "num_training_batches": 100}
    (folder / "training_params.json").write_text(json.dumps(options))
    (folder / "training_metrics.jsonl").write_text("".join(map(metrics_line, range(1, 61))))
    with (folder / "timeline.jsonl").open("w") as timeline:
        for step in range(1, 61):
            at = 1.76e9 + 3 * step
            for lane, what, begin, end in (
                ("engine g0", "generate", 0.0, 2.8),
                ("engine g1", "generate", 0.1, 2.2),
                ("rewards", "score", 0.4, 2.9),
                ("reference", "logprobs", 2.2, 2.6),
                ("trainer 0", "wait", 0.0, 0.9),
                ("trainer 0", "train", 0.9, 2.5),
                ("trainer 0", "sync", 2.5, 2.6),
                ("trainer 0", "save", 2.6, 2.9),
                ("weights", "sync", 2.5, 3.0),
                (HOSTILE, "evaluate", 0.5, 1.5),
            ):
                span = {"step": step, "lane": lane, "what": what, "begin": at + begin, "end": at + end}
                timeline.write(json.dumps(span) + "\n")
    with (folder / "eval_metrics.jsonl").open("w") as lines:
        for step in (0, 20, 40, 60):
            half = None if step == 0 else 0.05
            told = {"eval_avg@4": step / 80, "eval_avg@4_ci": half, "eval_pass@4": 0.5, "eval_pass@4_ci": 0.1}
            lines.write(json.dumps({"step": step, "file": "gsm8k", **told}) + "\n")
    return folder


@pytest.fixture(scope="module")
def address(run):
    """Of the command, really started."""
    command = [sys.executable, "-m", "async_grpo", "watch", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            said = server.stdout.readline()
            yield re.search(r"http://127\.0\.0\.1:\d+", said)[0] + "/"
        finally:
            server.send_signal(signal.SIGINT)
            assert server.wait(10) == 0, "Ctrl-C is the way to end it"


@pytest.fixture(scope="module")
def page(address, tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("browser"), height=2200) as browser:
        browser.open(address)
        until(browser, "columns.step.length === 60")
        yield browser


def until(browser, expression: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not browser.evaluate(expression):
        assert time.monotonic() < deadline, f"never {expression}"
        time.sleep(0.1)


def test_it_draws_all_that_a_run_tells_and_runs_nothing_of_it(page, address, tmp_path):
    assert "step 60 of 100" in page.text("#headline")
    assert page.evaluate("document.querySelectorAll('#curves figure').length") >= 9
    assert page.evaluate("document.querySelectorAll('#evaluations figure').length") == 2
    assert page.evaluate("document.querySelectorAll('#lanes rect').length") == 5 * 10
    assert (
        HOSTILE in page.text("#alarms")
        and HOSTILE in page.text("#verifiers")
        and HOSTILE in page.text("#lanes")
    )
    assert page.evaluate("document.querySelectorAll('img, iframe').length") == 0
    assert (
        page.dialogs == [] and page.errors == [] and page.evaluate("document.title").startswith("step 60 of")
    )
    assert all(request.startswith(address) for request in page.requests if request.startswith("http"))
    for scheme in ("light", "dark"):
        page.prefer(scheme)
        assert page.picture(tmp_path / f"{scheme}.png").stat().st_size > 20_000
    page.prefer("light")


def test_the_keys_choose_a_step_and_a_part_of_a_name_finds_other_numbers(page):
    said = "document.querySelector('#curves figcaption span').textContent"
    assert page.evaluate(said).startswith("step 60: ")
    page.evaluate("document.querySelector('#at').focus()")
    page.press("Home")
    assert page.evaluate(said).startswith("step 1: ")
    page.press("End")
    page.evaluate("document.querySelector('#keys').focus()")
    page.press(*"tokens")
    titles = "[...document.querySelectorAll('#curves b')].map((one) => one.textContent)"
    assert page.evaluate(titles) == ["tokens of a completion", "staleness_tokens/0", "staleness_tokens/1"]
    page.evaluate("document.querySelector('#keys').value = ''; drawCurves()")


def test_new_steps_appear_by_themselves_and_a_resumed_run_goes_back(page, run):
    file = run / "training_metrics.jsonl"
    before = file.read_text()
    with file.open("a") as end:
        end.write(metrics_line(61) + metrics_line(62))
    until(page, "columns.step.length === 62")
    assert page.evaluate("document.title").startswith("step 62 of 100")
    assert page.evaluate("document.querySelector('#curves figcaption span').textContent").startswith(
        "step 62: "
    )
    file.write_text("".join(before.splitlines(keepends=True)[:50]))
    until(page, "columns.step.length === 50")
    file.write_text(before)
    until(page, "columns.step.length === 60")
    assert page.evaluate("columns.step.every((step, place) => step === place + 1)") and page.errors == []
