"""The cache of packages: trees of files by the digest of their contents, checked before each use.

A tree never changes, and no box may write to it. The cache also remembers which tree a request resulted in, so that the
same request is fetched once.

Entries are removed only by `discard`, and only if no process uses them. The cache has a file `.lock`. A process that
uses a tree locks one byte of that file, chosen by the tree's digest, until the process ends, and its boxes with it. The
first two bytes stand for trees that are being prepared, and for the files of the index.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, field
from pathlib import Path
from typing import Any, Literal

from ringfence.core import canonical, system
from ringfence.core.errors import StoreError, Unavailable
from ringfence.core.record import dataclass

AT = "/packages"
"""The path of a tree in a box."""
FOLDER = "packages"
"""Name of the cache within a state folder."""
_MAX_MANIFEST_BYTES = 64 * 1024 * 1024
_CHUNK = 1024 * 1024
_ABANDONED_SECONDS = 86_400
_LOCK = ".lock"
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | system.PRIVATE
_MAX_DIGEST_BYTES = 1000
_CONFIGURATIONS = "configurations"
_MAX_PATH_BYTES = 4096
_PREPARING = 0
_WHEELS = 1
_FIRST_TREE = 2
_DIGITS = frozenset("0123456789abcdef")

Kind = Literal["npm", "pypi", "image"]

_lock_files: dict[str, int] = {}
"""The lock files of the caches that this process uses, by path."""
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Package:
    """One package as its registry has it."""

    name: str
    version: str
    integrity: str
    """Of the bytes that the registry sent: `sha512-…` as npm writes it, or `sha256:…`."""
    built_from: str = ""
    """If the registry sent sources: their digest; `integrity` is then that of the wheel built from them."""

    def plain(self) -> dict[str, str]:
        return {name: value for name, value in asdict(self).items() if value}


@dataclass(frozen=True, slots=True)
class Tree:
    """Unpacked packages, ready to be mounted in a box."""

    digest: str
    kind: Kind
    folder: Path
    packages: tuple[Package, ...]
    programs: Mapping[str, str]
    """Programs by name: paths within the tree."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Of an image: how to run it, as in `manifests.ImageConfig`, and which of its entries were left out."""


