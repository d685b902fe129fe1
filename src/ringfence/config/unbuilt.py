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
    for network in draft.networks.values():
        for key in ("methods", "paths", "max_bytes_out"):
            if getattr(network.shape, key) is not None:
                _refuse(draft, (*network.where, key), f"limiting a network by {key}")
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
    host, _ = words.listen_address(gateway.listen)
    if not is_loopback(host):
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
    if shape.mounts:
        _refuse(draft, (*where, "mounts"), "a server's own view of the file system")
    if shape.network != "denied":
        _refuse(draft, (*where, "network"), "a server's own network")
    if shape.secrets:
        _refuse(draft, (*where, "secrets"), "handing secrets to a server")
    if shape.placement not in ("own", "unsafe_host"):
        draft.problem((*where, "placement"), f"placement {shape.placement!r} {_NOT_BUILT}; write own or unsafe_host")


def _capability(draft: Draft, capability: Shaped[schema.Capability]) -> None:
    shape, where = capability.shape, capability.where
    if shape.transport == "direct":
        _refuse(draft, (*where, "transport"), "transport direct")
    for effect in ("compensate", "preview"):
        if getattr(shape.effects, effect) is not None:
            _refuse(draft, (*where, "effects", effect), f"effects.{effect}")
    if shape.transport == "mcp" and shape.filesystem is not None and shape.filesystem.mounts:
        _refuse(draft, (*where, "filesystem"), "mounting folders for one capability of a server")
    if shape.isolation in (None, "none"):
        return
    servers = draft.candidates(capability)
    if any(server.shape.url is None for server in servers):
        draft.problem(
            (*where, "isolation"),
            f"isolation {shape.isolation} for a server that is started by a command {_NOT_BUILT};"
            " write none, or leave it out",
        )
    elif servers and shape.isolation != "process":
        draft.problem((*where, "isolation"), f"isolation {shape.isolation} for a remote server {_NOT_BUILT}")


def _refused_calls(draft: Draft, name: str, capability: Shaped[schema.Capability]) -> None:
    shape, where = capability.shape, capability.where
    refused = f"every call of {name!r} will be refused"
    if shape.secrets:
        draft.warn((*where, "secrets"), f"{refused}: delivering secrets {_NOT_BUILT}")
    if shape.transport == "sandboxed_exec":
        if shape.network != "denied":
            draft.warn((*where, "network"), f"{refused}: a network in a box {_NOT_BUILT}")
        if shape.filesystem is not None and shape.filesystem.mounts:
            draft.warn((*where, "filesystem"), f"{refused}: mounting folders in a box {_NOT_BUILT}")
        if shape.isolation in ("gvisor", "microvm"):
            draft.warn((*where, "isolation"), f"{refused}: isolation {shape.isolation} {_NOT_BUILT}")
        return
    servers = draft.candidates(capability)
    if shape.transport == "mcp" and not draft.servers:
        draft.warn(where, f"{refused}: no server is declared")
    if shape.network == "denied":
        return
    if any(server.shape.url is None for server in servers):
        which = "" if len(servers) == 1 else " on a server that is started by a command"
        draft.warn((*where, "network"), f"{refused}{which}: confining the network of a server {_NOT_BUILT}")
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
    if sandbox.network_enabled:
        _refuse(draft, (*where, "network_enabled"), "a network in the sandbox")
    for key in ("allowed_egress_domains", "docker_image", "firecracker_kernel_path", "firecracker_rootfs_path"):
        if getattr(sandbox, key):
            _refuse(draft, (*where, key), key)
