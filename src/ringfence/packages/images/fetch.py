"""Fetches container images into the cache, through install boxes.

1. A box that reaches the image's registry, and the hosts that the registry refers to, brings index, manifest,
   configuration and layers, byte for byte. Nothing that the box says of them is trusted.
2. Each of them is checked here against the digest and size that led to it, from the name of the image down.
3. A second box, without a network, merges the layers into a list of entries; that list is unpacked here.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ringfence.core.box import MIB, Input
from ringfence.core.errors import Unavailable
from ringfence.core.quoting import quoted
from ringfence.core.record import dataclass
from ringfence.packages.cache import Package, PackageCache, Tree
from ringfence.packages.images import manifests, rootfs
from ringfence.packages.images.engines import Engines, ImageSource
from ringfence.packages.images.manifests import ImageConfig, Manifest, Piece
from ringfence.packages.images.references import Reference
from ringfence.packages.install_boxes import BoxJob, InstallBoxes, altered, file_digest, read_json
from ringfence.packages.registries import Credential, Registry

_GETTER = "ringfence.packages.inside.registry"
_LAYERS = "ringfence.packages.inside.layers"
_MAX_ROUNDS = 8
_MAX_BESIDE = 4
_MAX_ENTRIES = 300_000
_MAX_LISTING = 64 * MIB
_WORDS = re.compile(r"[A-Za-z0-9, -]{1,80}", re.ASCII)
_NAMED = re.compile(r"https://(?:[a-z0-9_](?:[a-z0-9_-]{0,62})\.)+[a-z][a-z0-9-]{0,62}(?::[0-9]{1,5})?", re.ASCII)
_ACCEPT = ", ".join((*manifests.MANIFEST_TYPES, *manifests.INDEX_TYPES))


@dataclass(slots=True)
class _RegistryAccess:
    """How a registry is reached: what it has demanded and referred us to so far."""

    source: ImageSource
    realm: str = ""
    """Where it issues tokens."""
    basic: bool = False
    beside: list[str] = field(default_factory=list)
    """Origins that it redirects to."""

    def order(self, pieces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        origins = [self.source.origin, *self.beside]
        asked = {"origin": self.source.origin, "origins": origins, "name": self.source.name}
        return {**asked, "realm": self.realm, "basic": self.basic, "pieces": list(pieces)}

    def led(self, needs: Mapping[str, Any], known: bool) -> None:
        """Grant what the box says it needs to go on. Raises Unavailable if that is not possible."""
        host = self.source.host
        if needs.get("basic") is True and not self.basic:
            if not known or self.source.plain:
                raise _no_credential(host, self.source.plain)
            self.basic = True
        elif isinstance(needs.get("realm"), str) and not self.realm:
            self._lead(_origin(needs["realm"]))
            self.realm = needs["realm"]
        elif isinstance(needs.get("origin"), str):
            self._lead(_origin(needs["origin"]))
        else:
            raise Unavailable("install_failed", f"{host} asks for what an install box cannot give")

    def _lead(self, origin: str) -> None:
        if origin == self.source.origin or origin in self.beside:
            return
        # A rule for an address, or for this machine, would open it whatever it is.
        if not _NAMED.fullmatch(origin):
            text = (
                f"{self.source.host} leads to {quoted(origin)}, which is not followed: it is not over TLS, or no name"
            )
            raise Unavailable("install_failed", text)
        if len(self.beside) >= _MAX_BESIDE:
            raise Unavailable("install_failed", f"{self.source.host} leads to more than {_MAX_BESIDE} other hosts")
        self.beside.append(origin)


class ImageFetcher:
    """Fetches images that are not in the cache yet."""

    def __init__(self, cache: PackageCache, boxes: InstallBoxes, engines: Callable[[], Engines]) -> None:
        """`engines`: reads the current configuration of this host's container engines."""
        self._cache = cache
        self._boxes = boxes
        self._engines = engines

    async def fetch(self, name: str) -> Tree:
        """Raises Unavailable, ValueError for a malformed name."""
        wanted = Reference.of(name)
        # A tag may mean another image tomorrow; only a digest always means the same.
        known = await asyncio.to_thread(self._cache.known, _asked(wanted)) if wanted.digest else None
        if known is not None:
            return known
        problems: list[Unavailable] = []
        engines = await asyncio.to_thread(self._engines)
        for source in engines.sources(wanted):
            try:
                tree = await self._from(source, engines)
            except Unavailable as exc:
                problems.append(exc)
                continue
            for each in {Reference.of(tree.packages[0].name), *([wanted] if wanted.digest else [])}:
                await asyncio.to_thread(self._cache.remember, _asked(each), tree)
            return tree
        if len(problems) == 1:
            raise problems[0]
        raise Unavailable(problems[-1].reason_code, "; ".join(each.message for each in problems))

    async def _from(self, source: ImageSource, engines: Engines) -> Tree:
        staging = await asyncio.to_thread(self._cache.staging)
        try:
            fetching = _Fetching(_RegistryAccess(source), engines, self._boxes, staging)
            digest, manifest = await fetching.manifest()
            pinned = source.reference.pinned(digest)
            known = await asyncio.to_thread(self._cache.known, _asked(pinned))
            if known is not None:  # the tag still means what it meant
                return known
            config = await fetching.all(manifest)
            package = Package(str(pinned), pinned.tag or pinned.digest, pinned.digest)
            return await lay_out(self._cache, self._boxes, package, manifest, config, staging)
        finally:
            await asyncio.to_thread(shutil.rmtree, staging, True)