class PackageCache:
    """Trees below one folder of our state."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._checked: set[str] = set()

    def wheels(self) -> Path:
        """The folder of single files of an index, by the digest that the index states. They are not removed while this
        process lives."""
        _hold(self._folder, _WHEELS)
        return self._folder / "wheels"

    def staging(self) -> Path:
        """Make a folder in the cache to prepare a tree in."""
        _make_private(self._folder)
        self._check_own()
        _hold(self._folder, _PREPARING)
        _sweep(self._folder)
        path = self._folder / f".new-{secrets.token_hex(8)}"
        path.mkdir(mode=0o700)
        return path

    def put(
        self,
        kind: Kind,
        tree: Path,
        packages: tuple[Package, ...],
        programs: Mapping[str, str],
        about: Mapping[str, Any] | None = None,
    ) -> Tree:
        """Move a tree into the cache, under the digest of its contents."""
        manifest = {
            "kind": kind,
            "packages": [package.plain() for package in packages],
            "programs": dict(programs),
            "files": dict(_fingerprints(tree, kind)),
            **({"about": dict(about)} if about else {}),
        }
        digest = canonical.digest(manifest)
        place = self._place(digest)
        _hold(self._folder, _lock_byte(digest))
        if not place.exists():
            made = self.staging()
            os.rename(tree, made / "tree")
            (made / "manifest.json").write_bytes(canonical.dumps(manifest))
            try:
                os.rename(made, place)
            except OSError:  # another process was faster: the same digest is the same tree
                shutil.rmtree(made, ignore_errors=True)
        return self.tree(digest)

    def tree(self, digest: str) -> Tree:
        """The tree with this digest, every byte of it checked. It is not removed while this process lives. Raises
        Unavailable."""
        place = self._place(digest)
        _hold(self._folder, _lock_byte(digest))
        try:
            if (place / "manifest.json").stat().st_size > _MAX_MANIFEST_BYTES:
                raise ValueError
            data = (place / "manifest.json").read_bytes()
            manifest = json.loads(data)
        except (OSError, ValueError, RecursionError):
            raise Unavailable(
                "no_package", f"the packages {digest[:19]}… are not here; fetch them: ringfence init --fetch"
            ) from None
        if canonical.digest(manifest) != digest:
            raise _altered_error(place)
        if digest not in self._checked:
            if dict(_fingerprints(place / "tree", manifest["kind"])) != manifest["files"]:
                raise _altered_error(place)
            self._checked.add(digest)
        return Tree(
            digest=digest,
            kind=manifest["kind"],
            folder=place / "tree",
            packages=tuple(Package(**package) for package in manifest["packages"]),
            programs=manifest["programs"],
            about=manifest.get("about", {}),
        )

    def digest_of(self, folder: Path) -> str | None:
        """The digest of the tree in this folder; None unless it is a tree of this cache."""
        name = folder.absolute().parent.name
        try:
            same = _is_digest(name) and os.path.samefile(folder, self._folder / name / "tree")
        except OSError:
            return None
        return f"sha256:{name}" if same else None

    # ── Requests that were fetched before ──

    def known(self, request: Any) -> Tree | None:
        """The tree that an equal request resulted in, if it is still in the cache."""
        try:
            digest = self._request_path(request).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return None
        try:
            return self.tree(digest)
        except Unavailable as exc:
            if exc.reason_code == "no_package":
                return None
            raise

    def remember(self, request: Any, tree: Tree) -> None:
        place = self._request_path(request)
        _make_private(place.parent)
        part = place.with_name(f".{secrets.token_hex(8)}")
        part.write_text(tree.digest, encoding="ascii")
        os.rename(part, place)

    # ── Which configurations pin trees ──

    def used_by(self, configuration: Path) -> None:
        """Note that this configuration pins trees of this cache. If the note cannot be written, a later pruning may
        remove them, and they have to be fetched again."""
        path = os.path.realpath(configuration)
        place = self._folder / _CONFIGURATIONS / hashlib.sha256(os.fsencode(path)).hexdigest()
        with suppress(OSError):
            if place.exists():
                return
            _make_private(place.parent)
            part = place.with_name(f".{secrets.token_hex(8)}")
            part.write_bytes(os.fsencode(path))
            os.rename(part, place)

    def configurations(self) -> list[Path]:
        """The configurations that were noted and still exist."""
        found: list[Path] = []
        with suppress(OSError):
            for place in sorted((self._folder / _CONFIGURATIONS).iterdir()):
                path = Path(os.fsdecode(place.read_bytes()[:_MAX_PATH_BYTES]))
                if place.name[:1] != "." and path.is_file():
                    found.append(path)
        return found

    # ── What can be removed ──

    def entries(self) -> Iterator[CacheEntry]:
        """Everything in the cache, by names alone: nothing is checked. Raises OSError."""
        if not os.path.lexists(self._folder):
            return
        system.check_own_folder(self._folder, os.lstat(self._folder))
        for path in sorted(self._folder.iterdir()):
            if path.name == "wheels":
                yield CacheEntry(path, "wheels", _wheel_names(path))
            elif path.name.startswith((".new-", ".old-")):
                yield CacheEntry(path, "leftover", ())
            elif _is_digest(path.name):
                yield _entry_of(path)

    def discard(self, entry: CacheEntry, in_use: Callable[[], str | None]) -> str | None:
        """Remove an entry, and return None; or, if it is in use, return why it was not removed. `in_use` says what uses
        trees by other means than the lock; it is called when no other process can begin to. Raises OSError."""
        # By descriptors: what can write to the state folder may have put links in place of the cache's folders.
        folder = system.open_own_folder(self._folder)
        try:
            return _discard(folder, entry, in_use)
        finally:
            os.close(folder)

    def _check_own(self) -> None:
        """Raise StoreError unless the folder is the cache's own: we write to it, and remove old entries from it."""
        try:
            system.check_own_folder(self._folder, os.lstat(self._folder))
        except OSError as exc:
            raise StoreError(f"the cache of packages {self._folder} cannot be used: {exc.strerror}") from None

    def _request_path(self, request: Any) -> Path:
        return self._folder / "asked" / canonical.digest(request).removeprefix("sha256:")

    def _place(self, digest: str) -> Path:
        number = digest.removeprefix("sha256:")
        if not _is_digest(number):
            raise Unavailable(
                "no_package", "this is not the digest of packages, which is sha256: and 64 hexadecimal digits"
            )
        return self._folder / number


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One thing in the cache, as its manifest describes it: its contents are not checked."""

    path: Path
    kind: Literal["npm", "pypi", "image", "wheels", "leftover"]
    names: tuple[str, ...]
    """Names and versions of its packages, or names of its wheels."""
    digest: str = ""
    """The digest of a tree; empty for wheels and leftovers."""
    projects: tuple[str, ...] = ()
    """Names without versions."""


def _entry_of(place: Path) -> CacheEntry:
    digest = f"sha256:{place.name}"
    try:
        if (place / "manifest.json").stat().st_size > _MAX_MANIFEST_BYTES:
            raise ValueError
        manifest = json.loads((place / "manifest.json").read_bytes())
        kind = manifest["kind"]
        packages = [Package(**package) for package in manifest["packages"]]
        if kind not in ("npm", "pypi", "image"):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return CacheEntry(place, "pypi", (), digest)
    names = tuple(each.name if kind == "image" else f"{each.name} {each.version}" for each in packages)
    return CacheEntry(place, kind, names, digest, tuple(each.name for each in packages))


def _wheel_names(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.name for path in folder.glob("*/*.whl")))


# ── Locks: what is in use ─────────────────────────────────────────────────────────────────────────


def _is_digest(text: str) -> bool:
    return len(text) == 64 and not set(text) - _DIGITS


def _lock_byte(digest: str) -> int:
    return _FIRST_TREE + int(digest.removeprefix("sha256:")[:15], 16)


def _lock_byte_of(entry: CacheEntry) -> int:
    if entry.digest:
        return _lock_byte(entry.digest)
    return _WHEELS if entry.kind == "wheels" else _PREPARING


def _open_lock(folder: Path) -> int:
    return os.open(folder / _LOCK, _LOCK_FLAGS, 0o600)


def _hold(folder: Path, at: int) -> None:
    """Lock a byte of the lock file until this process ends. On a file system without locks this does nothing, and
    `discard` removes nothing."""
    if not folder.is_dir():
        return
    with suppress(OSError), _lock:
        name = os.path.realpath(folder)
        if name not in _lock_files or not _is_same(_lock_files[name], folder / _LOCK):
            _lock_files[name] = _open_lock(folder)
        system.hold_byte(_lock_files[name], at)


def _is_same(descriptor: int, path: Path) -> bool:
    """Whether the path is still this open file: the whole state folder may have been removed and made again."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


