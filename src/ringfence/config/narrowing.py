"""Contracts of servers that run in boxes, against what those boxes have.

A box is made for its server, not for one call: whatever network and secrets it has, every call of it has. So a contract
says the same, or leaves it out and then has what its server has; one that says less could not be kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ringfence.config import schema
from ringfence.config.draft import Draft
from ringfence.config.shaping import Shaped


def check(draft: Draft, capability: Shaped[schema.Capability]) -> None:
    """Problems where it is sure which box a call runs in; a warning where another server may turn out to have it."""
    servers = draft.candidates(capability)
    objections = [list(_objections(capability, server)) for server in servers]
    for key, text in dict(each for found in objections for each in found).items():
        sure = all(any(key == other for other, _ in found) for found in objections)
        where = (*capability.where, key) if key in capability.given else capability.where
        tell = draft.problem if sure else draft.warn
        tell(where, text if sure else f"name its server, or: {text}", key=key not in capability.given)


def inherited(capability: Shaped[schema.Capability], server: Shaped[schema.Server] | None) -> dict[str, Any]:
    """What a contract has of its server's box, where it does not say so itself."""
    if server is None or not _boxed(server) or capability.shape.transport != "mcp":
        return {}
    has = {"network": server.shape.network, "secrets": list(server.shape.secrets)}
    return {key: value for key, value in has.items() if value not in ("denied", []) and key not in capability.given}


def _objections(capability: Shaped[schema.Capability], server: Shaped[schema.Server]) -> Iterator[tuple[str, str]]:
    if not _boxed(server) or server.broken or capability.broken:
        return
    name, call = server.where[-1], f"a call of {capability.where[-1]!r} runs in its box"
    given, shape, has = capability.given, capability.shape, server.shape
    strict = shape.mode == "high_risk"
    if has.network != "denied" and shape.network == "denied" and ("network" in given or strict):
        why = "" if "network" in given else ", and high_risk means none"
        yield (
            "network",
            f"server {name!r} has network {has.network!r}, and {call}{why}: write network: {has.network},"
            " or use a server that has none",
        )
    if has.secrets and not shape.secrets and ("secrets" in given or strict):
        why = "" if "secrets" in given else ", and high_risk means none"
        named = ", ".join(has.secrets)
        yield (
            "secrets",
            f"server {name!r} is given {named} for as long as it runs, and {call}{why}: write secrets: [{named}],"
            " or use a server that is given none",
        )


def _boxed(server: Shaped[schema.Server]) -> bool:
    return server.shape.command is not None and server.shape.placement != "unsafe_host"
