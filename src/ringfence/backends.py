"""Which backend a configuration names, and what is ready in its boxes. A part of the composition root, the lowest:
whoever wants a box alone loads no more."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from ringfence.config.settings import SandboxSettings
from ringfence.errors import Unavailable
from ringfence.sandbox.process.backend import ProcessBackend
from ringfence.sandbox.process.host import Host
from ringfence.sandbox.tools import TEMPLATES

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
    if sys.platform != "linux":
        raise Unavailable("no_backend", f"sandbox backend process needs Linux, and this is {sys.platform}")
    Host.detect().require(settings.accept_missing)
    return ProcessBackend(accept_missing=settings.accept_missing, templates=templates(settings), setups=settings.setups)


def templates(settings: SandboxSettings) -> Mapping[str, tuple[str, ...]]:
    return {**TEMPLATES, **settings.templates}
