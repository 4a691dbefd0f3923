"""Send metrics to TensorBoard, Weights & Biases, trackio or MLflow, through accelerate, and to Prometheus.

Each tracker runs in its own thread, so that it cannot slow down or end the run. If a tracker fails, the error is logged
once, and the tracker gets no more metrics.
"""

import hashlib
import logging
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from async_grpo.options.fields import is_number, refuse
from async_grpo.processes.http_host import REFUSAL, is_address

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

# Name of a tracker -> packages, one of which must be installed for this tracker
TRACKERS = {
    "tensorboard": ("tensorboardX", "tensorboard"),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "mlflow": ("mlflow",),
}
WAITING_LINES = 1000  # maximum number of lines that wait for a slow tracker; more lines are dropped
CLOSE_S = 15.0  # seconds that the trackers have at the end to write their waiting lines
PROMETHEUS_HOST = "127.0.0.1"
SILENT_S = 30.0  # seconds of silence after which a client of the Prometheus page is disconnected
MAX_ERROR_CHARACTERS = 300
Numbers = dict[str, float]
log = logging.getLogger(__name__)


class Tracker(Protocol):
    """A destination of metrics."""

    def log(self, values: Numbers, step: int) -> None: ...
    def finish(self) -> None: ...


def parse_trackers(text: str) -> tuple[str, ...]:
    """Parse comma-separated names of trackers.

    Raises:
        ConfigurationError: A tracker is unknown or not installed.
    """
    stripped = [name.strip() for name in text.split(",")]
    names = tuple(name for name in stripped if name)
    unknown = [name for name in names if name not in TRACKERS]
    refuse(bool(unknown), f"--track {text}: unknown {', '.join(unknown)}; known: {', '.join(TRACKERS)}")
    missing = [TRACKERS[name][0] for name in names if not any(map(find_spec, TRACKERS[name]))]
    refuse(bool(missing), f"--track {text}: pip install {' '.join(missing)}")
    return names


