"""The suite has teeth for what comes out of a box, and for folders of the host that a box may write to.

Without any one defence, harm is done in a case that was kept, or the facts no longer say what they should.
"""

from __future__ import annotations

import ast
import inspect
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ringfence.core.box import Mount
from ringfence.sandbox.files import acted_upon, collect, guarded, paths
from ringfence.sandbox.files.collect import Copy, LeftOut, _Target
from ringfence.sandbox.files.guarded import Hold
from ringfence.sandbox.process import output_files
from tests.doctor.teeth import Defence, Layers, Row, Taken, instead, tried, without_all

pytestmark = pytest.mark.anyio


class _Other:
    """A module, with some of its functions replaced."""

    def __init__(self, module: Any, **changed: Any) -> None:
        self._module = module
        self.__dict__.update(changed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def other(name: str, of: ModuleType = collect, **changed: Any) -> Taken:
    """For the collector, a function of a module that it uses is another one; over what was taken away before."""
    return lambda patch: patch.setattr(of, name, _Other(getattr(of, name), **changed))


def opened_anyway(path: str, flags: int, *, dir_fd: int | None = None) -> int:
    return os.open(path, flags & ~os.O_NOFOLLOW, dir_fd=dir_fd)


def waiting(patch: pytest.MonkeyPatch) -> None:
    """A pipe is opened as any file is, which waits until somebody writes to it: nobody is left who could."""

    def wait(name: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        found = os.open(name, flags | os.O_NONBLOCK, mode, dir_fd=dir_fd)
        if stat.S_ISFIFO(os.fstat(found).st_mode) and not flags & os.O_NONBLOCK:
            os.close(found)
            raise RuntimeError("it waits for ever")
        return found

    patch.setattr(collect, "READ", paths.READ & ~os.O_NONBLOCK)
    patch.setattr(paths, "os", _Other(os, open=wait))


def followed(path: str, *, dir_fd: int, follow_symlinks: bool) -> os.stat_result:
    return os.stat(path, dir_fd=dir_fd)


def anywhere(descriptor: int) -> SimpleNamespace:
    """All that is open lies on one file system."""
    found = os.fstat(descriptor)
    return SimpleNamespace(st_dev=0, st_mode=found.st_mode, st_size=found.st_size)


def empty(descriptor: int) -> SimpleNamespace:
    """A file says nothing of its size."""
    found = os.fstat(descriptor)
    return SimpleNamespace(st_dev=found.st_dev, st_mode=found.st_mode, st_size=0)


def with_mode(bits: int) -> Taken:
    """What a file may do on the host is what it may do in the box."""
    real = paths.opened

    @contextmanager
    def opened(name: str, flags: int, folder: int, mode: int = 0o600) -> Iterator[int]:
        with real(name, flags, folder, mode) as descriptor:
            yield descriptor
            if flags == paths.CREATE:  # after it was written, which takes away setuid
                os.fchmod(descriptor, bits)

    return instead(collect, "opened", opened)


def in_place(self: _Target, name: str, copy: Copy, *, executable: bool) -> None:
    """Written where it is to be, after the same look at what is there."""
    folder = self._open()
    try:
        if not stat.S_ISREG(vars(collect)["os"].stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise LeftOut("on the host something that is not a regular file is in its place")
    except FileNotFoundError:
        pass
    with paths.opened(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, folder, 0o644) as written:
        copy.run(written)


def every_file(patch: pytest.MonkeyPatch) -> None:
    real = collect.collect
    patch.setattr(collect, "collect", lambda root, output, **most: real(root, output, **{**most, "max_files": 10**6}))


def held(change: Any) -> Taken:
    """What is mounted over itself is changed, or left out, one by one."""
    real = guarded.holds

    def holds(mounts: Sequence[Mount]) -> Iterator[Hold]:
        yield from (changed for hold in real(mounts) if (changed := change(hold)) is not None)

    return instead(guarded, "holds", holds)


def no_way(patch: pytest.MonkeyPatch) -> None:
    """Folders on the way to what is held are not."""
    real = guarded._walk
    patch.setattr(guarded, "_walk", lambda *given: replace(real(*given), folders=()))


def only_pointers(patch: pytest.MonkeyPatch) -> None:
    real = guarded._target
    patch.setattr(guarded, "_target", lambda path, mode, way: None if stat.S_ISLNK(mode) else real(path, mode, way))


DEFENCES = {
    # What comes out
    "regular files alone": Defence(other("stat", S_ISREG=lambda mode: True), ("A04",), ("it is",), told=True),
    "no link in the place of the output": Defence(other("os", output_files, open=opened_anyway), ("A03",)),
    "nor in a box that stays": Defence(
        instead(output_files, "_FLAGS", output_files._FLAGS & ~os.O_NOFOLLOW), ("A03",), session=True
    ),
    "so many reasons": Defence(instead(collect, "MAX_REASONS", 10**6), ("A17",)),
    "names that can be shown": Defence(instead(collect, "unfit", lambda name: None), ("A09",), ("problem",)),
    "names that nobody acts upon": Defence(
        instead(collect, "is_acted_upon", lambda name, *, folder: False),
        ("A10",),
        ("tools on the host act upon a file of this name by themselves",),
    ),
    "the same in other letters": Defence(
        instead(collect, "is_acted_upon", lambda name, *, folder: name in acted_upon._TOPS), ("A10",)
    ),
    "no setuid": Defence(with_mode(0o6755), ("A07",)),
    "for its owner to write": Defence(with_mode(0o666), ("A08",)),
    "no link in the place of a folder": Defence(
        instead(collect, "FOLDER", paths.FOLDER & ~os.O_NOFOLLOW),
        ("A14",),
        ("on the host something that is not a folder is in the place of its folder",),
    ),
    "so many files": Defence(every_file, ("A15",), ("there are more than",)),
    # Folders of the host
    "held over themselves": Defence(held(lambda hold: None), ("F50", "F51", "F52", "F53")),
    "held read-only": Defence(held(lambda hold: replace(hold, writable=True)), ("F50", "F51", "F52", "F53")),
    "folders that stay where they are": Defence(held(lambda hold: None if hold.writable else hold), ("F51",)),
    "folders on the way": Defence(no_way, ("F50", "F52", "F53")),
    "where links lead": Defence(only_pointers, ("F50", "F52")),
    "links in what is held": Defence(instead(guarded, "_entries", lambda *_: ()), ("F50",)),
    "where a file leads": Defence(instead(guarded, "_read_pointer", lambda path: None), ("F53",)),
    "what is planted is told": Defence(instead(guarded, "planted_since", lambda *_: ()), ("F54",)),
    "so is a link that was replaced": Defence(instead(guarded, "_facts", lambda path: ()), ("F54",)),
}
LAYERS = {
    "nobody waits": Layers(
        {"regular files alone": other("stat", S_ISREG=lambda mode: True), "opened without waiting": waiting},
        ("A04",),
        fails="it waits for ever",
    ),
    "no link to a file": Layers(
        {
            "looked at": other("os", stat=followed),
            "opened": instead(collect, "READ", paths.READ & ~os.O_NOFOLLOW),
        },
        ("A01",),
    ),
    "no link to a folder": Layers(
        {
            "looked at": other("os", stat=followed),
            "opened": instead(collect, "FOLDER", paths.FOLDER & ~os.O_NOFOLLOW),
            "on the box's own file system": other("os", fstat=anywhere),
        },
        ("A02",),
        ("it is on another file system",),
    ),
    "no link in the place of a file": Layers(
        {"looked at": other("os", stat=followed), "written beside it": instead(_Target, "receive", in_place)},
        ("A06",),
        ("on the host something that is not a regular file is in its place",),
    ),
    "so many bytes": Layers(
        {
            "looked at": other("os", fstat=empty),
            "counted": instead(collect, "Copy", lambda source, most: Copy(source, None)),
        },
        ("A16",),
        ("it has", "it grew while it was read, beyond what may be collected"),
    ),
    "so deep": Layers(
        {"folders": instead(collect, "DEEPEST", 10**6), "letters": instead(collect, "LONGEST_PATH", 10**6)},
        ("A11",),
        ("it is deeper than", "its path is longer than"),
        fails="RecursionError",
    ),
}
ROWS: tuple[Row, ...] = (*DEFENCES.values(), *LAYERS.values())


async def test_with_all_of_them_no_harm_is_done() -> None:
    ids = {id for row in ROWS for id in row.cases}
    assert (await tried(ids, told=True)).harm == {}


@pytest.mark.parametrize("name", DEFENCES)
async def test_harm_is_done_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = DEFENCES[name]
    row.without(monkeypatch)
    assert (await tried(row.cases, told=row.told, session=row.session)).shows()


@pytest.mark.parametrize("name", LAYERS)
async def test_harm_is_done_without_all(name: str) -> None:
    assert (await without_all(LAYERS[name])).shows()


@pytest.mark.parametrize(("name", "kept"), [(name, kept) for name, row in LAYERS.items() for kept in row.without])
async def test_each_of_several_holds_alone(name: str, kept: str) -> None:
    assert (await without_all(LAYERS[name], but=kept)).harm == {}


# ── Nothing is forgotten ──

SAID_OTHERWISE = {
    "it cannot be read": "the box took the right away; A12",
    "its folder on the host cannot be had": "the host has no room or no right for it",
    "it cannot be written": "likewise",
}
"""Why a file is left out that could not be taken anyway."""
NOT_OF_A_BOX = {
    "names": "says what is held, and `holds` goes by it",
    "look": "the first half of `planted_since`",
    "planted": "compares what two looks saw, for `planted_since` and for sessions",
    "is_itself": "what an operator may mount, judged before there is a box",
}


def left_out(module: ModuleType) -> Iterator[str]:
    """What is said of a file that is left out, up to what differs from one to the next."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "LeftOut":
            said = node.args[0]
            if isinstance(said, ast.Name) and isinstance(vars(module).get(said.id), str):
                yield vars(module)[said.id]
                continue
            first = said.values[0] if isinstance(said, ast.JoinedStr) else said
            yield str(first.value).rstrip(": ") if isinstance(first, ast.Constant) else ast.unparse(first)


def test_every_reason_to_leave_a_file_out_has_teeth_or_says_why_not() -> None:
    bites = {said for row in ROWS for said in row.stops}
    assert {*left_out(collect)} == bites | set(SAID_OTHERWISE)


def test_whatever_looks_after_folders_of_the_host_has_teeth_or_says_why_not() -> None:
    asked = {name for name, value in vars(guarded).items() if inspect.isfunction(value) and name[0] != "_"}
    ours = {name for name in asked if getattr(guarded, name).__module__ == guarded.__name__}
    assert ours == {"holds", "planted_since", *NOT_OF_A_BOX}
