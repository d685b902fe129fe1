"""Servers: what each may touch, what was accepted of it, what it shows instead, and the contracts in force.

They are the gateway's own, and not of one tenant of several: people of other tenants do not see them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from starlette.responses import Response

from ringfence.console.house import House
from ringfence.core import canonical
from ringfence.core.aio import in_thread
from ringfence.core.errors import Refused
from ringfence.core.model import Contract, Json, ServerSpec
from ringfence.governance.drift import Drift

if TYPE_CHECKING:
    from ringfence.console.app import Visit

_MOST_TOLD = 20


async def every(visit: Visit) -> Response:
    if not visit.person.is_of_all:
        return visit.page("missing.html", {"here": "approvals", "what": "page"}, 404)
    return visit.page("servers.html", {"here": "servers", **await in_thread(partial(_all, visit.house))})


def _all(house: House) -> Json:
    connected = house.desk.connected()
    rows = []
    for name, spec in house.desk.servers().items():
        shown = house.desk.pins.shown(name)
        rows.append(
            {
                "spec": spec,
                "how": _how(spec),
                "connected": connected.get(name, 0),
                "asked": shown is not None,
                "accepted": len(house.desk.pins.accepted(name)),
                "drifts": len(house.desk.pins.drifts(name)),
            }
        )
    return {"servers": rows, "contracts": [_contract(each, why) for each, why in house.desk.contracts()]}


def _how(spec: ServerSpec) -> str:
    return spec.url if spec.url is not None else " ".join(spec.command)


def _contract(contract: Contract, why: Refused | None) -> Json:
    shown = {name: value for name, value in asdict(contract).items() if name not in ("name", "digest")}
    return {
        "contract": contract,
        "why": "" if why is None else why.message,
        "leads_to": contract.server
        or ("the gateway's own" if contract.transport == "sandboxed_exec" else "any server"),
        "whole": canonical.loads(canonical.dumps(_plain(shown))),
    }


def _plain(value: object) -> object:
    """As JSON has it."""
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float) else str(value)


# ── One ───────────────────────────────────────────────────────────────────────────────────────────


async def one(visit: Visit) -> Response:
    """What it may touch, and each of its definitions: accepted, changed, new or gone."""
    return await _shown(visit, "")


async def _shown(visit: Visit, problem: str, status: int = 200) -> Response:
    spec = visit.house.desk.servers().get(visit.named) if visit.person.is_of_all else None
    if spec is None:
        return visit.page("missing.html", {"here": "servers", "what": "server"}, 404)
    values = await in_thread(partial(_one, visit.house, spec))
    may = visit.person.is_admin
    return visit.page("server.html", {"here": "servers", **values, "may_accept": may, "problem": problem}, status)


def _one(house: House, spec: ServerSpec) -> Json:
    pins = house.desk.pins
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
        "how": _how(spec),
        "asked": shown is not None,
        "connected": house.desk.connected().get(spec.name, 0),
        "touches": _touches(spec),
        "drifts": [{"drift": each, "fields": list(each.fields()), "stamp": _stamp([each])} for each in drifts],
        "stamp": _stamp(drifts),
        "accepted": accepted,
        "unfit": pins.unfit(spec.name)[:_MOST_TOLD],
        "contracts": [_contract(each, why) for each, why in house.desk.contracts() if each.server == spec.name],
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
    desk = visit.house.desk
    if not visit.person.is_of_all or visit.named not in desk.servers():
        return visit.page("missing.html", {"here": "servers", "what": "server"}, 404)
    if not visit.person.is_admin:
        return visit.not_entitled("accept definitions")
    drifts = desk.pins.drifts(visit.named)
    chosen = [each for each in drifts if visit.given.get("which") in ("all", f"{each.new.kind} {each.new.name}")]
    if not chosen or visit.given.get("stamp") != _stamp(chosen):
        return await _shown(visit, "It is not what you have seen any more. Read it again; nothing was accepted.", 409)
    digests = [each.new.digest for each in chosen]
    await visit.note("definitions_reviewed", {"server": visit.named, "accepted": digests})
    await desk.pins.accept([each.new for each in chosen], visit.person.name)
    await desk.accepted()
    named = chosen[0].new.name if len(chosen) == 1 else f"{len(chosen)} definitions"
    return visit.back(f"servers/{visit.named}", f"Accepted: {named}.")
