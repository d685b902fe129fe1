"""Tries on this host what boxes need, in programs of their own: whoever tries has left its namespaces for good."""

from __future__ import annotations

import errno
import os
import pwd
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import ringfence
from ringfence.errors import Unavailable
from ringfence.sandbox.process.host import launched
from ringfence.sandbox.process.uids import take_block

_SOURCE_ROOT = str(Path(ringfence.__file__).parent.parent)
_PROGRAM = str(Path(__file__).with_name("attempt.py"))
_SECONDS = 600.0
"""A machine may be slow; a kernel that does not answer at all is not waited for."""


@dataclass(frozen=True, slots=True)
class Tried:
    """How a step of `attempt` went; 0 is well."""

    number: int
    text: str = ""


def attempt() -> dict[str, Tried]:
    """Each step up to the first that failed."""
    words: list[str] = []
    block = None
    if os.geteuid() == 0:
        try:
            block = take_block()
        except Unavailable as exc:
            return {"user_namespace": Tried(0), "mapping": Tried(errno.EPERM, exc.message)}
        words = [str(block.base), str(block.size)]
    try:
        said = _run(launched([_interpreter(), "-I", _PROGRAM, _SOURCE_ROOT, *words]))
    finally:
        if block is not None:
            block.release()
    lines = (line.split("\t") for line in said.splitlines())
    return {line[0]: Tried(int(line[1]), line[2]) for line in lines if len(line) == 3 and line[1].isdecimal()}


def _interpreter() -> str:
    """The one that zygotes run in: who is allowed what may depend on the program."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def _run(command: Sequence[str]) -> str:
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, cwd="/", check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ran.stdout


def mapped_by_helper(users: range, groups: range) -> str:
    """What newuidmap and newgidmap say when they are to map these; nothing where they do it."""
    with subprocess.Popen(
        launched([_interpreter(), "-I", _PROGRAM, _SOURCE_ROOT, "hold"]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as holder:
        assert holder.stdout is not None
        if holder.stdout.readline() != b"held\n":
            return "no user namespace to try it on"
        own = (os.getuid(), os.getgid())
        for helper, span, outer in zip(("newuidmap", "newgidmap"), (users, groups), own, strict=True):
            command = [helper, str(holder.pid), "0", str(outer), "1", "1", str(span.start), str(len(span))]
            ran = subprocess.run(command, capture_output=True, text=True, check=False)
            if ran.returncode:
                return (ran.stderr.strip().splitlines() or [f"it ended with {ran.returncode}"])[-1]
    return ""


def range_of(path: Path, uid: int) -> range | None:
    """What /etc/subuid or /etc/subgid hands to a user."""
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return None
    names = {str(uid)}
    with suppress(KeyError):
        names.add(pwd.getpwuid(uid).pw_name)
    for line in lines:
        words = line.split(":")
        if len(words) == 3 and words[0] in names and words[1].isdecimal() and words[2].isdecimal():
            return range(int(words[1]), int(words[1]) + int(words[2]))
    return None
