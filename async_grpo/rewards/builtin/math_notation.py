"""Rewrites notation that math-verify misreads. See `async_grpo.rewards.answer_reading.notation`."""

from async_grpo.rewards.answer_reading.notation import as_latex as as_latex
from async_grpo.rewards.answer_reading.notation import number_before_unit as number_before_unit
from async_grpo.rewards.answer_reading.notation import plain_notation as plain_notation
from async_grpo.rewards.answer_reading.notation import readings as readings
