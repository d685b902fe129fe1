"""What a box may not change in a folder that it may write to: files that other programs of this host obey or run.

An agent works on a project, and another program opens that project: an editor, Git, a shell, another agent. The files
that tell these what to run are mounted read-only over themselves; where such a file is a link, its target is, as long
as that lies in a folder which the box may write to. Nothing can prevent that a missing file is created, that a link is
replaced, or that a file which git itself replaces (its HEAD) is removed: that is reported afterwards.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from ringfence.core.box import Mount, within
from ringfence.core.record import plain
from ringfence.sandbox.files.acted_upon import FOLDERS, NAMES, PINNED, WITH_PROJECTS
from ringfence.sandbox.files.paths import open_without_links

_NOT_LOOKED_THROUGH = (".git/modules", ".git/worktrees", "modules", "worktrees")
"""Not searched for links: whole repositories, in which Git makes none."""
_IN_COMMON = ("config", "hooks", "modules", "worktrees")
"""The parts of a repository that git reads in the folder that `commondir` names."""
_HEAD = re.compile(rb"ref:[ \t\n\r]*refs/|[0-9a-fA-F]{40}")
_LONGEST_READ = 4096
_MAX_LINKS = 40
_MAX_ENTRIES = 1000
"""Entries of guarded folders that are searched for links, in each mount, and links that are followed there."""
_MAX_LOOKED_AT = 2000
"""Entries whose state one look takes. A box decides how many there are, and others wait meanwhile: a folder with more
counts as changed."""
_DEEPEST = 12
"""Folders within folders. What lies deeper is not looked at, and counts as changed, too."""

Held = Mapping[str, tuple[bool, tuple[int, int]]]
"""By path in the box: whether it may be written to, and its device and inode when it was mounted."""
_State = tuple[tuple[object, ...], tuple[object, ...] | None]
"""The state of the links on the way and of the target; None: nothing, or nothing that a box could change."""


@plain
class Hold:
    """A file or folder of the host that is to be mounted over itself."""

    mount: Mount
    """The mount that it lies in."""
    host: str
    at: str
    writable: bool
    """Only its place is pinned: the box may change its contents."""


@plain
class Seen:
    held: Held
    states: Mapping[str, _State]


NOTHING_SEEN = Seen({}, {})


@plain
class _Way:
    links: tuple[str, ...]
    folders: tuple[str, ...]
    """The folders on the way, none of them a link."""
    end: str | None
    """None: nothing is there, or it lies outside of what the box may write to."""


@plain
class _Item:
    name: str
    at: str
    way: _Way
    pinned: bool
    is_unsearched: bool = False
    """It has more in it than was searched for links."""


class _Budget:
    """How many entries may still be looked at."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.exceeded = False
        """Whether there was more, since this was last set to False."""

    def take(self, count: int) -> int:
        """As many of so many as are left."""
        taken = min(count, self.left)
        self.left -= taken
        self.exceeded = self.exceeded or taken < count
        return taken


def names(mount: Mount) -> tuple[str, ...]:
    """The names that are guarded in it: none in a mount that the operator declared unsafe."""
    if not _guards([mount]):
        return ()
    own = [os.path.basename(mount.host)]
    if own != [".git"] and _is_repository(mount.host):
        own.append(".git")
    tops = [f"{name}/" for name in own if name in PINNED]
    return (*NAMES, *(name.removeprefix(top) for top in tops for name in NAMES if name.startswith(top)))


def is_itself(mount: Mount) -> str | None:
    """Which of the names a writable mount is, or lies in, so that all of it would be read-only."""
    parts = [part for guard in _guards([mount]) for part in guard.host.split("/")]
    for name in NAMES:
        words = name.split("/")
        for start in range(1, len(parts) - len(words) + 1 if name not in PINNED else 0):
            last = start + len(words) == len(parts)
            if parts[start : start + len(words)] == words and (last or name not in WITH_PROJECTS):
                return name
    return None


def holds(mounts: Sequence[Mount]) -> Iterator[Hold]:
    """What is to be mounted over itself, as the host is now; folders on the way to another come before it."""
    guards = _guards(mounts)
    wanted: dict[str, bool] = {}
    for item in _survey(guards):
        end = item.way.end
        if end is None or not _can_be_held(end):
            continue
        if not item.pinned and any(within(mount.host, end) for mount in guards):
            continue  # a link to a whole mount does not make that read-only
        for folder in item.way.folders:
            wanted.setdefault(folder, True)
        wanted[end] = wanted.get(end, True) and item.pinned
    closed = {path for path, writable in wanted.items() if not writable}
    for path, writable in wanted.items():
        if any(path != outer and within(path, outer) for outer in closed):
            continue
        for mount in guards:
            if path != mount.host and within(path, mount.host):
                yield Hold(mount, path, _seen_at(mount, path), writable)


