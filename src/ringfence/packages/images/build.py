"""`ringfence image build`: a root file system out of this host, kept in the cache by its digest.

1. What it has is decided as a list of entries (`host.contents`); nothing but the names and headers of files was read.
2. Where these files were made into a tree before, and are what they were, that tree is taken from the cache.
3. Else the tree is written beside the cache (`host.tree`), and put into it.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from ringfence.core import system
from ringfence.core.record import dataclass
from ringfence.packages.cache import Package, PackageCache, Tree
from ringfence.packages.images import manifests
from ringfence.packages.images.host import contents, tree
from ringfence.packages.images.host.environment import EnvironmentPackages
from ringfence.packages.images.manifests import ImageConfig
from ringfence.packages.install_boxes import file_digest

_FORM = 1
"""Of the tree: a later version of us may make another one of the same files."""
USER = "1000:1000"
MODES = contents.WORLD_WRITABLE
"""Permissions that differ from those in the cache, for archives."""


@dataclass(frozen=True, slots=True)
class BuildRequest:
    packages: tuple[str, ...] = ()
    """Of the environment; what they require comes with them."""
    folders: tuple[Path, ...] = ()
    """With packages that were installed into them."""
    names: tuple[str, ...] = field(default=())
    """What lies in those, with versions."""


@dataclass(frozen=True, slots=True)
class BuiltImage:
    tree: Tree
    packages: tuple[str, ...]
    missing: tuple[str, ...]
    """Libraries that something in it names and this host does not have."""

    @property
    def config(self) -> ImageConfig:
        about = self.tree.about
        return ImageConfig(cmd=tuple(about["cmd"]), env=about["env"], cwd=about["cwd"], user=about["user"])


def build(
    cache: PackageCache,
    wanted: BuildRequest,
    total: Callable[[int], None],
    step: Callable[[int], None],
) -> BuiltImage:
    """`total` and `step` tell how much there is to do, and what was done. Raises Unavailable."""
    environment = EnvironmentPackages()
    names = environment.with_requirements(wanted.packages)
    files = environment.files(names)
    for folder in wanted.folders:
        files |= contents.listed_in(folder)
    made = contents.contents(files)
    packages = tuple(sorted({*environment.said(names), *wanted.names}))
    asked = {"kind": "image", "built": _FORM, "machine": manifests.machine(), "entries": tree.stamped(made)}
    known = cache.known(asked)
    if known is None:
        known = _made(cache, made, packages, total, step)
        cache.remember(asked, known)
    return BuiltImage(known, packages, made.missing)


def _made(
    cache: PackageCache,
    made: contents.RootContents,
    packages: tuple[str, ...],
    total: Callable[[int], None],
    step: Callable[[int], None],
) -> Tree:
    total(tree.steps(made))
    staging = cache.staging()
    try:
        tree.written(made, staging / "tree", step)
        program = system.interpreter()
        name = f"host/{program.name}"
        integrity = f"sha256:{file_digest(program, 'sha256').hex()}"
        version = ".".join(map(str, sys.version_info[:3]))
        about: Mapping[str, Any] = {**_config(made.python).plain(), "python": made.python, "packages": list(packages)}
        return cache.put("image", staging / "tree", (Package(name, version, integrity),), {}, about)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _config(python: str) -> ImageConfig:
    env = {"PATH": contents.SEARCH, "LANG": "C.UTF-8", "HOME": "/home/user"}
    return ImageConfig(cmd=(python,), env=env, cwd="/workspace", user=USER)
