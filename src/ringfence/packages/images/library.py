"""Implements `ports.Images`: any image that a caller names, as a root for boxes.

sha256:…                 one that `ringfence image build` made, or any other tree of the cache
./root, ./oci, ./x.tar   a folder or archive of this host: a root file system or an OCI layout
HOST/NAME:TAG            an image of a registry, fetched as those of servers are
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from pathlib import Path

from ringfence.core.box import ImageRoot
from ringfence.core.errors import Unavailable
from ringfence.packages.cache import PackageCache, Tree
from ringfence.packages.images import local, rootfs
from ringfence.packages.images.engines import Engines
from ringfence.packages.images.fetch import ImageFetcher
from ringfence.packages.images.references import Reference
from ringfence.packages.install_boxes import InstallBoxes

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_VERSION = re.compile(r"python(\d)\.(\d{1,3})", re.ASCII)
_MIN_VERSION = (3, 8)
_NOT_TAKEN = ("HOME", "TMPDIR", "PWD")
"""Variables of an image that a box has its own values of."""


def is_path(name: str) -> bool:
    """Whether a name means something of this host; `/`, `./` and `../` begin no name of a registry."""
    return name.startswith(("/", "./", "../")) or name in (".", "..")


class ImageLibrary:
    def __init__(self, cache: PackageCache, boxes: InstallBoxes, engines: Callable[[], Engines]) -> None:
        self._cache = cache
        self._boxes = boxes
        self._engines = engines
        self._fetcher = ImageFetcher(cache, boxes, engines)

    def check(self, name: str) -> None:
        if is_path(name):
            local.check(Path(name))
        elif _DIGEST.fullmatch(name):
            self._kept(name)
        else:
            wanted = _reference(name)
            if not wanted.digest:
                self._engines().sources(wanted)

    async def find(self, name: str) -> ImageRoot:
        if is_path(name):
            tree = await local.take(self._cache, self._boxes, Path(name))
        elif _DIGEST.fullmatch(name):
            tree = await asyncio.to_thread(self._kept, name)
        else:
            _reference(name)
            tree = await self._fetcher.fetch(name)
        return await asyncio.to_thread(root_of, tree)

    def _kept(self, digest: str) -> Tree:
        try:
            tree = self._cache.tree(digest)
        except Unavailable as problem:
            if problem.reason_code != "no_package":
                raise
            text = f"there is no image {digest[:19]}… here; make one with `ringfence image build`"
            raise Unavailable("no_image", text) from None
        if tree.kind != "image":
            raise Unavailable("no_image", f"{digest[:19]}… is no image, but packages of {tree.kind}")
        return tree


def _reference(name: str) -> Reference:
    try:
        return Reference.of(name)
    except ValueError as problem:
        text = f"{problem}; or a folder or archive of this host as ./PATH, or the sha256:… of `ringfence image build`"
        raise Unavailable("bad_image", text) from None


def root_of(tree: Tree) -> ImageRoot:
    """What a box needs to know of an image that is its root."""
    env = {name: value for name, value in (tree.about.get("env") or {}).items() if name not in _NOT_TAKEN}
    env.setdefault("PATH", _PATH)
    python, version = _python(tree.folder, env["PATH"])
    return ImageRoot(tree.folder, tree.packages[0].name, tree.digest, python, version, env)


def _python(tree: Path, path: str) -> tuple[str, tuple[int, int]]:
    """Its interpreter and the version of that, if there is one of 3.8 or later: by names alone, nothing is run."""
    for word in ("python3", "python"):
        found = rootfs.program(tree, word, path, "/")
        real = rootfs.resolved(tree, found) if found is not None else None
        if found is None or real is None:
            continue
        names = [os.path.basename(real)]
        prefix = os.path.dirname(os.path.dirname(real))
        folder = rootfs.resolved(tree, f"{prefix}/lib")
        if folder is not None and os.path.isdir(f"{tree}{folder}"):
            names += sorted(os.listdir(f"{tree}{folder}"), reverse=True)
        versions = [(int(match[1]), int(match[2])) for each in names if (match := _VERSION.fullmatch(each))]
        if versions and versions[0] >= _MIN_VERSION:
            return found, versions[0]
    return "", (0, 0)
