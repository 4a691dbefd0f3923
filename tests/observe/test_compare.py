"""`plot compare`, `plot staleness` and `plot info` of several runs: figures by hand, and pictures really drawn."""

import contextlib
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from rich.console import Console
from typer.testing import CliRunner

from async_grpo.errors import ConfigurationError
from async_grpo.observe import figures
from async_grpo.observe.figures import colours_for, mean_and_band
from async_grpo.observe.plot import app, compare, compared, main, staleness
from async_grpo.observe.reader import curve, load_runs, progress, read_run

PARAMS = {
    "WORLD_SIZE": 4,
    "generation_workers": 2,
    "tensor_parallel_size": 2,
    "settings": {"logprob_roles": ["reference"], "temperature": 1.0},
    "judge_model": "J",
    "judge_replicas": 3,
    "judge_gpus": None,
}


def run_folder(folder: Path, lines: list[dict[str, Any]], **params: Any) -> Path:
    folder.mkdir(parents=True)
    text = "".join(json.dumps({"step": step, **line}) + "\n" for step, line in enumerate(lines, 1))
    (folder / "training_metrics.jsonl").write_text(text)
    if params:
        (folder / "training_params.json").write_text(json.dumps(params))
    return folder


def rewards(folder: Path, *values: float, samples: int = 8) -> Path:
    lines = [
        {"avg_reward": value, "total_samples_accumulated": samples * i} for i, value in enumerate(values, 1)
    ]
    return run_folder(folder, lines)


@pytest.fixture
def drawn(monkeypatch) -> Figure:
    """What the next picture is drawn on."""
    figure = Figure()
    monkeypatch.setattr(figures, "picture", lambda output: contextlib.nullcontext(figure))
    return figure


def share_within(t: float, freedom: int) -> float:
    """Of Student's distribution between -t and t: the trapezoidal rule on its density."""
    x = np.linspace(-t, t, 20_001)
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    return float(np.trapezoid(scale * (1 + x**2 / freedom) ** (-(freedom + 1) / 2), x))


@pytest.mark.parametrize("count", [3, 4, 5, 8, 12, 31])
def test_the_band_of_three_runs_or_more_holds_95_percent_of_students_distribution(count: int) -> None:
    values = np.random.default_rng(count).normal(size=count)
    _, (mean,), (low,), (high,) = mean_and_band([np.array([[1.0], [value]]) for value in values], "a")
    assert mean == pytest.approx(sum(values) / count) and high - mean == pytest.approx(mean - low)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
    assert share_within((high - mean) / (deviation / math.sqrt(count)), count - 1) == pytest.approx(
        0.95, abs=3e-4
    )


def test_runs_of_other_lengths_and_other_steps_meet_at_the_x_of_the_shortest() -> None:
    long, short = np.array([[0.0, 10, 20, 30], [0, 1, 3, 9]]), np.array([[5.0, 15, 25], [1, 2, 3]])
    late = np.array([[10.0, 40], [5, 11]])
    x_T, mean_T, low_T, high_T = mean_and_band([long, short], "a")
    assert x_T.tolist() == [5, 15, 25]  # the long one there: 0.5, 2, 6
    assert (
        mean_T.tolist() == [0.75, 2, 4.5] and low_T.tolist() == [0.5, 2, 3] and high_T.tolist() == [1, 2, 6]
    )
    assert mean_and_band([long, short, late], "a")[:2].tolist() == [
        [15, 25],
        [10 / 3, 17 / 3],
    ]  # late: 6 and 8
    with pytest.raises(ConfigurationError, match="the runs of a have no x in common"):
        mean_and_band([short, late + 90], "a")


@given(
    st.lists(st.lists(st.floats(-9, 9), min_size=5, max_size=5), min_size=1, max_size=6),
    st.integers(1, 5),
)
def test_the_mean_lies_in_the_band_and_equal_runs_have_none(rows, length) -> None:
    x_T = np.arange(5.0)
    seeds = [np.stack([x_T, row])[:, : 5 if i else length] for i, row in enumerate(rows)]
    found_T, mean_T, low_T, high_T = mean_and_band(seeds, "a")
    assert len(found_T) == length and (low_T <= mean_T + 1e-9).all() and (mean_T <= high_T + 1e-9).all()
    same = mean_and_band([seeds[0]] * len(rows), "a")
    np.testing.assert_allclose(same[1:], np.tile(seeds[0][1], (3, 1)), atol=1e-12)


