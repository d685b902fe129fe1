"""`ringfence check --accept`: what servers say of their tools and prompts, put before a person, and pinned."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import anyio

from ringfence import identity
from ringfence.app import App
from ringfence.cli.terminal import MARGIN, confirm, json_text, quoted, safe
from ringfence.config import Config
from ringfence.errors import RingfenceError, Unavailable
from ringfence.model import Definition, Json, ServerSpec
from ringfence.rulebook import allowed_item

_FIRST = ("title", "description")
"""Read first: this is what a model is told."""


@dataclass(frozen=True, slots=True)
class Change:
    """A definition that is not accepted as it stands; `old` is the one that was."""

    new: Definition
    old: Definition | None


async def accept(settings: Config, yes: bool) -> bool:
    """Show what is new or changed and pin it if a person agrees; whether all is well afterwards."""
    async with App.open(settings) as app:
        changes: list[Change] = []
        down = 0
        for server in settings.servers.values():
            try:
                offered = await app.pool.definitions(server.name, app.agent)
            except RingfenceError as exc:
                print(safe(f"server {server.name} cannot be asked: {exc}"), file=sys.stderr)
                down += 1
                continue
            changes.extend(_changes(app, server, offered))
        agreed = await _settle(app, settings, changes, yes) if changes else True
    if not changes and not down:
        print("Nothing to accept: every definition that the configuration uses is accepted as it stands.")
    return agreed and not down


async def _settle(app: App, settings: Config, changes: list[Change], yes: bool) -> bool:
    shown = "\n".join(line for change in changes for line in _shown(change))
    many = "this definition" if len(changes) == 1 else f"these {len(changes)} definitions"
    if yes:
        print(shown)
    elif not await _agreed(shown, f"Accept {many}?"):
        print("Nothing was accepted.", file=sys.stderr)
        return False
    user = identity.os_user()
    person = identity.person_of(settings.people, user)
    for change in changes:
        await app.accept(change.new, person.name if person is not None else user)
    print(f"Accepted {many}. A gateway that is running notices by itself.")
    return True


async def _agreed(shown: str, question: str) -> bool:
    try:
        return await anyio.to_thread.run_sync(confirm, shown, question)
    except Unavailable as exc:
        print(shown)
        raise Unavailable(exc.reason_code, f"{exc}, or read the above and accept it with --yes") from None


def _changes(app: App, server: ServerSpec, offered: list[Definition]) -> Iterator[Change]:
    """What the configuration uses and nobody has accepted yet. A tool without a contract is not offered to anybody."""
    pins = {(pin.kind, pin.name): pin for pin in app.store.reader().pins(server.name)}
    tools = {c.tool for c in app.config.contracts.values() if c.server in (None, server.name)}
    for definition in offered:
        tool = definition.kind == "tool"
        used = definition.name in tools if tool else allowed_item(server, "prompt", definition.name)
        old = pins.get((definition.kind, definition.name))
        if used and (old is None or old.digest != definition.digest):
            yield Change(definition, old)


# ── Showing ───────────────────────────────────────────────────────────────────────────────────────


def _shown(change: Change) -> Iterator[str]:
    new, old = change.new, change.old
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
