"""The first program of a virtual machine, in its initial file system: it makes the disk the root, and passes on to what
it reads from the stream. Imports the standard library alone, and little of that: all of it is in that file system.

It says that it is there (`.`), reads a program and the words that start an interpreter in the root, each after its
length (4 bytes), and becomes that program.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
import time

LINK = 3
LISTEN = 4
_AF_VSOCK = 40
_NUMBERS = {"x86_64": {"finit_module": 313}, "aarch64": {"finit_module": 273}}
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _BIND, _MOVE = 1, 2, 4, 8, 4096, 8192
_SECONDS = 120.0

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str, flags: int = 0, data: str = "") -> None:
    words = [each.encode() or None for each in (source, target, kind)]
    _checked(_libc.mount(*words, ctypes.c_ulong(flags), data.encode() or None), f"mount {target}")


def _load_modules() -> None:
    number = _NUMBERS[os.uname().machine]["finit_module"]
    for name in sorted(os.listdir("/modules")):
        file = os.open(f"/modules/{name}", os.O_RDONLY)
        _checked(_libc.syscall(ctypes.c_long(number), file, b"", 0), name)
        os.close(file)


def _awaited(path: str) -> str:
    until = time.monotonic() + _SECONDS
    while not os.path.exists(path):
        if time.monotonic() > until:
            raise OSError(f"the machine has no {path}")
        time.sleep(0.01)
    return path


def _listening() -> int:
    """The port of a vsock at which the host connects, if the kernel was told of one; 0: it was not."""
    with open("/proc/cmdline") as file:
        for word in file.read().split():
            if word.startswith("ringfence.vsock="):
                return int(word.partition("=")[2])
    return 0


def _connected(port: int) -> int:
    """Takes the first connection, and keeps listening at `LISTEN`: a machine that goes on is connected to anew."""
    listening = _libc.socket(_AF_VSOCK, 1, 0)
    _checked(listening, "vsock")
    address = struct.pack("HHIIB3x", _AF_VSOCK, 0, port, 0xFFFFFFFF, 0)
    _checked(_libc.bind(listening, address, len(address)), "bind")
    _checked(_libc.listen(listening, 1), "listen")
    os.dup2(listening, LISTEN)
    os.close(listening)
    accepted: int = _libc.accept(LISTEN, None, None)
    _checked(accepted, "accept")
    return accepted


def _port() -> str:
    """The one port of the machine, whatever number it has."""
    until = time.monotonic() + _SECONDS
    while True:
        names = os.listdir("/sys/class/virtio-ports") if os.path.isdir("/sys/class/virtio-ports") else []
        if names:
            return _awaited(f"/dev/{names[0]}")
        if time.monotonic() > until:
            raise OSError("the machine has no port for the stream")
        time.sleep(0.01)


def _read(many: int) -> bytes:
    data = b""
    while len(data) < many:
        piece = os.read(LINK, many - len(data))
        if not piece:
            os._exit(0)
        data += piece
    return data


def _root() -> None:
    for name in ("disk", "over", "system"):
        os.mkdir(f"/{name}")
    _mount(_awaited("/dev/vda"), "/disk", "ext4", _RDONLY | _NOSUID | _NODEV)
    _mount("over", "/over", "tmpfs", _NOSUID | _NODEV, "size=16m,mode=755")
    os.mkdir("/over/upper")
    os.mkdir("/over/work")
    # What is to lie somewhere in the root needs a place there; the disk itself is not written to.
    layers = "lowerdir=/disk,upperdir=/over/upper,workdir=/over/work"
    _mount("root", "/system", "overlay", _NOSUID | _NODEV, layers)


def _devices() -> None:
    os.makedirs("/system/dev", exist_ok=True)
    _mount("dev", "/system/dev", "tmpfs", _NOSUID | _NOEXEC, "size=64k,mode=755")
    os.umask(0)
    devices = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
    for name, (major, minor) in devices.items():
        os.mknod(f"/system/dev/{name}", 0o666 | stat.S_IFCHR, os.makedev(major, minor))
        # A mount of its own: no other place keeps devices once programs run.
        _mount(f"/system/dev/{name}", f"/system/dev/{name}", "", _BIND)
    os.umask(0o022)
    for name in ("pts", "shm"):
        os.mkdir(f"/system/dev/{name}", 0o755)
    for name, at in (("ptmx", "pts/ptmx"), ("fd", "/proc/self/fd"), ("stdin", "/proc/self/fd/0")):
        os.symlink(at, f"/system/dev/{name}")
    for name, number in (("stdout", 1), ("stderr", 2)):
        os.symlink(f"/proc/self/fd/{number}", f"/system/dev/{name}")


def main() -> None:
    for name in ("proc", "sys"):
        os.makedirs(f"/{name}", exist_ok=True)
    _mount("dev", "/dev", "devtmpfs")
    _mount("sys", "/sys", "sysfs")
    _mount("proc", "/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    _load_modules()
    _root()
    listens = _listening()
    port = _connected(listens) if listens else os.open(_port(), os.O_RDWR)
    if port != LINK:
        os.dup2(port, LINK)
        os.close(port)
    os.set_inheritable(LINK, True)
    os.write(LINK, b".")
    program, words = (_read(int.from_bytes(_read(4), "big")).decode() for _ in range(2))
    _devices()
    for name, kind in (("proc", "proc"), ("sys", "sysfs")):
        os.makedirs(f"/system/{name}", exist_ok=True)
        _mount(kind, f"/system/{name}", kind, _NOSUID | _NODEV | _NOEXEC)
    os.chdir("/system")
    _mount(".", "/", "", _MOVE)
    os.chroot(".")
    os.chdir("/")
    nothing = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1):
        os.dup2(nothing, number)
    python = words.split("\0")
    argv = [*python, "-I", "-S", "-c", program]
    os.execve(argv[0], argv, {"PATH": "/usr/local/bin:/usr/bin:/bin"})  # noqa: S606 - of the root


main()
