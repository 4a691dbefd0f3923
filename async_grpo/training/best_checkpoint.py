"""The checkpoint with the best evaluation, which is kept in addition to the newest ones."""

from collections.abc import Callable
from pathlib import Path

from async_grpo.metrics.lines import metrics_lines
from async_grpo.metrics.writer import EVAL_FILE
from async_grpo.options.fields import is_number
from async_grpo.training.checkpoint_folder import checkpoints_of, step_and_save

MOST_EVALUATIONS = 1_000_000  # maximum number of lines that are read, from the end of EVAL_FILE


def keep_best(output_dir: Path, file: str, is_evaluated: Callable[[int], bool]) -> set[str]:
    """Return the names of checkpoints that must be kept, and let `checkpoints/best` point to the best one.

    The best checkpoint has the highest mean reward in the evaluations with one data file. If several have this reward,
    the newest of them is the best. Checkpoints that are not yet evaluated are also kept. The evaluation that began
    after step n belongs to the checkpoint of step n.

    Args:
        output_dir: The folder of the run.
        file: Name of the data file of the evaluations.
        is_evaluated: Takes the number of a step, and returns whether an evaluation begins after this step.
    """
    # Oldest first: if a step was saved twice, the dict keeps the newer folder
    folders = reversed(checkpoints_of(output_dir))
    names_by_step = {step_and_save(folder.name)[0]: folder.name for folder in folders}
    rewards: dict[int, float | None] = {}  # mean reward by step; None if no completion could be scored
    for line in metrics_lines(output_dir / EVAL_FILE, MOST_EVALUATIONS):
        if line.get("file", "") != file or "eval_avg_reward" not in line:
            continue
        reward = line["eval_avg_reward"]
        if reward is None or is_number(reward):
            rewards[line["step"]] = reward
    last_evaluated = max(rewards, default=0)
    names_to_keep = {
        name for step, name in names_by_step.items() if is_evaluated(step) and step > last_evaluated
    }
    scores = [(rewards[step], step) for step in names_by_step if rewards.get(step) is not None]
    if scores:
        _, best_step = max(scores)
        best = names_by_step[best_step]
        new_link = output_dir / "checkpoints" / ".best"
        new_link.unlink(missing_ok=True)
        new_link.symlink_to(best)
        new_link.replace(new_link.with_name("best"))
        names_to_keep.add(best)
    return names_to_keep
