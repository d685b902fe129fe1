"""The files of a guest, for the host: one order is one piece of work, done by a child of the agent with the rights of
programs. Runs in the guest, after `agent`, whose orders it adds to.

What the child writes to its output, and reads as its input, is a row of records:

    1 byte    what it is
    4 bytes   the length of the rest
    the rest

`J` is a JSON object, `D` bytes of a file; `.`, with a JSON object, says that all is done, and `E`, with one, why not:
a number of the kernel's, or a word and what it was about. Whether anything had begun to change, both say. The words for
people are the host's, which relies on nothing from here.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat

from ringfence.sandbox.guests import agent
from ringfence.sandbox.guests.agent_disk import (
    CHUNK,
    CREATE,
    FOLDER,
    READ,
    DiskBudget,
    DiskWalk,
    FoundEntry,
    NotDone,
    check_no_mount,
    device,
    empty,
    is_mount,
    new_name,
    only_regular,
    open_at,
    put,
    records,
    remove,
    tell,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

_LONGEST_LINK = 4000
_BENEATH = 8
_IN_ROOT = 16


# ── One piece of work ─────────────────────────────────────────────────────────────────────────────


class Work:
    """What the host asks of the files. Paths are rows of names, from the guest's root, or from `base`."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.begun = False
        self._resolve = _BENEATH if order.get("beneath") else _IN_ROOT
        self._base = os.open(order.get("base", "/"), FOLDER & ~os.O_NOFOLLOW)
        self._processes = _device_of("/proc")

    def begin(self) -> None:
        self.begun = True

    def open(self, parts: list[str], flags: int, mode: int = 0) -> int:
        return open_at(self._base, "/".join(parts), flags, mode, self._resolve)

    def folder(self, parts: list[str]) -> int:
        """A folder to look at, by links, too."""
        return self._seen(self.open(parts, FOLDER & ~os.O_NOFOLLOW))

    def regular(self, parts: list[str]) -> int:
        return self._seen(only_regular(self.open(parts, READ)))

    def _seen(self, descriptor: int) -> int:
        if device(descriptor) == self._processes:
            os.close(descriptor)
            raise OSError(errno.ENXIO, "what is there depends on who looks")
        return descriptor

    def enters(self, found: FoundEntry) -> bool:
        return found.info.st_dev != self._processes

    def around(self, parts: list[str]) -> int:
        """The folder of an entry that is to be changed."""
        return self.open(parts[:-1], FOLDER & ~os.O_NOFOLLOW)

    def made(self, parts: list[str]) -> tuple[int, bool]:
        """A folder, made with those above it where it is missing; and whether it was made just now."""
        there = len(parts)
        while True:
            try:
                folder = self.open(parts[:there], FOLDER & ~os.O_NOFOLLOW)
                break
            except FileNotFoundError:
                if not there:
                    raise
                there -= 1
        made = False
        for part in parts[there:]:
            try:
                made = False
                try:
                    os.mkdir(part, 0o755, dir_fd=folder)
                    made = True
                    self.begin()
                except FileExistsError:
                    pass
                below = os.open(part, FOLDER, dir_fd=folder)
            finally:
                os.close(folder)
            folder = below
            if made:
                os.fchmod(folder, 0o755)
        return folder, made

    # ── Reading ──

    def read(self) -> None:
        order = self.order
        descriptor = self.regular(order["path"])
        size = os.fstat(descriptor).st_size
        at = order["offset"]
        left = max(0, size - at)
        wanted = left if order["length"] is None else min(order["length"], left)
        if order["most"] is not None and wanted > order["most"]:
            raise NotDone("long", size=size, most=order["most"])
        tell({"size": wanted})
        while wanted > 0:
            data = os.pread(descriptor, min(CHUNK, wanted), at)
            if not data:
                return
            put(b"D", data)
            at += len(data)
            wanted -= len(data)

    def entries(self) -> None:
        folder = self.folder(self.order["path"])
        walk = DiskWalk(self.order["most"], self.order["depth"], lenient=True)
        walk.enters = self.enters
        for found in walk.through(folder):
            tell(_entry(found.parts, found.info, _target(found.folder, found.name, found.info)))

    def stat(self) -> None:
        parts = self.order["path"]
        if not parts or parts == self.order["top"]:
            tell(_entry((), os.fstat(self.folder(parts)), None))
            return
        folder = self.folder(parts[:-1])
        info = os.stat(parts[-1], dir_fd=folder, follow_symlinks=False)
        tell(_entry((), info, _target(folder, parts[-1], info)))

    def noted(self) -> None:
        """What the kernel notes when anything beneath changes; for what is too much to be read."""
        descriptor = self.open(self.order["path"], READ)
        whole = _sha256(_note((), os.fstat(descriptor)))
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            for found in DiskWalk(self.order["most"], lenient=True).through(descriptor):
                whole.update(_note(found.parts, found.info))
        elif stat.S_ISREG(os.fstat(descriptor).st_mode) and os.fstat(descriptor).st_size <= self.order["bytes"]:
            for data in _all_of(descriptor, os.fstat(descriptor).st_size):
                whole.update(data)
        tell({"digest": whole.hexdigest()})

    # ── Writing ──

    def write(self) -> None:
        parts, mode = self.order["path"], self.order["mode"]
        folder, _ = self.made(parts[:-1])
        check_no_mount(folder, parts[-1])
        if self.order["append"]:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
            file = os.open(parts[-1], flags | os.O_CLOEXEC, 0o644, dir_fd=folder)
            self.begin()
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise OSError(errno.ENXIO, "not a regular file")
            if mode is not None:
                os.fchmod(file, mode & 0o777)
            for _, data in records():
                _write_all(file, data)
            return
        self._replace(folder, parts[-1], mode)

    def _replace(self, folder: int, name: str, mode: int | None) -> None:
        part = new_name("part")
        if mode is None:
            mode = _mode_of(folder, name)
        _check_writable(folder, name)
        file = os.open(part, CREATE, 0o600, dir_fd=folder)
        before = self.begun
        self.begin()
        try:
            for _, data in records():
                _write_all(file, data)
            os.fchmod(file, mode & 0o777)
            os.rename(part, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            os.unlink(part, dir_fd=folder)
            self.begun = before
            raise

    def spool(self) -> None:
        """A new file, written as its contents come; where they do not come to their end, it is left empty."""
        folder, _ = self.made(self.order["path"][:-1])
        file = os.open(self.order["path"][-1], CREATE, 0o644, dir_fd=folder)
        try:
            for _, data in records():
                _write_all(file, data)
        except BaseException:
            os.ftruncate(file, 0)
            raise

    def make_dir(self) -> None:
        tell({"made": self.made(self.order["path"])[1]})

    def remove(self) -> None:
        parts = self.order["path"]
        remove(self.around(parts), parts[-1], self.begin)

    def rename(self) -> None:
        source, target = self.order["path"], self.order["to"]
        here = self.around(source)
        check_no_mount(here, source[-1])
        os.stat(source[-1], dir_fd=here, follow_symlinks=False)
        try:
            there = self.around(target)
            check_no_mount(there, target[-1])
            if device(here) != device(there):
                raise NotDone("other_disk")
            os.rename(source[-1], target[-1], src_dir_fd=here, dst_dir_fd=there)
        except OSError as problem:
            raise NotDone("", errno=problem.errno, text=problem.strerror, about="to") from problem

    # ── Whole folders ──

    def tree(self) -> None:
        """Everything in these folders: a record for each entry, and for a file its contents, or their digests."""
        order = self.order
        budget = DiskBudget(order["bytes"])
        walk = DiskWalk(order["most"], lenient=order["lenient"])
        for place in order["places"]:
            folder = self.folder(place) if order["links"] else self._exact(place)
            home = device(folder)
            walk.enters = self._entered(place, home)
            for found in walk.through(folder):
                self._node(found, place if order["named"] else [], budget)

    def _entered(self, place: list[str], home: int) -> Callable[[FoundEntry], bool]:
        """What of a place is walked through: no file systems of their own in a whole box, but its input."""
        given = self.order["input"]

        def enters(found: FoundEntry) -> bool:
            if not self.order["one_disk"] or found.info.st_dev == home:
                return True
            return given is not None and [*place, *found.parts][: len(given)] == given

        return enters

    def _leave_out(self, why: NotDone, path: str) -> None:
        """Go on without it, where the host wants what there is. Raises NotDone."""
        if not self.order["lenient"]:
            raise why
        tell({"left": path, "why": why.told["refused"]})

    def _exact(self, parts: list[str]) -> int:
        return self.open(parts, FOLDER)

    def _node(self, found: FoundEntry, place: list[str], budget: DiskBudget) -> None:
        mode = found.info.st_mode
        node: dict[str, Any] = {
            "path": "/".join((*place, *found.parts)),
            "kind": _kind(mode),
            "mode": stat.S_IMODE(mode) & 0o777,
            "modified": found.info.st_mtime_ns,
        }
        try:
            if node["kind"] == "file":
                self._file(node, found, budget)
                return
            if node["kind"] == "link":
                node["target"] = os.readlink(found.name, dir_fd=found.folder)
            elif node["kind"] == "other":
                node["other"] = stat.S_IFMT(mode)
            tell(node)
        except FileNotFoundError:
            return
        except PermissionError:
            self._leave_out(NotDone("no_permission", path=node["path"]), node["path"])
        except OSError:  # it is of another type than a moment ago
            self._leave_out(NotDone("changing", path=node["path"]), node["path"])

    def _file(self, node: dict[str, Any], found: FoundEntry, budget: DiskBudget) -> None:
        file = only_regular(os.open(found.name, READ | os.O_NOFOLLOW, dir_fd=found.folder))
        try:
            info = os.fstat(file)
            try:
                budget.take(file, info)
            except NotDone as why:
                self._leave_out(why, node["path"])
                return
            node["size"] = info.st_size
            if not self.order["contents"]:
                node["pieces"] = _digests(file, node, self.order["piece"])
                tell(node)
                return
            tell(node)
            for data in _all_of(file, info.st_size):
                put(b"D", data)
        finally:
            os.close(file)

    def clear(self) -> None:
        """Empty these folders, which are made where they are missing."""
        for place in self.order["places"]:
            stays, skips = (
                tuple(each[-1] for each in self.order[what] if each[:-1] == place) for what in ("stays", "skips")
            )
            folder, _ = self.made(place)
            empty(folder, stays, skips)
            os.close(folder)

    def put(self) -> None:
        """Create the files, folders and links that the host sends."""
        self.begin()
        place, _ = self.made(self.order["path"])
        _put_nodes(place)

    def unpack(self) -> None:
        """The same beside their place, and then moved there; nothing is moved where anything is in the way."""
        folder, _ = self.made(self.order["path"])
        stage = new_name("part")
        self.begin()
        os.mkdir(stage, 0o700, dir_fd=folder)
        try:
            staged = os.open(stage, FOLDER, dir_fd=folder)
            _put_nodes(staged)
            _check_merge(staged, folder)
            _merge(staged, folder)
        finally:
            with contextlib.suppress(FileNotFoundError):
                remove(folder, stage, lambda: None)


def _put_nodes(place: int) -> None:
    modes: list[tuple[str, int]] = []
    file = -1
    node: dict[str, Any] = {}

    def finish() -> None:
        nonlocal file
        if file >= 0:
            os.fchmod(file, node["mode"] & 0o777)
            os.utime(file, ns=(node["modified"], node["modified"]))
            os.close(file)
            file = -1

    for kind, data in records():
        if kind == b"D":
            _write_all(file, data)
            continue
        finish()
        node = json.loads(data)
        path = node["path"]
        if node["kind"] == "dir":
            try:
                os.mkdir(path, 0o700, dir_fd=place)
                modes.append((path, node["mode"]))
            except FileExistsError:
                if node["mode"] != stat.S_IMODE(os.stat(path, dir_fd=place, follow_symlinks=False).st_mode):
                    modes.append((path, -node["mode"]))
        elif node["kind"] == "link":
            os.symlink(node["target"], path, dir_fd=place)
        else:
            file = os.open(path, CREATE, 0o600, dir_fd=place)
    finish()
    for path, mode in reversed(modes):  # each when its contents are complete: it may forbid writing
        below = os.open(path, FOLDER, dir_fd=place)
        try:
            os.fchmod(below, abs(mode) & 0o777)
        except OSError:
            if mode > 0:  # else it is one that the guest always has
                raise
        finally:
            os.close(below)


def _check_merge(staged: int, folder: int, inside: tuple[str, ...] = ()) -> None:
    """Before anything is moved: refuse where a file and a folder would replace each other."""
    for name in os.listdir(staged):
        is_folder = stat.S_ISDIR(os.stat(name, dir_fd=staged, follow_symlinks=False).st_mode)
        try:
            there = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            continue
        path = "/".join((*inside, name))
        if is_folder != stat.S_ISDIR(there.st_mode):
            raise NotDone("in_the_way", path=path, folder=not is_folder)
        if not is_folder:
            if is_mount(folder, name):
                raise NotDone("mounted", path=path)
            continue
        below = os.open(name, FOLDER, dir_fd=staged)
        target = os.open(name, FOLDER, dir_fd=folder)
        try:
            if is_mount(folder, name) and os.listdir(below):
                raise NotDone("mounted", path=path)
            _check_merge(below, target, (*inside, name))
        finally:
            os.close(below)
            os.close(target)


def _merge(staged: int, folder: int) -> None:
    for name in os.listdir(staged):
        if stat.S_ISDIR(os.stat(name, dir_fd=staged, follow_symlinks=False).st_mode):
            try:
                target = os.open(name, FOLDER, dir_fd=folder)
            except FileNotFoundError:
                pass
            else:
                below = os.open(name, FOLDER, dir_fd=staged)
                _merge(below, target)
                os.close(below)
                os.close(target)
                continue
        os.rename(name, name, src_dir_fd=staged, dst_dir_fd=folder)


# ── Helpers ───────────────────────────────────────────────────────────────────────────────────────


def _device_of(path: str) -> int:
    try:
        return os.stat(path).st_dev
    except OSError:
        return -1


def _kind(mode: int) -> str:
    return {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "link"}.get(stat.S_IFMT(mode), "other")


def _entry(parts: tuple[str, ...], info: os.stat_result, target: str | None) -> list[Any]:
    kind = _kind(info.st_mode)
    size = info.st_size if kind == "file" else 0
    return [list(parts), kind, size, info.st_mtime_ns, stat.S_IMODE(info.st_mode), target]


def _target(folder: int, name: str, info: os.stat_result) -> str | None:
    if not stat.S_ISLNK(info.st_mode):
        return None
    try:
        return os.readlink(name, dir_fd=folder)[:_LONGEST_LINK]
    except OSError:  # it is no link any more
        return None


def _note(parts: tuple[str, ...], info: os.stat_result) -> bytes:
    """What changes with a file: no program can set the last of these times."""
    said = f"{info.st_mode} {info.st_ino} {info.st_size} {info.st_mtime_ns} {info.st_ctime_ns}\0"
    return os.fsencode("/".join(parts)) + b" " + said.encode()


def _all_of(file: int, size: int) -> Iterator[bytes]:
    """A file up to the size that it had. Raises NotDone where it was cut short."""
    at = 0
    while at < size:
        data = os.pread(file, min(CHUNK, size - at), at)
        if not data:
            raise NotDone("changing")
        at += len(data)
        yield data


def _digests(file: int, node: dict[str, Any], piece: int) -> list[str]:
    size = node["size"]
    found = []
    for at in range(0, max(size, 1), piece):
        digest = _sha256()
        left = min(piece, size - at)
        while left:
            data = os.pread(file, min(CHUNK, left), min(at, size) + min(piece, size - at) - left)
            if not data:
                raise NotDone("changing", path=node["path"])
            digest.update(data)
            left -= len(data)
        found.append(digest.hexdigest())
    return found


def _sha256(data: bytes = b"") -> Any:
    """Without the library that `hashlib` loads, where that is possible."""
    try:
        from _sha2 import sha256  # type: ignore[import-not-found, unused-ignore] # noqa: PLC0415 - in the guest; it has this name since Python 3.12
    except ImportError:
        from hashlib import sha256  # noqa: PLC0415
    return sha256(data)


def _write_all(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def _mode_of(folder: int, name: str) -> int:
    try:
        info = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return 0o644
    return stat.S_IMODE(info.st_mode) if stat.S_ISREG(info.st_mode) else 0o644


def _check_writable(folder: int, name: str) -> None:
    """Raise PermissionError for a file that a program may not write to, though it could replace it."""
    flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        os.close(os.open(name, flags, dir_fd=folder))
    except PermissionError:
        raise
    except OSError:
        return  # it is not there, or no file: that shows when it is replaced


def _room(base: str, parts: list[str]) -> list[int]:
    """What the file system of a path has: its bytes, its places for files, and how many of these are free."""
    while True:
        try:
            room = os.statvfs("/".join((base.rstrip("/"), *parts)) or "/")
        except OSError:
            if not parts:
                return [0, 0, 0]
            parts = parts[:-1]
            continue
        return [room.f_blocks * room.f_frsize, room.f_files, room.f_ffree]


def serve(order: dict[str, Any]) -> None:
    """Do what an order says, and tell how it went."""
    os.umask(0o022)
    begun = False
    try:
        work = Work(order)
        try:
            WORK[order["what"]](work)
        finally:
            begun = work.begun
        put(b".", json.dumps({"begun": begun}).encode())
    except NotDone as why:
        put(b"E", json.dumps({**why.told, "begun": begun}).encode())
    except EOFError:
        put(b"E", json.dumps({"refused": "cut", "begun": begun}).encode())
    except BrokenPipeError:
        return
    except OSError as problem:
        told: dict[str, Any] = {"errno": problem.errno, "text": problem.strerror, "begun": begun}
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            told["room"] = _room(order.get("base", "/"), order.get("path", []))
        put(b"E", json.dumps(told).encode())


WORK: dict[str, Callable[[Work], None]] = {
    name: getattr(Work, name)
    for name in (
        "read", "entries", "stat", "noted", "write", "spool", "make_dir",
        "remove", "rename", "tree", "clear", "put", "unpack",
    )
}  # fmt: skip
"""Other modules add their own."""


class FilesOrder(agent.Run):
    """One piece of work, by a child of the agent, which is none of the programs: it goes on when those are stopped."""

    def __init__(self, loop: agent.Loop, number: int, order: dict[str, Any], data: bytes) -> None:
        child = {"do": "run", "env": {}, "cwd": "/", "plain": True, "input": True, "work": lambda: serve(order)}
        super().__init__(loop, number, child, data)


agent.ORDERS["files"] = FilesOrder
