"""A checkout in a guest: packed here, unpacked there, and the ways in which somebody may run something from it."""

from __future__ import annotations

import io
import shlex
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Literal

from hosts.guests import Guest
from hosts.image import PYTHONS, compile_all
from hosts.machine import Line
from hosts.places import digest_of_files

# Who runs something: root and the ordinary user in a login session, or each without one.
Who = Literal["root", "user", "service", "plain"]
_TAKEN = ("src", "examples", "docs", "README.md", "pyproject.toml")


def files_of(source: Path) -> list[Path]:
    found: list[Path] = []
    for name in _TAKEN:
        place = source / name
        found += [place] if place.is_file() else [one for one in place.rglob("*") if one.is_file()]
    return [one for one in found if "__pycache__" not in one.parts]


def digest_of(source: Path) -> str:
    """What the code is, for telling whether a result is still its own. Prose does not count."""
    return digest_of_files((one for one in files_of(source) if one.is_relative_to(source / "src")), source)


def packed(source: Path, version: str) -> bytes:
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name) / "project"
        for file in files_of(source):
            target = tree / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
        compile_all(tree / "src", version)
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as archive:
            archive.add(tree, "project", filter=_ours)
    return buffer.getvalue()


def _ours(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    entry.mode |= 0o755 if entry.isdir() else 0o644
    return entry


def bring(line: Line, guest: Guest, source: Path) -> None:
    """Put the code of a checkout where the guest's virtual environment looks for it, unless it is there already."""
    mark = digest_of_files(files_of(source), source)
    if line.call(["cat", "/opt/project.mark"]).out == mark:
        return
    version = PYTHONS[guest.release]
    line.put("/opt/project.tar.gz", packed(source, version))
    script = (
        "rm -rf /opt/project && tar -xzf /opt/project.tar.gz -C /opt && cd /opt/project && "
        "{ find src -name '*.pyc' | grep -q . || python3 -m compileall -q src; } && "
        f"printf %s {mark} >/opt/project.mark"
    )
    ended = line.call(["sh", "-c", script])
    if ended.code:
        raise RuntimeError(ended.err)


def as_whom(who: Who, command: str) -> list[str]:
    """How a command line is started, for somebody."""
    profile = ". /etc/profile; cd; "
    if who == "service":
        return ["env", "HOME=/root", "sh", "-c", profile + command]
    if who == "plain":
        # Like a job of cron or an exec into a container: another uid, but nobody logged in.
        ids = ["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", "--reset-env"]
        return [*ids, "bash", "-c", profile + command]
    return ["su", "-l", "ada" if who == "user" else "root", "-c", command]


def quoted(command: list[str]) -> str:
    return command[0] if len(command) == 1 else shlex.join(command)