def look(mounts: Sequence[Mount], held: Held) -> Seen:
    """The state of every guarded name that is not held."""
    guards = _guards(mounts) if mounts else []
    if not guards:
        return Seen(held, {})
    budget = _Budget(_MAX_LOOKED_AT)
    found = ((item.at, _state(item, guards, held, budget)) for item in _survey(guards) if item.name not in FOLDERS)
    closed: dict[str, _State] = dict.fromkeys(_closed(guards), ((), ("closed",)))
    return Seen(held, {at: state for at, state in found if state is not None} | closed | dict(_repositories(guards)))


def planted_since(mounts: Sequence[Mount], before: Seen) -> tuple[str, ...]:
    """What was planted until now."""
    return planted(before, look(mounts, before.held)) if mounts else ()


def planted(before: Seen, after: Seen) -> tuple[str, ...]:
    """What was created or changed between two looks; of nested ones, the outer one alone."""
    found: list[str] = []
    for at, now in after.states.items():
        was = before.states.get(at, ((), None))
        if now == was or (now[1] is None and now[0] == was[0]):
            continue  # unchanged, or removed
        if not any(at.startswith(f"{outer}/") for outer in found):
            found.append(at)
    return tuple(found)


# ── Finding them ──────────────────────────────────────────────────────────────────────────────────


def _survey(guards: Sequence[Mount]) -> Iterator[_Item]:
    roots = [mount.host for mount in guards]
    for mount in guards:
        entries, links = _Budget(_MAX_ENTRIES), _Budget(_MAX_ENTRIES)
        inner: list[_Item] = []
        for name, at, way in _ways(mount, guards):
            folder = way.end is not None and _is_folder(way.end)
            item = _Item(name, at, way, folder and name in PINNED)
            yield item
            if way.end is None or not folder or item.pinned or name in _NOT_LOOKED_THROUGH or way.end in roots:
                continue
            entries.exceeded = links.exceeded = False
            for path, is_link in _entries(way.end, entries):
                if not is_link or not links.take(1):
                    continue
                within, own = os.path.split(path)
                at = item.at + os.fsencode(path.removeprefix(way.end)).decode("utf-8", "replace")
                inner.append(_Item(name, at, _walk(roots, within, own), False))
                links.left = max(0, links.left - len(inner[-1].way.links) + 1)
            if entries.exceeded or links.exceeded:
                inner.append(replace(item, is_unsearched=True))
        yield from inner


def _ways(mount: Mount, guards: Sequence[Mount]) -> Iterator[tuple[str, str, _Way]]:
    """Each name that may be there, its path in the box, and the way to it."""
    roots = [each.host for each in guards]
    wanted = names(mount)
    tops = {top for top in {name.partition("/")[0] for name in wanted} if _mode(f"{mount.host}/{top}")}
    for name in wanted:
        if name.partition("/")[0] not in tops:
            continue  # most are missing, and this is done for each run
        way = _walk(roots, mount.host, name)
        yield name, f"{mount.at}/{name}", way
        if os.path.basename(name) == "commondir" and way.end is not None:
            yield from _in_common(mount, guards, name, _commondir(way.end))


def _in_common(mount: Mount, guards: Sequence[Mount], name: str, common: str | None) -> Iterator[tuple[str, str, _Way]]:
    """What git reads in the folder that this `commondir` names, instead of beside it."""
    roots = [each.host for each in guards]
    own = "/" if common and common.startswith("/") else _walk(roots, mount.host, f"{os.path.dirname(name)}/.").end
    if own is None or common is None:
        return
    for inner in _IN_COMMON:
        way = _walk(roots, own, f"{common}/{inner}")
        seen = (_seen_at(each, way.end) for each in guards if way.end is not None and within(way.end, each.host))
        yield f".git/{inner}", next(seen, f"{mount.at}/{name}/{inner}"), way


