"""Boxes whose root is an unpacked image: what they can have, and how each is checked before it is used.

This is the supervisor's part; the zygote's is `template.build_from_image`.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from ringfence.core.box import BoxSpec, ImageRoot, Mount, Program
from ringfence.core.errors import Unavailable
from ringfence.sandbox.process import guest_code, mounting
from ringfence.sandbox.process.selftest import PROC_AT, ProbeResult
from ringfence.sandbox.process.zygote.machine import CPU
from ringfence.sandbox.process.zygote.template import DEVICES

COMMANDS = Program("command", argv=("image",))
"""The program of a box that stays with an image as its root: commands, which come later."""
_OURS = ("/workspace", "/proc", "/tmp", "/home/user", "/dev/pts", CPU)  # noqa: S108 - as they are called in a box
"""What each box makes for itself; no image has anything there that is in the way of these."""


def check(spec: BoxSpec, root: Path) -> None:
    """Raises ValueError, with a sentence for a person, for what a box with an image as its root cannot have."""
    asked = {
        "trees of the host": spec.trees,
        "packages": spec.packages or spec.installs,
        "named programs": spec.programs is not None,
        f"the template {spec.template}": spec.template != "python",
        "an interpreter of ours": spec.image is None and (spec.layout == "fresh" or spec.program.kind == "python"),
    }
    for what, wanted in asked.items():
        if wanted:
            raise ValueError(f"a box whose root is an image has that and no more: it cannot have {what}")
    if spec.image is not None and spec.program.kind == "python" and not spec.image.python:
        raise ValueError(
            f"the image {spec.image.name} has no Python of 3.8 or later: run a command, or name another image"
        )
    for mount in spec.mounts:
        _check_way(mount, root)


def lacks_cells(image: ImageRoot | None) -> str:
    """Why no interpreter serves cells in a box whose root is an image; empty: one does."""
    if image is None:
        return "a box whose root is an image has no interpreter of ours"
    if not image.python:
        return f"the image {image.name} has no Python of 3.8 or later"
    if image.version < guest_code.OLDEST:
        has, needs = (".".join(map(str, each)) for each in (image.version, guest_code.OLDEST))
        return f"the image {image.name} has Python {has}, and interpreters that keep their state need {needs} or later"
    return ""


def _check_way(mount: Mount, root: Path) -> None:
    """No link of an image is followed, and none that programs may use is hidden by a mount."""
    path = root
    for part in mount.at.strip("/").split("/"):
        path = path / part
        try:
            found = os.lstat(path)
        except OSError:
            return  # nothing of the image is in the way
        if stat.S_ISLNK(found.st_mode):
            at = f"/{path.relative_to(root)}"
            raise ValueError(f"a mount cannot be at {mount.at}: in the image, {at} is a link to {os.readlink(path)!r}")


def place(root: Path) -> mounting.Placed:
    """The folder as it is now. Raises ValueError."""
    (placed,) = mounting.place([Mount(str(root), "/")])
    if not placed.folder:
        raise ValueError(f"{root} is not a folder, so it cannot be the root of a box")
    if os.geteuid() == 0 and stat.S_IMODE(os.stat(root).st_mode) & 0o005 != 0o005:
        raise ValueError(f"{root} cannot be the root of a box: only its owner may read it")
    return placed


# ── Checks of a box ───────────────────────────────────────────────────────────────────────────────


def look(pid: int, mounts: Iterable[mounting.Placed]) -> dict[str, ProbeResult]:
    """Check the file systems of a box, by the steps that made them. Raises Unavailable.

    The self-test of a backend looks at a box with another root.
    """
    try:
        table = Path(f"/proc/{pid}/mountinfo").read_bytes()
    except OSError as exc:
        raise Unavailable("self_test", f"a box could not be looked at: {exc.strerror}") from None
    return judge(table, mounts)


def judge(table: bytes, mounts: Iterable[mounting.Placed]) -> dict[str, ProbeResult]:
    """As `look`, by a mount table of the kernel."""
    seen = list(_parsed(table))
    declared = {**dict.fromkeys(_OURS, True), **{each.at: each.writable for each in mounts}}
    around = {at: _innermost(at, declared) for at, _, _ in seen}
    fixed = {at: flags for at, flags, _ in seen if around[at] is None}
    read_only = [flags for at, flags, _ in seen if (within := around[at]) is not None and not declared[within]]
    ours = {"/dev", *(f"/dev/{name}" for name in DEVICES)}
    loose = sorted(",".join(sorted(flags)) for flags in (*fixed.values(), *read_only) if not {"ro", "nosuid"} <= flags)
    strange = sorted(fixed.keys() - {"/"} - ours)

    def found(probe: str, expected: object, saw: object) -> ProbeResult:
        return ProbeResult(probe, str(expected), str(saw), saw == expected)

    return {
        "own_root": found("mounted at /", ["overlay"], [kind for at, _, kind in seen if at == "/"]),
        "read_only_root": found("the mount at / is read-only", True, "ro" in fixed.get("/", ())),
        "trees_read_only": found("mounts of others, and flags without ro and nosuid", [], strange + loose),
        "own_devices": found("devices that are not mounted", [], sorted(ours - fixed.keys())),
        "proc": found(
            "where a proc file system is mounted", PROC_AT, sorted(at for at, _, kind in seen if kind == "proc")
        ),
    }


def _innermost(at: str, places: Iterable[str]) -> str | None:
    return max((each for each in places if at == each or at.startswith(f"{each}/")), key=len, default=None)


def _parsed(table: bytes) -> Iterator[tuple[str, set[str], str]]:
    """The place, flags and kind of each mount."""
    for line in table.splitlines():
        words = line.split(b" ")
        at = re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), words[4])
        yield os.fsdecode(at), set(os.fsdecode(words[5]).split(",")), os.fsdecode(words[words.index(b"-") + 1])
