"""What a box may not change in a folder that it may write to: what other programs of this host go by or run.

An agent works on a project, and somebody else opens that project: an editor, Git, a shell, another agent. What these
read to know what to run is mounted read-only over itself; where a link leads to it, what the link leads to, as long as
that lies in a folder which the box may write to. What is not there yet cannot be kept from being made, nor a link from
being replaced, nor what git itself replaces (its HEAD) from being removed: that is told of afterwards.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ringfence.box import Mount
from ringfence.plain import plain
from ringfence.sandbox.process import repository
from ringfence.sandbox.process.acted_upon import FOLDERS, NAMES, PINNED, WITH_PROJECTS

_NOT_LOOKED_THROUGH = (".git/modules", ".git/worktrees", "modules", "worktrees")
"""For links: whole repositories, in which Git makes none."""
_IN_COMMON = ("config", "hooks", "modules", "worktrees")
"""What of a repository git reads where `commondir` says."""
_MOST_LINKS = 40
_MOST_ENTRIES = 1000
_DEEPEST = 3

Held = Mapping[str, tuple[bool, tuple[int, int]]]
"""By where the box sees it: whether it may be written to, and what it was, by device and inode, when it was mounted."""
_State = tuple[tuple[object, ...], tuple[object, ...] | None]
"""Of the links that lead there, and of what is there; None: nothing, or nothing that a box could change."""


@plain
class Hold:
    """Something of the host that is to be mounted over itself."""

    mount: Mount
    """In which it lies."""
    host: str
    at: str
    writable: bool
    """It is only to stay where it is."""


@plain
class Seen:
    held: Held
    states: Mapping[str, _State]


@plain
class _Way:
    links: tuple[str, ...]
    folders: tuple[str, ...]
    """Through which it goes, none of them a link."""
    end: str | None
    """None: nothing is there, or not in what the box may write to."""


@plain
class _Item:
    name: str
    at: str
    way: _Way
    pinned: bool


def names(mount: Mount) -> tuple[str, ...]:
    """What is looked after in it. Whoever says that a mount is unsafe wants none of it."""
    if not _guards([mount]):
        return ()
    own = [os.path.basename(mount.host)]
    if own != [".git"] and repository.is_one(mount.host):
        own.append(".git")
    tops = [f"{name}/" for name in own if name in PINNED]
    return (*NAMES, *(name.removeprefix(top) for top in tops for name in NAMES if name.startswith(top)))


def is_itself(mount: Mount) -> str | None:
    """Which of the names a writable mount is, or lies in, so that nothing of it could be written to."""
    parts = [part for guard in _guards([mount]) for part in guard.host.split("/")]
    for name in NAMES:
        words = name.split("/")
        for start in range(1, len(parts) - len(words) + 1 if name not in PINNED else 0):
            last = start + len(words) == len(parts)
            if parts[start : start + len(words)] == words and (last or name not in WITH_PROJECTS):
                return name
    return None


def holds(mounts: Sequence[Mount]) -> Iterator[Hold]:
    """What is to be mounted over itself as the host is now: what lies on the way to another before that other."""
    guards = _guards(mounts)
    wanted: dict[str, bool] = {}
    for item in _survey(guards):
        end = item.way.end
        if end is None or not _can_be_held(end):
            continue
        if not item.pinned and any(_within(mount.host, end) for mount in guards):
            continue  # a link that leads to the whole of a mount does not make that read-only
        for folder in item.way.folders:
            wanted.setdefault(folder, True)
        wanted[end] = wanted.get(end, True) and item.pinned
    closed = {path for path, writable in wanted.items() if not writable}
    for path, writable in wanted.items():
        if any(path != outer and _within(path, outer) for outer in closed):
            continue
        for mount in guards:
            if path != mount.host and _within(path, mount.host):
                yield Hold(mount, path, _seen_at(mount, path), writable)


def look(mounts: Sequence[Mount], held: Held) -> Seen:
    """What is not held, as it is now."""
    guards = _guards(mounts) if mounts else []
    if not guards:
        return Seen(held, {})
    found = ((item.at, _state(item, guards, held)) for item in _survey(guards) if item.name not in FOLDERS)
    closed: dict[str, _State] = dict.fromkeys(_closed(guards), ((), ("closed",)))
    return Seen(held, {at: state for at, state in found if state is not None} | closed | dict(_repositories(guards)))


def planted(mounts: Sequence[Mount], before: Seen) -> tuple[str, ...]:
    """What has come to be, or has changed, since then; of what lies in another the outer alone."""
    if not mounts:
        return ()
    found: list[str] = []
    for at, now in look(mounts, before.held).states.items():
        was = before.states.get(at, ((), None))
        if now == was or (now[1] is None and now[0] == was[0]):
            continue  # as it was, or removed
        if not any(at.startswith(f"{outer}/") for outer in found):
            found.append(at)
    return tuple(found)


# ── What there is ──


def _survey(guards: Sequence[Mount]) -> Iterator[_Item]:
    roots = [mount.host for mount in guards]
    for mount in guards:
        left = _MOST_ENTRIES
        inner: list[_Item] = []
        for name, at, way in _ways(mount, guards):
            folder = way.end is not None and _is_folder(way.end)
            item = _Item(name, at, way, folder and name in PINNED)
            yield item
            if way.end is None or not folder or item.pinned or name in _NOT_LOOKED_THROUGH or way.end in roots:
                continue
            for path, is_link in _entries(way.end, left):
                left -= 1
                if is_link:
                    within, own = os.path.split(path)
                    at = item.at + os.fsencode(path.removeprefix(way.end)).decode("utf-8", "replace")
                    inner.append(_Item(name, at, _walk(roots, within, own), False))
        yield from inner


def _ways(mount: Mount, guards: Sequence[Mount]) -> Iterator[tuple[str, str, _Way]]:
    """Each name that may be there, where the box sees it, and the way to it."""
    roots = [each.host for each in guards]
    wanted = names(mount)
    tops = {top for top in {name.partition("/")[0] for name in wanted} if _mode(f"{mount.host}/{top}")}
    for name in wanted:
        if name.partition("/")[0] not in tops:
            continue  # most are not there, and this is done for each run
        way = _walk(roots, mount.host, name)
        yield name, f"{mount.at}/{name}", way
        if os.path.basename(name) == "commondir" and way.end is not None:
            yield from _in_common(mount, guards, name, repository.common(way.end))


def _in_common(mount: Mount, guards: Sequence[Mount], name: str, said: str | None) -> Iterator[tuple[str, str, _Way]]:
    """What git reads in the folder that this `commondir` names, instead of what lies beside it."""
    roots = [each.host for each in guards]
    own = "/" if said and said.startswith("/") else _walk(roots, mount.host, f"{os.path.dirname(name)}/.").end
    if own is None or said is None:
        return
    for inner in _IN_COMMON:
        way = _walk(roots, own, f"{said}/{inner}")
        seen = (_seen_at(each, way.end) for each in guards if way.end is not None and _within(way.end, each.host))
        yield f".git/{inner}", next(seen, f"{mount.at}/{name}/{inner}"), way


def _repositories(guards: Sequence[Mount]) -> Iterator[tuple[str, _State]]:
    """What makes the top of a mount a repository, and what has git pass over the one that is there."""
    roots = [mount.host for mount in guards]
    for mount in guards:
        itself = os.path.basename(mount.host) == ".git"
        if not itself and repository.is_one(mount.host):
            yield f"{mount.at}/HEAD", ((), ("repository",))
        own = mount.host if itself else _walk(roots, mount.host, ".git").end
        at = mount.at if itself else f"{mount.at}/.git"
        if own is not None and _is_folder(own):
            for name, how in repository.lacks(own):
                yield f"{at}/{name}", ((), how)


def _walk(roots: Sequence[str], start: str, name: str) -> _Way:
    """From a folder that no link leads to. A link is never followed out of the roots; one that leads through what is
    outside of them, and back, is: nothing there needs to be looked at, since no link leads to a root."""
    links: list[str] = []
    folders: list[str] = []
    at, rest = start, name.split("/")[::-1]
    while rest:
        part = rest.pop()
        if part in ("", "."):
            continue
        at = os.path.dirname(at) if part == ".." else os.path.join(at, part)
        if not any(_within(at, root) for root in roots):
            if any(_within(root, at) for root in roots):
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
        if len(links) > _MOST_LINKS:
            return _Way(tuple(links), (), None)
    inside = any(_within(at, root) for root in roots)
    return _Way(tuple(links), tuple(folders), at if inside else None)


def _target(path: str, mode: int, is_on_the_way: bool) -> str | None:
    """Where it leads: a link, or the file `.git` of a repository that is kept elsewhere."""
    try:
        if stat.S_ISLNK(mode):
            return os.readlink(path)
        if stat.S_ISREG(mode) and is_on_the_way and os.path.basename(path) == ".git":
            return _read_pointer(path)
    except OSError:
        pass  # it was there a moment ago
    return None


def _read_pointer(path: str) -> str | None:
    first, _, _ = (repository.read(path) or b"").partition(b"\n")
    if not first.startswith(b"gitdir:") or b"\0" in first:
        return None
    return os.fsdecode(first.removeprefix(b"gitdir:").strip())


def _entries(folder: str, most: int, depth: int = _DEEPEST) -> Iterator[tuple[str, bool]]:
    """What is in it and in its folders, and whether it is a link; no more than so many."""
    try:
        with os.scandir(folder) as found:
            entries = sorted((entry.path, entry.is_symlink(), entry.is_dir(follow_symlinks=False)) for entry in found)
    except OSError:
        return
    for path, is_link, is_folder in entries:
        if most <= 0:
            return
        most -= 1
        yield path, is_link
        for inner in _entries(path, most, depth - 1) if is_folder and depth > 1 else ():
            most -= 1
            yield inner


# ── How it is ──


def _state(item: _Item, guards: Sequence[Mount], held: Held) -> _State | None:
    """None where there is nothing."""
    way = item.way
    links = tuple((link, *_facts(link)) for link in way.links)
    there: tuple[object, ...] | None = None
    if way.end is not None and not _is_held(way.end, item.pinned, guards, held):
        there = _facts(way.end)
        if item.pinned or any(_within(link, way.end) for link in way.links):
            there = there[:3]  # what is in it is judged by itself, or is the whole project
        else:
            there += tuple((path, *_facts(path)) for path, _ in _entries(way.end, _MOST_ENTRIES, _DEEPEST))
    return (links, there) if links or there is not None else None


def _closed(guards: Sequence[Mount]) -> Iterator[str]:
    """Folders that we may not look into: a box can take that right away, so what it left there is not known."""
    for mount in guards:
        for inner in ("", *(f"/{name}" for name in PINNED)):
            try:
                os.lstat(f"{mount.host}{inner}/.")
            except PermissionError:
                yield mount.at + inner
            except OSError:
                pass  # no folder


def _is_held(path: str, pinned: bool, guards: Sequence[Mount], held: Held) -> bool:
    """Wherever the box may write to it; and it is what was mounted: where a program of the host has put another in its
    place since then, that one is not."""
    for mount in guards:
        if _within(mount.host, path) and not pinned:
            return False
        if _within(path, mount.host) and not _is_held_in(mount, path, pinned, held):
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
        path.encode()  # as which a box is told of it
    except UnicodeEncodeError:
        return False
    return stat.S_ISDIR(mode) or stat.S_ISREG(mode)


def _guards(mounts: Sequence[Mount]) -> list[Mount]:
    """Those in which something is looked after. No link leads to a mount, so that its path can be taken as words."""
    wanted = (mount for mount in mounts if mount.mode == "rw" and not mount.unsafe)
    return [replace(mount, host="/" + os.path.normpath(mount.host).strip("/")) for mount in wanted]


def _seen_at(mount: Mount, path: str) -> str:
    return mount.at + path.removeprefix(mount.host)


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")
