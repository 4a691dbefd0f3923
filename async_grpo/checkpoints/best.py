"""Checkpoints that stay for what an evaluation says of them (`--keep-best`)."""

from collections.abc import Callable
from pathlib import Path

from async_grpo.checkpoints.folder import checkpoints_of
from async_grpo.metrics.tail import last_records
from async_grpo.metrics.writer import EVAL_FILE


def keep_best(output_dir: Path, file: str, is_evaluated: Callable[[int], bool]) -> set[str]:
    """The names of checkpoints that must stay: the one with the highest mean reward on the evaluation file of that name, to
    which `checkpoints/best` points from now on (of equal ones the newest), and those that `is_evaluated` says have yet to
    be. The evaluation that began after step n is that of the checkpoint of step n.
    """
    folders = reversed(checkpoints_of(output_dir))  # of a step that was saved twice, the newer one
    saved = {int(folder.name.removeprefix("step_").partition(".")[0]): folder.name for folder in folders}
    lines = [line for line in last_records(output_dir / EVAL_FILE, 1_000_000) if line.get("file", "") == file]
    rewards = {line["step"]: line["eval_avg_reward"] for line in lines}
    stay = {name for step, name in saved.items() if is_evaluated(step) and step > max(rewards, default=0)}
    if scored := [(rewards[step], step) for step in saved if rewards.get(step) is not None]:
        best = saved[max(scored)[1]]
        new = output_dir / "checkpoints" / ".best"
        new.unlink(missing_ok=True)
        new.symlink_to(best)
        new.replace(new.with_name("best"))
        stay.add(best)
    return stay
