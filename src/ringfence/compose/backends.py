"""Which backend a configuration names, and what is ready in its boxes. The lowest part of the composition root: a
caller that wants a box alone loads no more."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ringfence.config.settings import SandboxSettings
from ringfence.core import deferred, system
from ringfence.core.box import TEMPLATES
from ringfence.core.errors import Unavailable

if TYPE_CHECKING:
    from ringfence.sandbox.guests.backend import GuestBackend
    from ringfence.sandbox.process.backend import ProcessBackend

BACKENDS = ("process", "wasm", "oci", "gvisor", "docker", "microvm", "firecracker", "microsandbox", "auto")
GUESTS = ("oci",)
"""Those whose boxes are guests of an engine. They do not stay yet."""


def make_backend(
    settings: SandboxSettings, state: Path | None = None, *, keep_ready: int | None = None
) -> ProcessBackend | GuestBackend:
    """The backend that the configuration names, never another. Nothing is started yet.

    `state`: where it remembers what it found out about this host. `keep_ready`: boxes of a kind; as many as suit this
    machine where nothing is said.

    Raises Unavailable, naming what is missing.
    """
    if settings.backend in GUESTS:
        with deferred.loading():
            from ringfence.compose.guests import guest_backend  # noqa: PLC0415 - most boxes are no guests

        return guest_backend(templates(settings), state)
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


def make_staying_backend(settings: SandboxSettings, state: Path | None = None) -> ProcessBackend:
    """The same, for boxes that stay. Raises Unavailable where those of this backend do not."""
    if settings.backend in GUESTS:
        raise Unavailable("no_backend", f"boxes of backend {settings.backend} do not stay yet; those of process do")
    return cast("ProcessBackend", make_backend(settings, state))


def templates(settings: SandboxSettings) -> Mapping[str, tuple[str, ...]]:
    return {**TEMPLATES, **settings.templates}