def _discard(folder: int, entry: CacheEntry, in_use: Callable[[], str | None]) -> str | None:
    descriptor = os.open(_LOCK, _LOCK_FLAGS, 0o600, dir_fd=folder)
    gone = f".old-{secrets.token_hex(8)}"
    try:
        if not system.take_byte(descriptor, _lock_byte_of(entry)):
            return "a process uses it" if system.no_boxes() is None else "only on Linux is it known what uses it"
        if entry.kind in ("npm", "pypi", "image") and (why := in_use()) is not None:
            return why
        # Renamed first: from now on no request finds it, however long its removal takes, and even if that fails.
        with suppress(FileNotFoundError):
            os.rename(entry.path.name, gone, src_dir_fd=folder, dst_dir_fd=folder)
            if entry.digest:
                _forget(folder, entry.digest)
    finally:
        os.close(descriptor)
    _remove(folder, gone)
    return None


def _forget(folder: int, digest: str) -> None:
    """Forget which requests resulted in this tree."""
    with suppress(OSError):
        asked = os.open("asked", os.O_RDONLY | os.O_DIRECTORY | system.PRIVATE, dir_fd=folder)
        try:
            for name in os.listdir(asked):
                with suppress(OSError):
                    flags = os.O_RDONLY | system.PRIVATE | system.UNHURRIED
                    with open(os.open(name, flags, dir_fd=asked), "rb") as file:
                        same = file.read(_MAX_DIGEST_BYTES).strip() == digest.encode()
                    if same:
                        os.unlink(name, dir_fd=asked)
        finally:
            os.close(asked)


