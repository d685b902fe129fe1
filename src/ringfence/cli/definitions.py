"""Definitions of servers' tools as a person sees them who is to accept them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from ringfence.cli.terminal import MARGIN, json_text, quoted, safe
from ringfence.core.model import Definition, Json
from ringfence.core.record import dataclass

_FIRST = ("title", "description")
"""Shown first: a model reads these."""


@dataclass(frozen=True, slots=True)
class Change:
    """A definition that is not accepted yet; `old` is the accepted one that it replaces."""

    new: Definition
    old: Definition | None

    def shown(self) -> Iterator[str]:
        """All that is accepted with it, quoted: nothing may be accepted of which only a part was seen."""
        new = self.new
        old = self.old
        yield ""
        yield safe(f"{new.kind} {new.name} of server {new.server}: {'new' if old is None else 'CHANGED'}")
        if old is None:
            yield f"  digest {new.digest}"
            for name in _ordered(new.body):
                yield safe(f"  {name}:")
                yield quoted(_text(new.body[name]), MARGIN)
            return
        yield f"  digest {old.digest}"
        yield f"     now {new.digest}"
        for name in _ordered({**old.body, **new.body}):
            if old.body.get(name) != new.body.get(name):
                yield safe(f"  {name}:")
                yield from _difference(old.body.get(name), new.body.get(name))
        if isinstance(new.body.get("description"), str):
            yield "  description, in full, as it is now:"
            yield quoted(new.body["description"], MARGIN)


def _ordered(body: Json) -> list[str]:
    first = [name for name in _FIRST if name in body]
    return [*first, *sorted(name for name in body if name not in (*_FIRST, "name"))]


def _difference(old: object, new: object) -> Iterator[str]:
    for line in difflib.ndiff(_text(old).split("\n"), _text(new).split("\n")):
        if not line.startswith("?"):
            yield f"    {safe(line)}"


def _text(value: object) -> str:
    if value is None:
        return "(none)"
    return value if isinstance(value, str) else json_text(value)
