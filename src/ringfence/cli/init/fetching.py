"""`ringfence init --fetch`: the packages of a configuration from elsewhere, into the cache of this machine."""

from __future__ import annotations

import sys
from pathlib import Path

from ringfence import config, storehouse
from ringfence.cli.terminal import quoted, safe
from ringfence.errors import RingfenceError
from ringfence.packages.installing import Wanted


async def fetch(path: Path) -> bool:
    """Whether every server has the tree that it is pinned to. Raises ConfigError."""
    settings = config.load(path)
    well = True
    for server in settings.servers.values():
        pin = server.packages
        if pin is None:
            continue
        print(safe(f"{server.name}: fetching {' '.join(pin.names)} …"), file=sys.stderr)
        try:
            tree = await storehouse.fetch(settings.gateway.state, settings.sandbox, Wanted(pin.kind, pin.names))
        except (RingfenceError, ValueError) as exc:
            print(quoted(str(exc), f"{server.name}: "), file=sys.stderr)
            well = False
            continue
        if tree.digest == pin.tree:
            print(safe(f"{server.name}: as it was pinned"))
            continue
        well = False
        print(safe(f"{server.name}: came to another tree than {pin.tree[:19]}…: newer packages that it needs, another"))
        print(safe(f"  kind of machine, or another Python. If that is right, write: tree: {tree.digest}"))
    return well
