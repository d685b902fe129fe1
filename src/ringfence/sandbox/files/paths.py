"""Paths in a box: how users write them, how the kernel resolves them, and how files are opened.

A hostile box changes its files while the supervisor looks at them, so no path is checked first and used later: the
kernel decides what is beneath in the one call that opens it (`openat2`), and an open file is then used by its
descriptor. Mounts are crossed: only the supervisor makes any there, and /workspace/input is one.

Links are followed where a path leads through them. Beneath a folder that is the root of a box, or stands for it, they
lead where they lead in the box (RESOLVE_IN_ROOT); beneath any other, absolute ones and those that lead out are refused
(RESOLVE_BENEATH). On a kernel without `openat2` no link is followed at all.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache

from ringfence.core import invisible
from ringfence.core.box import MIB
from ringfence.core.errors import Refused, WorkProgress
from ringfence.core.model import Status
from ringfence.core.quoting import quoted

WORKSPACE = "/workspace"
LONGEST_PATH = 4000
LONGEST_NAME = 255
DEEPEST = 64
PART = ".ringfence-"
"""Our own temporary names begin with this, while something is being written or removed."""

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

_OPENAT2 = 437
_NO_MAGIC_LINKS = 2
_NO_LINKS = 4
_BENEATH = 8
_IN_ROOT = 16
_ATTEMPTS = 64
"""A rename anywhere makes the kernel unsure whether `..` in a link stayed beneath; then it returns EAGAIN."""

_SETGROUPS = {"x86_64": 116, "aarch64": 159}
_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long


# ── Refusals ──────────────────────────────────────────────────────────────────────────────────────


def refusal(reason_code: str, text: str) -> Refused:
    """The caller asked for something impossible."""
    return Refused(Status.VALIDATION_FAILURE, reason_code, text)


def changing(path: str) -> Refused:
    """The box won a race, which it can do as often as it likes."""
    return Refused(Status.FAILED, "changing", f"{path!r} changes while it is used; pause the box, or try again")


class SourceError(Exception):
    """An error of the source of the bytes, which must not be taken for one of the workspace."""

    def __init__(self, problem: OSError) -> None:
        super().__init__(str(problem))
        self.problem = problem


def from_source(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Bytes from elsewhere; their errors are distinguished from ours."""
    try:
        yield from pieces
    except OSError as problem:
        raise SourceError(problem) from problem


@contextmanager
def explaining(root: int, path: str) -> Iterator[None]:
    """Turn errors of the kernel about this path into refusals in words."""
    try:
        yield
    except OSError as problem:
        raise _explained(problem, path, root) from problem
    except SourceError as trouble:
        raise trouble.problem from None


def _explained(problem: OSError, path: str, root: int) -> Refused:
    number = problem.errno or 0
    if number in (errno.ENOSPC, errno.EDQUOT):
        return _full(path, root)
    return explained(number, path)


def explained(number: int, path: str) -> Refused:
    """What an error of the kernel about this path says."""
    if number == errno.EAGAIN:
        return changing(path)
    code, text = _SENTENCES.get(number, ("not_possible", f"cannot be used so: {os.strerror(number)}"))
    return refusal(code, f"{path!r} {text}")


_SENTENCES = {
    errno.ENOENT: ("not_found", "does not exist; list its folder to see what does"),
    errno.ENOTDIR: ("not_a_folder", "leads through something that is not a folder, or through a link that is refused"),
    errno.EISDIR: ("not_a_file", "is a folder; name a file in it"),
    errno.EEXIST: ("exists", "exists already; remove it first, or use another name"),
    errno.ENOTEMPTY: ("exists", "exists already and is not empty; remove it first, or use another name"),
    errno.ELOOP: ("link", "is or leads through a link that is not followed here; use the path that the link leads to"),
    errno.EXDEV: ("link", "leads out of its folder by a link; use a path without links that lead out"),
    errno.EACCES: ("no_permission", "is closed by its permissions; change them in the box first (chmod)"),
    errno.EPERM: ("no_permission", "is closed by its permissions; change them in the box first (chmod)"),
    errno.EROFS: ("read_only", f"is read-only, as all of {WORKSPACE}/input is; use another folder"),
    errno.EBUSY: (
        "mounted",
        f"is mounted there for the box's whole life; use what is in it, or another folder of {WORKSPACE}",
    ),
    errno.ENXIO: ("not_a_file", "is not a regular file; only those can be read and written"),
    errno.EINVAL: ("not_possible", "cannot be put there; a folder cannot go into itself"),
    errno.ENAMETOOLONG: ("bad_path", "is too long; use shorter names"),
    errno.EFBIG: ("disk", "would be longer than a file may be; write less"),
}


