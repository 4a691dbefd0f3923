"""Run a call in a separate thread, and wait for its result with a time limit."""

import concurrent.futures
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from async_grpo.errors import DeadlineExceeded


def in_thread(
    call: Callable[[], Any],
    name: str,
    limit_s: float,
    timeout_message: str,
    outcome: concurrent.futures.Future | None = None,
) -> Callable[[], Any]:
    """Run `call` in a daemon thread, so that a call that never returns does not keep the process from exiting.

    Args:
        call: The function.
        name: Name of the thread.
        limit_s: Seconds to wait for the result.
        timeout_message: Message of the error after that time.
        outcome: The future that gets the result. Other code may set its result or error earlier. This ends the wait,
            and the result of the call is dropped.

    Returns:
        A function that waits for the call, and returns its result or raises its error. After `limit_s` seconds of
        waiting it raises DeadlineExceeded with `timeout_message`.
    """
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    future = outcome or concurrent.futures.Future()

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            result = call()
        except BaseException as error:
            with suppress(concurrent.futures.InvalidStateError):
                future.set_exception(error)
        else:
            with suppress(concurrent.futures.InvalidStateError):
                future.set_result(result)

    def wait() -> Any:
        if not concurrent.futures.wait([future], limit_s).done:
            raise DeadlineExceeded(timeout_message)
        return future.result()

    threading.Thread(target=run, name=name, daemon=True).start()
    return wait


def sync_in_thread(call: Callable[[], Any], version: int, sync_timeout_s: float) -> Callable[[], Any]:
    """Finish the sync of policy `version` in a thread, and return a function that waits for its result.

    Args:
        call: Finishes the sync.
        version: The policy version, which names the thread.
        sync_timeout_s: The option `--sync-timeout-s`. The limit is three times this, because the sync waits for three
            things: its beginning, the engines, and the commit.
    """
    limit_s = 3 * sync_timeout_s
    return in_thread(
        call,
        name=f"sync-{version}",
        limit_s=limit_s,
        timeout_message=(
            f"policy version {version} did not reach the engines within {limit_s:.0f} s (3 x --sync-timeout-s): the "
            "weight transport does not answer"
        ),
    )
