"""Host user ids for the boxes of an ordinary user: subordinate ones, which were set apart for that user.

The administrator hands each user a range of ids that nobody else has (`/etc/subuid`, `/etc/subgid`, or a directory
service that `getsubids` asks), and two setuid programs, `newuidmap` and `newgidmap`, map them into a user namespace of
that user. They are started once for a zygote. Where that cannot be, boxes have the user's own id, and facts say why.

The same range serves rootless containers of the user, which map all of it but use its first ids, and the one that is
nobody in them. Blocks are therefore taken from the upper part, and which one is left to chance; between supervisors of
one user locks decide.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from ringfence.errors import Unavailable
from ringfence.sandbox.process import kernel
from ringfence.sandbox.process.baseline import Baseline
from ringfence.sandbox.process.confine import INSIDE_ID
from ringfence.sandbox.process.uids import SIZE, Block, lock_range, open_locks

FILES = {"user": Path("/etc/subuid"), "group": Path("/etc/subgid")}
HELPERS = {"user": "newuidmap", "group": "newgidmap"}
_PLACES = "/usr/bin:/bin:/usr/local/bin:/run/wrappers/bin"
_NOBODY = 65534
_SECONDS = 300.0
_GET_NO_NEW_PRIVS = 39
LENDS_SINCE = (6, 3)
"""No older kernel mounts a tmpfs with mapped ids, so there is no need to try."""
_LEFT_OUT = frozenset({"landlock", "memfd"})
"""Steps whose absence changes nothing about who a box is."""

_refusals: list[str] = []
"""Why ids could not be mapped when that was tried: it is not tried for every zygote again."""


def take(baseline: Baseline, *, by_v1: bool) -> Block:
    """Ids for the boxes of one zygote. Raises Unavailable, saying why they have the user's own.

    `by_v1`: boxes enter control groups of v1, which nobody lets another user's process into but root.
    """
    if _refusals:
        raise Unavailable("uids", _refusals[0])
    if _release() < LENDS_SINCE:
        raise Unavailable("uids", "this kernel mounts no tmpfs with mapped ids (it needs Linux 6.3)")
    if kernel.prctl(_GET_NO_NEW_PRIVS):
        raise Unavailable("uids", "no_new_privs is set (NoNewPrivileges= in a unit), so newuidmap has no privileges")
    if baseline.borrows or frozenset(baseline.trees) - frozenset(baseline.packages):
        raise Unavailable("uids", "it is to see folders of this user as this user does")
    if frozenset(baseline.without) - _LEFT_OUT:
        raise Unavailable("uids", "confinement steps are left out")
    if by_v1:
        raise Unavailable("uids", "control groups of v1 let in no process of another user")
    if (closed := closed_to_others(baseline)) is not None:
        raise Unavailable("uids", f"{closed} is closed to other users (chmod -R go+rX opens it)")
    users, groups = found()
    return _locked(users, groups, _folders())


def refuse(why: str) -> None:
    """Ids could not be mapped, so this process does without."""
    _refusals[:] = [why]


def map_into(process: int, block: Block) -> None:
    """Have the helpers write the maps of a process's user namespace. Raises Unavailable.

    Its root is the first id of the block. Our own user is there as well, for the files of boxes to belong to.
    """
    for what, base, own in (("user", block.base, os.getuid()), ("group", block.groups, os.getgid())):
        words = (process, 0, base, block.size, INSIDE_ID, own, 1)
        try:
            done = subprocess.run(
                [helper(what), *map(str, words)], capture_output=True, stdin=subprocess.DEVNULL, timeout=_SECONDS
            )
        except (OSError, subprocess.TimeoutExpired) as exc:
            raise Unavailable("uids", f"{HELPERS[what]} cannot be run: {exc}") from None
        if done.returncode:
            said = done.stderr.decode("utf-8", "replace").strip().splitlines()
            raise Unavailable("uids", said[-1][:300] if said else f"{HELPERS[what]} ended with {done.returncode}")


def found() -> tuple[tuple[range, ...], tuple[range, ...]]:
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
    path = shutil.which(HELPERS[what], path=_PLACES)
    if path is None:
        raise Unavailable("uids", f"{HELPERS[what]} is not installed (the package is called uidmap or shadow-utils)")
    return path


def closed_to_others(baseline: Baseline) -> str | None:
    """Something that boxes are to read and that only its owner may, seen without looking at everything."""
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
        return False  # a link to nowhere: nobody can read it
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
    """By the program that asks what the helpers ask, where it is installed; else as the files have them."""
    asks = shutil.which("getsubids", path=_PLACES)
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
    """What `getsubids` says: lines like `0: name 100000 65536`."""
    return _spans(line.split()[-2:] for line in text.splitlines())


def written(text: str, names: Sequence[str]) -> tuple[range, ...]:
    """What a file like /etc/subuid has for a user, by name or number: lines like `name:100000:65536`."""
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


def _folders() -> tuple[Path, ...]:
    """The same for all that this user runs, whatever their environment."""
    user = os.geteuid()
    own, temporary = Path(f"/run/user/{user}/ringfence"), Path(tempfile.gettempdir(), f"ringfence-{user}")
    return own, _kept_elsewhere(user) if _is_taken(temporary, user) else temporary


def _kept_elsewhere(user: int) -> Path:
    """Where another user has made the folder among the temporary files, so that none of our boxes would start: in the
    home folder, which is nobody else's."""
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
