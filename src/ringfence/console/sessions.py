"""Sessions: a list, what each uses, its files and output, and a form that stops it.

A person looks after the sessions of all agents of their tenant. What was written in a box is shown as text, and handed
out as files that no browser opens.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from starlette.responses import Response

from ringfence.console.charts import Line, line_chart
from ringfence.console.page import HEADERS, tenant_seen
from ringfence.core.errors import Refused, Unavailable
from ringfence.core.model import Json
from ringfence.core.sessions import Owner, SessionInfo, SessionView, UsageSample
from ringfence.core.sizes import short_size

if TYPE_CHECKING:
    from ringfence.console.app import Visit
    from ringfence.sandbox.sessions.service import SessionService

_MAX_ENDED = 50
_MAX_ENTRIES = 500
_SHOWN_CHARACTERS = 8_000
_SHOWN_OF_STEP = 4_000
"""Of each stream. Twice as much is kept: see `_text`."""
_WORKSPACE = "/workspace"
_OUTPUT = "/workspace/output"
_LONGEST_PATH = 4_096


async def every(visit: Visit) -> Response:
    """Those that are open, and those that ended within a day."""
    found: Sequence[SessionInfo] = ()
    why = ""
    try:
        async with visit.gateway.sessions() as service:
            if service is not None:
                found = await service.of_tenant(Owner(tenant_seen(visit.person) or "", ""))
    except Unavailable as exc:  # such as a keeper that still has the settings of before
        why = str(visit.gateway.clean(exc.message, _SHOWN_CHARACTERS))
    open_ = [_row(info) for info in found if info.state != "stopped"]
    ended = [_row(info) for info in found if info.state == "stopped"]
    values = {"here": "sessions", "open": open_[::-1], "ended": ended[: -_MAX_ENDED - 1 : -1], "why": why}
    return visit.page("sessions.html", values)


def _row(info: SessionInfo) -> Json:
    return {
        "info": info,
        "agent": info.owner.agent,
        "created": _moment(info.created_at),
        "expires": _moment(info.expires_at),
        "ended": _moment(info.ended_at),
    }


def _moment(text: str | None) -> float | None:
    with suppress(ValueError):
        return None if text is None else datetime.fromisoformat(text).timestamp()
    return None


# ── One ───────────────────────────────────────────────────────────────────────────────────────────


async def one(visit: Visit) -> Response:
    """What it uses, its files, and what its last steps wrote."""
    async with visit.gateway.sessions() as service:
        view = None if service is None else await _find(visit, service)
        if service is None or view is None:
            return _missing(visit)
        path = visit.given.get("path", _OUTPUT if view.info.state == "stopped" else _WORKSPACE)[:_LONGEST_PATH]
        files = await _files(visit, service, view.info, path)
        processes = await _processes(visit, service, view.info)
    info = view.info
    shown = {
        "here": "sessions",
        **_row(info),
        "charts": _charts(view.samples, info),
        "steps": [_step(visit, each) for each in reversed(view.steps)],
        "processes": processes,
        "path": path,
        "above": path.rpartition("/")[0] if path.startswith(f"{_WORKSPACE}/") else None,
        "may_stop": info.state != "stopped" and visit.person.is_admin,
        **files,
    }
    return visit.page("session.html", shown)


async def _find(visit: Visit, service: SessionService) -> SessionView | None:
    """The session that the address names, if it is of this person's tenant."""
    every = await service.of_tenant(Owner(tenant_seen(visit.person) or "", ""))
    info = next((each for each in every if each.id == visit.named), None)
    if info is None or not visit.person.answers_for(info.owner.tenant):
        return None
    try:
        return await service.view(info.owner, info.id)
    except Refused:
        return None


def _missing(visit: Visit) -> Response:
    return visit.page("missing.html", {"here": "sessions", "what": "session"}, 404)


async def _files(visit: Visit, service: SessionService, info: SessionInfo, path: str) -> Json:
    """The entries of one of its folders, or why there are none."""
    try:
        entries = await service.entries(info.owner, info.id, path, 1)
    except (Refused, Unavailable) as exc:
        return {"entries": [], "no_files": str(visit.gateway.clean(exc.message, _SHOWN_CHARACTERS)), "more_files": 0}
    shown = [
        {"entry": each, "href": quote(each.path, safe=""), "at": each.modified.timestamp()}
        for each in entries[:_MAX_ENTRIES]
    ]
    return {"entries": shown, "no_files": "", "more_files": max(0, len(entries) - _MAX_ENTRIES)}