def _repositories(guards: Sequence[Mount]) -> Iterator[tuple[str, _State]]:
    """What makes the top of a mount a repository, and what makes git skip the existing one."""
    roots = [mount.host for mount in guards]
    for mount in guards:
        itself = os.path.basename(mount.host) == ".git"
        if not itself and _is_repository(mount.host):
            yield f"{mount.at}/HEAD", ((), ("repository",))
        own = mount.host if itself else _walk(roots, mount.host, ".git").end
        at = mount.at if itself else f"{mount.at}/.git"
        if own is not None and _is_folder(own):
            for name, how in _missing_parts(own):
                yield f"{at}/{name}", ((), how)


def _walk(roots: Sequence[str], start: str, name: str) -> _Way:
    """From a folder whose path has no links. A link is never followed out of the roots; one that leads out of them and
    back in is: nothing outside needs to be looked at, since no path to a root has a link."""
    links: list[str] = []
    folders: list[str] = []
    at = start
    rest = name.split("/")[::-1]
    while rest:
        part = rest.pop()
        if part in ("", "."):
            continue
        at = os.path.dirname(at) if part == ".." else os.path.join(at, part)
        if not any(within(at, root) for root in roots):
            if any(within(root, at) for root in roots):
                continue
            return _Way(tuple(links), (), None)
        mode = _mode(at)
        target = _target(at, mode, bool(rest))
        if target is not None:
            links.append(at)
            at = "/" if target.startswith("/") else os.path.dirname(at)
            rest.extend(target.split("/")[::-1])
        elif mode == 0 or (rest and not stat.S_ISDIR(mode)):
            return _Way(tuple(links), (), None)
        elif rest and at not in roots:
            folders.append(at)
        if len(links) > _MAX_LINKS:
            return _Way(tuple(links), (), None)
    inside = any(within(at, root) for root in roots)
    return _Way(tuple(links), tuple(folders), at if inside else None)


def _target(path: str, mode: int, is_on_the_way: bool) -> str | None:
    """The target of a link, or of the file `.git` of a repository that is kept elsewhere."""
    try:
        if stat.S_ISLNK(mode):
            return os.readlink(path)
        if stat.S_ISREG(mode) and is_on_the_way and os.path.basename(path) == ".git":
            return _read_pointer(path)
    except OSError:
        pass  # it was there a moment ago
    return None


def _read_pointer(path: str) -> str | None:
    first, _, _ = (_read_start(path) or b"").partition(b"\n")
    if not first.startswith(b"gitdir:") or b"\0" in first:
        return None
    return os.fsdecode(first.removeprefix(b"gitdir:").strip())


def _entries(folder: str, budget: _Budget, depth: int = _DEEPEST) -> Iterator[tuple[str, bool]]:
    """Its entries and those of its folders, as far as the budget allows, and whether each is a link."""
    try:
        with os.scandir(folder) as found:
            listed = list(islice(found, budget.left + 1))
            entries = sorted((entry.path, entry.is_symlink(), entry.is_dir(follow_symlinks=False)) for entry in listed)
    except OSError:
        return
    del entries[budget.take(len(entries)) :]
    for path, is_link, is_folder in entries:
        yield path, is_link
        if is_folder and depth > 1 and budget.left:
            yield from _entries(path, budget, depth - 1)
        elif is_folder:
            budget.exceeded = True


# ── Their state ───────────────────────────────────────────────────────────────────────────────────


def _state(item: _Item, guards: Sequence[Mount], held: Held, budget: _Budget) -> _State | None:
    """None where nothing is there. What could not be looked at has a state that is like no other."""
    way = item.way
    links = tuple((link, *_facts(link)) for link in way.links)
    there: tuple[object, ...] | None = None
    if way.end is not None and not _is_held(way.end, item.pinned, guards, held):
        there = _facts(way.end)
        if item.pinned or any(within(link, way.end) for link in way.links):
            there = there[:3]  # its contents are judged by themselves, or are the whole project
        else:
            budget.exceeded = False
            there += tuple((path, *_facts(path)) for path, _ in _entries(way.end, budget))
            there += (object(),) if budget.exceeded or item.is_unsearched else ()
    return (links, there) if links or there is not None else None


def _closed(guards: Sequence[Mount]) -> Iterator[str]:
    """Folders that the supervisor may not read: a box can remove that permission, so what it left there is unknown."""
    for mount in guards:
        for inner in ("", *(f"/{name}" for name in PINNED)):
            try:
                os.lstat(f"{mount.host}{inner}/.")
            except PermissionError:
                yield mount.at + inner
            except OSError:
                pass  # no folder


