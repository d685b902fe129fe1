"""The cache of packages: trees of files by the digest of their contents, checked before each use.

A tree never changes, and no box may write to it. The cache also remembers which tree a request resulted in, so that the
same request is fetched once.

Entries are removed only by `discard`, and only if no process uses them. The cache has a file `.lock`: whoever uses a
tree holds a byte of it that follows from the tree's digest, to the end of the process, whose boxes end with it. The
first bytes stand for trees that are being prepared, and for the files of the index.
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
"""Where a box sees a tree."""
FOLDER = "packages"
"""Name of the cache within a state folder."""
_MAX_MANIFEST_BYTES = 64 * 1024 * 1024
_CHUNK = 1024 * 1024
_ABANDONED_SECONDS = 86_400
_LOCK = ".lock"
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | system.PRIVATE
_MAX_ASKED_BYTES = 1000
_CONFIGURATIONS = "configurations"
_MAX_PATH_BYTES = 4096
_PREPARING = 0
_WHEELS = 1
_FIRST_TREE = 2
_DIGITS = frozenset("0123456789abcdef")

Kind = Literal["npm", "pypi", "image"]

_open: dict[str, int] = {}
"""The lock files of the caches that this process uses, by path."""
_turn = threading.Lock()


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
        """Where single files of an index are kept, by the digest that the index gives. They stay while we live."""
        _hold(self._folder, _WHEELS)
        return self._folder / "wheels"

    def staging(self) -> Path:
        """A new folder beside the trees, to prepare one in."""
        _private(self._folder)
        self._check()
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
        """Keep a tree under the digest of its contents."""
        manifest = {
            "kind": kind,
            "packages": [package.plain() for package in packages],
            "programs": dict(programs),
            "files": dict(_files(tree, kind)),
            **({"about": dict(about)} if about else {}),
        }
        digest = canonical.digest(manifest)
        place = self._place(digest)
        _hold(self._folder, _byte(digest))
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
        """A tree by its digest, every byte of it checked; it stays while we live. Raises Unavailable."""
        place = self._place(digest)
        _hold(self._folder, _byte(digest))
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
            raise _altered(place)
        if digest not in self._checked:
            if dict(_files(place / "tree", manifest["kind"])) != manifest["files"]:
                raise _altered(place)
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
        """The digest of the tree that a folder is, if it is one of ours."""
        name = folder.absolute().parent.name
        try:
            same = _is_digest(name) and os.path.samefile(folder, self._folder / name / "tree")
        except OSError:
            return None
        return f"sha256:{name}" if same else None

    # ── Requests that were fetched before ──

    def known(self, wanted: Any) -> Tree | None:
        """The tree of an equal earlier request, if it is here."""
        try:
            digest = self._asked(wanted).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return None
        try:
            return self.tree(digest)
        except Unavailable as exc:
            if exc.reason_code == "no_package":
                return None
            raise

    def remember(self, wanted: Any, tree: Tree) -> None:
        place = self._asked(wanted)
        _private(place.parent)
        part = place.with_name(f".{secrets.token_hex(8)}")
        part.write_text(tree.digest, encoding="ascii")
        os.rename(part, place)

    # ── Which configurations pin trees ──

    def used_by(self, configuration: Path) -> None:
        """Note that this configuration pins trees of this cache. Where it cannot be noted, a later pruning may remove
        what it pins, and that has to be fetched again."""
        path = os.path.realpath(configuration)
        place = self._folder / _CONFIGURATIONS / hashlib.sha256(os.fsencode(path)).hexdigest()
        with suppress(OSError):
            if place.exists():
                return
            _private(place.parent)
            part = place.with_name(f".{secrets.token_hex(8)}")
            part.write_bytes(os.fsencode(path))
            os.rename(part, place)

    def configurations(self) -> list[Path]:
        """The configurations that were noted, and are still there."""
        found: list[Path] = []
        with suppress(OSError):
            for place in sorted((self._folder / _CONFIGURATIONS).iterdir()):
                path = Path(os.fsdecode(place.read_bytes()[:_MAX_PATH_BYTES]))
                if place.name[:1] != "." and path.is_file():
                    found.append(path)
        return found

    # ── What can be removed ──

    def entries(self) -> Iterator[CacheEntry]:
        """Everything in the cache, as its names say. Raises OSError."""
        if not os.path.lexists(self._folder):
            return
        system.check_own_folder(self._folder, os.lstat(self._folder))
        for path in sorted(self._folder.iterdir()):
            if path.name == "wheels":
                yield CacheEntry(path, "wheels", _about_wheels(path))
            elif path.name.startswith((".new-", ".old-")):
                yield CacheEntry(path, "leftover", ())
            elif _is_digest(path.name):
                yield _described(path)

    def discard(self, entry: CacheEntry, in_use: Callable[[], str | None]) -> str | None:
        """Remove an entry, unless a process uses it: then, why it is left. `in_use` says who else uses trees, and is
        asked when no other process can begin to. Raises OSError."""
        # By its descriptor: whoever wrote the state may have put links where the cache has folders.
        folder = system.open_own_folder(self._folder)
        try:
            return _discarded(folder, entry, in_use)
        finally:
            os.close(folder)

    def _check(self) -> None:
        """Raises StoreError if we would write, and remove what is old, in a folder that is not the cache's own."""
        try:
            system.check_own_folder(self._folder, os.lstat(self._folder))
        except OSError as exc:
            raise StoreError(f"the cache of packages {self._folder} cannot be used: {exc.strerror}") from None

    def _asked(self, wanted: Any) -> Path:
        return self._folder / "asked" / canonical.digest(wanted).removeprefix("sha256:")

    def _place(self, digest: str) -> Path:
        number = digest.removeprefix("sha256:")
        if not _is_digest(number):
            raise Unavailable("no_package", "that is not the digest of packages: sha256: and 64 digits")
        return self._folder / number


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One thing in the cache, as it says of itself: nothing of it is checked."""

    path: Path
    kind: Literal["npm", "pypi", "image", "wheels", "leftover"]
    names: tuple[str, ...]
    """Names and versions of what is in it."""
    digest: str = ""
    """Of a tree."""
    projects: tuple[str, ...] = ()
    """Names without versions."""


def _described(place: Path) -> CacheEntry:
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


def _about_wheels(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.name for path in folder.glob("*/*.whl")))


# ── Who uses what ─────────────────────────────────────────────────────────────────────────────────


def _is_digest(text: str) -> bool:
    return len(text) == 64 and not set(text) - _DIGITS


def _byte(digest: str) -> int:
    return _FIRST_TREE + int(digest.removeprefix("sha256:")[:15], 16)


def _byte_of(entry: CacheEntry) -> int:
    if entry.digest:
        return _byte(entry.digest)
    return _WHEELS if entry.kind == "wheels" else _PREPARING


def _opened_lock(folder: Path) -> int:
    return os.open(folder / _LOCK, _LOCK_FLAGS, 0o600)


def _hold(folder: Path, at: int) -> None:
    """Hold a byte of the lock to the end of this process. A file system without locks has none to be waited for: there
    nothing is removed, either."""
    if not folder.is_dir():
        return
    with suppress(OSError), _turn:
        name = os.path.realpath(folder)
        if name not in _open or not _is_same(_open[name], folder / _LOCK):
            _open[name] = _opened_lock(folder)
        system.hold_byte(_open[name], at)


def _is_same(descriptor: int, path: Path) -> bool:
    """Whether the file is still there: the whole state may have been removed and made anew."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


