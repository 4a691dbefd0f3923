"""A judge of essays, for `--reward-fns examples/essay_judge.py:essay` with `--judge-model` or `--judge-urls`.

There is no right answer to compare with, so the judge is shown only the task, the rubric and the essay.
"""

from async_grpo.rewards.judges import LLMJudge

RUBRIC = """The essay answers the task and takes a position in its first paragraph.
Each paragraph has one point, with a reason or an example that is specific.
It deals with the strongest objection, and ends where its argument ends.
Take points off for filler, repetition, lists in place of argument, and praise of itself."""

TEMPLATE = """Task:
{prompt}

Rubric:
{rubric}

Essay to judge:
{completion}

Say in two sentences what the essay does best and worst by the rubric. Its length is no merit. End with one line \
`Score: x`, x from {low} (worst) to {high} (best)."""

# If a run starts the judge's server itself, the name of the served model is "judge"
essay = LLMJudge(model="judge", rubric=RUBRIC, template=TEMPLATE, scale=(1, 10), max_tokens=256)
