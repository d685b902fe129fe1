"""Whose a server's volume is: of the configuration that had it first.

Configurations share a state unless they say otherwise, and each chooses the names of its volumes. By its name alone,
one could read and change what another's servers keep. So beside the volumes stands, for each name, the configuration
that it belongs to, and no other one gets it.
"""

from __future__ import annotations

import os
from pathlib import Path

from ringfence.core.errors import StoreError
from ringfence.sandbox.files.blobstore import private_folder

_OWNERS = "owners"
"""No agent's folder is called so: those have digests for names."""


def owner_of(volumes: Path, name: str) -> str | None:
    """The configuration that a volume belongs to; None where none has had it. Raises OSError."""
    try:
        return (volumes / _OWNERS / name).read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return None


def is_free(volumes: Path, name: str, configuration: Path) -> bool:
    """Whether nothing is kept under this name but by this configuration. Raises OSError."""
    owner = owner_of(volumes, name)
    if owner is not None:
        return owner == os.path.realpath(configuration)
    return not volumes.is_dir() or not any((each / name).exists() for each in volumes.iterdir())


def claim(volumes: Path, name: str, configuration: Path) -> None:
    """Take a volume for this configuration. Raises StoreError if it belongs to another, and OSError."""
    owners = volumes / _OWNERS
    private_folder(owners)
    own = os.path.realpath(configuration)
    owner = owner_of(volumes, name)
    if owner is None:
        # A link is made whole or not at all, and by one process alone.
        new = owners / f".{name}.{os.getpid()}"
        new.write_text(own, encoding="utf-8", errors="surrogateescape")
        try:
            os.link(new, owners / name)
        except FileExistsError:
            pass
        finally:
            new.unlink()
        owner = owner_of(volumes, name)
    if owner != own:
        raise StoreError(
            f"the volume {name} belongs to the configuration {owner}: give this one another name, or, if it is the same"
            f" configuration in another place, remove {owners / name}"
        )
