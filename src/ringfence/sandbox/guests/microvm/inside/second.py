"""The first process of a virtual machine, in its root: it makes ready all that every box needs, waits while the machine
is saved, and becomes one box when it is told which. Then the agent is read from the stream, as in every guest.

Over the stream it reads the agent that it is to have ready (4 bytes of length, and that), and answers `!`. From there
on a machine may be saved, and go on any number of times. It is told what it is to be by a JSON object (after its
length) and the files that belong to it, and answers `+`.

Runs with the Python of the root, and imports the standard library alone.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import io
import json
import marshal
import os
import resource
import socket
import stat
import struct
import sys
import tarfile
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

LINK = 3
LISTEN = 4
_NOSUID, _NODEV, _NOEXEC, _BIND, _REC = 2, 4, 8, 4096, 16384
_DETACH = 2
_ADD_ENTROPY, _RESEED = 0x40085203, 0x5207
_SET_FLAGS, _UP = 0x8914, 1
_GROUPS = "/sys/fs/cgroup"
_SETTINGS = {
    "kernel/dmesg_restrict": "1",
    "kernel/kptr_restrict": "2",
    "kernel/unprivileged_bpf_disabled": "1",
    "kernel/perf_event_paranoid": "3",
    "kernel/yama/ptrace_scope": "1",
    "kernel/panic_on_oops": "1",
    "kernel/modules_disabled": "1",
    "kernel/kexec_load_disabled": "1",
    "kernel/core_pattern": "",
}
_COUNTED = ("memory.current", "memory.stat", "memory.events", "cpu.stat", "pids.events")

_libc = ctypes.CDLL(None, use_errno=True)


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    words = [each.encode() or None for each in (source, target, kind)]
    if _libc.mount(*words, ctypes.c_ulong(flags), data.encode() or None) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {target}: {os.strerror(number)}")


def _write(path: str, text: str) -> bool:
    try:
        with open(path, "w") as file:
            file.write(text)
    except OSError:
        return False
    return True


def _read(many: int) -> bytes:
    data = bytearray()
    while len(data) < many:
        try:
            piece = os.read(LINK, min(65536, many - len(data)))
        except ConnectionError:
            piece = b""
        if not piece:
            _connect_anew()
            data.clear()
        data += piece
    return bytes(data)


def _connect_anew() -> None:
    """A vsock does not outlive that its machine is saved: the host connects again. All other streams do."""
    try:
        mode = os.fstat(LISTEN).st_mode
    except OSError:
        os._exit(0)
    if not stat.S_ISSOCK(mode):
        os._exit(0)
    with socket.socket(fileno=os.dup(LISTEN)) as listening:
        stream, _ = listening.accept()
    os.dup2(stream.fileno(), LINK)
    stream.close()


def _piece() -> bytes:
    return _read(int.from_bytes(_read(4), "big"))


# ── What every box needs ──────────────────────────────────────────────────────────────────────────


def _settle() -> None:
    for name, value in _SETTINGS.items():
        _write(f"/proc/sys/{name}", value)
    socket.sethostname("box")
    plug = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    fcntl.ioctl(plug, _SET_FLAGS, struct.pack("16sH14x", b"lo", _UP))
    plug.close()
    _mount("groups", _GROUPS, "cgroup2", _NOSUID | _NODEV | _NOEXEC)
    _write(f"{_GROUPS}/cgroup.subtree_control", "+memory +pids +cpu")
    os.mkdir(f"{_GROUPS}/box")
    for at in ("/tmp", "/var/tmp", "/home/user", "/workspace"):  # noqa: S108 - in the machine
        os.makedirs(at, exist_ok=True)


def _load(agent: bytes) -> None:
    for name, code in marshal.loads(agent):  # noqa: S302 - the host's own
        module = sys.modules[name] = type(sys)(name)
        made = compile(code, "<" + name + ">", "exec") if isinstance(code, bytes) else code
        exec(made, module.__dict__)  # noqa: S102 - the host's own


# ── What one box is ───────────────────────────────────────────────────────────────────────────────


def _reseed(seed: bytes) -> None:
    """Machines that go on from one place would draw the same numbers from here on."""
    with open("/dev/random", "wb", buffering=0) as pool:
        fcntl.ioctl(pool, _ADD_ENTROPY, struct.pack("ii", 8 * len(seed), len(seed)) + seed)
        fcntl.ioctl(pool, _RESEED)


def _become(told: dict[str, Any], files: bytes) -> None:
    _reseed(bytes.fromhex(told["seed"]))
    time.clock_settime(time.CLOCK_REALTIME, told["time"])
    size = f"mode=755,uid={told['user']},gid={told['user']},size={told['disk_bytes']},nr_inodes={told['inodes']}"
    _mount("workspace", "/workspace", "tmpfs", _NOSUID | _NODEV, size)
    if files:
        _lend(told["lent"], files)
    for name, value in told["group"].items():
        _write(f"{_GROUPS}/box/{name}", str(value))
    _write(f"{_GROUPS}/box/cgroup.procs", "0")
    counted = {name: os.open(f"{_GROUPS}/box/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in _COUNTED}
    sys.modules["ringfence.sandbox.guests.counting"].FILES.update(counted)
    _libc.umount2(_GROUPS.encode(), _DETACH)  # what was opened there can be read nevertheless
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (told["open_files"], told["open_files"]))


def _lend(lent: list[list[str]], files: bytes) -> None:
    """Copies of what belongs to the host: each entry is a name in the archive, and where it is seen."""
    os.mkdir("/dev/lent")
    _mount("lent", "/dev/lent", "tmpfs", _NOSUID | _NODEV, "mode=755")
    with tarfile.open(fileobj=io.BytesIO(files)) as archive:
        archive.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)
        archive.extractall("/dev/lent")  # noqa: S202 - the host packed it
    for name, at in lent:
        source = f"/dev/lent/{name}"
        if os.path.isdir(source):
            os.makedirs(at, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(at), exist_ok=True)
            os.close(os.open(at, os.O_CREAT | os.O_WRONLY, 0o644))
        _mount(source, at, "", _BIND | _REC)
    _libc.umount2(b"/dev/lent", _DETACH)
    os.rmdir("/dev/lent")


def main() -> None:
    _settle()
    ready = _piece()
    _load(ready)
    had = hashlib.sha256(ready).digest()
    os.write(LINK, b"!")
    told = json.loads(_piece())
    files = _read(told["files"])
    _become(told, files)
    del files
    os.write(LINK, b"+")
    agent = _piece()
    if hashlib.sha256(agent).digest() != had:
        _load(agent)
    sys.modules["ringfence.sandbox.guests.agent"].serve(LINK, LINK)


main()
