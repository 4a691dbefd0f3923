"""Where metrics go beside their file: accelerate's trackers (TensorBoard, Weights & Biases, trackio, MLflow), Prometheus.

They run in a thread. One that fails is named once and left; none ends or slows a run.
"""

import contextlib
import hashlib
import logging
import math
import queue
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from async_grpo.errors import ConfigurationError

# Which packages a tracker needs, any of them
TRACKERS = {
    "tensorboard": ("tensorboardX", "tensorboard"),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "mlflow": ("mlflow",),
}
WAITING_LINES = 1000  # for trackers that are slow; what comes beyond is dropped
CLOSE_S = 15.0
Numbers = dict[str, float]
log = logging.getLogger(__name__)


class Tracker(Protocol):
    """One place that metrics go to."""

    def log(self, values: Numbers, step: int) -> None: ...
    def finish(self) -> None: ...


def parse_trackers(text: str) -> tuple[str, ...]:
    """Names from a comma list. ConfigurationError: one is unknown, or not installed."""
    names = tuple(filter(None, (name.strip() for name in text.split(","))))
    if unknown := [name for name in names if name not in TRACKERS]:
        raise ConfigurationError(
            f"--track {text}: unknown {', '.join(unknown)}; known: {', '.join(TRACKERS)}"
        )
    if missing := [TRACKERS[name][0] for name in names if not any(map(find_spec, TRACKERS[name]))]:
        raise ConfigurationError(f"--track {text}: pip install {' '.join(missing)}")
    return names


def numbers_of(line: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The finite numbers of a metrics line, nested ones by their path.

    >>> dict(numbers_of({"a@2": 1, "b": {"c": 0.5, "d": "text"}, "e": float("nan"), "f": True}))
    {'a_at_2': 1.0, 'b/c': 0.5}
    """
    for key, value in line.items():
        if isinstance(value, Mapping):
            yield from numbers_of(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            yield (prefix + key).replace("@", "_at_"), float(value)  # MLflow takes no @


class Trackers:
    """Hands every line to all trackers, in a thread.

    Args:
        make: name -> what makes the tracker, in the thread: imports and logins may take their time.
    """

    def __init__(self, make: Mapping[str, Callable[[], Tracker]]) -> None:
        self._lines: queue.Queue[tuple[Numbers, int] | None] = queue.Queue(WAITING_LINES)
        self._is_behind = False
        self._thread = threading.Thread(target=self._run, args=[dict(make)], name="trackers", daemon=True)
        self._thread.start()

    def log(self, line: Mapping[str, Any]) -> None:
        """Of one step; returns at once."""
        try:
            self._lines.put_nowait((dict(numbers_of(line)), int(line["step"])))
        except queue.Full:
            if not self._is_behind:
                log.error(
                    "the trackers are slower than the run: lines are left out from step %s on", line["step"]
                )
            self._is_behind = True

    def close(self) -> None:
        """Wait until they have what was logged, `CLOSE_S` at most."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=CLOSE_S)
            self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.error("the trackers do not answer: what they lack stays in the metrics file")

    def _run(self, make: dict[str, Callable[[], Tracker]]) -> None:
        made: dict[str, Tracker] = {}
        for name, maker in make.items():
            with self._left_out_if_it_fails(name, made):
                made[name] = maker()
        while (entry := self._lines.get()) is not None:
            for name, tracker in list(made.items()):
                with self._left_out_if_it_fails(name, made):
                    tracker.log(*entry)
        for name, tracker in list(made.items()):
            with self._left_out_if_it_fails(name, made):
                tracker.finish()

    @contextlib.contextmanager
    def _left_out_if_it_fails(self, name: str, made: dict[str, Tracker]) -> Iterator[None]:
        try:
            yield
        except (
            Exception
        ) as error:  # of a library that is not ours: whatever it is, the run goes on without it
            made.pop(name, None)
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            log.error("--track %s fails and is left out from here on: %s", name, why)


def trackers_of(
    names: Sequence[str], prometheus_port: int | None, folder: Path, run_name: str, options: Mapping[str, Any]
) -> Trackers:
    """What `--track` and `--prometheus-port` ask for; `options` of the run, which hold no secrets."""
    make: dict[str, Callable[[], Tracker]] = {
        name: partial(_accelerate_tracker, name, folder, run_name, options) for name in names
    }
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

        self._registry, self._gauges = prometheus_client.CollectorRegistry(), dict[str, Any]()
        self._make = partial(prometheus_client.Gauge, registry=self._registry)
        self._server, _ = prometheus_client.start_http_server(port, addr="127.0.0.1", registry=self._registry)
        log.info("metrics for Prometheus: http://127.0.0.1:%d/metrics", self._server.server_port)

    def log(self, values: Numbers, step: int) -> None:
        for key, value in values.items():
            name = "async_grpo_" + re.sub(r"[^a-zA-Z0-9_]", "_", key)
            self._gauges[name] = self._gauges.get(name) or self._make(name, key)
            self._gauges[name].set(value)

    def finish(self) -> None:
        self._server.shutdown()
