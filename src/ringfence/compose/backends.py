"""Which backend a configuration names, and what is ready in its boxes. The lowest part of the composition root: a
caller that wants a box alone loads no more."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ringfence.config.settings import SandboxSettings
from ringfence.core import deferred, system
from ringfence.core.box import TEMPLATES
from ringfence.core.errors import Unavailable

if TYPE_CHECKING:
    from ringfence.sandbox.process.backend import ProcessBackend

BACKENDS = ("process", "wasm", "oci", "gvisor", "docker", "microvm", "firecracker", "microsandbox", "auto")


def make_backend(
    settings: SandboxSettings, state: Path | None = None, *, keep_ready: int | None = None
) -> ProcessBackend:
    """The backend that the configuration names, never another. Nothing is started yet.

    `state`: where it remembers what it found out about this host. `keep_ready`: boxes of a kind; as many as suit this
    machine where nothing is said.

    Raises Unavailable, naming what is missing.
    """
    if settings.backend != "process":
        what = (
            "is not built yet" if settings.backend in BACKENDS else f"does not exist; there are {', '.join(BACKENDS)}"
        )
        raise Unavailable("no_backend", f"sandbox backend {settings.backend} {what}")
    if (missing := system.no_boxes()) is not None:
        raise Unavailable("no_backend", missing)
    # Loaded only now: what boxes are made of is not there on other systems, not even to be imported.
    with deferred.loading():
        from ringfence.sandbox.process.backend import ProcessBackend  # noqa: PLC0415
        from ringfence.sandbox.process.host.capabilities import HostCapabilities  # noqa: PLC0415

    HostCapabilities.detect().require(settings.accept_missing)
    return ProcessBackend(
        accept_missing=settings.accept_missing,
        templates=templates(settings),
        setups=settings.setups,
        depth=keep_ready,
        state=state,
    )


def templates(settings: SandboxSettings) -> Mapping[str, tuple[str, ...]]:
    return {**TEMPLATES, **settings.templates}
