"""Images that lie on this host, taken into the cache: OCI layouts, archives of them, archives and folders of a root.

Each is hostile input. Parts of an OCI layout are bound by digests, as those of a registry. Layers, and an archive that
is a root itself, are laid out in an install box without a network, like layers that were fetched.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from ringfence.core.errors import Unavailable
from ringfence.core.quoting import quoted
from ringfence.packages.cache import Package, PackageCache, Tree, fingerprint
from ringfence.packages.images import manifests
from ringfence.packages.images.fetch import lay_out
from ringfence.packages.images.manifests import ImageConfig, Manifest, Piece
from ringfence.packages.install_boxes import InstallBoxes, altered, file_digest

_MAX_ROOT_BYTES = 3 * 1024**3
_MAX_ENTRIES = 300_000
_CHUNK = 1 << 20
_USUAL = ImageConfig()


async def take(cache: PackageCache, boxes: InstallBoxes, path: Path) -> Tree:
    """The tree of the image at this path. Raises Unavailable."""
    kind = _kind(path)
    if kind == "folder":
        return _of_folder(cache, path)
    asked = {"kind": "image", "local": kind, "stamp": _stamp(path, kind), "machine": manifests.machine()}
    if (known := cache.known(asked)) is not None:
        return known
    staging = cache.staging()
    try:
        name = f"local/{path.name}"
        if kind == "layout":
            digest, manifest, config = _taken(path.name, _FolderLayout(path), staging)
        elif (archive := _archived(path, staging)) is not None:
            digest, manifest, config = archive
        else:
            digest, manifest, config = _whole(path, staging)
        package = Package(f"{name}@{digest}", digest, digest)
        tree = await lay_out(cache, boxes, package, manifest, config, staging)
    except OSError as problem:
        raise _bad(path.name, str(problem.strerror)) from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    cache.remember(asked, tree)
    return tree


def check(path: Path) -> None:
    """Raises Unavailable where nothing at this path can be an image."""
    _kind(path)


def _kind(path: Path) -> str:
    try:
        mode = path.stat().st_mode
    except OSError as problem:
        raise Unavailable("no_image", f"the image {path} cannot be read: {problem.strerror}") from None
    if stat.S_ISREG(mode):
        return "archive"
    if not stat.S_ISDIR(mode):
        raise _bad(path.name, "it is neither a folder nor a file")
    return "layout" if (path / "oci-layout").is_file() else "folder"


def _stamp(path: Path, kind: str) -> list[Any]:
    """What tells that it is another than it was. The index of a layout names all of the rest by digests."""
    if kind == "layout":
        return [hashlib.sha256(_FolderLayout(path).read("index.json", manifests.MAX_BYTES)).hexdigest()]
    return [file_digest(path, "sha256").hex()]


# ── OCI layouts ───────────────────────────────────────────────────────────────────────────────────


class _FolderLayout:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, inside: str, most: int) -> bytes:
        with self._opened(inside) as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise _bad(self._folder.name, f"its {inside} is too long")
        return data

    def copy(self, piece: Piece, to: Path) -> None:
        with self._opened(_blob(piece.digest)) as file, to.open("wb") as copied:
            _copied(file, copied, piece, self._folder.name)

    @contextmanager
    def _opened(self, inside: str) -> Iterator[IO[bytes]]:
        try:
            descriptor = os.open(self._folder / inside, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            raise _bad(self._folder.name, f"there is no {inside} in it") from None
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise _bad(self._folder.name, f"its {inside} is no file")
            yield file


class _ArchiveLayout:
    """The same in an archive, whose parts may come in any order: all of them are put beside the tree first."""

    def __init__(self, name: str, parts: dict[str, Path]) -> None:
        self._name = name
        self._parts = parts

    def read(self, inside: str, most: int) -> bytes:
        path = self._part(inside)
        if path.stat().st_size > most:
            raise _bad(self._name, f"its {inside} is too long")
        return path.read_bytes()

    def copy(self, piece: Piece, to: Path) -> None:
        with self._part(_blob(piece.digest)).open("rb") as file, to.open("wb") as copied:
            _copied(file, copied, piece, self._name)

    def _part(self, inside: str) -> Path:
        found = self._parts.get(inside)
        if found is None:
            raise _bad(self._name, f"there is no {inside} in it")
        return found


def _taken(name: str, layout: _FolderLayout | _ArchiveLayout, staging: Path) -> tuple[str, Manifest, ImageConfig]:
    """Check all that an index leads to, and copy the layers. Raises Unavailable."""
    data = layout.read("index.json", manifests.MAX_BYTES)
    digest = ""
    for _ in range(3):  # an index may be of indexes
        chosen = _only(data, name) or manifests.chosen(data, name)
        if chosen is None:
            break
        digest = chosen
        data = layout.read(_blob(digest), manifests.MAX_BYTES)
        if f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
            raise altered(f"a part of {name}")
    manifest = manifests.manifest(data, name)
    about = layout.read(_blob(manifest.config.digest), manifests.MAX_BYTES)
    if f"sha256:{hashlib.sha256(about).hexdigest()}" != manifest.config.digest:
        raise altered(f"a part of {name}")
    config = manifests.config(about, name)
    for piece in {each.file: each for each in manifest.layers}.values():
        layout.copy(piece, staging / piece.file)
    return digest, manifest, config


def _only(data: bytes, name: str) -> str | None:
    """The only manifest of an index that says for no platform: who keeps one image on a disk need not say so."""
    try:
        listed = json.loads(data).get("manifests")
    except (ValueError, AttributeError, RecursionError):
        raise _bad(name, "its index is no JSON") from None
    if not isinstance(listed, list) or len(listed) != 1 or not isinstance(listed[0], dict) or "platform" in listed[0]:
        return None
    found = listed[0].get("digest")
    return found if isinstance(found, str) and manifests.is_digest(found) else None


def _blob(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/', 1)}"


def _copied(file: IO[bytes], to: IO[bytes], piece: Piece, name: str) -> None:
    digest = hashlib.sha256()
    size = 0
    while chunk := file.read(_CHUNK):
        size += len(chunk)
        if size > piece.size:
            break
        digest.update(chunk)
        to.write(chunk)
    if size != piece.size or f"sha256:{digest.hexdigest()}" != piece.digest:
        raise altered(f"a part of {name}")


# ── Archives ──────────────────────────────────────────────────────────────────────────────────────


def _archived(path: Path, staging: Path) -> tuple[str, Manifest, ImageConfig] | None:
    """What an archive of an OCI layout has; None: it is none, so it is a root."""
    parts: dict[str, Path] = {}
    room = _MAX_ROOT_BYTES
    beside = staging / "parts"
    beside.mkdir()
    try:
        with tarfile.open(path, "r:*") as archive:
            names = set(archive.getnames()) if path.stat().st_size <= _MAX_ROOT_BYTES else set()
            if not {"oci-layout", "index.json"} <= {each.removeprefix("./") for each in names}:
                if {"manifest.json"} & names and not {"usr", "bin"} & names:
                    text = (
                        "it is in docker's old form: make an OCI layout of it with skopeo copy docker-archive:… oci:…"
                    )
                    raise _bad(path.name, text)
                return None
            for member in archive:
                inside = member.name.removeprefix("./")
                if not member.isreg() or not (inside == "index.json" or inside.startswith("blobs/sha256/")):
                    continue
                room -= member.size
                content = archive.extractfile(member)
                if room < 0 or len(parts) > _MAX_ENTRIES or content is None:
                    raise _bad(path.name, "it is too long")
                parts[inside] = beside / str(len(parts))
                with parts[inside].open("wb") as file:
                    shutil.copyfileobj(content, file, _CHUNK)
    except (tarfile.TarError, EOFError, ValueError, OverflowError):
        raise _bad(path.name, "it is no archive that can be read") from None
    return _taken(path.name, _ArchiveLayout(path.name, parts), staging)


def _whole(path: Path, staging: Path) -> tuple[str, Manifest, ImageConfig]:
    """An archive that is a root, as an image of one layer."""
    size = path.stat().st_size
    if size > _MAX_ROOT_BYTES:
        raise _bad(path.name, f"it has more than {_MAX_ROOT_BYTES} bytes")
    piece = Piece(f"sha256:{file_digest(path, 'sha256').hex()}", size, _packed(path))
    with path.open("rb") as file, (staging / piece.file).open("wb") as copied:
        _copied(file, copied, piece, path.name)
    return piece.digest, Manifest(piece, (piece,)), _USUAL


def _packed(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(4)
    return "gzip" if head[:2] == b"\x1f\x8b" else "zstd" if head == b"\x28\xb5\x2f\xfd" else "plain"


# ── Folders ───────────────────────────────────────────────────────────────────────────────────────


def _of_folder(cache: PackageCache, path: Path) -> Tree:
    """A folder that is a root, or the tree of one that is in the cache."""
    if (digest := cache.digest_of(path)) is not None:
        return cache.tree(digest)
    asked = {"kind": "image", "local": "folder", "contents": fingerprint(path)}
    if (known := cache.known(asked)) is not None:
        return known
    staging = cache.staging()
    try:
        _copy_folder(path, staging / "tree")
        digest = fingerprint(staging / "tree")
        package = Package(f"local/{path.name}", digest, digest)
        tree = cache.put("image", staging / "tree", (package,), {}, _USUAL.plain())
    except OSError as problem:
        raise _bad(path.name, f"{problem.filename}: {problem.strerror}") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    cache.remember(asked, tree)
    return tree


def _copy_folder(source: Path, to: Path) -> None:
    """Files, folders and links, with the permissions that trees have. Devices, pipes and sockets are left out."""
    waiting = [(source, to)]
    count = 0
    while waiting:
        folder, made = waiting.pop()
        made.mkdir(mode=0o755)
        made.chmod(0o755)
        with os.scandir(folder) as entries:
            for entry in entries:
                count += 1
                if count > _MAX_ENTRIES:
                    raise _bad(source.name, f"it has more than {_MAX_ENTRIES} entries")
                place = made / entry.name
                if entry.is_symlink():
                    place.symlink_to(os.readlink(entry.path))
                elif entry.is_dir(follow_symlinks=False):
                    waiting.append((Path(entry.path), place))
                elif entry.is_file(follow_symlinks=False):
                    shutil.copyfile(entry.path, place, follow_symlinks=False)
                    place.chmod(0o755 if entry.stat(follow_symlinks=False).st_mode & 0o111 else 0o644)


def _bad(name: str, why: str) -> Unavailable:
    return Unavailable("bad_image", f"the image {quoted(name)} is not taken: {why}")
