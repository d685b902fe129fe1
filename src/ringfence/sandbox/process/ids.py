"""The user ids of boxes on the host: ids that no other user has, or else the supervisor's own.

A supervisor that runs as root takes blocks of ids that belong to no user. A zygote takes a block of them for itself, so
that no box shares a user id with a person, a service, a container or another zygote. A block is free when the user
databases do not name it and no process holds its lock, one byte of a file that all supervisors of the host open. The
kernel drops a lock with its holder, however that ends. Group ids are taken with the same numbers.

An ordinary user's boxes have subordinate ids. The administrator gives each user a range of ids of their own
(`/etc/subuid`, `/etc/subgid`, or a directory service that `getsubids` asks), and two setuid programs, `newuidmap` and
`newgidmap`, map them into a user namespace of that user. They are started once for a zygote. Where that is not
possible, boxes have the user's own id, and facts say why. The same range serves rootless containers of the user, which
map all of it but use its first ids, and the id of `nobody`. Blocks are therefore taken from the upper part, at random;
between supervisors of one user locks decide.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import os
import pwd
import secrets
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from ringfence.core.errors import Unavailable
from ringfence.core.model import Json
from ringfence.sandbox.process.baseline import Baseline
from ringfence.sandbox.process.cgroups.cgroup import GroupPool
from ringfence.sandbox.process.zygote import kernel
from ringfence.sandbox.process.zygote.confine import INSIDE_ID

SIZE = 64
FIRST = 2_000_200_064
"""Above what distributions, systemd's containers (to 1,879,048,191) and directory services (to 2,000,199,999) use, and
above the user of the signer (2,000,200,000, see `audit.signing_client`)."""
LAST = 2_147_352_575
"""Below systemd's range for foreign images, and below 2**31, where numbers become negative for some programs."""
BLOCKS = (LAST + 1 - FIRST) // SIZE

FOLDERS = (Path("/run/ringfence"), Path("/var/lib/ringfence"))
USERS = (Path("/etc/passwd"), Path("/etc/group"))
RANGES = (Path("/etc/subuid"), Path("/etc/subgid"))
FILES = {"user": Path("/etc/subuid"), "group": Path("/etc/subgid")}
HELPERS = {"user": "newuidmap", "group": "newgidmap"}
_PLACES = "/usr/bin:/bin:/usr/local/bin:/run/wrappers/bin"
_NOBODY = 65534
_SECONDS = 300.0
_GET_NO_NEW_PRIVS = 39
LENDS_SINCE = (6, 3)
"""No older kernel mounts a tmpfs with mapped ids, so there is no need to try."""
_LEFT_OUT = frozenset({"landlock", "memfd", "subset"})
"""Steps whose absence does not change the id of a box."""

_refusals: list[str] = []
"""Why mapping ids failed when it was tried; it is not tried again for every zygote."""


