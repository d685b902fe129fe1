"""Machines that were started once, made ready for any box, and saved: boxes go on from there.

Beside that, what this host taught about its accelerator: only a machine that boots tells whether KVM serves."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import time
from pathlib import Path

from ringfence.core.aio import in_thread, shielded
from ringfence.core.errors import Unavailable
from ringfence.core.record import plain
from ringfence.sandbox.guests.microvm import disks, locks
from ringfence.sandbox.guests.microvm.kernel import GuestKernel, initial
from ringfence.sandbox.guests.microvm.machine import Hypervisor, Machine, MachineShape, Saved

log = logging.getLogger(__name__)

_INSIDE = Path(__file__).parent / "inside"
_BOOT_SECONDS = 600.0
"""Emulation on a busy host is slow, but it always moves; this is for one that does not."""
_PROBE_SECONDS = 20.0
_PROBED_MEMORY = 256 * 1024 * 1024
_FAILED_SECONDS = 600.0
"""How long it is believed that an accelerator does not serve."""
_KEPT_SECONDS = 14 * 24 * 3600.0
_MODULES = Path("/sys/module")
_PROCESSORS = Path("/proc/cpuinfo")


@plain
class GuestStart:
    """What a machine is made ready with."""

    agent: bytes
    """The code of the agent; another is sent later if it is not that."""
    words: tuple[str, ...]
    """That start an interpreter in its root."""


class SavedMachines:
    """Those of one state folder."""

    def __init__(self, kept: Path, kernel: GuestKernel) -> None:
        self._kept = kept
        self._kernel = kernel
        self._making = asyncio.Lock()

    async def disk(self, folder: Path, digest: str) -> Path:
        """The disk of a root; an operator's own is one already."""
        return await in_thread(lambda: folder if folder.is_file() else disks.disk(folder, digest, self._kept / "disks"))

    async def initrd(self) -> Path:
        return await in_thread(self._initrd)

    def _initrd(self) -> Path:
        ours = Path(initial.__code__.co_filename).read_bytes()
        made = _digest(self._kernel.release, _stamp(self._kernel.image), _stamp(Path(os.__file__)), ours, _INSIDE)
        return locks.made_once(self._kept / "initrd" / made, lambda at: _put(at, initial(self._kernel)))

    async def saved(self, hypervisor: Hypervisor, shape: MachineShape, start: GuestStart) -> Saved:
        """Made if there is none. Raises Unavailable."""
        about = (hypervisor.version, hypervisor.accelerator, os.uname().release, _stamp(shape.kernel))
        of_shape = (shape.initrd.name, shape.disk.name, shape.memory_bytes, shape.processors)
        digest = _digest(*about, *of_shape, _INSIDE, hashlib.sha256(start.agent).hexdigest(), start.words)
        place = self._kept / "saved" / digest
        async with self._making:
            if not (place / "memory").exists():
                await self._make(hypervisor, shape, start, place)
        with contextlib.suppress(OSError):
            os.utime(place)
        return Saved(place)

    async def _make(self, hypervisor: Hypervisor, shape: MachineShape, start: GuestStart, place: Path) -> None:
        lock = locks.locked(place)
        await in_thread(lock.__enter__)
        try:
            if (place / "memory").exists():
                return
            await in_thread(lambda: _remove_unused(place.parent))
            began = time.monotonic()
            log.info("a machine for guests is started and saved, once (%s)", hypervisor.accelerator)
            beside = locks.staging(place)
            beside.mkdir(mode=0o700)
            machine = await hypervisor.start(shape)
            try:
                async with asyncio.timeout(_BOOT_SECONDS):
                    await heard(machine, b".")
                    program = (_INSIDE / "second.py").read_bytes()
                    for part in (program, "\0".join(start.words).encode(), start.agent):
                        await told(machine, part)
                    await heard(machine, b"!")
                await machine.save(beside)
            except TimeoutError:
                raise Unavailable("no_box", f"a machine did not start within {_BOOT_SECONDS:.0f} seconds") from None
            finally:
                await shielded(asyncio.ensure_future(machine.remove()))
            beside.rename(place)
            log.info("it is saved after %.1f seconds", time.monotonic() - began)
        finally:
            await in_thread(lambda: lock.__exit__(None, None, None))

    # ── Whether KVM serves ──

    async def accelerated(self, hypervisor: Hypervisor, accelerator: str) -> str | None:
        """Why machines do not boot with it on this host; None where one did. Found out once for a host's
        kernel where it serves, and again after a while where it does not."""
        if (why := _hopeless(accelerator)) is not None:
            return why
        await hypervisor.open()
        asked = (hypervisor.version, accelerator, os.uname().release, os.uname().version, _stamp(self._kernel.image))
        known = self._kept / "probed" / f"{_digest(*asked)}.json"
        with contextlib.suppress(OSError, ValueError, KeyError):
            found: str | None = json.loads(known.read_text())["why"]
            if found is None or time.time() - known.stat().st_mtime < _FAILED_SECONDS:
                return found
            known.unlink()
        why = await self._tried(hypervisor)
        await in_thread(lambda: locks.made_once(known, lambda at: _put(at, json.dumps({"why": why}).encode())))
        return why

    async def _tried(self, hypervisor: Hypervisor) -> str | None:
        disk = await in_thread(lambda: disks.empty(self._kept / "disks"))
        shape = MachineShape(self._kernel.image, await self.initrd(), disk, _PROBED_MEMORY, 1)
        machine: Machine | None = None
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                machine = await hypervisor.start(shape)
                await heard(machine, b".")
        except TimeoutError:
            return f"a machine did not boot with it within {_PROBE_SECONDS:.0f} seconds"
        except Unavailable as problem:
            return f"a machine does not boot with it: {problem}"
        finally:
            if machine is not None:
                await shielded(asyncio.ensure_future(machine.remove()))
        return None


