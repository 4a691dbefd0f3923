"""Let the rewards check the rows before a run starts, because a row that cannot be scored would fail in every step."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from async_grpo.config.rewards import ResolvedRewards
from async_grpo.config.run import RunConfig
from async_grpo.errors import ConfigurationError
from async_grpo.experience.dataset import Question
from async_grpo.processes.deadline import interrupted_after
from async_grpo.rewards.adapter.decorators import accepted_options

CHECK_S = 2.0  # time for all checks together. Rows that are not reached in this time are not checked
ROW_S = 5.0  # maximum time of one check
FIRST_ROWS = 100  # number of rows at the beginning that are checked first, in their order
STRIDE = 101  # after the first rows, distance from one checked row to the next

RowCheck = Callable[..., None]
log = logging.getLogger(__name__)


def check_rows(config: RunConfig, rewards: ResolvedRewards, questions: Sequence[Question]) -> None:
    """Have each reward check the rows that it will score (`rows_checked_by`).

    The first `FIRST_ROWS` rows are checked one by one. The other rows are then checked in steps of `STRIDE`, so that a
    short time covers all parts of the files. The checks end when all rows are checked, or after `CHECK_S` seconds.
    Rewards with a fallback are not asked, because they may fail. Nothing is checked in a run with an environment,
    because the environment may add columns to the rows.

    Raises:
        ConfigurationError: A row cannot be scored. The message names its file and line, the reward and the reason.
    """
    checks = _checks_of(config, rewards)
    is_main_thread = threading.current_thread() is threading.main_thread()
    # A check is interrupted by a signal, and only the main thread gets signals
    if not checks or config.environment or not is_main_thread:
        return
    options = config.options_by_name
    end = time.monotonic() + CHECK_S
    for num_checked, index in enumerate(_order_of(len(questions))):
        if time.monotonic() >= end:
            log.info("%d of %d rows were checked by %s", num_checked, len(questions), ", ".join(checks))
            return
        question = questions[index]
        for name in config.combination.chosen(question.row):
            if name in checks:
                _check_row(name, checks[name], question, options)


def _checks_of(config: RunConfig, rewards: ResolvedRewards) -> dict[str, RowCheck]:
    """Return the check of each reward that has one, by the reward's name."""
    checks = {}
    for name, adapter in rewards.adapters.items():
        check = getattr(adapter, "check_row", None)
        if callable(check) and name not in config.fallbacks:
            checks[name] = check
    return checks


def _order_of(num_rows: int) -> Iterator[int]:
    """Yield the index of each row once, in the order in which they are checked."""
    yield from range(min(FIRST_ROWS, num_rows))
    for begin in range(FIRST_ROWS, FIRST_ROWS + STRIDE):
        yield from range(begin, num_rows, STRIDE)


def _check_row(name: str, check: RowCheck, question: Question, options: dict[str, Any]) -> None:
    row = question.row
    try:
        with interrupted_after(ROW_S, f"the check of the row by {name}"):
            check(row, **accepted_options(check, options))
    except Exception as error:
        # A check may be the user's own function, which may raise any exception
        kind = "" if isinstance(error, ValueError | ConfigurationError) else f"{type(error).__name__}: "
        raise ConfigurationError(
            f"{question.where}: the reward {name} cannot score this row: {kind}{error}. Correct the row or drop it, or "
            "name a reward that fits it"
        ) from error