async def lay_out(
    cache: PackageCache, boxes: InstallBoxes, package: Package, manifest: Manifest, config: ImageConfig, staging: Path
) -> Tree:
    """Put the layers that lie in `staging`, checked, together in a box, and the tree into the cache. Raises
    Unavailable."""
    order = {
        "layers": [{"file": each.file, "packed": each.packed} for each in manifest.layers],
        "most_entries": _MAX_ENTRIES,
    }
    inputs = tuple(
        Input(f"files/{each}", staging / each, links=True) for each in {layer.file for layer in manifest.layers}
    )
    left = staging / "left"
    await boxes.run(package.name, BoxJob(_LAYERS, "unpack", order, left, inputs=inputs))
    listing = await asyncio.to_thread(read_json, left / "listing.json", _MAX_LISTING)
    await asyncio.to_thread(rootfs.laid_out, listing, left / "files", staging / "tree")
    about = {**config.plain(), "left_out": _left_out(listing)}
    return await asyncio.to_thread(cache.put, "image", staging / "tree", (package,), {}, about)


class _Fetching:
    """One image from one source, each part checked against the part that names it."""

    def __init__(self, access: _RegistryAccess, engines: Engines, boxes: InstallBoxes, staging: Path) -> None:
        self._access = access
        self._engines = engines
        self._boxes = boxes
        self._staging = staging
        self._name = str(access.source.reference)

    async def manifest(self) -> tuple[str, Manifest]:
        """The manifest for this machine, and its digest. Raises Unavailable."""
        wanted = self._access.source.reference
        data = await self._manifest(wanted.wanted)
        digest = _sha256(data)
        if wanted.digest and digest != wanted.digest:
            raise altered(self._name)
        chosen = manifests.chosen(data, self._name)
        if chosen is not None:
            digest, data = chosen, await self._manifest(chosen)
            if _sha256(data) != chosen:
                raise altered(self._name)
        return digest, manifests.manifest(data, self._name)

    async def all(self, manifest: Manifest) -> ImageConfig:
        """Fetch everything that the manifest names. Raises Unavailable."""
        await self._blobs([manifest.config])
        raw = await asyncio.to_thread((self._staging / manifest.config.file).read_bytes)
        config = manifests.config(raw, self._name)
        await self._blobs(manifest.layers)
        return config

    async def _manifest(self, wanted: str) -> bytes:
        path = f"/v2/{self._access.source.name}/manifests/{wanted}"
        piece = {"path": path, "accept": _ACCEPT, "into": "manifest", "most": manifests.MAX_BYTES}
        await self._got([piece])
        place = self._staging / "manifest"
        data = await asyncio.to_thread(place.read_bytes)
        place.unlink()
        return data

    async def _blobs(self, wanted: Sequence[Piece]) -> None:
        blobs = {each.file: each for each in wanted}
        await self._got(
            [
                {
                    "path": f"/v2/{self._access.source.name}/blobs/{each.digest}",
                    "accept": "*/*",
                    "into": each.file,
                    "most": each.size,
                }
                for each in blobs.values()
            ]
        )
        for each in blobs.values():
            await asyncio.to_thread(_check, self._staging / each.file, each, self._name)

    async def _got(self, pieces: Sequence[Mapping[str, Any]]) -> None:
        """Fetch all pieces, with another round for each demand of the registry."""
        for number in range(_MAX_ROUNDS):
            missing = [each for each in pieces if not (self._staging / each["into"]).is_file()]
            if not missing:
                return
            into = self._staging / f"round-{number}"
            await self._boxes.run(
                self._name, BoxJob(_GETTER, "get", self._access.order(missing), into, self._registry())
            )
            more = await asyncio.to_thread(self._taken, into, [str(each["into"]) for each in missing])
            if more is not None:
                self._access.led(more, self._engines.basic(self._access.source.host) is not None)
        raise Unavailable("install_failed", f"{self._access.source.host} has one condition after the other")

    def _taken(self, into: Path, names: list[str]) -> dict[str, Any] | None:
        """Move what a round brought to the rest. Returns what the box needs to go on. Raises Unavailable."""
        needs = read_json(into / "needs.json", 1_000_000) if (into / "needs.json").exists() else None
        for name in names:
            place = into / "files" / name
            if place.is_file() and not place.is_symlink():
                os.rename(place, self._staging / name)
            elif needs is None:
                raise Unavailable("install_failed", f"an install box did not bring all of {self._name}")
        shutil.rmtree(into, ignore_errors=True)
        return needs

    def _registry(self) -> Registry:
        access = self._access
        host = self._access.source.host
        known = self._engines.basic(host)
        credentials: tuple[Credential, ...] = ()
        if known is not None and (access.realm or access.basic) and not access.source.plain:
            where = urlsplit(access.realm or f"{access.source.origin}/v2/")
            header, parts = known
            credential = Credential(str(where.hostname), where.port or 443, where.path or "/", header, parts)
            credentials = (credential,)
        return Registry(
            client=(),
            hosts=(_endpoint(access.source.origin),),
            certificates=self._engines.trusted(host),
            credentials=credentials,
            beside=tuple(map(_endpoint, access.beside)),
        )


