"""Servers that run from our cache of packages: which tree each was pinned to, and where its box sees that."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from ringfence.box import Mount
from ringfence.config import schema
from ringfence.config.draft import Draft
from ringfence.model import PackageSpec, ServerSpec
from ringfence.packages.references import Reference
from ringfence.packages.shelf import AT, folder_of

_FETCHERS = ("npx", "bunx", "uvx", "pipx", "docker", "podman", "nerdctl")


def packaged(server: ServerSpec, shape: schema.Packages | None, state: Path) -> ServerSpec:
    """The server with its packages in sight. They lie in our own state, which nobody else can have mounted."""
    if shape is None:
        return server
    folder = str(folder_of(state, shape.tree))
    spec = PackageSpec(shape.kind, tuple(shape.names), shape.tree, folder)
    if spec.kind == "image":  # which is the root of its box
        return replace(server, packages=spec)
    return replace(server, packages=spec, mounts=(*server.mounts, Mount(folder, AT, "ro")))


def check(draft: Draft) -> None:
    """An image is named as it was pinned, and is the root of a box that is its own."""
    for server in draft.servers.values():
        shape = server.shape.packages
        if shape is None or shape.kind != "image":
            continue
        where = (*server.where, "packages", "names")
        try:
            pinned = [Reference.of(name) for name in shape.names]
        except ValueError as exc:
            draft.problem(where, str(exc))
            continue
        if len(pinned) != 1 or not pinned[0].digest or not pinned[0].host:
            draft.problem(where, "an image is one, with its registry and digest: [HOST/NAME:TAG@sha256:…]")
        if server.shape.placement != "own" and "placement" not in server.broken:
            text = "an image is the root of its server's box, so that box is its own"
            draft.problem((*server.where, "placement"), text)


def warn(draft: Draft) -> None:
    """Of commands that fetch what they run: in a box without a network there is nothing to fetch it from."""
    for server in draft.servers.values():
        shape = server.shape
        name = os.path.basename(shape.command[0]) if shape.command else ""
        if name in _FETCHERS and shape.network == "denied" and shape.placement != "unsafe_host":
            draft.warn(
                (*server.where, "command"),
                f"{name} fetches what it runs when it starts, which a box without a network cannot;"
                " `ringfence init --from` writes such a server fetched and pinned",
            )
