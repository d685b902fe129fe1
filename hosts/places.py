"""Where things are kept, and the few ways in which other programs are started."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".tools" / "hosts"

# The programs that images are made and guests are run with, and the Debian package of each.
_PROGRAMS = {
    "debootstrap": "debootstrap",
    "mke2fs": "e2fsprogs",
    "depmod": "kmod",
    "dpkg-deb": "dpkg",
    "apt-get": "apt",
    "zstd": "zstd",
    "qemu-img": "qemu-utils",
    "qemu-system-x86_64": "qemu-system-x86",
    "qemu-system-aarch64": "qemu-system-arm",
}


class Trouble(Exception):
    """Something that the person who runs this has to see to; its text says what."""


def say(text: str) -> None:
    print(f"hosts: {text}", file=sys.stderr, flush=True)


def find(program: str) -> str | None:
    # An ordinary user's PATH often has no /sbin.
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def run(command: Sequence[str | Path], *, cwd: Path | None = None, log: Path | None = None) -> str:
    """What a command prints. Its complaints are shown where it fails, and go to `log` in any case."""
    program = find(str(command[0]))
    if program is None:
        raise Trouble(f"{command[0]} is not installed")
    shown = subprocess.run(
        [program, *map(str, command[1:])], cwd=cwd, capture_output=True, text=True, check=False, errors="replace"
    )
    if log is not None:
        log.write_text(shown.stdout + shown.stderr)
    if shown.returncode:
        said = (shown.stdout + shown.stderr).strip().splitlines()
        raise Trouble(f"{' '.join(map(str, command))[:300]}\nfailed:\n" + "\n".join(said[-20:]))
    return shown.stdout


def need_programs() -> None:
    """Install the programs that are missing where that is allowed; otherwise say which they are."""
    missing = sorted({package for program, package in _PROGRAMS.items() if find(program) is None})
    if not missing:
        return
    if os.geteuid() == 0 and find("apt-get"):
        say(f"installing {' '.join(missing)} with apt-get")
        run(["apt-get", "update", "-qq"])
        quiet = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "install", "-y", "-qq", "--no-install-recommends"]
        run([*quiet, *missing])
        return
    raise Trouble(f"missing: {' '.join(missing)}. Install them with: sudo apt-get install {' '.join(missing)}")


def digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, default=str, sort_keys=True).encode()).hexdigest()[:16]


def digest_of_files(files: Iterable[Path], base: Path) -> str:
    whole = hashlib.sha256()
    for file in sorted(files):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        whole.update(f"{file.relative_to(base)} {content}\n".encode())
    return whole.hexdigest()[:16]


def fresh(folder: Path) -> Path:
    """An empty folder of that name."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def make_ext4(image: Path, folder: Path, megabytes: int) -> None:
    """A file system that holds a folder, complete or not there at all."""
    part = image.with_suffix(".part")
    part.unlink(missing_ok=True)
    with part.open("wb") as file:
        file.truncate(megabytes << 20)
    run(["mke2fs", "-q", "-F", "-t", "ext4", "-E", "lazy_itable_init=1", "-d", folder, part])
    part.rename(image)


def size_of(folder: Path) -> int:
    """In mebibytes, each file rounded up to whole blocks."""
    return sum((path.lstat().st_size // 4096 + 1) * 4096 for path in folder.rglob("*")) >> 20