def _discarded(folder: int, entry: CacheEntry, in_use: Callable[[], str | None]) -> str | None:
    descriptor = os.open(_LOCK, _LOCK_FLAGS, 0o600, dir_fd=folder)
    gone = f".old-{secrets.token_hex(8)}"
    try:
        if not system.take_byte(descriptor, _byte_of(entry)):
            return "a process uses it" if system.no_boxes() is None else "who uses it is known on Linux alone"
        if entry.kind in ("npm", "pypi", "image") and (why := in_use()) is not None:
            return why
        # From now on it is not found, however long its removal takes and however that ends.
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
                        same = file.read(_MAX_ASKED_BYTES).strip() == digest.encode()
                    if same:
                        os.unlink(name, dir_fd=asked)
        finally:
            os.close(asked)


def _remove(folder: int, name: str) -> None:
    """Trees may have folders that we cannot write to. Where there is a link instead of one, the link goes alone: what
    it leads to is somebody's own."""
    with suppress(OSError):
        if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=folder)
            return
        for _, folders, _, at in os.fwalk(name, dir_fd=folder):
            for each in folders:
                with suppress(OSError):
                    _open_up(each, at)
    shutil.rmtree(name, ignore_errors=True, dir_fd=folder)


def _open_up(name: str, at: int) -> None:
    opened = os.open(name, os.O_PATH | os.O_DIRECTORY | system.PRIVATE, dir_fd=at)
    try:
        os.chmod(f"/proc/self/fd/{opened}", 0o700)
    finally:
        os.close(opened)


def fingerprint(root: Path) -> str:
    """A digest of all that is in a root file system: every file, folder and link. Raises Unavailable."""
    return canonical.digest(dict(_files(root, "image")))


def folder_of(state: Path, digest: str) -> Path:
    """The folder of the tree with this digest, if it is here."""
    return state / FOLDER / digest.removeprefix("sha256:") / "tree"


def _private(folder: Path) -> None:
    """Make a folder, and its missing parents, that no other user can read."""
    for each in reversed((folder, *folder.parents)):
        each.mkdir(mode=0o700, exist_ok=True)


def _sweep(folder: Path) -> None:
    """Remove what processes left that were killed while they fetched."""
    for left in folder.glob(".new-*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(left, ignore_errors=True)


def _altered(place: Path) -> Unavailable:
    text = f"packages in our cache are not what was fetched; remove {place} and fetch them anew"
    return Unavailable("package_altered", text)


def _files(root: Path, kind: Kind) -> Iterator[tuple[str, list[Any]]]:
    """Every file below: digest, size, whether it is executable; every link; of an image, every folder."""
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
                        yield name, _file(entry.path)
                    else:
                        waiting.append(f"{name}/")
                        if kind == "image":
                            yield name, ["folder", 0, False]
        except OSError as problem:
            raise Unavailable("package_altered", f"our cache of packages cannot be read: {problem.strerror}") from None


def _file(path: str) -> list[Any]:
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
