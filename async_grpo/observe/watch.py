"""`async-grpo watch RUN`: serve a page that shows a run, while it runs or after its end.

By default only the same user on this machine can open the page (see `--host`). The server answers only GET requests
whose host is an IP address or localhost. Other host names are refused, because a foreign web page could make its own
host name point to this machine (DNS rebinding).
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any

from aiohttp import web

from async_grpo.errors import ConfigurationError
from async_grpo.metrics.trackers import numbers_of
from async_grpo.metrics.writer import as_json
from async_grpo.observe.run_view import RunView
from async_grpo.observe.samples import SamplesConfig, samples_page, security_policy
from async_grpo.observe.status import RECENT, REWARD_STATUSES, headline
from async_grpo.options.fields import NOT_NEGATIVE, Section, option, required
from async_grpo.processes.http_host import REFUSAL, REFUSAL_OF_USERS, is_address, may_read
from async_grpo.processes.http_server import IDLE_S, bound_logs

POINTS = 2000  # maximum number of points of a curve
# Maximum numbers of evaluations, spans and samples. The newest are shown
EVALUATIONS = 300
SPANS = 1500
SAMPLES = 2000
LOG_LINES = 5
SHUTDOWN_TIMEOUT_S = 2.0
MAX_DIGITS = 20  # limit for a position in a file, because Python refuses to convert more than 4300 digits
Line = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class WatchConfig(Section):
    """Options of `async-grpo watch`."""

    path: str = required("Folder of the run.", "Watch", argument=True)
    port: int = option(8765, "Port of the page; 0 takes any free port.", "Watch", range=NOT_NEGATIVE)
    host: str = option(
        "127.0.0.1", "Address to listen on. Everybody who can reach this address can read the run.", "Watch"
    )


def watch(config: WatchConfig) -> None:
    """Serve the page until Ctrl-C.

    Raises:
        ConfigurationError: The folder contains no run, or the address cannot be listened on.
    """
    try:
        web.run_app(
            application(config),
            host=config.host,
            port=config.port,
            print=partial(print, flush=True),
            shutdown_timeout=SHUTDOWN_TIMEOUT_S,
            keepalive_timeout=IDLE_S,
            access_log=None,
        )
    except (OSError, OverflowError) as error:
        address = f"--host {config.host} --port {config.port}"
        raise ConfigurationError(f"{address} cannot be listened on ({error}): choose another") from error


def application(config: WatchConfig) -> web.Application:
    """Return the web application with the paths `/`, `/data?since=BYTE` and `/samples`.

    Raises:
        ConfigurationError: The folder contains no run.
    """
    bound_logs()
    folder = Path(config.path)
    # If the folder contains no run, this raises an error now, and not at the browser's first request
    _ = RunView(folder).total_steps
    template = (resources.files("async_grpo.observe") / "watch.html").read_text(encoding="utf-8")

    async def page(request: web.Request) -> web.Response:
        return _answer(template, "text/html")

    async def numbers(request: web.Request) -> web.Response:
        since = request.query.get("since", "0")
        if not since.isdecimal() or len(since) > MAX_DIGITS:
            raise web.HTTPBadRequest(text=f"since={since[:MAX_DIGITS]} is not a position in a file")
        text = await asyncio.to_thread(lambda: as_json(data(RunView(folder), int(since))))
        return _answer(text, "application/json")

    async def samples(request: web.Request) -> web.Response:
        try:
            options = SamplesConfig(path=str(folder), limit=SAMPLES, evaluation="evaluation" in request.query)
            text = await asyncio.to_thread(samples_page, options)
        except ConfigurationError as error:
            raise web.HTTPNotFound(text=str(error)) from error
        return _answer(text, "text/html")

    @web.middleware
    async def guard(request: web.Request, handler: Callable[..., Awaitable[Any]]) -> Any:
        if not is_address(request.headers.get("Host", ""), config.host):
            raise web.HTTPForbidden(text=REFUSAL)
        transport = request.transport
        if transport is None:  # the client has closed the connection
            raise web.HTTPForbidden(text=REFUSAL_OF_USERS)
        client = transport.get_extra_info("peername")
        server = transport.get_extra_info("sockname")
        if not await asyncio.to_thread(may_read, client[:2], server[:2]):
            raise web.HTTPForbidden(text=REFUSAL_OF_USERS)
        return await handler(request)

    server = web.Application(middlewares=[guard])
    server.add_routes([web.get("/", page), web.get("/data", numbers), web.get("/samples", samples)])
    return server


def _answer(text: str, content_type: str) -> web.Response:
    """Return a response. Its Content-Security-Policy allows only the page's script and connections to this server."""
    policy = "default-src 'none'"
    if content_type == "text/html":
        policy = f"{security_policy(text)}; connect-src 'self'"
    return web.Response(
        body=text.encode("utf-8", "replace"),
        content_type=content_type,
        charset="utf-8",
        headers={
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-store",
            "Content-Security-Policy": f"{policy}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        },
    )


def data(run: RunView, since: int) -> dict[str, Any]:
    """Return the data that the page draws: new points of the curves, and the current state of everything else.

    Args:
        run: The run.
        since: Position in the metrics file. The page already has the points before this position.

    Returns:
        A dict that can be written as JSON. If the file is shorter than the argument `since`, because a resumed run has
        cut it, the dict has the points of the whole file, and its `since` is 0.
    """
    since, lines, next_byte = run.metrics_from(since, POINTS)
    recent_lines = run.metrics(RECENT)
    last_line = recent_lines[-1] if recent_lines else {}
    log_lines: list[str] = []
    if not recent_lines:
        log_lines = list(chain.from_iterable(run.log_lines(LOG_LINES).values()))
    spans = run.spans(SPANS)
    lanes = sorted({span["lane"] for span in spans})
    return {
        "since": since,
        "next": next_byte,
        "columns": columns(lines),
        "name": run.folder.resolve().name,
        "headline": headline(run, recent_lines).plain,
        "step": last_line.get("step", 0),
        "total": run.total_steps,
        "alarms": last_line.get("alarms", []),
        "log": log_lines,
        "recent": len(recent_lines),
        "staleness": _tokens_by_staleness(recent_lines),
        "verifiers": _calls_by_reward(recent_lines),
        "evaluations": [
            {"step": line["step"], "file": line.get("file", ""), "means": intervals(line)}
            for line in run.evaluations(EVALUATIONS)
        ],
        "lanes": lanes,
        "spans": [
            [lanes.index(span["lane"]), span["what"], span["begin"], span["end"], span["step"]]
            for span in spans
        ],
    }


def _tokens_by_staleness(lines: Sequence[Line]) -> Mapping[str, int]:
    tokens: Counter[str] = Counter()
    for line in lines:
        tokens += Counter(line.get("staleness_tokens", {}))
    return tokens


def _calls_by_reward(lines: Sequence[Line]) -> dict[str, list[int]]:
    """Return for each reward the number of calls per status, in the order of `REWARD_STATUSES`."""
    counts: dict[str, list[int]] = {}
    for line in lines:
        for name, stats in line.get("verifiers", {}).items():
            earlier = counts.get(name, [0] * len(REWARD_STATUSES))
            counts[name] = [
                count + stats.get(status, 0) for count, status in zip(earlier, REWARD_STATUSES, strict=True)
            ]
    return counts


def columns(lines: Sequence[Line]) -> dict[str, list[float | None]]:
    """Return for each key its numbers in the metrics lines, with None for lines without the key.

    >>> columns([{"step": 1, "a": {"b": 0.5}}, {"step": 2}])
    {'step': [1.0, 2.0], 'a/b': [0.5, None]}
    """
    rows = [dict(numbers_of(line)) for line in lines]
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: [row.get(key) for row in rows] for key in keys}


def intervals(line: Line) -> dict[str, tuple[float | None, float | None]]:
    """Return for each mean of an evaluation its value and half the width of its 95 % interval."""
    return {key: (line[key], line[f"{key}_ci"]) for key in line if f"{key}_ci" in line}
