"""Machines of QEMU: with KVM, or emulated (TCG).

The program has no device but the disk, the stream, and a console that only its kernel writes to. It runs as a user of
its own without any right, behind its own filter for system calls, in the view of the host that `warden` gives it. It
opens no file of the host by a path: all that it has comes to it as descriptors.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringfence.core.aio import in_thread, shielded
from ringfence.core.errors import Unavailable
from ringfence.core.model import Json
from ringfence.sandbox.guests.link import said
from ringfence.sandbox.guests.microvm.machine import MachineShape, Saved
from ringfence.sandbox.guests.microvm.memory import Memory, copied
from ringfence.sandbox.guests.microvm.programs import Confinement, MachineProgram, Wardens
from ringfence.sandbox.process.cgroups.cgroup import Group
from ringfence.sandbox.process.ids import Block, take_block

KVM = "kvm"
TCG = "tcg"
_PROGRAMS = {"x86_64": "qemu-system-x86_64", "aarch64": "qemu-system-aarch64"}
_PACKAGES = {"x86_64": "qemu-system-x86", "aarch64": "qemu-system-arm"}
_CONSOLES = {"x86_64": "ttyS0", "aarch64": "ttyAMA0"}
_SEARCH = "/usr/local/bin:/usr/bin:/bin"
_KVM = "/dev/kvm"
_FILTER = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
_MIB = 1024 * 1024
_FILES = 64
_STATE_BYTES = 512 * _MIB
"""The most that a saved state may take, without the memory."""
_SAVE_SECONDS = 300.0
_ANSWER_SECONDS = 120.0
_LAST_WORDS = 6000


class Qemu:
    """Runs machines."""

    name = "qemu"

    def __init__(self, accelerator: str = TCG) -> None:
        self.accelerator = accelerator
        self.version = ""
        self._program = ""
        self._wardens = Wardens()
        self._blocks: list[Block] = []
        self._free: list[int] = []
        self._memories: dict[Path, Memory] = {}
        """What saved machines go on with."""
        self._loading = asyncio.Lock()

    async def open(self) -> None:
        if self.version:
            return
        machine = os.uname().machine
        if machine not in _PROGRAMS:
            raise Unavailable("no_backend", f"backend microvm is built for x86_64 and arm64, and this is {machine}")
        program = shutil.which(_PROGRAMS[machine], path=_SEARCH)
        if program is None:
            text = f"backend microvm needs {_PROGRAMS[machine]}: apt install {_PACKAGES[machine]}"
            raise Unavailable("no_backend", text)
        self._program = program
        process = await asyncio.create_subprocess_exec(self._program, "--version", stdout=asyncio.subprocess.PIPE)
        told, _ = await process.communicate()
        self.version = told.decode("utf-8", "replace").partition("\n")[0].strip()

    # ── A machine ──

    async def start(self, shape: MachineShape, saved: Saved | None = None, group: Group | None = None) -> QemuMachine:
        await self.open()
        pairs = [socket.socketpair() for _ in range(3)]
        files: list[int] = []
        memory: Memory | None = None
        user = self._take_user()
        try:
            files.append(os.open(shape.disk, os.O_RDONLY | os.O_CLOEXEC))
            words = self._words(shape, shared=saved is None)
            if saved is None:
                memory = Memory.new(shape.memory_bytes)
                files += [memory.descriptor, copied(shape.kernel), copied(shape.initrd)]
                words += ["-kernel", "/proc/self/fd/8", "-initrd", "/proc/self/fd/9"]
                words += ["-append", _kernel_words(self.accelerator)]
            else:
                files += [(await self._memory(saved)).descriptor, os.open(saved.folder / "state", os.O_RDONLY)]
                words += ["-incoming", "defer"]
            given = [*(theirs.fileno() for _, theirs in pairs), *files]
            program = await self._wardens.start(words, given, self._confined(user), group)
            control, console, stream = (ours for ours, _ in pairs)
            made = QemuMachine(self, program, control, console, stream, memory, user)
        except BaseException as problem:
            for ours, _ in pairs:
                ours.close()
            if memory is not None:
                memory.close()
            self._give_back(user)
            if isinstance(problem, OSError):
                raise Unavailable("no_box", f"a machine could not be started: {problem}") from None
            raise
        finally:
            for _, theirs in pairs:
                theirs.close()
            for number, descriptor in enumerate(files):
                if number != 1:  # the memory is kept
                    os.close(descriptor)
        try:
            await made.begin(goes_on=saved is not None)
        except BaseException:
            await shielded(asyncio.ensure_future(made.remove()))
            raise
        return made

    def _words(self, shape: MachineShape, *, shared: bool) -> list[str]:
        """Its descriptors: control, console, stream, disk, memory; then those of a kernel, or of a saved state."""
        size = f"{shape.memory_bytes // _MIB}M"
        backed = f"id=mem,size={size},mem-path=/proc/self/fd/7,share={'on' if shared else 'off'}"
        return [
            self._program,
            *_board(self.accelerator, shape.processors),
            *("-object", f"memory-backend-file,{backed}", "-m", size, "-smp", str(shape.processors)),
            *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-sandbox", _FILTER),
            *("-chardev", "socket,id=control,fd=3", "-mon", "chardev=control,mode=control"),
            *("-chardev", "socket,id=console,fd=4", "-serial", "chardev:console"),
            *("-chardev", "socket,id=stream,fd=5", "-device", "virtio-serial-pci,max_ports=2"),
            *("-device", "virtserialport,chardev=stream,name=ringfence"),
            *("-add-fd", "fd=6,set=1", "-device", "virtio-blk-pci,drive=root"),
            *("-drive", "file=/dev/fdset/1,format=raw,if=none,id=root,readonly=on,file.locking=off"),
        ]

    def _confined(self, user: int | None) -> Confinement:
        limits = {"RLIMIT_NOFILE": _FILES, "RLIMIT_CORE": 0, "RLIMIT_FSIZE": _STATE_BYTES, "RLIMIT_MEMLOCK": 0}
        accelerated = self.accelerator == KVM
        groups = (os.stat(_KVM).st_gid,) if accelerated and user is not None else ()
        return Confinement(user, groups, (_KVM,) if accelerated else (), limits)

    async def _memory(self, saved: Saved) -> Memory:
        async with self._loading:
            if saved.folder not in self._memories:
                self._memories[saved.folder] = await in_thread(lambda: Memory.loaded(saved.folder / "memory"))
        return self._memories[saved.folder]

    def _take_user(self) -> int | None:
        if os.geteuid() != 0:
            return None
        if not self._free:
            block = take_block()
            self._blocks.append(block)
            self._free += range(block.base, block.base + block.size)
        return self._free.pop(0)

    def _give_back(self, user: int | None) -> None:
        if user is not None:
            self._free.append(user)

    def removed(self, machine: QemuMachine) -> None:
        self._give_back(machine.user)

    async def close(self) -> None:
        await self._wardens.close()
        for memory in self._memories.values():
            memory.close()
        self._memories = {}
        for block in self._blocks:
            block.release()
        self._blocks, self._free = [], []


def _board(accelerator: str, processors: int) -> list[str]:
    machine = os.uname().machine
    if accelerator == KVM:
        board = "virt,gic-version=max" if machine == "aarch64" else "pc"
        return ["-accel", "kvm", "-cpu", "host", "-M", f"{board},memory-backend=mem"]
    if machine == "aarch64":
        # Without pointer authentication and vectors, which cost much to emulate.
        return ["-accel", "tcg", "-cpu", "max,pauth=off,sve=off", "-M", "virt,gic-version=max,memory-backend=mem"]
    # Several processors take turns: side by side, one may still execute what another has changed.
    turns = ",thread=single" if processors > 1 else ""
    return ["-accel", f"tcg{turns}", "-cpu", "max,la57=off", "-M", "pc,hpet=off,memory-backend=mem"]


def _kernel_words(accelerator: str) -> str:
    machine = os.uname().machine
    words = f"console={_CONSOLES[machine]} quiet panic=-1 cgroup_no_v1=all"
    if machine == "x86_64":
        words += " reboot=t"
        if accelerator == TCG:  # the counter of an emulated processor is good enough for a clock
            words += " tsc=reliable clocksource=tsc no_timer_check"
    return words


class QemuMachine:
    """One machine."""

    def __init__(
        self,
        qemu: Qemu,
        program: MachineProgram,
        control: socket.socket,
        console: socket.socket,
        stream: socket.socket,
        memory: Memory | None,
        user: int | None,
    ) -> None:
        self.stream = stream
        self.user = user
        self.pid = program.pid
        self._qemu = qemu
        self._program = program
        self._memory = memory
        """Its own, which it began with; None: it goes on with that of a saved one."""
        self._control = QemuControl(control)
        self._printed = bytearray()
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = loop.create_future()
        self._listening = loop.create_task(self._listen(console))
        self._gone = loop.create_task(self._wait())

    async def begin(self, *, goes_on: bool) -> None:
        """Raises Unavailable."""
        try:
            await self._control.open()
            if goes_on:
                await self._control.ask("migrate-set-capabilities", capabilities=[_WITHOUT_MEMORY])
                await self._control.ask("migrate-incoming", uri="fd:8")
                await self._until("query-status", lambda told: told["status"] not in ("inmigrate", "prelaunch"))
        except (OSError, EOFError, TimeoutError) as problem:
            self.kill()
            why = await self.ended
            raise Unavailable("no_box", f"a machine could not be started: {why or problem}") from None

    async def _until(self, question: str, answered: Any) -> Json:
        for pause in itertools.chain((0.001,) * 50, itertools.repeat(0.01)):
            told = await self._control.ask(question)
            if answered(told):
                return told
            await asyncio.sleep(pause)
        raise AssertionError

    async def _listen(self, console: socket.socket) -> None:
        """To what its kernel says, which tells why it did not start."""
        loop = asyncio.get_running_loop()
        console.setblocking(False)
        with contextlib.suppress(OSError):
            while data := await loop.sock_recv(console, 4096):
                self._printed += data
                del self._printed[:-_LAST_WORDS]
        console.close()

    async def _wait(self) -> None:
        words = await self._program.said()
        await self._listening
        self._control.close()
        self.ended.set_result(words or _said(self._printed.decode("utf-8", "replace")) or "it ended")

    async def pause(self) -> None:
        await self._asked("stop")

    async def resume(self) -> None:
        await self._asked("cont")

    async def _asked(self, order: str) -> None:
        try:
            await self._control.ask(order)
        except (OSError, EOFError, TimeoutError) as problem:
            raise Unavailable("guest_failed", f"the machine does not answer: {problem}") from None

    async def save(self, folder: Path) -> None:
        assert self._memory is not None
        state = os.open(folder / "state", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            await self._control.ask("migrate-set-capabilities", capabilities=[_WITHOUT_MEMORY])
            await self._control.hand_over("state", state)
            await self._control.ask("migrate", uri="fd:state")
            async with asyncio.timeout(_SAVE_SECONDS):
                over = await self._until("query-migrate", lambda told: told.get("status") in ("completed", "failed"))
            if over["status"] == "failed":
                raise Unavailable("no_box", f"the machine could not be saved: {over.get('error-desc', 'no reason')}")
        except (OSError, EOFError, TimeoutError) as problem:
            raise Unavailable("no_box", f"the machine could not be saved: {problem}") from None
        finally:
            os.close(state)
        self.kill()
        await asyncio.shield(self._gone)
        memory = self._memory
        await in_thread(lambda: memory.save(folder / "memory"))

    def kill(self) -> None:
        self._program.kill()

    async def remove(self) -> Sequence[str]:
        self.kill()
        self.stream.close()
        if not await self._program.gone():
            return ["the machine did not end when it was killed"]
        await asyncio.shield(self._gone)
        if self._memory is not None:
            self._memory.close()
        self._qemu.removed(self)
        return []


def _said(printed: str) -> str:
    """The last that its first process said, which explains what the kernel says of that one's end."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    own = [line for line in lines if not line.startswith("[")]
    return said((own or lines or [""])[-1])