def _is_held(path: str, pinned: bool, guards: Sequence[Mount], held: Held) -> bool:
    """Whether it is held in every mount through which the box may write to it, and is still what was mounted: a
    program of the host may have replaced it since then."""
    for mount in guards:
        if within(mount.host, path) and not pinned:
            return False
        if within(path, mount.host) and not _is_held_in(mount, path, pinned, held):
            return False
    return True


def _is_held_in(mount: Mount, path: str, pinned: bool, held: Held) -> bool:
    while path != mount.host:
        writable, identity = held.get(_seen_at(mount, path), (True, None))
        if identity is not None and (pinned or not writable):
            return _facts(path)[:2] == identity
        path, pinned = os.path.dirname(path), False
    return False


def _facts(path: str) -> tuple[int, ...]:
    try:
        found = os.lstat(path)
    except OSError:
        return ()
    return found.st_dev, found.st_ino, stat.S_IFMT(found.st_mode), found.st_mode, found.st_size, found.st_ctime_ns


def _mode(path: str) -> int:
    try:
        return os.lstat(path).st_mode
    except OSError:
        return 0


def _is_folder(path: str) -> bool:
    return stat.S_ISDIR(_mode(path))


def _can_be_held(path: str) -> bool:
    mode = _mode(path)
    try:
        path.encode()  # the zygote is given its path as text
    except UnicodeEncodeError:
        return False
    return stat.S_ISDIR(mode) or stat.S_ISREG(mode)


def _guards(mounts: Sequence[Mount]) -> list[Mount]:
    """The mounts that are guarded. No path to a mount has a link, so that paths can be compared as text."""
    wanted = (mount for mount in mounts if mount.mode == "rw" and not mount.unsafe)
    return [replace(mount, host="/" + os.path.normpath(mount.host).strip("/")) for mount in wanted]


def _seen_at(mount: Mount, path: str) -> str:
    return mount.at + path.removeprefix(mount.host)


# ── Repositories ──────────────────────────────────────────────────────────────────────────────────
#
# Git takes any folder for a repository that has a HEAD, with `objects` and `refs` beside it or in the folder that
# `commondir` names. It looks for `.git` in a folder, then at the folder itself, then above it, and passes over one that
# lacks something. A box may write to these folders: no link is followed, and no read blocks.


def _is_repository(folder: str) -> bool:
    """Whether it is one, or the box could make it one: `objects` may be missing where the environment names others, and
    `commondir` may name any folder."""
    mode = _mode(f"{folder}/HEAD")
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        return False
    there = {name for name in ("commondir", "objects", "refs", "config") if _mode(f"{folder}/{name}")}
    return "commondir" in there or {"objects", "refs"} <= there or ("config" in there and _has_head(folder))


def _missing_parts(folder: str) -> Iterator[tuple[str, tuple[object, ...]]]:
    """The parts that git misses in it, each with its state; of a link only the state, since none is followed."""
    if not _has_head(folder):
        yield "HEAD", ("no head",)
    if _mode(f"{folder}/commondir"):
        return
    for name in ("objects", "refs"):
        mode = _mode(f"{folder}/{name}")
        if stat.S_ISLNK(mode):
            found = os.lstat(f"{folder}/{name}")
            yield name, (found.st_dev, found.st_ino, found.st_ctime_ns)
        elif not mode & stat.S_IXUSR:
            yield name, ("not there",)


def _has_head(folder: str) -> bool:
    path = f"{folder}/HEAD"
    mode = _mode(path)
    try:
        if stat.S_ISLNK(mode):
            return os.readlink(path).startswith("refs/")
        return bool(mode & stat.S_IRUSR and _HEAD.match(_read_start(path) or b""))
    except OSError:
        return False


def _commondir(path: str) -> str | None:
    """The folder that a file `commondir` names, relative to the repository or absolute."""
    try:
        content = (_read_start(path) or b"").rstrip(b"\r\n")
    except OSError:
        return None
    return os.fsdecode(content) if content and b"\0" not in content else None


def _read_start(path: str) -> bytes | None:
    """The beginning of a regular file. Raises OSError."""
    descriptor = open_without_links(path)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        with open(f"/proc/self/fd/{descriptor}", "rb", buffering=0) as file:
            return file.read(_LONGEST_READ)
    finally:
        os.close(descriptor)
