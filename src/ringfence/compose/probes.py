"""Which backends make boxes on this host, found out by making some, and how long that takes.

A device file that can be opened, or a program that can be found, says little: only a box that ran does. What was found
is kept in the state folder, as the self-test is (`remembered`), for an hour at most, and for a shorter time where
nothing could be made. It holds for the same boot, kernel, rights, settings, code and engines.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import ringfence
from ringfence.config import paths
from ringfence.config.settings import SandboxSettings
from ringfence.core import system
from ringfence.core.aio import shielded
from ringfence.core.box import BoxSpec, Program
from ringfence.core.errors import Unavailable
from ringfence.core.model import Json
from ringfence.core.ports import Backend
from ringfence.core.record import plain

if TYPE_CHECKING:
    from ringfence.compose.backends import BackendRow

NAME = "probes.json"
_KEPT_SECONDS = 3600.0
_MISSING_SECONDS = 600.0
_STARTS = 3
_ENGINES = (
    *("runc", "crun", "runsc", "newuidmap", "docker", "dockerd", "podman", "msb", "firecracker", "jailer"),
    *("qemu-system-x86_64", "qemu-system-aarch64"),
)
"""What backends start: one that was installed, upgraded or removed since is no longer the one that was tried."""
_SOCKETS = ("/var/run/docker.sock", "/run/podman/podman.sock")
_NOTHING = BoxSpec(Program("python", b"pass"))


@plain
class Makers:
    """The backends that are built, by name, and how one is made."""

    rows: Mapping[str, BackendRow]
    row_of: Callable[[str], BackendRow]
    """Raises Unavailable for a name that is none."""
    level_of: Callable[[str], str]
    make: Callable[..., Backend]
    """As `backends.make_backend`."""

    def no_stay(self, name: str) -> str:
        """What is said of a backend whose boxes do not stay."""
        others = ", ".join(other for other, row in self.rows.items() if row.stays)
        return f"boxes of backend {name} do not stay; those of {others} do"


@plain
class Probed:
    """What came of trying a backend."""

    missing: str | None = None
    """Why it makes no boxes here, and what to do; None: it does."""
    start_ms: float = 0.0
    """How long a box takes after the first, program included."""
    emulated: bool = False
    """Whether its machines are emulated, instruction by instruction."""


class Probes:
    """What is known of the backends of one configuration, on this host."""

    def __init__(self, settings: SandboxSettings, state: Path | None, makers: Makers) -> None:
        self._settings = settings
        self._makers = makers
        self._state = state
        self._found: dict[str, Probed] = {}
        self._turns: dict[str, asyncio.Lock] = {}

    async def of(self, name: str) -> Probed:
        """Tried, if that was not done lately."""
        async with self._turns.setdefault(name, asyncio.Lock()):
            if name not in self._found:
                recalled = await asyncio.to_thread(self._recall, name)
                self._found[name] = await self._try(name) if recalled is None else recalled
        return self._found[name]

    def known(self, name: str) -> Probed | None:
        """What is known without trying."""
        return self._found.get(name) or self._recall(name)

    def must_emulate(self, name: str) -> bool:
        """Whether it is known without trying that its machines would be emulated. That there is a device says nothing;
        that there is none, enough."""
        return self._makers.row_of(name).emulates and not os.access("/dev/kvm", os.R_OK | os.W_OK)

    async def _try(self, name: str) -> Probed:
        try:
            backend = self._makers.make(replace(self._settings, backend=name), self._state, keep_ready=1)
        except Unavailable as exc:
            return Probed(exc.message)
        try:
            found = await probe(backend, self._makers.row_of(name).probe_seconds)
        finally:
            await shielded(asyncio.ensure_future(backend.close()))
        await asyncio.to_thread(self._keep, name, found)
        return found

    # ── Kept ──

    def _recall(self, name: str) -> Probed | None:
        if self._state is None or system.no_boxes() is not None:
            return None
        from ringfence.sandbox.process.host import remembered  # noqa: PLC0415 - for Linux alone

        try:
            kept = remembered.written(self._state, NAME)[name]
            found = Probed(**kept["found"])
            seconds = _KEPT_SECONDS if found.missing is None else _MISSING_SECONDS
            return found if remembered.holds(kept, self._grounds(name), seconds) else None
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return None  # nothing was kept, or not by us: it is tried again

    def _keep(self, name: str, found: Probed) -> None:
        if self._state is None or system.no_boxes() is not None or not self._state.is_dir():
            return
        from ringfence.sandbox.process.host import remembered  # noqa: PLC0415 - for Linux alone

        kept: Json = {}
        try:
            before = remembered.written(self._state, NAME)
            kept = dict(before) if type(before) is dict else {}
        except (OSError, ValueError):
            pass  # the first that is kept
        kept[name] = {**remembered.stamp(self._grounds(name)), "found": asdict(found)}
        remembered.write(self._state, NAME, kept)

    def _grounds(self, name: str) -> str:
        from ringfence.sandbox.process.host import remembered  # noqa: PLC0415 - for Linux alone

        return remembered.grounds((name, *_engines(), *_code(), repr(replace(self._settings, backend=name))))


async def probe(backend: Backend, seconds: float) -> Probed:
    """Make boxes until it is known how long they take; the first one may take long."""
    try:
        async with asyncio.timeout(seconds):
            report = await backend.run(_NOTHING)
            if (report.ended, report.exit_status) != ("exited", 0):
                text = f"the first box of {backend.name} did not run its program: it ended by {report.ended}"
                return Probed(f"{text}; {_more(backend)}")
            starts = []
            for _ in range(_STARTS):
                begun = time.perf_counter()
                report = await backend.run(_NOTHING)
                starts.append(_since(begun))
    except Unavailable as exc:
        return Probed(exc.message)
    except TimeoutError:
        return Probed(f"the first box of {backend.name} did not end within {seconds:g} seconds; {_more(backend)}")
    return Probed(None, round(median(starts), 2), emulated=report.isolation.get("accelerator") == "tcg")


def _more(backend: Backend) -> str:
    return f"`ringfence doctor --backend {backend.name} --case F01` says more"


def _since(begun: float) -> float:
    return round((time.perf_counter() - begun) * 1000, 2)


def _engines() -> Iterator[str]:
    path = f"{paths.process_environment().get('PATH', os.defpath)}:/usr/sbin:/sbin"
    places = [shutil.which(name, path=path) for name in _ENGINES]
    yield from map(_looks, (*filter(None, places), *_SOCKETS, "/dev/kvm", "/sys/module/kvm_pvm"))


def _code() -> Iterator[str]:
    from ringfence.sandbox.process.host import remembered  # noqa: PLC0415 - for Linux alone

    folder = os.path.dirname(ringfence.__file__)
    yield from map(_looks, sorted((*remembered.modules(f"{folder}/sandbox"), *remembered.modules(f"{folder}/compose"))))


def _looks(place: str) -> str:
    try:
        info = os.stat(place)
    except OSError:
        return f"no {place}"
    changed = f"{info.st_size} {info.st_mtime_ns}" if stat.S_ISREG(info.st_mode) else ""
    return f"{place} {info.st_dev} {info.st_ino} {changed}"
