"""Where servers run and what of the host they see: that it can be, and as it is meant."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from ringfence.box import MIB, Mount
from ringfence.config import schema, words
from ringfence.config.draft import Draft
from ringfence.config.folders import declared, real_path
from ringfence.config.nearest import did_you_mean
from ringfence.config.paths import resolve
from ringfence.config.shaping import Shaped
from ringfence.config.source import Where

PLACES = ("own", "session", "remote", "unsafe_host")
"""What a placement may be beside the name of a box that several servers share."""
_LONGEST_SOCKET = 107
"""In bytes; the kernel takes no more."""
_BOXED = ("mounts", "limits", "network")
"""What is said of a box, and of nothing else."""


def check(draft: Draft) -> None:
    """Every problem with servers' placements, and with what is mounted for them and for capabilities."""
    groups: dict[str, list[Shaped[schema.Server]]] = {}
    for server in draft.servers.values():
        if "placement" not in server.broken:
            _placement(draft, server)
            if server.shape.placement not in PLACES:
                groups.setdefault(server.shape.placement, []).append(server)
    for name, group in groups.items():
        _group(draft, name, group)
    for where, shape in _every_mount(draft):
        try:
            mount(draft, shape)
        except ValueError as exc:
            draft.problem((*where, "host"), str(exc))
    _socket(draft)
    for capability in draft.capabilities.values():
        if capability.shape.transport == "mcp" and capability.shape.filesystem is not None:
            _narrowed(draft, capability, capability.shape.filesystem.mounts)


def socket(draft: Draft) -> Path | None:
    """The unix socket that the gateway listens on, if it is to."""
    path = words.socket_path(draft.gateway.shape.listen)
    return None if path is None else resolve(path, draft.base)


def _socket(draft: Draft) -> None:
    """A box that sees the socket could call the gateway as whoever runs it."""
    path, where = socket(draft), (*draft.gateway.where, "listen")
    if path is None:
        return
    if len(os.fsencode(path)) > _LONGEST_SOCKET:
        draft.problem(where, f"{path} is too long for a socket: {_LONGEST_SOCKET} bytes are the most")
    real = Path(os.path.realpath(path))
    for place, shape in _every_mount(draft):
        with suppress(ValueError):  # told at its own place
            if real.is_relative_to(mount(draft, shape).host):
                what = ".".join(map(str, place))
                draft.problem(
                    where, f"{path} lies in a folder that is mounted into a box ({what}), which could call us"
                )


def _placement(draft: Draft, server: Shaped[schema.Server]) -> None:
    shape, where = server.shape, server.where
    placement, remote = shape.placement, shape.url is not None or shape.openapi is not None
    if remote and placement not in ("own", "remote"):
        draft.problem((*where, "placement"), "a server with a url runs elsewhere: its placement is remote")
    if not remote and placement == "remote" and shape.command is not None:
        draft.problem((*where, "placement"), "a server that is started by a command is not remote: it needs a url")
    if placement not in PLACES and (hint := did_you_mean(placement, PLACES)):
        known = ", ".join(PLACES)
        draft.problem((*where, "placement"), f"{placement!r} is too much like one of {known} to name a box{hint}")
    for key in _BOXED:
        if key in server.given and (remote or placement in ("session", "unsafe_host")) and getattr(shape, key):
            if key == "network" and (remote or shape.network == "denied"):
                continue
            what = "runs elsewhere" if remote else f"has no box of its own (placement {placement})"
            draft.problem((*where, key), f"{key} is for a server in a box, and this one {what}", key=True)
    if placement == "session":
        if shape.secrets:
            draft.problem((*where, "secrets"), "a server in an agent's own box can have no secret", key=True)
        _only_reads(draft, server)


def _only_reads(draft: Draft, server: Shaped[schema.Server]) -> None:
    name = str(server.where[-1])
    for capability in draft.capabilities.values():
        if capability.shape.transport == "mcp" and capability.shape.server == name and capability.shape.mode != "read":
            text = f"server {name!r} lives in an agent's own box, where only read contracts are served"
            draft.problem((*capability.where, "mode"), text)


def _group(draft: Draft, name: str, group: list[Shaped[schema.Server]]) -> None:
    """Those in one box see the same, reach the same, and hold the same secrets."""
    if len(group) == 1:
        text = f"no other server is in the box {name!r}, so nothing is shared; own would do"
        draft.warn((*group[0].where, "placement"), text, key=False)
    for server in group[1:]:
        for key in ("network", "secrets"):
            if getattr(server.shape, key) != getattr(group[0].shape, key):
                first = str(group[0].where[-1])
                text = f"it shares the box {name!r} with {first!r}, so its {key} must be the same"
                draft.problem((*server.where, key) if key in server.given else server.where, text, key=True)


# ── Mounts ──


def _every_mount(draft: Draft) -> Iterator[tuple[Where, schema.Mount]]:
    for server in draft.servers.values():
        for index, shape in enumerate(server.shape.mounts):
            yield (*server.where, "mounts", index), shape
    for capability in draft.capabilities.values():
        filesystem = capability.shape.filesystem
        for index, shape in enumerate(filesystem.mounts if filesystem is not None else ()):
            yield (*capability.where, "filesystem", "mounts", index), shape


def mount(draft: Draft, shape: schema.Mount) -> Mount:
    """With the real path of its folder. Raises ValueError."""
    written = [
        real_path(str(resolve(each.host, draft.base)))
        for _, each in _every_mount(draft)
        if each.mode == "rw" and each is not shape
    ]
    return declared(Mount(shape.host, shape.at, shape.mode, shape.unsafe or ""), draft.base, written)


def _narrowed(draft: Draft, capability: Shaped[schema.Capability], wanted: list[schema.Mount]) -> None:
    """A call of a server has what that server has, or less of it: then in an instance of its own."""
    servers = draft.candidates(capability)
    for index, shape in enumerate(wanted):
        objections = [text for server in servers if (text := _not_there(draft, shape, server))]
        where: Where = (*capability.where, "filesystem", "mounts", index)
        if objections and len(objections) == len(servers):
            draft.problem(where, objections[0], key=False)
        elif objections:
            draft.warn(where, f"name its server, or: {objections[0]}", key=False)


def _not_there(draft: Draft, wanted: schema.Mount, server: Shaped[schema.Server]) -> str | None:
    name, shape = server.where[-1], server.shape
    if shape.command is None:
        return f"server {name!r} runs elsewhere, where nothing is mounted: leave filesystem out"
    if shape.placement in ("session", "unsafe_host"):
        return f"server {name!r} has no box of its own (placement {shape.placement}): leave filesystem out"
    try:
        given, has = mount(draft, wanted), [mount(draft, each) for each in shape.mounts]
    except ValueError:
        return None  # told at its own place
    if any(each.host == given.host and each.at == given.at and given.mode in ("ro", each.mode) for each in has):
        return None
    entry = f"{{host: {wanted.host}, at: {wanted.at}, mode: {wanted.mode}}}"
    return f"server {name!r} does not see this: write it under servers: {name}: mounts: [{entry}], too"


def limits(shape: schema.ServerLimits | None) -> Mapping[str, float | int]:
    """By the names of `box.Limits`."""
    if shape is None:
        return {}
    given: dict[str, float | int | None] = {
        "memory_bytes": None if shape.memory_mb is None else shape.memory_mb * MIB,
        "disk_bytes": None if shape.disk_mb is None else shape.disk_mb * MIB,
        "processes": shape.processes,
        "cpu_cores": shape.cpu_cores,
    }
    return {name: value for name, value in given.items() if value is not None}