def test_progress_is_told_in_five_units(tmp_path: Path) -> None:
    """The third step saved within itself (3 of its 9 s), and the run lay dead for 1,000 s before the fourth."""
    lines = [
        {"timestamp": 100.0, "time_per_batch": 5.0},
        {"timestamp": 107.5, "time_per_batch": 6.0, "seconds_evaluating": 1.0, "seconds_checkpointing": 0.5},
        {"timestamp": 116.5, "time_per_batch": 9.0, "seconds_checkpointing": 3.0},
        {"timestamp": 1121.5, "time_per_batch": 5.0, "seconds_evaluating": None},
    ]
    for i, line in enumerate(lines):
        line |= {"tokens_generated": 100 * 2**i, "total_samples_accumulated": 64 * (i + 1)}
    run = read_run(run_folder(tmp_path / "a", lines, **PARAMS))
    assert progress(run, "steps").tolist() == [1, 2, 3, 4]
    assert progress(run, "samples").tolist() == [64, 128, 192, 256]
    assert progress(run, "tokens").tolist() == [100, 300, 700, 1500]
    assert progress(run, "seconds").tolist() == [5, 12.5, 21.5, 26.5]
    gpus = 4 + 2 * 2 + 1 + 3
    np.testing.assert_allclose(progress(run, "gpu-hours"), np.array([5, 12.5, 21.5, 26.5]) * gpus / 3600)
    np.testing.assert_allclose(progress(run, "gpu-hours", 2), np.array([5, 12.5, 21.5, 26.5]) * 2 / 3600)
    silent = read_run(run_folder(tmp_path / "b", lines))
    with pytest.raises(ConfigurationError, match=r"does not say how many GPUs .* --gpus"):
        progress(silent, "gpu-hours")
    with pytest.raises(ConfigurationError, match="--x 'hours' is unknown; known: steps, samples"):
        progress(run, "hours")


def test_an_evaluation_stands_at_the_step_it_began_at_and_not_where_it_ended(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [{"total_samples_accumulated": 8 * i} for i in (1, 2, 3, 4)]
    lines[1] |= {"eval_step": 0, "eval_avg@4": 0.25}
    lines[3] |= {"eval_step": 2, "eval_avg@4": 0.5}
    run = read_run(run_folder(tmp_path / "a", lines))
    assert curve(run, "samples", "eval_avg@4").tolist() == [[0, 16], [0.25, 0.5]]
    assert curve(run, "steps", "eval_avg@4").tolist() == [[0, 2], [0.25, 0.5]]


def test_runs_of_one_name_are_one_curve_and_the_others_their_own(tmp_path: Path, drawn: Figure) -> None:
    base = [rewards(tmp_path / f"base-{i}", *values) for i, values in enumerate([(0, 1, 2), (2, 3)])]
    other = rewards(tmp_path / "other", 5, 6, 7, 8)
    compare([*base, other], names=[f"base={tmp_path}/base-*"])
    (axes,) = drawn.axes
    first, second = axes.lines
    assert first.get_xydata().tolist() == [[8, 1], [16, 2]]
    assert second.get_xydata().tolist() == [[8, 5], [16, 6], [24, 7], [32, 8]]
    corners = axes.collections[0].get_paths()[0].vertices.tolist()
    assert {tuple(corner) for corner in corners} == {(8, 0), (8, 2), (16, 1), (16, 3)}
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == ["base (2 runs)", "other"]
    assert (first.get_color(), second.get_color()) == ("#0072b2", "#d55e00")
    assert "from the lower to the higher of two runs, or the 95 % t interval" in drawn.get_supxlabel()


def test_smoothing_comes_before_the_mean(tmp_path: Path, drawn: Figure) -> None:
    run = rewards(tmp_path / "a", 0, 3, 9)
    compare([run], "steps", smooth_window=3)
    assert drawn.axes[0].lines[0].get_ydata().tolist() == [1.5, 4, 6]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--name", "b={}/b*"],
            "--name b: NAME=GLOB is wanted, with a GLOB that fits some of the runs given",
        ),
        (["--name", "base"], "--name base: NAME=GLOB is wanted"),
        (["--x", "hours"], "--x 'hours' is unknown"),
        (["--y", "rewards"], "no step has samples and a number 'rewards'; --y may name: step, avg_reward"),
        (["--x", "tokens"], "no step has tokens and a number 'avg_reward'"),
        (["-o", "x.gif"], r"cannot write x\.gif: the name must end in \.svg, \.png, \.pdf, \.html"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, arguments: list[str], words: str, capsys) -> None:
    run = rewards(tmp_path / "a", 1, 2)
    with pytest.raises(SystemExit) as ended:
        main(["compare", str(run), *(word.format(tmp_path) for word in arguments)])
    assert ended.value.code == 2
    with pytest.raises(ConfigurationError, match=words):
        raise ConfigurationError(capsys.readouterr().err)


