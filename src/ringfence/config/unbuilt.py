"""What the file can say but this version cannot do yet.

Two kinds. What would leave something unprotected, or do nothing, is a problem that says so: it is never accepted.
What only means that calls are refused is a warning. When a part is built, its line here goes.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from ringfence.config import schema, words
from ringfence.config.draft import Draft
from ringfence.config.shaping import Shaped
from ringfence.config.source import Where
from ringfence.dispatch import network_allows
from ringfence.model import NetworkSpec

_NOT_BUILT = "is not built yet"


def check(draft: Draft) -> None:
    _gateway(draft)
    if draft.agents:
        draft.problem(
            ("agents",),
            f"telling agents apart {_NOT_BUILT}: a caller cannot prove who it is; remove agents:"
            " (the local user's agent needs no entry)",
            key=True,
        )
    for server in draft.servers.values():
        _server(draft, server)
    for name, capability in draft.capabilities.items():
        _capability(draft, capability)
        _refused_calls(draft, name, capability)
    _sandbox(draft)


def rule_problems(rule: schema.Rule) -> list[tuple[str, str]]:
    """Keys of a rule that nothing supplies yet."""
    return [
        (key, f"{key} {_NOT_BUILT}: nothing supplies what it would look at, so the rule would never match")
        for key in ("taint_labels", "conditions")
        if getattr(rule, key)
    ]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().removesuffix(".") == "localhost"


def _refuse(draft: Draft, where: Where, what: str) -> None:
    draft.problem(where, f"{what} {_NOT_BUILT}", key=True)


def _gateway(draft: Draft) -> None:
    gateway = draft.gateway.shape
    where = draft.gateway.where
    host = None if words.socket_path(gateway.listen) is not None else words.listen_address(gateway.listen)[0]
    if host is not None and not is_loopback(host):
        draft.problem(
            (*where, "listen"),
            f"listening on {host}, which others can reach, needs identity and TLS, and that {_NOT_BUILT};"
            " use 127.0.0.1",
        )
    if gateway.state is not None and "://" in gateway.state:
        draft.problem((*where, "state"), f"a database as state {_NOT_BUILT}; name a folder")
    if gateway.code_mode != "off":
        _refuse(draft, (*where, "code_mode"), f"code_mode {gateway.code_mode}")


def _server(draft: Draft, server: Shaped[schema.Server]) -> None:
    shape, where = server.shape, server.where
    if shape.openapi is not None:
        _refuse(draft, (*where, "openapi"), "a server from an OpenAPI description")


def _capability(draft: Draft, capability: Shaped[schema.Capability]) -> None:
    shape, where = capability.shape, capability.where
    if shape.transport == "direct":
        _refuse(draft, (*where, "transport"), "transport direct")
    for effect in ("compensate", "preview"):
        if getattr(shape.effects, effect) is not None:
            _refuse(draft, (*where, "effects", effect), f"effects.{effect}")
    if shape.isolation in (None, "none"):
        return
    servers = draft.candidates(capability)
    if servers and shape.isolation != "process":
        draft.problem((*where, "isolation"), f"isolation {shape.isolation} for a server {_NOT_BUILT}")
    elif any(server.shape.placement == "unsafe_host" for server in servers):
        draft.problem((*where, "isolation"), "its server runs in no box (placement unsafe_host): write none")


def _refused_calls(draft: Draft, name: str, capability: Shaped[schema.Capability]) -> None:
    shape, where = capability.shape, capability.where
    refused = f"every call of {name!r} will be refused"
    if shape.transport == "sandboxed_exec":
        if shape.isolation in ("gvisor", "microvm"):
            draft.warn((*where, "isolation"), f"{refused}: isolation {shape.isolation} {_NOT_BUILT}")
        return
    servers = draft.candidates(capability)
    if shape.transport == "mcp" and not draft.servers:
        draft.warn(where, f"{refused}: no server is declared")
    if shape.network == "denied":
        return
    commanded = [server.shape for server in servers if server.shape.url is None]
    if commanded:
        if not any(each.network == shape.network and each.placement != "unsafe_host" for each in commanded):
            text = f"{refused}: the box of its server does not have network {shape.network!r}"
            draft.warn((*where, "network"), text)
    elif shape.network in draft.networks:
        network = NetworkSpec(shape.network, tuple(draft.networks[shape.network].shape.allow))
        if servers and not any(_reaches(network, server.shape.url or "") for server in servers):
            draft.warn((*where, "network"), f"{refused}: network {shape.network!r} does not allow its server's address")


def _reaches(network: NetworkSpec, url: str) -> bool:
    parts = urlsplit(url)
    return network_allows(network, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))


def _sandbox(draft: Draft) -> None:
    sandbox, where = draft.sandbox.shape, draft.sandbox.where
    if sandbox.backend != "process":
        _refuse(draft, (*where, "backend"), f"sandbox backend {sandbox.backend}")
    for key in ("docker_image", "firecracker_kernel_path", "firecracker_rootfs_path"):
        if getattr(sandbox, key):
            _refuse(draft, (*where, key), key)
