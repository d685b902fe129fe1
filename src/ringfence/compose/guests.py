"""Backends whose boxes are guests of an engine, and the roots that guests have."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from ringfence.config import paths
from ringfence.core.aio import in_thread
from ringfence.packages.cache import PackageCache
from ringfence.packages.images import build
from ringfence.packages.images.host.environment import EnvironmentPackages
from ringfence.sandbox.guests.backend import GuestBackend
from ringfence.sandbox.guests.engine import GuestRoot
from ringfence.sandbox.guests.oci import OciEngine

log = logging.getLogger(__name__)


def oci_backend(templates: Mapping[str, tuple[str, ...]], state: Path | None) -> GuestBackend:
    """Containers of runc or crun."""
    cache = PackageCache((state or paths.state_folder()) / "packages")
    return GuestBackend(OciEngine(), partial(_root, cache, templates), templates)


async def _root(cache: PackageCache, templates: Mapping[str, tuple[str, ...]], template: str) -> GuestRoot:
    """The root of a template's guests, made of this host if it was not made before. Raises Unavailable."""
    built = await in_thread(lambda: _built(cache, templates[template]))
    return GuestRoot(built.tree.folder, built.tree.about["python"], built.tree.digest)


def _built(cache: PackageCache, modules: tuple[str, ...]) -> build.BuiltImage:
    packages = EnvironmentPackages().of_modules(modules)
    return build.build(cache, build.BuildRequest(packages), _tell, lambda done: None)


def _tell(steps: int) -> None:
    log.info("a root file system of this host is made for guests, once: %d steps", steps)
