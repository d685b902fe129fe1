"""Which backend a configuration names, and what is ready in its boxes. A part of the composition root, the lowest:
whoever wants a box alone loads no more."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ringfence import system
from ringfence.config.settings import SandboxSettings
from ringfence.errors import Unavailable
from ringfence.sandbox.tools import TEMPLATES

if TYPE_CHECKING:
    from ringfence.sandbox.process.backend import ProcessBackend

BACKENDS = ("process", "wasm", "oci", "gvisor", "docker", "microvm", "firecracker", "microsandbox", "auto")


def make_backend(settings: SandboxSettings) -> ProcessBackend:
    """The backend that the configuration names, never another. Nothing is started yet.

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
    host: Any = import_module("ringfence.sandbox.process.host")
    process: Any = import_module("ringfence.sandbox.process.backend")
    host.Host.detect().require(settings.accept_missing)
    backend: ProcessBackend = process.ProcessBackend(
        accept_missing=settings.accept_missing, templates=templates(settings), setups=settings.setups
    )
    return backend


def templates(settings: SandboxSettings) -> Mapping[str, tuple[str, ...]]:
    return {**TEMPLATES, **settings.templates}
