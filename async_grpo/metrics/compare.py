"""Several runs in one picture, over any measure of how far they have come; runs of one name as mean and band."""

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from async_grpo.metrics.figures import colours_for, moving_average, picture, subplots
from async_grpo.metrics.reader import Run, load_runs
from async_grpo.options.fields import refuse

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNITS = ("steps", "samples", "tokens", "seconds", "gpu-hours")
BANDS = "bands: of two runs from one to the other, of more the 95 % t interval of their mean"


def compare_runs(
    paths: list[Path],
    unit: str,
    keys: Sequence[str],
    names: Sequence[str] = (),
    output: Path | None = None,
    window: int = 1,
    gpus: int | None = None,
) -> None:
    """Draw `keys` over `unit`, a curve for each run; one for all `paths` that a GLOB of `names` (NAME=GLOB) fits.

    `window`: steps of a moving average; `gpus`: see `progress`. ConfigurationError: a run cannot be read or has not the
    numbers, a GLOB fits none, or the runs of a name have no x in common.
    """
    groups: dict[str, list[Run]] = {name.partition("=")[0]: [] for name in names}
    for path, run in zip(paths, load_runs(paths), strict=True):
        fits = [name for name, _, glob in (one.partition("=") for one in names) if fnmatch(str(path), glob)]
        groups.setdefault((fits or [run.name])[0], []).append(run)
    empty = ", ".join(name for name, of in groups.items() if not of)
    refuse(bool(empty), f"--name {empty}: NAME=GLOB is wanted, with a GLOB that fits some of the runs given")
    curves = {key: [[curve(run, unit, key, gpus) for run in of] for of in groups.values()] for key in keys}

    def fill(figure: "Figure") -> None:
        axes = subplots(figure, keys, unit, BANDS if names else "")
        for ax, key in zip(axes, keys, strict=True):
            width = 1 if key.startswith("eval_") else window  # evaluations are few, and means already
            for name, runs, colour in zip(groups, curves[key], colours_for(len(groups)), strict=True):
                smooth = [np.stack([x_T, moving_average(y_T, width)]) for x_T, y_T in runs]
                x_T, mean_T, low_T, high_T = mean_and_band(smooth, name)
                label = f"{name} ({len(runs)} runs)" if len(runs) > 1 else name
                ax.plot(x_T, mean_T, color=colour, linewidth=1.8, label=label)
                ax.fill_between(x_T, low_T, high_T, color=colour, alpha=0.2, linewidth=0)
        figure.legend(handles=axes[0].get_lines(), loc="outside upper center", ncols=4, frameon=False)

    picture(output, fill)


def mean_and_band(runs: Sequence[np.ndarray], name: str) -> np.ndarray:
    """Of curves (2, T_r): x, mean, lower and upper end, (4, T), at those x of the shortest one that all have reached.

    >>> mean_and_band([np.array([[0, 2, 4], [0, 2, 4]]), np.array([[1, 2], [3, 4]])], "a").tolist()
    [[1.0, 2.0], [2.0, 3.0], [1.0, 2.0], [3.0, 4.0]]
    """
    shortest = min(runs, key=lambda run: float(run[0, -1]))
    x_T = shortest[0][shortest[0] >= max(run[0, 0] for run in runs)]
    refuse(not x_T.size, f"the runs of {name} have no x in common")
    y_RT, freedom = np.stack([np.interp(x_T, *run) for run in runs]), len(runs) - 1
    mean_T, low_T, high_T = y_RT.mean(0), y_RT.min(0), y_RT.max(0)
    if freedom > 1:
        # Student's t at 97.5 % within 0.1 %: the expansion of Abramowitz and Stegun 26.7.5, its last term fitted
        t = 1.95996 + 2.37227 / freedom + 2.82250 / freedom**2 + 2.55585 / freedom**3 + 2.1 / freedom**4
        half_T = t * y_RT.std(0, ddof=1) / len(runs) ** 0.5
        low_T, high_T = mean_T - half_T, mean_T + half_T
    return np.stack([x_T, mean_T, low_T, high_T])


def curve(run: Run, unit: str, key: str, gpus: int | None = None) -> np.ndarray:
    """(2, T): `progress`, rising, and `key`, where both are finite numbers. An evaluation stands where it began."""
    x_T, y_T = progress(run, unit, gpus), run.column(key)
    if key.startswith("eval_"):  # its line is that of the step in which it ended
        step_T, began_T = run.column("step"), run.column("eval_step")
        x_T = np.interp(np.where(np.isfinite(began_T), began_T, step_T), [0, *step_T], [0, *x_T])
    found_2T = np.stack([x_T, y_T])[:, np.isfinite(x_T) & np.isfinite(y_T)]
    known = ", ".join(run.plottable_keys)
    refuse(not found_2T.size, f"{run.source}: no step has {unit} and a number {key!r}; --y may name: {known}")
    return found_2T[:, np.argsort(found_2T[0], kind="stable")]


def progress(run: Run, unit: str, gpus: int | None = None) -> np.ndarray:
    """(T,): how far the run had come after each step, in one of `UNITS`.

    Tokens: that the engines generated. Seconds: without the time that the run lay dead between two steps. `gpus` default
    to what `async-grpo run` gave to ranks, engines, logprob workers and judges.
    """
    refuse(unit not in UNITS, f"--x {unit!r} is unknown; known: {', '.join(UNITS)}")
    if unit in ("steps", "samples"):
        return run.column("step" if unit == "steps" else "total_samples_accumulated")
    if unit == "tokens":
        return np.cumsum(run.column("tokens_generated"))
    after_T = np.nan_to_num([run.column("seconds_evaluating"), run.column("seconds_checkpointing")]).sum(0)
    # Less has passed if it saved within the step, more if it died and went on later
    passed_T = np.diff(run.column("timestamp"), prepend=np.nan)
    seconds_T = np.cumsum(np.fmin(run.column("time_per_batch") + after_T, passed_T))
    return seconds_T if unit == "seconds" else seconds_T / 3600 * (gpus or _gpus(run))


def _gpus(run: Run) -> int:
    told, needed = run.options, ("WORLD_SIZE", "generation_workers", "settings.logprob_roles")
    silent = any(key not in told for key in needed)
    refuse(silent, f"{run.source} does not say how many GPUs it was given: add --gpus, or choose another --x")
    ranks, engines, roles = (told[key] for key in needed)
    judges = told["judge_replicas"] if told.get("judge_model") and not told.get("judge_gpus") else 0
    return int(ranks + engines * told.get("tensor_parallel_size", 1) + len(roles) + judges)
