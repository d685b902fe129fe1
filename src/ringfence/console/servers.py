"""Servers: what each may touch, what was accepted of it, what it shows instead, and the contracts in force.

They are the gateway's own, and not of one tenant of several: people of other tenants do not see them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.responses import Response

from ringfence.console.gateway import ConsoleGateway
from ringfence.core import canonical
from ringfence.core.aio import in_thread
from ringfence.core.errors import Refused
from ringfence.core.model import Contract, GuardedText, Json, ServerSpec
from ringfence.core.secret import REPLACEMENT
from ringfence.governance.drift import Drift

if TYPE_CHECKING:
    from ringfence.console.app import Visit

Clean = Callable[[str, int], GuardedText]
_MAX_TOLD = 20
_MAX_SHOWN = 2_000
"""Characters of one text of the configuration."""
_KEY = r"(?i:key|token|secret|passw|pwd|credential|auth|bearer)"
_OPTION = re.compile(rf"-[\w-]*{_KEY}[\w-]*")
_GIVEN = re.compile(rf"([\w-]*{_KEY}[\w-]*[=:]).+", re.DOTALL)
"""A word that names a key and has it."""


async def every(visit: Visit) -> Response:
    if not visit.person.is_of_all:
        return visit.page("missing.html", {"here": "approvals", "what": "page"}, 404)
    servers = visit.gateway.servers
    # What the loop changes is read on the loop.
    specs, connected = dict(servers.specs()), servers.connected()
    values = await in_thread(partial(_all, visit.gateway, specs, connected))
    return visit.page("servers.html", {"here": "servers", **values})


def _all(gateway: ConsoleGateway, specs: Mapping[str, ServerSpec], connected: Mapping[str, int]) -> Json:
    rows = []
    for name, spec in specs.items():
        shown = gateway.servers.pins.shown(name)
        rows.append(
            {
                "spec": spec,
                "how": how(spec, gateway.clean),
                "connected": connected.get(name, 0),
                "asked": shown is not None,
                "accepted": len(gateway.servers.pins.accepted(name)),
                "drifts": len(gateway.servers.pins.drifts(name)),
            }
        )
    return {"servers": rows, "contracts": [_contract(gateway, each, why) for each, why in gateway.servers.contracts()]}


def how(spec: ServerSpec, clean: Clean) -> GuardedText:
    """How a server is reached, without credentials: the operator wrote it for this machine, not for all who
    look at pages."""
    if spec.url is None:
        return clean(" ".join(_without_keys(spec.command)), _MAX_SHOWN)
    parts = urlsplit(spec.url)
    asked = f"?{REPLACEMENT}" if parts.query or parts.fragment else ""
    return clean(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}{asked}", _MAX_SHOWN)


def _without_keys(words: Sequence[str]) -> Iterator[str]:
    follows = False
    for word in words:
        if follows and not word.startswith("--"):
            yield REPLACEMENT
        elif match := _GIVEN.search(word):
            yield word[: match.end(1)] + REPLACEMENT
        else:
            yield word
        follows = not follows and _OPTION.fullmatch(word) is not None


def _contract(gateway: ConsoleGateway, contract: Contract, why: Refused | None) -> Json:
    shown = {name: value for name, value in asdict(contract).items() if name not in ("name", "digest")}
    return {
        "contract": contract,
        "why": "" if why is None else why.message,
        "leads_to": contract.server
        or ("the gateway's own" if contract.transport == "sandboxed_exec" else "any server"),
        "whole": canonical.loads(canonical.dumps(_plain(shown, gateway.clean))),
    }


def _plain(value: object, clean: Clean) -> object:
    """As JSON has it, and each text as it may be shown."""
    if isinstance(value, dict):
        return {str(name): _plain(each, clean) for name, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each, clean) for each in value]
    return value if value is None or isinstance(value, bool | int | float) else str(clean(str(value), _MAX_SHOWN))


# ── One ───────────────────────────────────────────────────────────────────────────────────────────


async def one(visit: Visit) -> Response:
    """What it may touch, and each of its definitions: accepted, changed, new or gone."""
    return await _shown(visit, "")


async def _shown(visit: Visit, problem: str, status: int = 200) -> Response:
    spec = visit.gateway.servers.specs().get(visit.named) if visit.person.is_of_all else None
    if spec is None:
        return visit.page("missing.html", {"here": "servers", "what": "server"}, 404)
    connected = visit.gateway.servers.connected().get(spec.name, 0)
    values = await in_thread(partial(_one, visit.gateway, spec, connected))
    may = visit.person.is_admin
    return visit.page("server.html", {"here": "servers", **values, "may_accept": may, "problem": problem}, status)


def _one(gateway: ConsoleGateway, spec: ServerSpec, connected: int) -> Json:
    pins = gateway.servers.pins
    shown = pins.shown(spec.name)
    drifts = pins.drifts(spec.name)
    there = {(each.kind, each.name) for each in shown or ()}
    changed = {(each.new.kind, each.new.name) for each in drifts}
    accepted = []
    for row in pins.accepted(spec.name):
        place = (row.definition.kind, row.definition.name)
        state = "unasked" if shown is None else "changed" if place in changed else "kept" if place in there else "gone"
        accepted.append({"row": row, "state": state})
    return {
        "spec": spec,
        "how": how(spec, gateway.clean),
        "asked": shown is not None,
        "connected": connected,
        "touches": [(label, gateway.clean(text, _MAX_SHOWN)) for label, text in _touches(spec)],
        "drifts": [{"drift": each, "fields": list(each.fields()), "stamp": _stamp([each])} for each in drifts],
        "stamp": _stamp(drifts),
        "accepted": accepted,
        "unfit": [gateway.clean(text, _MAX_SHOWN) for text in pins.unfit(spec.name)[:_MAX_TOLD]],
        "contracts": [
            _contract(gateway, each, why) for each, why in gateway.servers.contracts() if each.server == spec.name
        ],
    }


def _touches(spec: ServerSpec) -> list[tuple[str, str]]:
    """What it may reach and change, in words."""
    mounts = [f"{each.host} at {each.at} ({each.mode})" for each in spec.mounts]
    return [
        ("Runs", "elsewhere" if spec.url is not None else _PLACEMENTS.get(spec.placement, f"in box {spec.placement}")),
        ("Network", spec.network if spec.url is None else "its own"),
        ("Folders", "; ".join(mounts) or "none of this host"),
        ("Secrets", ", ".join(spec.secrets) or "none"),
        ("Pins", "accepted by a person" if spec.pins == "accepted" else "accepted when first seen"),
    ]


_PLACEMENTS = {
    "own": "in a box of its own",
    "session": "in the box of each session",
    "unsafe_host": "on this host, without a box",
}


def _stamp(drifts: Sequence[Drift]) -> str:
    """What of them a person has seen."""
    return canonical.digest(
        [[each.new.kind, each.new.name, each.new.digest, each.old.digest if each.old else None] for each in drifts]
    )


async def accept(visit: Visit) -> Response:
    """Accept what a person has seen: one definition, or all that the page showed."""
    servers = visit.gateway.servers
    if not visit.person.is_of_all or visit.named not in servers.specs():
        return visit.page("missing.html", {"here": "servers", "what": "server"}, 404)
    if not visit.person.is_admin:
        return visit.not_entitled("accept definitions")
    drifts = servers.pins.drifts(visit.named)
    chosen = [each for each in drifts if visit.given.get("which") in ("all", f"{each.new.kind} {each.new.name}")]
    if not chosen or visit.given.get("stamp") != _stamp(chosen):
        return await _shown(visit, "It is not what you have seen any more. Read it again; nothing was accepted.", 409)
    digests = [each.new.digest for each in chosen]
    await visit.note("definitions_reviewed", {"server": visit.named, "accepted": digests})
    await servers.pins.accept([each.new for each in chosen], visit.person.name)
    await servers.accepted()
    named = chosen[0].new.name if len(chosen) == 1 else f"{len(chosen)} definitions"
    return visit.back(f"servers/{visit.named}", f"Accepted: {named}.")
