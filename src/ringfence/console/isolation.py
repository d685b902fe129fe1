"""Isolation: what boxes of this gateway have, and what `ringfence doctor` saw when it tried to get out of some."""

from __future__ import annotations

import platform
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from ringfence import __version__
from ringfence.console.gateway import ConsoleGateway
from ringfence.core.aio import in_thread
from ringfence.core.canonical import object_at
from ringfence.core.model import Json

if TYPE_CHECKING:
    from ringfence.console.app import Visit

_PLACES = {
    "box": "In fresh boxes",
    "session": "In a session, after a hostile step",
    "server": "As MCP servers in their boxes",
}


async def shown(visit: Visit) -> Response:
    if not visit.person.is_of_all:
        return visit.page("missing.html", {"here": "approvals", "what": "page"}, 404)
    return visit.page("isolation.html", {"here": "isolation", **await in_thread(partial(_seen, visit.gateway))})


def _seen(gateway: ConsoleGateway) -> Json:
    boxes = gateway.boxes()
    return {"boxes": boxes, "reports": [_report(each) for each in boxes["reports"]]}


def _report(report: Json) -> Json:
    """One run of the doctor, as far as its parts are what they should be."""
    host = report["host"]
    cases = [each for each in report["cases"] if isinstance(each, dict)]
    isolation = object_at(host, "isolation")
    return {
        "title": _PLACES.get(str(report.get("place")), "Elsewhere"),
        "at": _moment(host.get("at")),
        "host": " ".join(str(host.get(name, "")) for name in ("system", "kernel", "machine")),
        "user": str(host.get("user", "")),
        "stale": _stale(report, host),
        "kept": [each for each in cases if each.get("kept") is True],
        "broken": [each for each in cases if each.get("kept") is False],
        "uncounted": [each for each in cases if each.get("kept") is None],
        "protections": {
            str(name): how for name, how in object_at(isolation, "protections").items() if type(how) is dict
        },
        "limits": {str(name): how for name, how in object_at(isolation, "limits").items() if type(how) is dict},
    }


def _stale(report: Json, host: Json) -> str:
    """Why it says little of how things are now."""
    if report.get("version") != __version__:
        return f"it was made with version {report.get('version')}, and this is {__version__}"
    if host.get("kernel") != platform.release():
        return f"it was made on kernel {host.get('kernel')}, and this is {platform.release()}"
    return ""


def _moment(text: Any) -> float | None:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None
