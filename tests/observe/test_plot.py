"""`plot.py` and `async_grpo.observe.figures`: real files, real pictures, an `scp` of our own on PATH."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from typer.testing import CliRunner

from async_grpo.errors import ConfigurationError, RunFailed
from async_grpo.observe import figures
from async_grpo.observe import reader as metrics_files
from async_grpo.observe.figures import draw
from async_grpo.observe.plot import app, plot
from async_grpo.observe.reader import DEFAULT_X_KEY, RunMetrics, fetch, load_runs, read_run

ROOT = Path(__file__).resolve().parents[2]
MAGIC = {".png": b"\x89PNG\r\n", ".svg": b"<?xml", ".pdf": b"%PDF"}


def write(path: Path, steps: list[Any], end: str = "\n") -> Path:
    path.write_text("\n".join(json.dumps(step) for step in steps) + end)
    return path


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    values = {"avg_reward": 0.5, "avg_max_reward_in_group": 1.0, "avg_output_tokens": 300.0, "note": "text"}
    values["wait"] = {"trainer": {"experience": 2.5}}
    steps = [{DEFAULT_X_KEY: 64 * (i + 1), "avg_kl_div": 1e-4 * i**2, **values} for i in range(12)]
    return write(tmp_path / "metrics.jsonl", steps)


def cli(*args: object, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    hidden = ("DISPLAY", "WAYLAND_DISPLAY", "MPLBACKEND")
    env = {key: value for key, value in os.environ.items() if key not in hidden} | environment
    command = [sys.executable, str(ROOT / "plot.py"), *map(str, args)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60)


def drawn(
    runs: list[RunMetrics], variables: list[str], window: int | None = None, legend: bool = False
) -> Figure:
    figure = Figure()
    draw(figure, runs, variables, "x", window, legend)
    return figure


def xy(axes: Axes) -> list[list[tuple[float, float]]]:
    return [list(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in axes.lines]


@pytest.mark.parametrize("suffix", [".svg", ".png", ".pdf", ".PNG"])
def test_the_suffix_of_the_output_chooses_its_format(metrics: Path, tmp_path: Path, suffix: str) -> None:
    output = tmp_path / f"plots{suffix}"
    plot([metrics], ["avg_reward", "wait.trainer.experience"], DEFAULT_X_KEY, output=output)
    assert output.read_bytes().startswith(MAGIC[suffix.lower()])
    if suffix == ".svg":
        assert "<!-- wait.trainer.experience -->" in output.read_text()  # a key of a nested object


@pytest.mark.parametrize(
    "spelling", ["--x-key y -s --smooth-window 3", "--x_key y --smooth --smooth_window 3"]
)
def test_dashes_and_underscores_are_alike_in_option_names(tmp_path, monkeypatch, spelling: str) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(figures, "draw", lambda figure, runs, *more: asked.append(more))
    file, output = write(tmp_path / "m", [{"y": 1, "z": 2}]), tmp_path / "a.png"
    command = ["plot", str(file), "-v", "z", "-o", str(output), *spelling.split()]
    assert CliRunner().invoke(app, command).exit_code == 0 and output.exists()
    assert asked == [(["z"], "y", 3, False)]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["plot", "{file}", "-v", "reward", "-o", "x.png"], ["'reward'", "may name: ", "avg_reward, total_"]),
        (["plot", "{file}", "--nonsense", "-o", "x.png"], ["--nonsense"]),
        (["plot", "{file}", "-v", "avg_reward"], ["display", "-o FILE"]),
        (["info", "absent.jsonl"], ["absent.jsonl", "No such file"]),
    ],
)
def test_a_user_error_is_one_line_on_stderr_and_exit_code_2(metrics, tmp_path, args, words) -> None:
    done = cli(*[arg.format(file=metrics) for arg in args], cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
    assert all(word in done.stderr for word in words), done.stderr
    assert not (tmp_path / "x.png").exists()


def test_without_output_a_window_is_shown_if_the_backend_has_one(metrics: Path, monkeypatch) -> None:
    import matplotlib.pyplot as plt

    shown: list[int] = []
    monkeypatch.setattr(plt, "get_backend", lambda: "TkAgg")
    monkeypatch.setattr(plt, "show", lambda: shown.append(len(plt.gcf().axes)))
    plot([metrics], ["avg_reward", "avg_kl_div"], DEFAULT_X_KEY)
    plt.close("all")
    assert shown == [2]


def test_a_key_of_some_runs_only_is_drawn_for_those_and_noted(tmp_path: Path, caplog) -> None:
    files = [
        write(tmp_path / "old.jsonl", [{"x": 1, "y": 2}, {"x": 2, "y": 3}]),
        write(tmp_path / "new.jsonl", [{"x": 1, "y": 5, "z": 7}, {"x": 2, "y": 6, "z": 8}]),
    ]
    plot(files, ["y", "z"], "x", output=tmp_path / "a.png")
    assert caplog.messages == ["z: nothing to draw in old.jsonl"]
    y_axes, z_axes = drawn(load_runs(files), ["y", "z"]).axes
    assert [pairs for pairs in xy(y_axes) if pairs] == [[(1, 2), (2, 3)], [(1, 5), (2, 6)]]
    assert [pairs for pairs in xy(z_axes) if pairs] == [[(1, 7), (2, 8)]]


GOOD = [{"x": 1, "y": 2}]


@pytest.mark.parametrize(
    ("steps", "more", "message"),
    [
        ([], {}, "no finished step"),
        (GOOD, {"output": "a.gif"}, r"cannot write .*a\.gif: the name must end in \.svg, \.png, \.pdf"),
        (GOOD, {"output": "absent/a.png"}, r"cannot write .*a\.png: No such file"),
        (GOOD, {"names": ["a", "b"]}, "2 names for 1 files"),
        ([{"x": 1, "y": "text"}], {}, "numbers for both 'y' and 'x'; -v and -x may name: x"),
        ([{"x": "text", "y": 2}], {}, "numbers for both 'y' and 'x'; -v and -x may name: y"),
        ([{"x": 1}, {"y": 2}, {"x": None, "y": 3}], {}, "no step has numbers for both 'y' and 'x'"),
        ([{"x": 1, "z": 0.5}], {"variables": None}, "numbers for both 'avg_reward' and 'x'; .*: x, z"),
    ],
)
def test_what_cannot_be_drawn_is_refused_with_what_can(tmp_path, steps, more, message) -> None:
    asked = {"variables": ["y"], "x_key": "x", "output": "a.png"} | more
    asked["output"] = tmp_path / asked["output"]
    with pytest.raises(ConfigurationError, match=message):
        plot([write(tmp_path / "m.jsonl", steps)], **asked)
    assert not asked["output"].exists()


def test_default_variables_of_no_file_and_an_unfinished_last_line_are_skipped_with_a_note(tmp_path, caplog):
    steps = [{"x": 1, "avg_reward": 0.5, "avg_kl_div": None}]
    file = write(tmp_path / "a.jsonl", steps, end='\n{"x": 3, "avg_re')
    plot([file], None, "x", output=tmp_path / "a.svg")
    assert caplog.messages == [
        f"{file}: the last line (2) is unfinished and was skipped",
        "skipped, not in any file: avg_output_tokens, perc_truncated_samples, mismatch_kl, staleness_mean, avg_kl_div",
    ]
    assert "<!-- avg_kl_div -->" not in (tmp_path / "a.svg").read_text()


def test_by_default_the_curves_are_drawn_that_change_the_evaluations_first(tmp_path, caplog):
    rising = {"avg_reward": [0.1, 0.2], "eval_b_avg@16": [0.3, 0.4], "eval_avg@1": [0.5, 0.6]}
    constant = {
        "avg_kl_div": [0.0, 0.0],
        "staleness_mean": [1.0, 1.0],
        "eval_pass@2": [0.1, 0.9],
        "eval_avg@1_ci": [0.1, 0.2],
    }
    columns = {"x": [1, 2]} | rising | constant
    steps = [{key: values[step] for key, values in columns.items()} for step in range(2)]
    plot([write(tmp_path / "a.jsonl", steps)], None, "x", output=tmp_path / "a.svg")
    labels = re.findall(
        r"<!-- (\w*(?:reward|avg@\d+|pass@\d|kl_div|staleness\w*)) -->", (tmp_path / "a.svg").read_text()
    )
    assert labels == ["eval_avg@1", "eval_b_avg@16", "avg_reward"]
    assert "skipped, as they never change: staleness_mean, avg_kl_div" in caplog.messages


def test_a_malformed_line_is_an_error_with_file_and_line_number(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    for broken in ('{"x": 1', "[1, 2]", "nonsense", "\xff"):
        file.write_bytes(f'{{"x": 1}}\n\n{broken}\n{{"x": 2}}\n'.encode("latin-1"))
        with pytest.raises(ConfigurationError, match=r"a\.jsonl, line 3: "):
            read_run(file)


LINES = [json.dumps({"x": i, "text": "größer {"}, ensure_ascii=False).encode() + b"\n" for i in range(4)]


def test_a_file_that_is_still_written_gives_exactly_its_finished_steps(tmp_path: Path) -> None:
    ends = np.cumsum([len(line) for line in LINES]) - 1  # finished with its brace, before its newline
    for cut in range(len(LINES[0]), sum(map(len, LINES)) + 1):
        (tmp_path / "a.jsonl").write_bytes(b"".join(LINES)[:cut])
        steps = read_run(tmp_path / "a.jsonl").steps
        assert [step["x"] for step in steps] == list(range(int((ends <= cut).sum())))


def test_what_is_no_number_makes_a_gap_and_an_absent_key_does_not() -> None:
    values = [1, None, 2, float("nan"), 3, True, 4, "text", 5, float("inf"), 6, 10**400, 7, -1e308]
    steps: list[dict[str, object]] = [{"x": i, "y": value} for i, value in enumerate(values)]
    steps[2:2] = [{"x": 99}]
    x_T, y_T = RunMetrics("a", "a", steps).series("x", "y")
    assert x_T.tolist() == list(range(14))
    np.testing.assert_array_equal(y_T[::2], [1, 2, 3, 4, 5, 6, 7])
    assert np.isnan(y_T[1::2]).all()


def test_a_lone_number_is_marked_and_smoothing_draws_the_average_over_the_faded_line() -> None:
    steps: list[dict[str, object]] = [{"x": i, "y": y} for i, y in enumerate([1, None, 0, 3, 9, None, 4])]
    (axes,) = drawn([RunMetrics("a", "a", steps)], ["y"], window=3).axes
    raw, smooth = axes.lines
    assert raw.get_markevery() == [0, 6] and raw.get_alpha() < 0.5 and smooth.get_alpha() is None
    np.testing.assert_array_equal(raw.get_ydata(), [1, np.nan, 0, 3, 9, np.nan, 4])
    np.testing.assert_array_equal(smooth.get_ydata(), [1, np.nan, 1.5, 4, 6, np.nan, 4])


@pytest.mark.parametrize(("names", "files", "shown"), [([], 1, 0), (["run"], 1, 1), ([], 2, 2)])
def test_a_legend_appears_for_several_runs_or_given_names(metrics, tmp_path, names, files, shown) -> None:
    plot([metrics] * files, ["avg_reward"], DEFAULT_X_KEY, names=names, output=tmp_path / "a.svg")
    svg = (tmp_path / "a.svg").read_text()
    assert ('id="legend_1"' in svg) == bool(shown)
    assert svg.count(f"<!-- {(names or [metrics.name])[0]} -->") == shown


@pytest.mark.parametrize("count", [2, 14])
def test_every_run_keeps_one_colour_of_its_own(count: int) -> None:
    runs = [RunMetrics(str(i), str(i), [{"x": 1, "y": i, "z": i}]) for i in range(count)]
    figure = drawn(runs, ["y", "z"], window=2, legend=True)
    first, second = ([tuple(line.get_color()) for line in axes.lines] for axes in figure.axes)
    legend = [tuple(line.get_color()) for line in figure.legends[0].get_lines()]
    assert first == second == [colour for colour in legend for _ in range(2)]  # raw and smoothed
    assert len(set(legend)) == count


def test_dollars_underscores_and_brackets_in_names_are_drawn_as_they_are(tmp_path: Path) -> None:
    x_key, key, names = r"a $x^$", r"_y $\frac$", [r"_$\sqrt$", "[b]"]  # none of them is a valid formula
    file = write(tmp_path / "a.jsonl", [{x_key: 1, key: 2}] * 2)
    plot([file, file], [key], x_key, names=names, output=tmp_path / "a.svg")
    svg = (tmp_path / "a.svg").read_text()
    assert all(f"<!-- {text} -->" in svg for text in (x_key, key, *names))


@pytest.fixture
def scp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that begins PATH, with an `scp` that records its arguments and then runs `scp.sh`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "scp"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > "{folder}/argv"\n. "{folder}/scp.sh"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def test_remote_files_are_fetched_by_scp_and_named_by_their_remote_path(scp, metrics, tmp_path) -> None:
    # `$6` is host:path and `$7` the local copy: 4 words of options and "--" stand before them.
    (scp / "scp.sh").write_text(f'cp "{tmp_path}/${{6##*/}}" "$7"')
    output = tmp_path / "a.svg"
    files = ("runs/b/metrics.jsonl", "runs/a/metrics.jsonl")
    done = cli("plot", *files, "--remote", "me@[fe80::1%eth0]", "-o", output.name, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    *options, separator, source, target = (scp / "argv").read_text().splitlines()
    assert options == ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
    assert (separator, source) == ("--", "me@[fe80::1%eth0]:runs/a/metrics.jsonl")
    labels = ("a/metrics.jsonl", "avg_reward", "avg_kl_div", DEFAULT_X_KEY)
    assert all(f"<!-- {label} -->" in output.read_text() for label in labels)
    assert not Path(target).parent.exists()


def test_an_scp_that_hangs_or_is_missing_is_named(scp: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(metrics_files, "FETCH_TIMEOUT_S", 0.3)
    (scp / "scp.sh").write_text("exec sleep 60")
    with pytest.raises(RunFailed, match=r"host:m\.jsonl within 0\.3 s"):
        fetch("host", "m.jsonl", tmp_path / "copy")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RunFailed, match="scp did not start"):
        fetch("host", "m.jsonl", tmp_path / "copy")


def test_a_failing_scp_ends_with_exit_code_1_and_its_own_words(scp: Path, tmp_path: Path) -> None:
    (scp / "scp.sh").write_text('echo "no route to host" >&2; : > "$7"; exit 255')
    done = cli("plot", "m.jsonl", "-r", "host", "-o", tmp_path / "a.png")
    assert done.returncode == 1
    assert done.stderr == "error: scp could not fetch host:m.jsonl (exit code 255): no route to host\n"
    assert not (tmp_path / "a.png").exists()


DOUBTFUL_HOSTS = ["", "-oProxyCommand=x", "me@-host", "a b", "host\n", "h;ls", "$(ls)", "::1", "h:p", "a@b@c"]
DOUBTFUL_PATHS = ["m;ls", "$(ls)", "`ls`", "a\nb", "a|b", "a>b", "*", ""]


def test_what_a_shell_or_scp_would_interpret_never_reaches_scp(scp: Path, tmp_path: Path) -> None:
    for host, path in (
        *((host, "m") for host in DOUBTFUL_HOSTS),
        *(("host", path) for path in DOUBTFUL_PATHS),
    ):
        with pytest.raises(ConfigurationError, match="user@" if path == "m" else "shell"):
            fetch(host, path, tmp_path / "copy")
    assert not (scp / "argv").exists()


def test_info_tells_steps_x_range_wall_time_the_numbers_of_each_key_and_what_cannot_be_plotted(
    tmp_path,
) -> None:
    long_key, values = "adapter_latency_seconds." + "x" * 90, [3, 1.25, None, 1e7, "text", -2]
    steps = [{DEFAULT_X_KEY: 64 * (i + 1), long_key: value, "note": "a"} for i, value in enumerate(values)]
    steps[1]["timestamp"], steps[-1]["timestamp"] = 1735689600.0, 1735689661.25
    done = cli("info", write(tmp_path / "a.jsonl", [*steps, {"z": 1e-5}]))
    assert done.returncode == 0 and done.stderr == ""
    first, x_range, lasted, titles, _, numbers, *_, z, others = done.stdout.splitlines()
    assert (first, x_range) == (f"{tmp_path}/a.jsonl: 7 steps", f"{DEFAULT_X_KEY}: 64 to 384")
    assert lasted == "wall time from the first to the last step: 0:01:01"
    assert titles.split() == ["key", "first", "last", "min", "max", "non-numbers"]
    assert numbers.split() == [long_key, "3", "-2", "-2", "10000000", "2"]
    assert z.split() == ["z", "1e-05", "1e-05", "1e-05", "1e-05", "0"]
    assert others == "not plottable (no numbers): note"