def _hopeless(accelerator: str) -> str | None:
    """Why it is not worth a try."""
    device = f"/dev/{accelerator}"
    if not os.path.exists(device):
        return f"there is no {device}"
    if not os.access(device, os.R_OK | os.W_OK):
        return f"{device} may not be opened by this user"
    if (_MODULES / "kvm_pvm").is_dir():
        return "it is PVM, which boots only kernels that are made for it"
    if os.uname().machine == "x86_64":
        flags = re.search(r"^flags\s*:(.*)$", _PROCESSORS.read_text(), re.MULTILINE)
        if flags is None or not {"vmx", "svm"} & set(flags[1].split()):
            return "the processor has no virtualization"
    return None


async def heard(machine: Machine, word: bytes) -> None:
    """Wait for one byte. Raises Unavailable where the machine ends first, or says something else."""
    machine.stream.setblocking(False)
    loop = asyncio.get_running_loop()
    try:
        data = await loop.sock_recv(machine.stream, 1)
    except OSError:
        data = b""
    if data != word:
        machine.kill()
        raise Unavailable("no_box", f"a machine did not start: {await asyncio.shield(machine.ended)}")


async def told(machine: Machine, part: bytes) -> None:
    """Send a piece, after its length. Raises Unavailable."""
    try:
        await asyncio.get_running_loop().sock_sendall(machine.stream, len(part).to_bytes(4, "big") + part)
    except OSError:
        machine.kill()
        raise Unavailable("no_box", f"a machine has ended: {await asyncio.shield(machine.ended)}") from None


def _remove_unused(folder: Path) -> None:
    """Of machines that nobody has gone on from for long, and of those whose shape no supervisor asks for any more."""
    long_ago = time.time() - _KEPT_SECONDS
    for each in folder.glob("[0-9a-f]*"):
        if each.is_dir() and each.stat().st_mtime < long_ago:
            shutil.rmtree(each, ignore_errors=True)


def _put(at: Path, content: bytes) -> None:
    at.write_bytes(content)


def _stamp(path: Path) -> tuple[str, int, int]:
    state = path.stat()
    return str(path), state.st_size, state.st_mtime_ns


def _digest(*parts: object) -> str:
    whole = hashlib.sha256()
    for part in parts:
        if part is _INSIDE:
            part = [each.read_bytes() for each in sorted(_INSIDE.glob("*.py"))]
        whole.update(repr(part).encode() + b"\0")
    return whole.hexdigest()