_WITHOUT_MEMORY = {"capability": "x-ignore-shared", "state": True}
"""The memory is a file of its own, so the state need not have it."""


class QemuControl:
    """The way to tell a program of QEMU what to do: QMP."""

    def __init__(self, stream: socket.socket) -> None:
        stream.setblocking(False)
        self._stream = stream
        self._received = bytearray()
        self._turn = asyncio.Lock()

    async def open(self) -> None:
        """Raises OSError, EOFError, TimeoutError, as the others."""
        async with asyncio.timeout(_ANSWER_SECONDS):
            await self._line()
        await self.ask("qmp_capabilities")

    async def ask(self, order: str, **arguments: Any) -> Json:
        async with self._turn, asyncio.timeout(_ANSWER_SECONDS):
            text = json.dumps({"execute": order, "arguments": arguments}) + "\n"
            await asyncio.get_running_loop().sock_sendall(self._stream, text.encode())
            return await self._answer(order)

    async def hand_over(self, name: str, descriptor: int) -> None:
        async with self._turn, asyncio.timeout(_ANSWER_SECONDS):
            text = json.dumps({"execute": "getfd", "arguments": {"fdname": name}}) + "\n"
            socket.send_fds(self._stream, [text.encode()], [descriptor])
            await self._answer("getfd")

    async def _answer(self, order: str) -> Json:
        while True:
            told: Json = json.loads(await self._line())
            if "error" in told:
                raise OSError(f"{order}: {told['error'].get('desc')}")
            if "return" in told:
                answer: Json = told["return"]
                return answer

    async def _line(self) -> bytes:
        loop = asyncio.get_running_loop()
        while b"\n" not in self._received:
            data = await loop.sock_recv(self._stream, 65536)
            if not data:
                raise EOFError("its program has ended")
            self._received += data
        line, _, rest = bytes(self._received).partition(b"\n")
        self._received = bytearray(rest)
        return line

    def close(self) -> None:
        self._stream.close()
