"""Machines of Firecracker, told what to do over its control socket, and started by its jailer.

The jailer gives each a root of its own with nothing but its files, and a user of its own; `warden` gives the jailer
namespaces without a network, and ends it with its supervisor. The stream is a vsock: the machine listens at a port, and
we connect to it through Firecracker's socket. A machine that goes on from a saved one listens there as before.

Requests and their order follow Firecracker's published description of its interface. No machine of it has been booted
where this was written, because it needs KVM: docs/backends.md says what was tried instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from ringfence.core.aio import in_thread, shielded
from ringfence.core.errors import Unavailable
from ringfence.core.model import Json
from ringfence.sandbox.guests.microvm.machine import MachineShape, Saved
from ringfence.sandbox.guests.microvm.programs import Confinement, MachineProgram, Wardens
from ringfence.sandbox.process.cgroups.cgroup import Group
from ringfence.sandbox.process.ids import Block, take_block

PORT = 1024
"""At which the machine listens."""
_SEARCH = "/usr/local/bin:/usr/bin:/bin:/opt/firecracker"
_MIB = 1024 * 1024
_ANSWER_SECONDS = 120.0
_LISTEN_SECONDS = 120.0
_START_SECONDS = 30.0
_SOCKET = "run/api.sock"
_STREAM = "run/stream.sock"
_MOST_PROCESSORS = 32
_FILES = 1024
_BOOT = f"console=ttyS0 reboot=k panic=1 pci=off quiet cgroup_no_v1=all ringfence.vsock={PORT}"


class Firecracker:
    """Runs machines."""

    name = "firecracker"
    accelerator = "kvm"

    def __init__(self, folder: Path, search: str = _SEARCH) -> None:
        """`folder`: where the roots of its machines are made."""
        self.version = ""
        self._folder = folder
        self._search = search
        self._program = ""
        self._jailer = ""
        self._wardens = Wardens()
        self._blocks: list[Block] = []
        self._free: list[int] = []

    async def open(self) -> None:
        if self.version:
            return
        found = {name: shutil.which(name, path=self._search) for name in ("firecracker", "jailer")}
        if lacking := [name for name, path in found.items() if path is None]:
            text = f"backend firecracker needs {' and '.join(lacking)} in {self._search.replace(':', ', ')}"
            raise Unavailable("no_backend", f"{text}: install a release of Firecracker there")
        if os.geteuid() != 0:
            raise Unavailable("no_backend", "backend firecracker needs root, as its jailer does; use microvm")
        self._program, self._jailer = str(found["firecracker"]), str(found["jailer"])
        try:
            process = await asyncio.create_subprocess_exec(self._program, "--version", stdout=asyncio.subprocess.PIPE)
            told, _ = await process.communicate()
        except OSError as problem:
            text = f"{self._program} cannot be run: {problem.strerror}"
            raise Unavailable("no_backend", f"backend firecracker: {text}") from None
        said = told.decode("utf-8", "replace").partition("\n")[0].strip()
        if process.returncode != 0 or not said:
            raise Unavailable("no_backend", f"backend firecracker: {self._program} --version says nothing")
        self.version = said

    async def start(
        self, shape: MachineShape, saved: Saved | None = None, group: Group | None = None
    ) -> FirecrackerMachine:
        await self.open()
        user = self._take_user()
        ident = f"ringfence-{secrets.token_hex(8)}"
        place = self._folder / Path(self._program).name / ident
        machine: FirecrackerMachine | None = None
        try:
            files = _files(shape, saved)
            await in_thread(lambda: _make_root(place / "root", files, user))
            program = await self._wardens.start(self._words(ident, user), [], self._confined(), group)
            machine = FirecrackerMachine(self, program, place, user)
            await machine.begin(shape, goes_on=saved is not None)
            return machine
        except BaseException as problem:
            if machine is not None:
                await shielded(asyncio.ensure_future(machine.remove()))
            else:
                await in_thread(lambda: shutil.rmtree(place, ignore_errors=True))
                self.give_back(user)
            if isinstance(problem, OSError):
                raise Unavailable("no_box", f"a machine could not be started: {problem}") from None
            raise

    def _words(self, ident: str, user: int) -> list[str]:
        return [
            *(self._jailer, "--id", ident, "--exec-file", self._program),
            *("--uid", str(user), "--gid", str(user), "--chroot-base-dir", str(self._folder)),
            *("--resource-limit", f"no-file={_FILES}"),
            *("--", "--api-sock", f"/{_SOCKET}"),
        ]

    def _confined(self) -> Confinement:
        own = (self._folder, Path(self._program).parent, Path(self._jailer).parent)
        return Confinement(None, devices=("/dev/kvm", "/dev/net/tun"), limits={"RLIMIT_CORE": 0}, shown=own)

    def _take_user(self) -> int:
        if not self._free:
            block = take_block()
            self._blocks.append(block)
            self._free += range(block.base, block.base + block.size)
        return self._free.pop(0)

    def give_back(self, user: int) -> None:
        self._free.append(user)

    async def close(self) -> None:
        await self._wardens.close()
        for block in self._blocks:
            block.release()
        self._blocks, self._free = [], []


def _files(shape: MachineShape, saved: Saved | None) -> Mapping[str, Path]:
    """What a machine finds in its root, by name."""
    files = {"disk": shape.disk}
    if saved is None:
        return {**files, "kernel": shape.kernel, "initrd": shape.initrd}
    return {**files, "memory": saved.folder / "memory", "state": saved.folder / "state"}


def _make_root(root: Path, files: Mapping[str, Path], user: int) -> None:
    for folder in (root, root / "run"):
        folder.mkdir(parents=True, mode=0o755)
        os.chown(folder, user, user)
    for name, source in files.items():
        _put(source, root / name, user)


def _put(source: Path, at: Path, user: int) -> None:
    """The file itself where its user may read it there, and no file of somebody else's; else a copy."""
    state = source.stat()
    if state.st_uid == os.geteuid() and state.st_mode & 0o004 and not state.st_mode & 0o022:
        with contextlib.suppress(OSError):  # another file system
            os.link(source, at)
            return
    shutil.copyfile(source, at)
    os.chown(at, user, user)
    at.chmod(0o400)