@pytest.mark.parametrize("suffix", [".svg", ".html", ".png"])
def test_the_picture_is_drawn_with_its_labels(tmp_path: Path, suffix: str) -> None:
    runs = [rewards(tmp_path / name, 1, 2, 3) for name in ("<b>one", "$two")]
    output = tmp_path / f"a{suffix}"
    done = CliRunner().invoke(app, ["compare", *map(str, runs), "-x", "steps", "-o", str(output)])
    assert done.exit_code == 0, done.output
    content = output.read_bytes()
    if suffix == ".png":
        assert content.startswith(b"\x89PNG")
        return
    text = content.decode()
    assert all(f"<!-- {label} -->" in text for label in ("&lt;b&gt;one", "$two", "avg_reward", "steps"))
    if suffix == ".html":
        assert text.startswith("<!doctype html>") and text.count("<svg") == text.count("</svg>") == 1
        assert "default-src 'none'" in text and "<b>" not in text and "<?xml" not in text


def test_colours_are_told_apart_by_the_colour_blind_up_to_eight_and_differ_beyond() -> None:
    assert colours_for(8)[:2] == ["#0072b2", "#d55e00"] and len(set(colours_for(8))) == 8
    assert len({tuple(colour) for colour in colours_for(30)}) == 30


def test_staleness_is_drawn_over_the_steps_and_by_share_of_tokens(tmp_path: Path, drawn: Figure) -> None:
    lines = [
        {"staleness_mean": 0.0, "staleness_max": 0, "staleness_tokens": {"0": 30}},
        {"staleness_mean": 0.5, "staleness_max": 1, "staleness_tokens": {"0": 10, "1": 10}},
        {"staleness_mean": 1.2, "staleness_max": 2, "staleness_tokens": {"1": 40, "2": 10}},
    ]
    staleness(run_folder(tmp_path / "a", lines, max_staleness=2), None)
    over_steps, shares = drawn.axes
    mean, most, bound = over_steps.lines
    assert mean.get_xydata().tolist() == [[1, 0], [2, 0.5], [3, 1.2]]
    assert (
        most.get_ydata().tolist() == [0, 1, 2]
        and set(bound.get_ydata()) == {2}
        and bound.get_label() == "bound: 2"
    )
    bars = {bar.get_x() + bar.get_width() / 2: bar.get_height() for bar in shares.patches}
    assert bars == pytest.approx({0: 0.4, 1: 0.5, 2: 0.1})
    assert "mean of the steps 0.567, largest 2" in drawn.get_supxlabel()


def test_staleness_of_a_run_that_did_not_count_tokens_is_drawn_over_the_steps(tmp_path: Path) -> None:
    old = run_folder(tmp_path / "old", [{"staleness_mean": 1.0, "staleness_max": 1}])
    output = tmp_path / "a.svg"
    assert CliRunner().invoke(app, ["staleness", str(old), "-o", str(output)]).exit_code == 0
    text = output.read_text()
    assert "<!-- mean over tokens -->" in text and "share of tokens" not in text and "<!-- bound" not in text
    with pytest.raises(ConfigurationError, match="does not say how old its tokens were"):
        staleness(rewards(tmp_path / "none", 1), output)


def test_info_of_several_runs_shows_the_options_that_differ_and_each_last_number(tmp_path: Path) -> None:
    lines = [{"avg_reward": 0.25}, {"avg_reward": 0.5}, {"avg_reward": None, "only": 3}]
    first = run_folder(tmp_path / "a", lines, lr=1e-6, seed=0, reward_fns=["x"], settings={"t": 1})
    second = run_folder(tmp_path / "b", lines[:1], lr=2e-6, seed=0, reward_fns=["[bold]y"], settings={"t": 2})
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(compared(load_runs([first, second, rewards(tmp_path / "c", 7)])))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in console.export_text().splitlines()]
    table = {row[0]: row[1:] for row in rows if row}
    assert table["steps"] == ["3", "1", "1"]
    assert table["* lr"] == ["1e-06", "2e-06", "-"] and table["* reward_fns"] == ["['x']", "['[bold]y']", "-"]
    assert table["avg_reward"] == ["0.5", "0.25", "7"] and table["only"] == ["3", "-", "-"]
    assert not any("seed" in key or key.startswith("* settings") for key in table)


def test_info_of_several_runs_is_not_cut_where_there_is_no_terminal(tmp_path: Path) -> None:
    runs = [rewards(tmp_path / f"{i}-{'x' * 30}", 1) for i in range(4)]
    done = CliRunner().invoke(app, ["info", *map(str, runs)])
    assert done.exit_code == 0 and all(run.name in done.output for run in runs)