def numbers_of(line: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield (name, value) for each finite number of a metrics line. Nested numbers are named by their path.

    >>> dict(numbers_of({"a@2": 1, "b": {"c": 0.5, "d": "text"}, "e": float("nan"), "f": True}))
    {'a_at_2': 1.0, 'b/c': 0.5}
    """
    for key, value in line.items():
        if isinstance(value, Mapping):
            yield from numbers_of(value, f"{prefix}{key}/")
        elif is_number(value):
            # MLflow does not accept "@" in names
            yield (prefix + key).replace("@", "_at_"), float(value)


class TrackerThread(threading.Thread):
    """A thread that creates a tracker and passes all lines to it, so that a slow tracker does not slow down the run.

    If the tracker's library raises any exception, the run continues without the tracker.

    Args:
        name: Name of the tracker.
        make: Creates the tracker.
    """

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        super().__init__(name=name, daemon=True)
        self.make = make
        self.is_late = False  # whether lines have been dropped because the tracker is too slow
        self.lines = queue.SimpleQueue[tuple[Numbers, int] | None]()
        self.start()

    def log(self, values: Numbers, step: int) -> None:
        """Queue the numbers of one step, without waiting for the tracker."""
        if self.is_alive() and self.lines.qsize() < WAITING_LINES:
            self.lines.put((values, step))
        elif self.is_alive() and not self.is_late:
            self.is_late = True
            log.error("--track %s is slower than the run: lines are left out from step %d", self.name, step)

    def run(self) -> None:
        """Create the tracker, and pass lines to it until the queue returns None, which means that no line follows."""
        try:
            tracker = self.make()
            while (line := self.lines.get()) is not None:
                values, step = line
                tracker.log(values, step)
            tracker.finish()
        except Exception as error:
            message = " ".join(str(error).split())[:MAX_ERROR_CHARACTERS]
            log.error(
                "--track %s fails and is left out from here on: %s: %s",
                self.name,
                type(error).__name__,
                message,
            )


class Trackers:
    """All trackers of a run.

    Args:
        make: Functions that create the trackers, by name.
    """

    def __init__(self, make: Mapping[str, Callable[[], Tracker]]) -> None:
        self._threads = [TrackerThread(name, make_tracker) for name, make_tracker in make.items()]

    def log(self, line: Mapping[str, Any]) -> None:
        """Queue the numbers of one step for all trackers, without waiting for them."""
        for thread in self._threads:
            thread.log(dict(numbers_of(line)), int(line["step"]))

    def close(self) -> None:
        """Wait until the trackers have written all lines, at most `CLOSE_S` seconds."""
        deadline = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.lines.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        late = [thread.name for thread in self._threads if thread.is_alive()]
        if late:
            log.error(
                "the trackers do not answer (%s): the lines that they lack are in the metrics file", late
            )


def trackers_of(
    names: Sequence[str], prometheus_port: int | None, folder: Path, run_name: str, options: Mapping[str, Any]
) -> Trackers:
    """Create the trackers of a run.

    Args:
        names: The trackers in `--track`.
        prometheus_port: Port of the page for Prometheus; None serves no page.
        folder: The run's folder.
        run_name: Name of the run.
        options: The run's options, which contain no secrets.
    """
    make: dict[str, Callable[[], Tracker]] = {}
    for name in names:
        make[name] = partial(_accelerate_tracker, name, folder, run_name, options)
    if prometheus_port is not None:
        make["prometheus"] = partial(PrometheusPage, prometheus_port)
    return Trackers(make)


def _accelerate_tracker(name: str, folder: Path, run_name: str, options: Mapping[str, Any]) -> Tracker:
    from accelerate import tracking

    # Replace accelerate's logger, because it needs an object that would set up distributed processes
    tracking.logger = log
    tracker_class = tracking.LOGGER_TYPE_TO_CLASS[name]
    settings = {}
    if tracker_class.requires_logging_directory:
        settings = {"logging_dir": str(folder / name)}
    if name == "wandb":
        # A stable id makes a resumed run continue the same W&B run
        folder_digest = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:16]
        settings = {"id": f"{run_name}-{folder_digest}", "resume": "allow"}
    tracker = tracker_class(run_name, **settings)
    # Only rank 0 has trackers, so the tracker need not check the rank with a process group
    tracker.main_process_only = False
    tracker.start()
    plain_options = {
        key: value for key, value in options.items() if isinstance(value, int | float | str | bool)
    }
    tracker.store_init_configuration(plain_options)
    return tracker


class PrometheusPage:
    """`Tracker` that serves the numbers of the last step for Prometheus at http://127.0.0.1:PORT/metrics."""

    def __init__(self, port: int) -> None:
        import prometheus_client

        registry = prometheus_client.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        self._make_gauge = partial(prometheus_client.Gauge, registry=registry)
        self._server, _ = prometheus_client.start_http_server(port, addr=PROMETHEUS_HOST, registry=registry)
        page = self._server.get_app()
        assert page is not None, "`start_http_server` sets the page"
        self._server.set_app(_under_an_address(page))
        # Without a timeout, a silent connection would keep its thread and file descriptor until the end of the run
        self._server.RequestHandlerClass.timeout = SILENT_S  # type: ignore[attr-defined]  # `StreamRequestHandler` has it
        log.info("metrics for Prometheus: http://%s:%d/metrics", PROMETHEUS_HOST, self._server.server_port)

    def log(self, values: Numbers, step: int) -> None:
        """Set the gauge of each number."""
        for key, value in values.items():
            name = "async_grpo_" + re.sub(r"[^a-zA-Z0-9_]", "_", key)
            if name not in self._gauges:
                self._gauges[name] = self._make_gauge(name, key)
            self._gauges[name].set(value)

    def finish(self) -> None:
        """Stop the server."""
        self._server.shutdown()


def _under_an_address(page: "WSGIApplication") -> "WSGIApplication":
    """Return an application that serves the page only if `is_address` accepts the Host header of the request."""

    def answer(request: "WSGIEnvironment", respond: "StartResponse") -> Iterable[bytes]:
        if is_address(request.get("HTTP_HOST", ""), PROMETHEUS_HOST):
            return page(request, respond)
        respond("403 Forbidden", [("Content-Type", "text/plain")])
        return [REFUSAL.encode()]

    return answer
