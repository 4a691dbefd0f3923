"""Python imports this module at its start: it ends a program that looks for any host but this one.

Frameworks hide failed connections of their telemetry, so an exception would not be seen.
"""

import os
import sys
from typing import Any

LOCAL = (None, "", "localhost", "127.0.0.1", "::1", "0.0.0.0")


def _end_at_foreign_host(event: str, arguments: tuple[Any, ...]) -> None:
    host = None
    if event == "socket.getaddrinfo":
        host = arguments[0]
    elif event == "socket.connect" and isinstance(arguments[1], tuple):
        host = arguments[1][0]
    if isinstance(host, bytes):
        host = host.decode()
    if host not in LOCAL:
        print(f"NetworkError: the program looks for the host {host}", file=sys.stderr, flush=True)
        os._exit(1)


sys.addaudithook(_end_at_foreign_host)
