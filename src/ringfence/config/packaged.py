"""Servers that run from our cache of packages: which tree each was pinned to, and where its box sees that."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from ringfence.box import Mount
from ringfence.config import schema
from ringfence.config.draft import Draft
from ringfence.model import PackageSpec, ServerSpec
from ringfence.packages.shelf import AT, folder_of

_FETCHERS = ("npx", "bunx", "uvx", "pipx")


def packaged(server: ServerSpec, shape: schema.Packages | None, state: Path) -> ServerSpec:
    """The server with its packages in sight. They lie in our own state, which nobody else can have mounted."""
    if shape is None:
        return server
    spec = PackageSpec(shape.kind, tuple(shape.names), shape.tree)
    mount = Mount(str(folder_of(state, spec.tree)), AT, "ro")
    return replace(server, packages=spec, mounts=(*server.mounts, mount))


def warn(draft: Draft) -> None:
    """Of commands that fetch what they run: in a box without a network there is nothing to fetch it from."""
    for server in draft.servers.values():
        shape = server.shape
        name = os.path.basename(shape.command[0]) if shape.command else ""
        if name in _FETCHERS and shape.network == "denied" and shape.placement != "unsafe_host":
            draft.warn(
                (*server.where, "command"),
                f"{name} fetches its package when it starts, which a box without a network cannot;"
                " `ringfence init --from` writes such a server fetched and pinned",
            )