class Block:
    """User and group ids, ours alone until they are released or this process ends."""

    def __init__(self, base: int, size: int, lock: int, groups: int | None = None) -> None:
        self.base = base
        self.groups = base if groups is None else groups
        """Where the group ids begin."""
        self.size = size
        self._lock: int | None = lock

    def release(self) -> None:
        """Give the ids back. No process may run under them any more."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def take_block(folders: Sequence[Path] | None = None) -> Block:
    """A block that no other process on this host uses. Raises Unavailable.

    The lock is in the first usable folder of these, so supervisors that may use the same ids must name the same
    folders. By default those of the system, and where they cannot be written a folder of our own among the temporary
    files.
    """
    taken = [*named_ids(_texts(USERS)), *ranges(_texts(RANGES))]
    lock = open_locks(_usual_folders() if folders is None else folders, "uids")
    try:
        for number in _blocks_in_order():
            base = FIRST + number * SIZE
            if any(span.start < base + SIZE and base < span.stop for span in taken):
                continue
            if lock_range(lock, number, 1):
                return Block(base, SIZE, lock)
    except OSError as problem:
        os.close(lock)
        raise Unavailable("uids", f"no user ids can be set apart for boxes: {problem.strerror}") from problem
    os.close(lock)
    raise Unavailable("uids", "no user ids can be set apart for boxes: all of them are in use")


def _write_maps(process: int, block: Block) -> None:
    """Write the maps of its user namespace: there, the ids begin with 0. Raises OSError."""
    for name, base in (("uid_map", block.base), ("gid_map", block.groups)):
        Path(f"/proc/{process}/{name}").write_text(f"0 {base} {block.size}", encoding="ascii")


def named_ids(texts: Iterable[str]) -> Iterator[range]:
    """The ids that files like /etc/passwd (`name:x:uid:gid:…`) and /etc/group (`name:x:gid:…`) name."""
    for text in texts:
        for line in text.splitlines():
            for number in line.split(":")[2:4]:
                if _is_number(number):
                    yield range(int(number), int(number) + 1)


def ranges(texts: Iterable[str]) -> Iterator[range]:
    """The ids that files like /etc/subuid (`name:start:count`) hand to containers."""
    for text in texts:
        for line in text.splitlines():
            parts = line.split(":")
            if len(parts) == 3 and _is_number(parts[1]) and _is_number(parts[2]):
                yield range(int(parts[1]), int(parts[1]) + int(parts[2]))


def _is_number(text: str) -> bool:
    # An id has at most ten digits; a file may hold anything.
    return text.isascii() and text.isdecimal() and len(text) <= 20


def _texts(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        try:
            yield path.read_text("utf-8", "surrogateescape")
        except FileNotFoundError:
            continue
        except OSError as problem:
            raise Unavailable("uids", f"{path} cannot be read: {problem.strerror}") from problem


def _blocks_in_order() -> Iterator[int]:
    """The blocks in the order in which they are tried.

    Containers may share the ids of a host without sharing a folder. Each starts at a place of its own, given by its pid
    namespace, so that they hardly ever meet.
    """
    namespace = os.stat("/proc/self/ns/pid").st_ino
    start = int.from_bytes(hashlib.sha256(str(namespace).encode()).digest()[:8]) % BLOCKS
    for step in range(BLOCKS):
        yield (start + step) % BLOCKS


def _usual_folders() -> Iterator[Path]:
    yield from FOLDERS
    yield Path(tempfile.gettempdir(), f"ringfence-{os.geteuid()}")


def open_locks(folders: Iterable[Path], name: str) -> int:
    """The open file of locks, in the first folder that can be made or is there."""
    problem: OSError | None = None
    for path in folders:
        try:
            folder = _open_folder(path)
        except OSError as refused:
            problem = refused
            continue
        try:
            return os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
        except OSError as refused:
            problem = refused
        finally:
            os.close(folder)
    why = problem.strerror if problem else "no folder was named"
    raise Unavailable("uids", f"no folder is available for the user id locks: {why}")


def _open_folder(path: Path) -> int:
    """A folder into which no other user can have put a file. Raises OSError where there is none.

    An existing folder that is not safe is refused outright: its owner may want us to look elsewhere.
    """
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as problem:
        if problem.errno in (errno.ELOOP, errno.ENOTDIR):
            raise Unavailable("uids", f"{path} is not a folder, so it cannot hold the locks of user ids") from problem
        raise
    found = os.fstat(folder)
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        os.close(folder)
        raise Unavailable("uids", f"{path} belongs to another user or can be written by others; remove it first")
    return folder


def lock_range(lock: int, start: int, length: int) -> bool:
    """Lock bytes, for this open file rather than for this process: two zygotes of ours are two as well."""
    wanted = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
    try:
        fcntl.fcntl(lock, fcntl.F_OFD_SETLK, wanted)
    except BlockingIOError:
        return False
    return True


# ── Subordinate ids: for the boxes of an ordinary user ────────────────────────────────────────────


def take_subids(baseline: Baseline, *, by_v1: bool) -> Block:
    """Ids for the boxes of one zygote. Raises Unavailable with the reason why they have the user's own.

    `by_v1`: boxes enter control groups of v1, into which only root lets another user's process.
    """
    if _refusals:
        raise Unavailable("uids", _refusals[0])
    if _release() < LENDS_SINCE:
        raise Unavailable("uids", "this kernel mounts no tmpfs with mapped ids (it needs Linux 6.3)")
    _check_helpers()
    if baseline.uses_host_mounts or frozenset(baseline.trees) - frozenset(baseline.packages):
        raise Unavailable("uids", "it must see this user's folders with this user's permissions")
    if frozenset(baseline.without) - _LEFT_OUT:
        raise Unavailable("uids", "confinement steps are left out")
    if by_v1:
        raise Unavailable("uids", "control groups of v1 let in no process of another user")
    if (closed := closed_to_others(baseline)) is not None:
        raise Unavailable("uids", f"{closed} is closed to other users (chmod -R go+rX opens it)")
    users, groups = found_subids()
    return _locked(users, groups, _lock_folders())


def take_for_containers() -> Block:
    """Ids for containers of an ordinary user. Raises Unavailable."""
    _check_helpers()
    users, groups = found_subids()
    return _locked(users, groups, _lock_folders())


def _check_helpers() -> None:
    if kernel.prctl(_GET_NO_NEW_PRIVS):
        raise Unavailable("uids", "no_new_privs is set (NoNewPrivileges= in a unit), so newuidmap has no privileges")


def refuse(why: str) -> None:
    """Note that ids could not be mapped: this process goes on without."""
    _refusals[:] = [why]


def map_by_helpers(process: int, block: Block) -> None:
    """Have the helpers write the maps of a process's user namespace. Raises Unavailable.

    Its root is the first id of the block. Our own user is there as well, for the files of boxes to belong to.
    """
    for what, base, own in (("user", block.base, os.getuid()), ("group", block.groups, os.getgid())):
        _map(what, process, 0, base, block.size, INSIDE_ID, own, 1)


def map_ourselves_as_root(process: int, block: Block) -> None:
    """The same, with our own user as the root of that namespace; the ids of the block begin with 1 in it. Raises
    Unavailable."""
    for what, base, own in (("user", block.base, os.getuid()), ("group", block.groups, os.getgid())):
        _map(what, process, 0, own, 1, 1, base, block.size)


def _map(what: str, *words: int) -> None:
    try:
        done = subprocess.run(
            [helper(what), *map(str, words)], capture_output=True, stdin=subprocess.DEVNULL, timeout=_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise Unavailable("uids", f"{HELPERS[what]} cannot be run: {exc}") from None
    if done.returncode:
        errors = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise Unavailable("uids", errors[-1][:300] if errors else f"{HELPERS[what]} ended with {done.returncode}")


def found_subids() -> tuple[tuple[range, ...], tuple[range, ...]]:
    """The subordinate ids of users and of groups that this user has. Raises Unavailable where they are of no use."""
    for what in HELPERS:
        helper(what)
    users, groups = (_ranges(what, os.getuid()) for what in HELPERS)
    for what, spans in (("user", users), ("group", groups)):
        if not any(len(span) >= SIZE for span in spans):
            raise Unavailable("uids", f"{FILES[what]} has no {SIZE} ids in a row for this user; {_remedy()}")
    return users, groups


@cache
def helper(what: str) -> str:
    """The program that maps ids of this kind. Raises Unavailable."""
    path = _program(HELPERS[what])
    if path is None:
        raise Unavailable("uids", f"{HELPERS[what]} is not installed (the package is called uidmap or shadow-utils)")
    return path


def _program(name: str) -> str | None:
    """Where a program of the system is. Not `shutil.which`: a short run would import nothing else of that module."""
    places = (f"{folder}/{name}" for folder in _PLACES.split(":"))
    return next((place for place in places if os.access(place, os.X_OK)), None)


def closed_to_others(baseline: Baseline) -> str | None:
    """A path that boxes must read and only its owner can, found without looking at everything."""
    prefix = os.path.realpath(sys.base_prefix)
    library = os.path.dirname(os.path.realpath(os.__file__))
    for path in (prefix, library, *baseline.trees):
        within: list[str] = _entries(path) if path in (library, *baseline.packages) else []
        if closed := [each for each in (path, *within) if _is_closed(each)]:
            return closed[0]
    return None


def _entries(path: str) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return [entry.path for entry in entries if entry.name != "__pycache__"]
    except OSError:
        return []


def _is_closed(path: str) -> bool:
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False  # a link to nowhere: it cannot be read
    needed = 0o005 if os.path.isdir(path) else 0o004
    return mode & needed != needed


@cache
def _release() -> tuple[int, ...]:
    numbers = os.uname().release.replace("-", ".").split(".")[:2]
    return tuple(int(number) if number.isdecimal() else 0 for number in numbers)


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _remedy() -> str:
    return f"as root: usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {_user()}"


@cache
def _ranges(what: str, user: int) -> tuple[range, ...]:
    """From `getsubids` where it is installed, which asks what the helpers ask; else from the files."""
    asks = _program("getsubids")
    if asks is not None:
        command = [asks, *(["-g"] if what == "group" else []), _user()]
        try:
            done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            done = None
        if done is not None and done.returncode == 0:
            return answered(done.stdout.decode("utf-8", "replace"))
    try:
        return written(FILES[what].read_text("utf-8", "surrogateescape"), (_user(), str(user)))
    except OSError:
        return ()


def answered(text: str) -> tuple[range, ...]:
    """Parse the output of `getsubids`: lines like `0: name 100000 65536`."""
    return _spans(line.split()[-2:] for line in text.splitlines())


def written(text: str, names: Sequence[str]) -> tuple[range, ...]:
    """Parse a file like /etc/subuid for a user, by name or number: lines like `name:100000:65536`."""
    lines = (line.strip().split(":") for line in text.splitlines())
    return _spans(words[1:] for words in lines if words[0] in names)


def _spans(pairs: Iterator[list[str]]) -> tuple[range, ...]:
    # An id has at most ten digits; a file may hold anything.
    numbers = [
        (int(pair[0]), int(pair[1]))
        for pair in pairs
        if len(pair) == 2 and all(word.isascii() and word.isdecimal() and len(word) <= 10 for word in pair)
    ]
    return tuple(range(start, start + count) for start, count in numbers if start > 0 and start + count < 2**32)


def blocks(spans: Sequence[range]) -> list[int]:
    """Where blocks begin, those that containers hardly use first."""
    upper: list[int] = []
    lower: list[int] = []
    for span in spans:
        for start in range(span.start, span.stop - SIZE + 1, SIZE):
            if start <= span.start + _NOBODY - 1 < start + SIZE:
                continue
            (upper if start - span.start >= len(span) // 2 else lower).append(start)
    return [*upper, *reversed(lower)]


def _locked(users: Sequence[range], groups: Sequence[range], folders: Sequence[Path]) -> Block:
    """A pair of blocks that no other supervisor of this user has. Raises Unavailable."""
    pairs = list(zip(blocks(users), blocks(groups), strict=False))
    first = secrets.randbelow(max(1, len(pairs) // 2))  # where locks are not seen, they hardly ever meet
    lock = open_locks(folders, "subids")
    try:
        for user, group in (*pairs[first:], *pairs[:first]):
            # The groups beyond all ids of users: they are other numbers, and the same file.
            if lock_range(lock, user, SIZE) and lock_range(lock, 2**32 + group, SIZE):
                return Block(user, SIZE, lock, group)
    except OSError as problem:
        os.close(lock)
        raise Unavailable("uids", f"subordinate ids cannot be locked: {problem.strerror}") from problem
    os.close(lock)
    raise Unavailable("uids", "all subordinate ids of this user are in use")


def _lock_folders() -> tuple[Path, ...]:
    """The same path for all processes of this user, whatever their environment."""
    user = os.geteuid()
    own = Path(f"/run/user/{user}/ringfence")
    temporary = Path(tempfile.gettempdir(), f"ringfence-{user}")
    return own, _kept_elsewhere(user) if _is_taken(temporary, user) else temporary


def _kept_elsewhere(user: int) -> Path:
    """A folder in the home of the user, for when another user has made the one among the temporary files."""
    try:
        home = Path(pwd.getpwuid(user).pw_dir, ".local", "state", "ringfence")
        home.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (KeyError, OSError) as problem:
        text = f"the folder for the locks of user ids in {tempfile.gettempdir()} was made by another user"
        raise Unavailable("uids", f"{text}, and there is no home folder for them: {problem}") from problem
    return home


def _is_taken(folder: Path, user: int) -> bool:
    try:
        return folder.lstat().st_uid != user
    except OSError:
        return False


# ── For one zygote ────────────────────────────────────────────────────────────────────────────────


class Unmapped(Exception):
    """Ids were taken, but could not be mapped; says why."""


def take(baseline: Baseline, groups: GroupPool) -> tuple[Block | None, Json]:
    """Ids for one zygote, if there are any, and the fact. Raises Unavailable for root, which needs them."""
    if os.geteuid() == 0:
        block = take_block()
        # A mount is mapped to one id, so all boxes that see the same have that one.
        return block, {"whose": "own"} if not baseline.mounts else {"whose": "shared", "with": "boxes of these mounts"}
    try:
        return take_subids(baseline, by_v1=groups.of_v1), {"whose": "own"}
    except Unavailable as exc:
        return None, _users(exc.message)


def shared(why: str) -> Json:
    """The fact where ids could not be mapped. Mapping is not tried again."""
    refuse(why)
    return _users(why)


def _users(why: str) -> Json:
    return {"whose": "user", "why": why}


async def map_into(process: int, block: Block) -> None:
    """Write the maps of its user namespace. Raises OSError, Unmapped."""
    if os.geteuid() == 0:
        _write_maps(process, block)
        return
    try:
        await asyncio.to_thread(map_by_helpers, process, block)
    except Unavailable as exc:
        raise Unmapped(exc.message) from None
