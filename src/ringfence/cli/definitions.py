"""Definitions of servers' tools as a person sees them who is to accept them."""

from __future__ import annotations

from collections.abc import Iterator

from ringfence.cli.terminal import MARGIN, quoted, safe
from ringfence.governance.drift import Drift, ordered, text


class Change(Drift):
    """The same for a terminal."""

    __slots__ = ()

    def shown(self) -> Iterator[str]:
        """All that is accepted with it, quoted: nothing may be accepted of which only a part was seen."""
        new = self.new
        old = self.old
        yield ""
        yield safe(f"{new.kind} {new.name} of server {new.server}: {'new' if old is None else 'CHANGED'}")
        if old is None:
            yield f"  digest {new.digest}"
            for name in ordered(new.body):
                yield safe(f"  {name}:")
                yield quoted(text(new.body[name]), MARGIN)
            return
        yield f"  digest {old.digest}"
        yield f"     now {new.digest}"
        for name, lines in self.fields():
            yield safe(f"  {name}:")
            yield from (f"    {safe(f'{sign} {line}')}" for sign, line in lines)
        if isinstance(new.body.get("description"), str):
            yield "  description, in full, as it is now:"
            yield quoted(new.body["description"], MARGIN)