def _full(path: str, root: int) -> Refused:
    parts = parts_of(path)
    while parts:
        parts = parts[:-1]
        with suppress(OSError), beneath(root, parts) as folder:
            room = os.fstatvfs(folder)  # of its own file system, which may be another than the workspace's
            break
    else:
        room = os.fstatvfs(root)
    return disk_full(path, room.f_blocks * room.f_frsize, room.f_files, room.f_ffree)


def disk_full(path: str, size: int, files: int, free: int) -> Refused:
    """`files`: how many there may be, where that is limited; so many of these are `free`."""
    if files and not free:
        which = f"the box's limit of {files} files and folders"
    else:
        which = f"the box's disk limit of {size / MIB:.0f} MiB"
    return Refused(Status.FAILED, "disk", f"{path!r} was not written: {which} is used up; remove files, or raise it")


# ── Paths as users write them ─────────────────────────────────────────────────────────────────────


def parts_of(path: str) -> tuple[str, ...]:
    """The names in an absolute path of a box, or in one that is relative to the workspace; none for the root."""
    if not path or "\0" in path:
        raise refusal("bad_path", f"{path!r} is not a path; give an absolute one, or one relative to {WORKSPACE}")
    if len(path) > LONGEST_PATH:
        raise refusal("bad_path", f"{quoted(path)} is longer than {LONGEST_PATH} bytes; use a shorter path")
    parts = [] if path.startswith("/") else [WORKSPACE[1:]]
    for part in path.split("/"):
        if part == "..":
            del parts[-1:]
        elif part not in ("", "."):
            parts.append(part)
    check_names(parts, path)
    return tuple(parts)


def check_names(parts: list[str] | tuple[str, ...], path: str) -> None:
    """Raise Refused for names that no file should have, and for paths that are too deep or too long."""
    if problem := next(filter(None, map(unfit, parts)), None):
        raise refusal("bad_path", f"{path!r} cannot be used: {problem}")
    if len(parts) > DEEPEST:
        raise refusal("bad_path", f"{quoted(path)} is deeper than {DEEPEST} folders; use a shorter path")
    sizes = [len(part.encode()) for part in parts]
    if sum(sizes) + len(sizes) > LONGEST_PATH or max(sizes, default=0) > LONGEST_NAME:
        raise refusal("bad_path", f"{quoted(path)} has names that are too long; use shorter ones")


