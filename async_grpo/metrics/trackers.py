"""Where metrics go beside their file: accelerate's trackers (TensorBoard, Weights & Biases, trackio, MLflow), Prometheus.

Each runs in a thread. One that fails is named once and left; none ends or slows a run.
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

# Which packages a tracker needs, any of them
TRACKERS = {
    "tensorboard": ("tensorboardX", "tensorboard"),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "mlflow": ("mlflow",),
}
WAITING_LINES = 1000  # for trackers that are slow; what comes beyond is dropped
CLOSE_S = 15.0
PROMETHEUS_HOST = "127.0.0.1"
SILENT_S = 30.0  # for which a client of the Prometheus page may say nothing
Numbers = dict[str, float]
log = logging.getLogger(__name__)


class Tracker(Protocol):
    """One place that metrics go to."""

    def log(self, values: Numbers, step: int) -> None: ...
    def finish(self) -> None: ...


def parse_trackers(text: str) -> tuple[str, ...]:
    """Names from a comma list. ConfigurationError: one is unknown, or not installed."""
    names = tuple(filter(None, (name.strip() for name in text.split(","))))
    unknown = [name for name in names if name not in TRACKERS]
    refuse(bool(unknown), f"--track {text}: unknown {', '.join(unknown)}; known: {', '.join(TRACKERS)}")
    missing = [TRACKERS[name][0] for name in names if not any(map(find_spec, TRACKERS[name]))]
    refuse(bool(missing), f"--track {text}: pip install {' '.join(missing)}")
    return names


def numbers_of(line: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The finite numbers of a metrics line, nested ones by their path.

    >>> dict(numbers_of({"a@2": 1, "b": {"c": 0.5, "d": "text"}, "e": float("nan"), "f": True}))
    {'a_at_2': 1.0, 'b/c': 0.5}
    """
    for key, value in line.items():
        if isinstance(value, Mapping):
            yield from numbers_of(value, f"{prefix}{key}/")
        elif is_number(value):
            yield (prefix + key).replace("@", "_at_"), float(value)  # MLflow takes no @


class TrackerThread(threading.Thread):
    """Hands every line to the tracker that `make` makes in it: imports and logins may take their time.

    Whatever a library that is not ours raises, the run goes on without it.
    """

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        super().__init__(name=name, daemon=True)
        self.make, self.is_late = make, False
        self.lines = queue.SimpleQueue[tuple[Numbers, int] | None]()
        self.start()

    def log(self, values: Numbers, step: int) -> None:
        """Returns at once."""
        if self.is_alive() and self.lines.qsize() < WAITING_LINES:
            self.lines.put((values, step))
        elif self.is_alive() and not self.is_late:
            self.is_late = True
            log.error("--track %s is slower than the run: lines are left out from step %d", self.name, step)

    def run(self) -> None:
        try:
            tracker = self.make()
            while (entry := self.lines.get()) is not None:
                tracker.log(*entry)
            tracker.finish()
        except Exception as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            log.error("--track %s fails and is left out from here on: %s", self.name, why)


class Trackers:
    """All of them, made by what `make` holds for each name."""

    def __init__(self, make: Mapping[str, Callable[[], Tracker]]) -> None:
        self._threads = [TrackerThread(*one) for one in make.items()]

    def log(self, line: Mapping[str, Any]) -> None:
        """Of one step; returns at once."""
        for thread in self._threads:
            thread.log(dict(numbers_of(line)), int(line["step"]))

    def close(self) -> None:
        """Wait until they have what was logged, `CLOSE_S` at most."""
        give_up = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.lines.put(None)
        for thread in self._threads:
            thread.join(max(0.0, give_up - time.monotonic()))
        if late := [thread.name for thread in self._threads if thread.is_alive()]:
            log.error("the trackers do not answer (%s): what they lack stays in the metrics file", late)


def trackers_of(
    names: Sequence[str], prometheus_port: int | None, folder: Path, run_name: str, options: Mapping[str, Any]
) -> Trackers:
    """What `--track` and `--prometheus-port` ask for; `options` of the run, which hold no secrets."""
    make = dict[str, Callable[[], Tracker]]()
    for name in names:
        make[name] = partial(_accelerate_tracker, name, folder, run_name, options)
    if prometheus_port is not None:
        make["prometheus"] = partial(PrometheusPage, prometheus_port)
    return Trackers(make)


def _accelerate_tracker(name: str, folder: Path, run_name: str, options: Mapping[str, Any]) -> Tracker:
    from accelerate import tracking

    tracking.logger = log  # its own asks for a state that would set up processes
    kind = tracking.LOGGER_TYPE_TO_CLASS[name]
    given = {"logging_dir": str(folder / name)} if kind.requires_logging_directory else {}
    if name == "wandb":  # a run that goes on is one run there, too
        own = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:16]
        given = {"id": f"{run_name}-{own}", "resume": "allow"}
    tracker = kind(run_name, **given)
    tracker.main_process_only = False  # this is rank 0: it need not find out by a process group of its own
    tracker.start()
    plain = {key: value for key, value in options.items() if isinstance(value, int | float | str | bool)}
    tracker.store_init_configuration(plain)
    return tracker


class PrometheusPage:
    """`Tracker` that serves the last step's numbers on the loopback interface, http://127.0.0.1:PORT/metrics."""

    def __init__(self, port: int) -> None:
        import prometheus_client

        registry, self._gauges = prometheus_client.CollectorRegistry(), dict[str, Any]()
        self._make = partial(prometheus_client.Gauge, registry=registry)
        self._server, _ = prometheus_client.start_http_server(port, addr=PROMETHEUS_HOST, registry=registry)
        page = self._server.get_app()
        assert page is not None  # `start_http_server` has set it
        self._server.set_app(_under_an_address(page))
        # A connection that says nothing would keep its thread and its descriptor until the run's end
        self._server.RequestHandlerClass.timeout = SILENT_S  # type: ignore[attr-defined]  # `StreamRequestHandler` has it
        log.info("metrics for Prometheus: http://%s:%d/metrics", PROMETHEUS_HOST, self._server.server_port)

    def log(self, values: Numbers, step: int) -> None:
        for key, value in values.items():
            name = "async_grpo_" + re.sub(r"[^a-zA-Z0-9_]", "_", key)
            self._gauges[name] = self._gauges.get(name) or self._make(name, key)
            self._gauges[name].set(value)

    def finish(self) -> None:
        self._server.shutdown()


def _under_an_address(page: "WSGIApplication") -> "WSGIApplication":
    """Return the page for requests whose Host header is an address, and a refusal for others. See `is_address`."""

    def answer(request: "WSGIEnvironment", respond: "StartResponse") -> Iterable[bytes]:
        if is_address(request.get("HTTP_HOST", ""), PROMETHEUS_HOST):
            return page(request, respond)
        respond("403 Forbidden", [("Content-Type", "text/plain")])
        return [REFUSAL.encode()]

    return answer