class FirecrackerMachine:
    """One machine."""

    stream: socket.socket

    def __init__(self, firecracker: Firecracker, program: MachineProgram, place: Path, user: int) -> None:
        self.pid = program.pid
        self._firecracker = firecracker
        self._program = program
        self._place = place
        self._user = user
        self._root = os.open(place / "root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        loop = asyncio.get_running_loop()
        self.stream, self._nothing = socket.socketpair()
        self.ended: asyncio.Future[str] = loop.create_future()
        self._gone = loop.create_task(self._wait())

    async def _wait(self) -> None:
        said = await self._program.said()
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        own = [line for line in lines if not line.startswith("[")]  # the kernel's lines say what came of it
        self.ended.set_result((own or lines or ["it ended"])[-1])

    def _at(self, name: str) -> str:
        """A path that is short enough for a socket, however deep its folder lies."""
        return f"/proc/self/fd/{self._root}/{name}"

    def _listens(self) -> bool:
        """Whether it does: the file of its socket is there a moment before."""
        with socket.socket(socket.AF_UNIX) as trying:
            trying.setblocking(False)
            return trying.connect_ex(self._at(_SOCKET)) == 0

    async def begin(self, shape: MachineShape, *, goes_on: bool) -> None:
        """Raises Unavailable."""
        await self._there()
        for method, path, body in loading() if goes_on else booting(shape):
            await self._ask(method, path, body)
        stream = await self._connected()
        self.stream.close()
        self._nothing.close()
        self.stream = stream

    async def _there(self) -> None:
        """Wait until it listens to us. Raises Unavailable."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_START_SECONDS):
                while not self._listens():
                    if self.ended.done():
                        break
                    await asyncio.sleep(0.005)
                else:
                    return
        self.kill()
        why = await asyncio.shield(self.ended)
        raise Unavailable("no_box", f"Firecracker did not start: {why}")

    async def _ask(self, method: str, path: str, body: Json) -> None:
        """Raises Unavailable."""
        try:
            async with (
                asyncio.timeout(_ANSWER_SECONDS),
                aiohttp.ClientSession(connector=aiohttp.UnixConnector(self._at(_SOCKET))) as client,
                client.request(method, f"http://localhost{path}", json=body) as answer,
            ):
                if answer.status == 204:
                    return
                said = await _fault(answer)
        except (aiohttp.ClientError, OSError, TimeoutError) as problem:
            said = getattr(problem, "strerror", None) or "there is no answer"
        raise Unavailable("no_box", f"Firecracker refused {method} {path}: {said}")

    async def _connected(self) -> socket.socket:
        """The stream, once the machine listens. Raises Unavailable."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LISTEN_SECONDS):
                while not self.ended.done():
                    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                    made.setblocking(False)
                    try:
                        await loop.sock_connect(made, self._at(_STREAM))
                        await loop.sock_sendall(made, f"CONNECT {PORT}\n".encode())
                        if await _greeted(made):
                            return made
                    except OSError:
                        pass  # nobody listens yet: Firecracker closes the connection
                    except BaseException:
                        made.close()
                        raise
                    made.close()
                    await asyncio.sleep(0.02)
        self.kill()
        why = await asyncio.shield(self.ended)
        raise Unavailable("no_box", f"a machine of Firecracker did not get ready: {why}")

    async def pause(self) -> None:
        await self._ask("PATCH", "/vm", {"state": "Paused"})

    async def resume(self) -> None:
        await self._ask("PATCH", "/vm", {"state": "Resumed"})

    async def save(self, folder: Path) -> None:
        await self.pause()
        body = {"snapshot_type": "Full", "snapshot_path": "/run/state", "mem_file_path": "/run/memory"}
        await self._ask("PUT", "/snapshot/create", body)
        self.kill()
        await asyncio.shield(self._gone)
        await in_thread(lambda: self._keep(folder))

    def _keep(self, folder: Path) -> None:
        for name in ("state", "memory"):
            made = self._place / "root" / "run" / name
            if not made.is_file() or made.is_symlink():
                raise Unavailable("no_box", f"Firecracker has left no {name}")
            shutil.move(made, folder / name)
            os.chown(folder / name, os.geteuid(), os.getegid())
            (folder / name).chmod(0o444)  # in a folder that only we may enter; each machine that goes on reads it

    def kill(self) -> None:
        self._program.kill()

    async def remove(self) -> Sequence[str]:
        self.kill()
        self.stream.close()
        self._nothing.close()
        if not await self._program.gone():
            return ["the machine did not end when it was killed"]
        await asyncio.shield(self._gone)
        if self._root >= 0:
            os.close(self._root)
            self._root = -1
            await in_thread(lambda: shutil.rmtree(self._place, ignore_errors=True))
            self._firecracker.give_back(self._user)
        return []


async def _greeted(stream: socket.socket) -> bool:
    """Whether Firecracker says that the machine took the connection. Nothing after its line is read."""
    loop = asyncio.get_running_loop()
    line = b""
    while not line.endswith(b"\n") and len(line) < 40:
        piece = await loop.sock_recv(stream, 1)
        if not piece:
            return False
        line += piece
    return line.startswith(b"OK ")


async def _fault(answer: aiohttp.ClientResponse) -> str:
    with contextlib.suppress(aiohttp.ClientError, ValueError):
        told: Any = await answer.json(content_type=None)
        if isinstance(told, dict) and isinstance(told.get("fault_message"), str):
            return str(told["fault_message"])[:500]
    return f"HTTP {answer.status}"


# ── Requests ──────────────────────────────────────────────────────────────────────────────────────

Request = tuple[str, str, Json]


def booting(shape: MachineShape) -> list[Request]:
    """What makes a machine and boots it, in this order. Paths are those of its own root."""
    disk = {"drive_id": "root", "path_on_host": "/disk", "is_root_device": False, "is_read_only": True}
    memory = math.ceil(shape.memory_bytes / _MIB)
    return [
        ("PUT", "/machine-config", {"vcpu_count": processors(shape.processors), "mem_size_mib": memory, "smt": False}),
        ("PUT", "/boot-source", {"kernel_image_path": "/kernel", "initrd_path": "/initrd", "boot_args": _BOOT}),
        ("PUT", "/drives/root", disk),
        ("PUT", "/vsock", {"guest_cid": 3, "uds_path": f"/{_STREAM}"}),
        ("PUT", "/entropy", {}),
        ("PUT", "/actions", {"action_type": "InstanceStart"}),
    ]


def loading() -> list[Request]:
    """What lets a saved one go on."""
    memory = {"backend_type": "File", "backend_path": "/memory"}
    return [("PUT", "/snapshot/load", {"snapshot_path": "/state", "mem_backend": memory}), ("PATCH", "/vm", _GO_ON)]


_GO_ON: Json = {"state": "Resumed"}


def processors(wanted: int) -> int:
    """One, or an even number, as Firecracker has it."""
    return 1 if wanted <= 1 else min(_MOST_PROCESSORS, wanted + wanted % 2)