def _asked(name: Reference) -> dict[str, str]:
    return {"kind": "image", "reference": str(name), "machine": manifests.machine()}


def _check(path: Path, piece: Piece, name: str) -> None:
    if path.stat().st_size != piece.size or file_digest(path, "sha256").hex() != piece.digest.partition(":")[2]:
        raise altered(f"a part of {name}")


def _sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _origin(url: str) -> str:
    """The origin of an address. Raises Unavailable if it is malformed."""
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None or parts.port == 0:
            raise ValueError
    except ValueError:
        raise Unavailable("install_failed", "a registry leads to what is no address") from None
    return f"{parts.scheme}://{parts.netloc.lower()}"


def _endpoint(origin: str) -> str:
    parts = urlsplit(origin)
    host = f"[{parts.hostname}]" if ":" in str(parts.hostname) else str(parts.hostname)
    return f"{host}:{parts.port or (443 if parts.scheme == 'https' else 80)}"


def _left_out(listing: Mapping[str, Any]) -> dict[str, int]:
    left_out = listing.get("left_out")
    found = left_out.items() if isinstance(left_out, dict) else ()
    return {what: count for what, count in list(found)[:10] if _WORDS.fullmatch(what) and type(count) is int}


def _no_credential(host: str, plain: bool) -> Unavailable:
    if plain:
        text = f"the registry at {host} wants a credential, which anyone on the way could read over plain HTTP"
    else:
        text = f"the registry at {host} wants to know who asks, and no auth of a docker config on this host says it"
    return Unavailable("registry_credentials", text)
