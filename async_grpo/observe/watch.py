"""`async-grpo watch RUN`: a page that shows what a run does, from its files alone; also after its end.

It is served to this user on this machine alone unless `--host` says otherwise, and can only be read. A browser is
answered under an address or as localhost: a name that a foreign page has made point here (DNS rebinding) gets nothing.
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
from async_grpo.observe.status import RECENT, headline
from async_grpo.options.fields import NOT_NEGATIVE, Section, option, required
from async_grpo.processes.http_host import REFUSAL, REFUSAL_OF_USERS, is_address, may_read
from async_grpo.processes.http_server import IDLE_S, bound_logs

POINTS = 2000  # of each curve, at most
EVALUATIONS, SPANS, SAMPLES = 300, 1500, 2000  # the newest
MAX_DIGITS = 20  # of a place in a file; Python reads no number of more than 4300
STATUSES = ("ok", "failed", "timed_out", "abstained")
Line = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class WatchConfig(Section):
    """Which run, and where its page is."""

    path: str = required("Folder of the run.", "Watch", argument=True)
    port: int = option(8765, "Port of the page; 0 takes any free port.", "Watch", range=NOT_NEGATIVE)
    host: str = option(
        "127.0.0.1", "Address to listen on. Everybody who reaches it can read the run.", "Watch"
    )


def watch(config: WatchConfig) -> None:
    """Serve the page until Ctrl-C. ConfigurationError: the folder holds no run, or the address is taken."""
    told: dict[str, Any] = {"host": config.host, "port": config.port, "print": partial(print, flush=True)}
    limits: dict[str, Any] = {"shutdown_timeout": 2.0, "keepalive_timeout": IDLE_S}
    try:
        web.run_app(application(config), **told, **limits, access_log=None)
    except (OSError, OverflowError) as error:
        where = f"--host {config.host} --port {config.port}"
        raise ConfigurationError(f"{where} cannot be listened on ({error}): choose another") from error


def application(config: WatchConfig) -> web.Application:
    """Return the server of `/`, `/data?since=BYTE` and `/samples`, which answers only GET."""
    bound_logs()
    folder = Path(config.path)
    _ = RunView(folder).total_steps  # or it is refused here, not in the browser
    template = (resources.files("async_grpo.observe") / "watch.html").read_text(encoding="utf-8")

    async def page(request: web.Request) -> web.Response:
        return _answer(template, "text/html")

    async def numbers(request: web.Request) -> web.Response:
        since = request.query.get("since", "0")
        if not since.isdecimal() or len(since) > MAX_DIGITS:
            raise web.HTTPBadRequest(text=f"since={since[:MAX_DIGITS]} is no byte")
        text = await asyncio.to_thread(lambda: as_json(data(RunView(folder), int(since))))
        return _answer(text, "application/json")

    async def samples(request: web.Request) -> web.Response:
        try:
            told = SamplesConfig(path=str(folder), limit=SAMPLES, evaluation="evaluation" in request.query)
            text = await asyncio.to_thread(samples_page, told)
        except ConfigurationError as error:
            raise web.HTTPNotFound(text=str(error)) from error
        return _answer(text, "text/html")

    @web.middleware
    async def guard(request: web.Request, handler: Callable[..., Awaitable[Any]]) -> Any:
        if not is_address(request.headers.get("Host", ""), config.host):
            raise web.HTTPForbidden(text=REFUSAL)
        transport = request.transport
        if transport is None:  # who asked has gone
            raise web.HTTPForbidden(text=REFUSAL_OF_USERS)
        client, server = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        if not await asyncio.to_thread(may_read, client[:2], server[:2]):
            raise web.HTTPForbidden(text=REFUSAL_OF_USERS)
        return await handler(request)

    served = web.Application(middlewares=[guard])
    served.add_routes([web.get("/", page), web.get("/data", numbers), web.get("/samples", samples)])
    return served


def _answer(text: str, kind: str) -> web.Response:
    """Of a page only its own script runs, and that one asks nobody but this server."""
    rules = security_policy(text) + "; connect-src 'self'" if kind == "text/html" else "default-src 'none'"
    headers = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
    rules += "; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    headers["Content-Security-Policy"] = rules
    body = text.encode("utf-8", "replace")
    return web.Response(body=body, content_type=kind, charset="utf-8", headers=headers)


def data(run: RunView, since: int) -> dict[str, Any]:
    """Return what the page draws: the curves behind byte `since` of the metrics file, and the present state of all else.

    `since` comes back as 0 if the file is shorter than that, as after a resume: then the curves are whole.
    """
    since, lines, following_byte = run.metrics_from(since, POINTS)
    recent, spans = run.metrics(RECENT), run.spans(SPANS)
    verifiers = [line.get("verifiers", {}) for line in recent]
    lanes = sorted({span["lane"] for span in spans})
    return {
        "since": since,
        "next": following_byte,
        "columns": columns(lines),
        "name": run.folder.resolve().name,
        "headline": headline(run, recent).plain,
        "step": recent[-1]["step"] if recent else 0,
        "total": run.total_steps,
        "alarms": recent[-1].get("alarms", []) if recent else [],
        "log": [] if recent else list(chain.from_iterable(run.log_lines(5).values())),
        "recent": len(recent),
        "staleness": sum((Counter(line.get("staleness_tokens", {})) for line in recent), Counter()),
        "verifiers": {
            name: [sum(of.get(name, {}).get(status, 0) for of in verifiers) for status in STATUSES]
            for name in chain.from_iterable(verifiers)
        },
        "evaluations": [
            {"step": line["step"], "file": line.get("file", ""), "means": intervals(line)}
            for line in run.evaluations(EVALUATIONS)
        ],
        "lanes": lanes,
        "spans": [[lanes.index(s["lane"]), s["what"], s["begin"], s["end"], s["step"]] for s in spans],
    }


def columns(lines: Sequence[Line]) -> dict[str, list[float | None]]:
    """Return the numbers of metrics lines by key, None where a line has none.

    >>> columns([{"step": 1, "a": {"b": 0.5}}, {"step": 2}])
    {'step': [1.0, 2.0], 'a/b': [0.5, None]}
    """
    rows = [dict(numbers_of(line)) for line in lines]
    return {key: [row.get(key) for row in rows] for key in dict.fromkeys(key for row in rows for key in row)}


def intervals(line: Line) -> dict[str, tuple[float | None, float | None]]:
    """Return the means of an evaluation, each with half of its interval."""
    return {key: (line[key], line[f"{key}_ci"]) for key in line if f"{key}_ci" in line}
