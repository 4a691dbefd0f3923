"""The checkpoint that evaluations like best: it stays beside the newest ones."""

from collections.abc import Callable
from pathlib import Path

from async_grpo.metrics.lines import metrics_lines
from async_grpo.metrics.writer import EVAL_FILE
from async_grpo.options.fields import is_number
from async_grpo.training.checkpoint_folder import checkpoints_of

MOST_EVALUATIONS = 1_000_000  # lines that are read, from the end


def keep_best(output_dir: Path, file: str, is_evaluated: Callable[[int], bool]) -> set[str]:
    """Return the names of checkpoints that must stay.

    The best has the highest mean reward on the evaluation file of that name (of equal ones the newest); `checkpoints/best`
    points to it from now on. Those that `is_evaluated` says have yet to be stay, too. The evaluation that began after
    step n is that of the checkpoint of step n.
    """
    folders = reversed(checkpoints_of(output_dir))  # of a step that was saved twice, the newer one
    saved = {int(folder.stem.removeprefix("step_")): folder.name for folder in folders}
    rewards: dict[int, float | None] = {}  # None: nothing could be scored
    for line in metrics_lines(output_dir / EVAL_FILE, MOST_EVALUATIONS):
        if line.get("file", "") != file or "eval_avg_reward" not in line:
            continue
        reward = line["eval_avg_reward"]
        if reward is None or is_number(reward):
            rewards[line["step"]] = reward
    stay = {name for step, name in saved.items() if is_evaluated(step) and step > max(rewards, default=0)}
    if scored := [(rewards[step], step) for step in saved if rewards.get(step) is not None]:
        best = saved[max(scored)[1]]
        new = output_dir / "checkpoints" / ".best"
        new.unlink(missing_ok=True)
        new.symlink_to(best)
        new.replace(new.with_name("best"))
        stay.add(best)
    return stay