def unfit(name: str) -> str | None:
    """Why this name of a file or folder cannot be shown and used safely; None if it can."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return "its name is not valid UTF-8"
    if any(unicodedata.category(letter) in ("Cc", "Zl", "Zp") for letter in name):
        return "its name has control characters"
    if invisible.name(name) != name:
        return "its name has characters that cannot be seen"
    return None


def shown(name: str) -> str:
    """A name in printable form."""
    return invisible.visible(name)


def kind(found: os.stat_result) -> str:
    return KINDS.get(stat.S_IFMT(found.st_mode), "not a regular file")


def full_path(parts: tuple[str, ...]) -> str:
    return "/" + "/".join(parts)


def too_long(path: str, size: int, most: int) -> Refused:
    text = f"{path!r} has {size} bytes, and one read gives {most}; stream it, or read it in parts"
    return refusal("too_large", text)


def outside(path: str) -> Refused:
    return refusal("outside", f"{path!r} is outside of {WORKSPACE}; give a path beneath it, absolute or relative to it")


# ── Opening ───────────────────────────────────────────────────────────────────────────────────────


def open_beneath(root: int, parts: tuple[str, ...], flags: int, mode: int = 0, *, as_root: bool = False) -> int:
    """Open what these names lead to; `as_root`: absolute links begin there. Raises OSError: EXDEV where one leads
    out."""
    if not has_openat2():
        return _open_step_by_step(root, parts, flags, mode)
    path = os.fsencode("/".join(parts) or ".")
    resolve = (_IN_ROOT if as_root else _BENEATH) | _NO_MAGIC_LINKS
    how = struct.pack("QQQ", flags | os.O_CLOEXEC, mode if flags & os.O_CREAT else 0, resolve)
    number = 0
    for _ in range(_ATTEMPTS):
        descriptor = int(_syscall(ctypes.c_long(_OPENAT2), ctypes.c_long(root), path, how, ctypes.c_long(len(how))))
        if descriptor >= 0:
            return descriptor
        number = ctypes.get_errno()
        if number not in (errno.EAGAIN, errno.EINTR):
            break
    raise OSError(number, os.strerror(number), os.fsdecode(path))


def open_without_links(path: str, flags: int = os.O_PATH) -> int:
    """Open a path of the host; no link on the way is followed. Raises OSError."""
    if not has_openat2():
        start = os.open("/" if path.startswith("/") else ".", FOLDER)
        try:
            return _open_step_by_step(start, tuple(filter(None, path.split("/"))), flags, 0)
        finally:
            os.close(start)
    how = struct.pack("QQQ", flags | os.O_CLOEXEC, 0, _NO_LINKS | _NO_MAGIC_LINKS)
    name = os.fsencode(path)
    here = ctypes.c_long(-100)
    descriptor = int(_syscall(ctypes.c_long(_OPENAT2), here, name, how, ctypes.c_long(len(how))))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
    return descriptor


def make_folder_without_links(path: str) -> int:
    """Open a folder of the host, made with its parents where it is missing; no link on the way is followed, not even by
    what is made. Raises OSError."""
    folder = os.open("/" if path.startswith("/") else ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in filter(None, path.split("/")):
            with suppress(FileExistsError):
                os.mkdir(part, dir_fd=folder)
            below = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            os.close(folder)
            folder = below
        return os.open(".", FOLDER, dir_fd=folder)
    finally:
        os.close(folder)


@cache
def has_openat2() -> bool:
    """Whether the kernel has it, and no seccomp filter forbids it."""
    how = struct.pack("QQQ", os.O_PATH | os.O_CLOEXEC, 0, 0)
    descriptor = int(_syscall(ctypes.c_long(_OPENAT2), ctypes.c_long(-100), b"/", how, ctypes.c_long(len(how))))
    if descriptor < 0:
        return ctypes.get_errno() not in (errno.ENOSYS, errno.EPERM)
    os.close(descriptor)
    return True


def _open_step_by_step(root: int, parts: tuple[str, ...], flags: int, mode: int) -> int:
    folder = root
    try:
        for part in parts[:-1]:
            below = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            if folder != root:
                os.close(folder)
            folder = below
        last = parts[-1] if parts else "."
        return os.open(last, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=folder)
    finally:
        if folder != root:
            os.close(folder)


@contextmanager
def beneath(
    root: int, parts: tuple[str, ...], flags: int = FOLDER & ~os.O_NOFOLLOW, *, as_root: bool = False
) -> Iterator[int]:
    descriptor = open_beneath(root, parts, flags, as_root=as_root)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_regular(root: int, parts: tuple[str, ...], *, follow: bool, as_root: bool = False) -> int:
    """A regular file, open for reading; nothing else, and without blocking."""
    flags = READ & ~os.O_NOFOLLOW if follow else READ
    return _only_regular(open_beneath(root, parts, flags, as_root=as_root), parts)


def open_regular_here(folder: int, name: str) -> int:
    """Likewise, in an open folder."""
    return _only_regular(os.open(name, READ, dir_fd=folder), (name,))


def _only_regular(descriptor: int, parts: tuple[str, ...]) -> int:
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), "/".join(parts))
    raise OSError(errno.ENXIO, kind(found), "/".join(parts))


@contextmanager
def made_folder(
    root: int, parts: tuple[str, ...], owner: int | None, *, as_root: bool = False, progress: WorkProgress | None = None
) -> Iterator[tuple[int, bool]]:
    """The folder of this path, made with its parents where it is missing; and whether it was made just now. `progress`
    begins with the first that is made."""
    there = len(parts)
    while True:
        try:
            with acting_as(owner):
                folder = open_beneath(root, parts[:there], FOLDER & ~os.O_NOFOLLOW, as_root=as_root)
            break
        except FileNotFoundError:
            if not there:
                raise
            there -= 1
    made = False
    try:
        for part in parts[there:]:
            made = False
            with suppress(FileExistsError), acting_as(owner):
                os.mkdir(part, 0o755, dir_fd=folder)
                made = True
                if progress is not None:
                    progress.begin()
            below = os.open(part, FOLDER, dir_fd=folder)
            os.close(folder)
            folder = below
            if made:
                os.fchmod(folder, 0o755)  # regardless of our umask
        yield folder, made
    finally:
        os.close(folder)


@contextmanager
def opened(name: str, flags: int, folder: int, mode: int = 0o600) -> Iterator[int]:
    descriptor = os.open(name, flags, mode, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def acting_as(owner: int | None) -> Iterator[None]:
    """Files that this thread creates belong to `owner`: the host's root has no id in a box's user namespace."""
    if owner is None:
        yield
        return
    _libc.setfsgid(owner)
    _libc.setfsuid(owner)
    try:
        yield
    finally:
        _libc.setfsuid(os.geteuid())
        _libc.setfsgid(os.getegid())


@contextmanager
def looking_as(owner: int | None) -> Iterator[None]:
    """As `acting_as`, also without our groups: this thread may look at what `owner` may look at, and no more."""
    groups = os.getgroups() if owner is not None else []
    if groups:
        _set_groups([])
    try:
        with acting_as(owner):
            yield
    finally:
        if groups:
            _set_groups(groups)


def _set_groups(groups: list[int]) -> None:
    """Of this thread alone: the C library's own function would set those of all threads. Raises OSError."""
    numbers = (ctypes.c_uint32 * len(groups))(*groups)
    if _syscall(ctypes.c_long(_SETGROUPS[os.uname().machine]), ctypes.c_long(len(groups)), numbers) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
