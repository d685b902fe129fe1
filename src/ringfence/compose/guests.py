"""Backends whose boxes are guests of an engine, and the roots that guests have."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from ringfence.config import paths
from ringfence.core.aio import in_thread
from ringfence.core.box import ImageRoot
from ringfence.packages.cache import PackageCache
from ringfence.packages.images import build, guests
from ringfence.packages.images.host.environment import EnvironmentPackages
from ringfence.sandbox.guests.backend import GuestBackend
from ringfence.sandbox.guests.engine import GuestRoot
from ringfence.sandbox.guests.oci import OciEngine

log = logging.getLogger(__name__)


def oci_backend(templates: Mapping[str, tuple[str, ...]], state: Path | None) -> GuestBackend:
    """Containers of runc or crun."""
    cache = PackageCache((state or paths.state_folder()) / "packages")
    return GuestBackend(OciEngine(), partial(_root, cache, templates), templates)


async def _root(
    cache: PackageCache, templates: Mapping[str, tuple[str, ...]], template: str, image: ImageRoot | None
) -> GuestRoot:
    """The root of a template's guests, made of this host if it was not made before; or that of an image. Raises
    Unavailable."""
    return await in_thread(lambda: _found(cache, templates[template], image))


def _found(cache: PackageCache, modules: tuple[str, ...], image: ImageRoot | None) -> GuestRoot:
    tree = _built(cache, modules).tree
    if image is None:
        python = tree.about["python"]
        return GuestRoot(tree.folder, tree.digest, (python,), python, sys.version_info[:2])
    folder = guests.joined(cache, image.folder, tree)
    words = guests.starts(tree.folder, tree.about["python"])
    return GuestRoot(folder, image.digest, words, image.python, image.version)


def _built(cache: PackageCache, modules: tuple[str, ...]) -> build.BuiltImage:
    packages = EnvironmentPackages().of_modules(modules)
    return build.build(cache, build.BuildRequest(packages), _tell, lambda done: None)


def _tell(steps: int) -> None:
    log.info("a root file system of this host is made for guests, once: %d steps", steps)