def _remove(folder: int, name: str) -> None:
    """Remove an entry. A tree may have folders that we cannot write to: they are made writable first. If there is a
    link in place of a tree, the link is removed, not its target."""
    with suppress(OSError):
        if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=folder)
            return
        for _, folders, _, at in os.fwalk(name, dir_fd=folder):
            for each in folders:
                with suppress(OSError):
                    _make_removable(each, at)
    shutil.rmtree(name, ignore_errors=True, dir_fd=folder)


def _make_removable(name: str, at: int) -> None:
    opened = os.open(name, os.O_PATH | os.O_DIRECTORY | system.PRIVATE, dir_fd=at)
    try:
        os.chmod(f"/proc/self/fd/{opened}", 0o700)
    finally:
        os.close(opened)


def fingerprint(root: Path) -> str:
    """The digest of a root file system, over every file, folder and link in it. Raises Unavailable."""
    return canonical.digest(dict(_fingerprints(root, "image")))


def folder_of(state: Path, digest: str) -> Path:
    """The folder of the tree with this digest, which need not exist."""
    return state / FOLDER / digest.removeprefix("sha256:") / "tree"


def _make_private(folder: Path) -> None:
    """Make a folder and its missing parents, readable by this user alone."""
    for each in reversed((folder, *folder.parents)):
        each.mkdir(mode=0o700, exist_ok=True)


def _sweep(folder: Path) -> None:
    """Remove what killed processes left of trees that they were preparing."""
    for left in folder.glob(".new-*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(left, ignore_errors=True)


def _altered_error(place: Path) -> Unavailable:
    text = f"packages in the cache are not as they were fetched; remove {place}, and fetch them again"
    return Unavailable("package_altered", text)


def _fingerprints(root: Path, kind: Kind) -> Iterator[tuple[str, list[Any]]]:
    """Every file below `root`, with its digest, its size and whether it is executable; every link with its target; and,
    in an image, every folder."""
    waiting = [""]
    while waiting:
        inside = waiting.pop()
        try:
            with os.scandir(f"{root}/{inside}") as entries:
                for entry in entries:
                    name = f"{inside}{entry.name}"
                    if entry.is_symlink():
                        yield name, ["link", 0, False, os.readlink(entry.path)]
                    elif not entry.is_dir(follow_symlinks=False):
                        yield name, _fingerprint_of(entry.path)
                    else:
                        waiting.append(f"{name}/")
                        if kind == "image":
                            yield name, ["folder", 0, False]
        except OSError as problem:
            raise Unavailable("package_altered", f"the cache of packages cannot be read: {problem.strerror}") from None


def _fingerprint_of(path: str) -> list[Any]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            return ["other", 0, False]
        digest = hashlib.sha256()
        most = min(found.st_size + 1, _CHUNK)
        while chunk := os.read(descriptor, most):
            digest.update(chunk)
    finally:
        os.close(descriptor)
    return [digest.hexdigest(), found.st_size, bool(found.st_mode & 0o100)]
