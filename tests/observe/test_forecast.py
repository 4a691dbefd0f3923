"""`plot forecast`: known curves are found again, their intervals cover, and what bears no forecast is refused."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from async_grpo.errors import ConfigurationError
from async_grpo.observe import forecast as module
from async_grpo.observe.forecast import Sigmoid, fit, fits, interval
from async_grpo.observe.plot import app, main

X_T = np.arange(1, 81) * 64.0


def sigmoid(start: float, asymptote: float, middle: float, exponent: float) -> Sigmoid:
    return Sigmoid(start, asymptote, math.log(middle), math.log(exponent))


TRUTH = 0.2, 0.7, 1200.0, 1.6  # R0, A, C_mid, B


def formula(x: float, start: float, asymptote: float, middle: float, exponent: float) -> float:
    """As the paper has it."""
    return start + (asymptote - start) / (1 + (middle / x) ** exponent)


def noisy(seed: int, truth: tuple[float, float, float, float] = TRUTH, deviation: float = 0.02) -> np.ndarray:
    noise_T = np.random.default_rng(seed).normal(scale=deviation, size=len(X_T))
    return np.array([formula(x, *truth) for x in X_T]) + noise_T


def refused(x_T: np.ndarray, y_T: np.ndarray) -> str:
    with pytest.raises(ConfigurationError) as error:
        fits(np.stack([x_T, y_T]), "reward over samples")
    return str(error.value)


@pytest.mark.parametrize("start", [-1.0, 0.2])
@pytest.mark.parametrize(("middle", "exponent"), [(400.0, 0.8), (1200.0, 1.6), (3000.0, 6.0)])
def test_without_noise_the_parameters_are_found(start: float, middle: float, exponent: float) -> None:
    truth = start, start + 0.5, middle, exponent
    found = fit(X_T, noisy(0, truth, 0.0))
    np.testing.assert_allclose(found, sigmoid(*truth), rtol=1e-9)
    at_zero, *others = found.at(np.array([0.0, 640.0, 1e5]))
    assert at_zero == found.start
    assert others == pytest.approx([formula(640.0, *truth), formula(1e5, *truth)], rel=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_no_other_curve_fits_better(seed: int) -> None:
    y_T, random = noisy(seed, deviation=0.05), np.random.default_rng(seed)
    best = ((y_T - fit(X_T, y_T).at(X_T)) ** 2).sum()
    others = [sigmoid(*np.array(TRUTH) * random.uniform(0.7, 1.4, 4)) for _ in range(500)] + [sigmoid(*TRUTH)]
    assert best <= min(((y_T - other.at(X_T)) ** 2).sum() for other in others)


@pytest.mark.exhaustive
def test_the_intervals_of_20_noisy_runs_cover_the_truth(monkeypatch) -> None:
    """Each with a chance of 95 %: less than 17 of 20 would happen to 16 tests in 1,000."""
    monkeypatch.setattr(module, "NUM_RESAMPLES", 50)
    covered = {"asymptote": 0, "middle": 0, "later": 0}
    for seed in range(20):
        best, resampled = fits(np.stack([X_T, noisy(seed)]), "reward")
        assert best.asymptote == pytest.approx(TRUTH[1], abs=0.1)
        later_T = X_T[-1:] * 4
        for name, truth, values in (
            ("asymptote", TRUTH[1], [one.asymptote for one in resampled]),
            ("middle", math.log(TRUTH[2]), [one.log_middle for one in resampled]),
            ("later", formula(later_T[0], *TRUTH), [one.at(later_T)[0] for one in resampled]),
        ):
            low, high = interval(values)
            covered[name] += low <= truth <= high
    assert min(covered.values()) >= 17, covered


LINE_T = 0.2 + 0.4 * X_T / X_T[-1]


@pytest.mark.parametrize(
    ("y_T", "why"),
    [
        (LINE_T, "no better|hardly better than a straight line"),
        (LINE_T + noisy(1) - noisy(1, deviation=0.0), "hardly better than a straight line"),
        (np.full_like(X_T, 0.5), "it is 0.5 throughout"),
        (1.0 - noisy(2), "it falls"),
        (noisy(3, (0.1, 0.9, 20_000.0, 2.0), 0.005), "beyond the end of the data|straight line"),
        (
            0.1 * np.log(X_T) + noisy(4, deviation=0.01) - noisy(4, deviation=0.0),
            "beyond the end|wider than the rise",
        ),
        (np.exp(X_T / 2000) / 10 + noisy(5) - noisy(5, deviation=0.0), "beyond the end of the data"),
    ],
    ids=["line", "noisy line", "constant", "falling", "early", "logarithm", "exponential"],
)
def test_what_has_no_curvature_past_its_middle_is_refused(y_T: np.ndarray, why: str) -> None:
    assert any(words in refused(X_T, y_T) for words in why.split("|"))


def test_noise_alone_is_refused() -> None:
    for seed in range(30):
        y_T = np.random.default_rng(seed).normal(size=len(X_T))
        assert refused(X_T, y_T).startswith("no forecast of reward over samples: ")


def test_what_drifts_without_a_trend_is_refused_but_by_chance() -> None:
    borne = 0
    for seed in range(40):
        try:
            y_T = np.random.default_rng(seed).normal(size=len(X_T)).cumsum()
            fits(np.stack([X_T, y_T]), "reward")
            borne += 1
        except ConfigurationError:
            pass
    assert borne <= 2


def test_too_few_points_are_refused() -> None:
    assert "5 points are too few, 12 are needed" in refused(X_T[:5], noisy(0)[:5])
    assert "11 points are too few" in refused(X_T[:11], noisy(0)[:11])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """1,000 steps, first with a dip that no sigmoid has; and evaluations of every 50th step."""
    lines = []
    random = np.random.default_rng(7)
    for step in range(1, 1001):
        reward = formula(64.0 * step, 0.2, 0.7, 12_000.0, 1.6) + random.normal(scale=0.03)
        line = {"step": step, "total_samples_accumulated": 64 * step, "avg_reward": reward - (step < 100)}
        if step % 50 == 0:
            line |= {"eval_step": step - 2, "eval_avg@4": formula(step - 2, 0.1, 0.8, 200.0, 2.0)}
        lines.append(json.dumps(line) + "\n")
    (tmp_path / "training_metrics.jsonl").write_text("".join(lines))
    return tmp_path


def test_the_command_tells_the_parameters_and_draws_the_curve(run: Path, tmp_path: Path) -> None:
    output = tmp_path / "a.svg"
    done = CliRunner().invoke(app, ["forecast", str(run), "--from", "6400", "-o", str(output)])
    assert done.exit_code == 0, done.output
    told = {
        name: rest.split() for name, _, rest in (line.partition(" = ") for line in done.output.splitlines())
    }
    assert list(told) == ["R0", "A", "C_mid", "B", *(f"after {x} samples" for x in (64000, 128000, 256000))]
    low, high = float(told["A"][1][1:]), float(told["A"][3][:-1])
    assert low <= 0.7 <= high and high - low < 0.2
    text = output.read_text()
    labels = ("avg_reward", "samples", "measured", "forecast", "A, its asymptote", "end of the data")
    assert all(f"<!-- {label} -->" in text for label in labels)


def test_an_evaluation_is_forecast_over_steps(run: Path) -> None:
    done = CliRunner().invoke(app, ["forecast", str(run), "-x", "steps", "-y", "eval_avg@4"])
    assert done.exit_code == 0, done.output
    assert "A = 0.8 (0.8 to 0.8)" in done.output and "C_mid = 200 (200 to 200)" in done.output


def test_the_command_refuses_in_one_line_with_exit_code_2(run: Path, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["forecast", str(run), "--from", "63500"])
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == ""
    assert said.err == "error: no forecast of avg_reward over samples: 8 points are too few, 12 are needed\n"