async def _processes(visit: Visit, service: SessionService, info: SessionInfo) -> list[Json]:
    """Its background commands, and the end of what they wrote."""
    out: list[Json] = []
    try:
        for each in await service.processes(info.owner, info.id):
            logs = await service.logs(info.owner, info.id, each.process, 0, 0)
            out.append(
                {
                    "number": each.process,
                    "words": visit.gateway.clean(" ".join(each.argv), 300),
                    "at": _moment(each.started_at),
                    "state": "running" if each.running else each.report.ended if each.report else "ended",
                    "text": _text(visit, logs.stdout, _SHOWN_CHARACTERS) + _text(visit, logs.stderr, _SHOWN_CHARACTERS),
                }
            )
    except (Refused, Unavailable):  # it ended meanwhile
        return out
    return out


def _step(visit: Visit, step: Any) -> Json:
    return {
        "number": step.step,
        "at": _moment(step.at),
        "what": visit.gateway.clean(step.what, 300),
        "ended": step.ended,
        "stdout": _text(visit, step.stdout, _SHOWN_OF_STEP),
        "stderr": _text(visit, step.stderr, _SHOWN_OF_STEP),
    }


def _text(visit: Visit, data: bytes, most: int) -> str:
    """The end of output, as it may be shown: without known secrets. It is cut once it is clean, so that none is cut in
    two and not known. Its characters are made visible on the page."""
    cleaned = str(visit.gateway.clean(data[-2 * most :].decode("utf-8", "replace"), 4 * most))
    return cleaned if len(data) <= most else cleaned[-most:]


def _charts(samples: Sequence[UsageSample], info: SessionInfo) -> list[Json]:
    """Memory at each moment, and the processors that were used between two of them."""
    if len(samples) < 2:
        return []
    times = [each.at for each in samples]
    cores = [0.0]
    for before, now in itertools.pairwise(samples):
        cores.append(max(0.0, now.cpu_ms - before.cpu_ms) / 1000.0 / max(0.001, now.at - before.at))
    memory = [float(each.memory_bytes) for each in samples]
    most = float(info.limits.memory_bytes)
    return [
        line_chart("Processors in use", times, [Line("processors", cores)], lambda value: f"{value:.2f}"),
        line_chart("Memory", times, [Line("memory", memory)], lambda value: short_size(int(value)), most),
    ]


# ── Files and the end ─────────────────────────────────────────────────────────────────────────────


async def file(visit: Visit) -> Response:
    """One file, as a download that no browser opens. The download is on record."""
    path = visit.given.get("path", "")[:_LONGEST_PATH]
    async with visit.gateway.sessions() as service:
        view = None if service is None else await _find(visit, service)
        if service is None or view is None:
            return _missing(visit)
        try:
            data = await service.read(view.info.owner, view.info.id, path, 0, None)
        except (Refused, Unavailable) as exc:
            text = str(visit.gateway.clean(exc.message, _SHOWN_CHARACTERS))
            return visit.page("error.html", {"title": "No such file", "text": text, "known": True}, 404)
    named = visit.gateway.clean(path, 300)
    await visit.note("session_file_read", {"session": view.info.id, "path": named, "bytes": len(data)})
    return Response(data, 200, attachment(path), "application/octet-stream")


def attachment(path: str) -> Mapping[str, str]:
    """What keeps a browser from showing a file, under its name."""
    name = path.rpartition("/")[2] or "file"
    plain = "".join(each if each.isascii() and (each.isalnum() or each in "-_.") else "_" for each in name)[:100]
    whole = quote(name.encode("utf-8", "replace")[:400], safe="")
    return {
        **HEADERS,
        "content-security-policy": "default-src 'none'; sandbox; frame-ancestors 'none'",
        "content-disposition": f"attachment; filename=\"{plain}\"; filename*=UTF-8''{whole}",
    }


async def stop(visit: Visit) -> Response:
    """End a session, on record before it ends."""
    if not visit.person.is_admin:
        return visit.not_entitled("stop sessions")
    async with visit.gateway.sessions() as service:
        view = None if service is None else await _find(visit, service)
        if service is None or view is None:
            return _missing(visit)
        info = view.info
        if info.state == "stopped":
            return visit.back(f"sessions/{info.id}", "It had ended already.")
        body = {"session": info.id, "owner": list(info.owner), "reason": visit.reason()}
        await visit.note("session_stopped", {name: each for name, each in body.items() if each})
        began = time.monotonic()
        try:
            await service.end(info.owner, info.id)
        except (Refused, Unavailable) as exc:
            return visit.back(f"sessions/{info.id}", f"It could not be stopped: {exc.message}")
    return visit.back("sessions", f"{info.id} was stopped, in {time.monotonic() - began:.1f} s.")
