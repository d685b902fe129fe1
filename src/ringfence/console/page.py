"""A page: its template, the headers that every answer has, and how values of others become text on it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache, partial
from importlib import resources
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from starlette.responses import HTMLResponse, Response

from ringfence.console.charts import clock
from ringfence.core import invisible
from ringfence.core.errors import StoreError
from ringfence.core.model import Person
from ringfence.core.sizes import short_size, short_time

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
        " form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # Not `no-referrer`: browsers would then send forms without the origin that we look at.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_KINDS = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}


def _text(folder: str, name: str) -> str | None:
    file = resources.files("ringfence.console").joinpath(folder, name)
    return file.read_text(encoding="utf-8") if file.is_file() else None


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=FunctionLoader(lambda name: _text("templates", name)),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        ago=ago, clock=clock, exact=exact, json=invisible.json_text, ms=ms, seen=seen, size=short_size, span=short_time
    )
    return environment


def page(template: str, values: Mapping[str, Any], status: int = 200) -> Response:
    return HTMLResponse(_templates().get_template(template).render(values), status, HEADERS)


class Unmade(Response):
    """A page that is laid out later, and not on the loop: what stands on it may be long."""

    def __init__(self, template: str, values: Mapping[str, Any], status: int) -> None:
        super().__init__(None, status)
        self.make = partial(page, template, values, status)


def static(name: str) -> Response | None:
    """A file of ours that pages refer to."""
    kind = _KINDS.get(name.rpartition(".")[2])
    text = _text("static", name) if kind is not None and "/" not in name and not name.startswith(".") else None
    return None if text is None else Response(text, 200, {**HEADERS, "cache-control": "no-cache"}, kind)


def tenant_seen(person: Person) -> str | None:
    """The tenant whose calls this person sees; None: who is alone here sees all."""
    return None if person.answers_for("") else person.tenant


# ── Values on it ──────────────────────────────────────────────────────────────────────────────────


def seen(value: object, *, lines: bool = False) -> str:
    """Text that anybody may have written, with every character that its reader would not see escaped."""
    return invisible.visible("" if value is None else str(value), lines=lines)


def ms(value: float | None) -> str:
    """Milliseconds, with as many digits as say something."""
    if value is None:
        return "–"
    return f"{value / 1000:,.1f} s" if value >= 1000 else f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"


def ago(at: float, now: float) -> str:
    if abs(now - at) < 1:
        return "just now"
    return f"{short_time(now - at)} ago" if at < now else f"in {short_time(at - now)}"


def exact(at: float) -> str:
    """Raises StoreError for what is no time: the database was edited."""
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        raise StoreError("the database holds a time that cannot be read") from None
