"""The result of the self-test, kept in the state folder, so that a single run need not make a box to look at first.

It holds for as long as nothing has changed that it rests on: the boot and the kernel, the namespaces, rights, limits
and security label that we have, the interpreter and our own code. A container on the same kernel has others. It is
never kept for more than an hour, since a host may change in ways that nothing here would tell; and only the result of
a box that had every protection is kept. `verified_at` in the facts is the time of the test itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import secrets
import stat
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ringfence.core import system
from ringfence.core.model import Json
from ringfence.sandbox.process.host.capabilities import Tested

NAME = "selftest.json"
KEPT_SECONDS = 3600.0
_MAX_BYTES = 65536
_CODE = os.path.dirname(os.path.dirname(__file__))
_SPACES = ("user", "pid", "mnt", "ipc", "uts", "net", "cgroup")
_FILES = (
    "/proc/sys/kernel/osrelease",
    "/proc/sys/kernel/version",
    "/proc/sys/kernel/seccomp/actions_avail",
    "/proc/sys/kernel/unprivileged_userns_clone",
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
    "/proc/sys/user/max_user_namespaces",
    "/sys/kernel/security/lsm",
    "/proc/self/attr/current",
    "/proc/self/cgroup",
    "/proc/self/uid_map",
    "/proc/self/gid_map",
)
_OF_US = ("Uid:", "Gid:", "Groups:", "Cap", "NoNewPrivs:", "Seccomp")


def recall(folder: Path, grounds: str) -> Tested | None:
    """The result that was kept for these grounds, if it still holds."""
    try:
        kept = written(folder, NAME)
        if not holds(kept, grounds, KEPT_SECONDS):
            return None
        return Tested({str(name): bool(on) for name, on in kept["found"].items()}, str(kept["at"]), frozenset())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None  # there is none, or none that we wrote: the test is made again


def written(folder: Path, name: str) -> Any:
    """What we wrote into a file of this name. Raises OSError, ValueError where nobody did, or somebody else."""
    descriptor = os.open(folder / name, os.O_RDONLY | system.PRIVATE | system.UNHURRIED)
    with open(descriptor, "rb") as file:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode) or system.stranger(info) or system.open_to_others(info, 0o077):
            raise ValueError(f"{name} is not ours alone")
        return json.loads(file.read(_MAX_BYTES))


def stamp(grounds: str) -> Json:
    """When something was found out, and what it rests on."""
    return {"boot": system.boot(), "uptime": system.uptime(), "grounds": grounds}


def holds(kept: Json, grounds: str, seconds: float) -> bool:
    """Whether what has such a stamp may still be believed, for so long. Raises LookupError, TypeError."""
    same = kept["boot"] is not None and kept["boot"] == system.boot() and kept["grounds"] == grounds
    return same and 0 <= system.uptime() - kept["uptime"] <= seconds


def keep(folder: Path, grounds: str, tested: Tested) -> None:
    """Keep a result in which nothing was missing. Where that fails, the next one makes the test again."""
    if tested.left_out or not all(tested.found.values()) or system.boot() is None:
        return
    write(folder, NAME, stamp(grounds) | {"at": tested.at, "found": dict(tested.found)})


def write(folder: Path, name: str, kept: Json) -> None:
    """Put it into a file that only we can read, whole or not at all. Where that fails, it is not kept."""
    text = json.dumps(kept)
    made = folder / f".{name}.{secrets.token_hex(6)}"
    with contextlib.suppress(OSError):
        descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | system.PRIVATE, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        made.replace(folder / name)


def grounds(besides: Iterable[str]) -> str:
    """A digest of all that the result rests on; `besides` is what the backend knows of it."""
    digest = hashlib.sha256()
    for each in (sys.version, *besides, *_of_us(), *_of_host(), *_of_code()):
        digest.update(each.encode("utf-8", "surrogateescape") + b"\0")
    return digest.hexdigest()


def _of_us() -> Iterable[str]:
    yield from (line for line in _text("/proc/self/status").splitlines() if line.startswith(_OF_US))
    for name in _SPACES:
        yield os.readlink(f"/proc/self/ns/{name}")
    for number in range(16):
        yield str(resource.getrlimit(number)[1])


def _of_host() -> Iterable[str]:
    return map(_text, _FILES)


def _of_code() -> Iterable[str]:
    """The interpreter and what makes boxes: an upgrade or an edit changes their size and time."""
    for place in sorted((str(system.interpreter()), *modules(_CODE))):
        info = os.stat(place)
        yield f"{place} {info.st_dev} {info.st_ino} {info.st_size} {info.st_mtime_ns}"


def modules(code: str) -> Iterable[str]:
    """Every module below a folder."""
    for folder, _, names in os.walk(code):
        yield from (f"{folder}/{name}" for name in names if name.endswith(".py"))


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError as exc:
        return f"no {path}: {exc.errno}"
