"""Waiting for what can neither be cancelled nor joined."""

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any

import torch


def in_thread(call: Callable[[], Any], name: str) -> concurrent.futures.Future:
    """Run `call` in a daemon thread: one that never returns cannot be cancelled, and must not be joined at exit."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    outcome: concurrent.futures.Future = concurrent.futures.Future()

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome
