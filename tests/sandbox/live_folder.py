"""A folder as a box has it: a small tmpfs in namespaces of its own, with input mounted in it read-only.

Started as a program it makes one, sends its descriptors and waits until nobody wants it any more. What is mounted is
mounted in its own namespaces alone.
"""

from __future__ import annotations

import array
import ctypes
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

NOBODY = 65534
_NEWNS, _NEWUSER = 0x00020000, 0x10000000
_NOSUID_NODEV, _BIND, _REMOUNT, _RDONLY = 6, 4096, 32, 1
_PLACE = "/tmp"


@dataclass(frozen=True)
class LiveFolder:
    descriptor: int
    input_descriptor: int
    owner: int | None
    pid: int
    """Of a process that sees it as /tmp."""

    @property
    def path(self) -> str:
        """As the box sees it, from here."""
        return f"/proc/{self.pid}/root{_PLACE}"


@contextmanager
def live_folder(size: int = 64 * 1024 * 1024, inodes: int = 4096) -> Iterator[LiveFolder | None]:
    """None where this host makes no such namespaces."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-I", "-S", __file__, str(theirs.fileno()), str(size), str(inodes)]
        with subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE) as process:
            theirs.close()
            _, descriptors, _, _ = socket.recv_fds(ours, 1, 2)
            try:
                if len(descriptors) < 2:
                    yield None
                else:
                    owner = NOBODY if os.geteuid() == 0 else None
                    yield LiveFolder(descriptors[0], descriptors[1], owner, process.pid)
            finally:
                ours.close()
                for descriptor in descriptors:
                    os.close(descriptor)
                process.wait()


def _check(result: int, what: str) -> None:
    if result < 0:
        raise SystemExit(f"{what}: {os.strerror(ctypes.get_errno())}")


def main() -> None:
    channel, size, inodes = socket.socket(fileno=int(sys.argv[1])), sys.argv[2], sys.argv[3]
    libc = ctypes.CDLL(None, use_errno=True)
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        libc.prctl(4, 1, 0, 0, 0)
    user, group = os.getuid(), os.getgid()
    _check(libc.unshare(_NEWUSER | _NEWNS), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"1000 {user} 1"), ("gid_map", f"1000 {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)

    def mount(source: str, target: str, kind: str, flags: int, data: str) -> None:
        words = [word.encode() for word in (source, target, kind, data)]
        _check(libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]), f"mounting on {target}")

    inside = f"{_PLACE}/input"
    mount("workspace", _PLACE, "tmpfs", _NOSUID_NODEV, f"mode=0755,size={size},nr_inodes={inodes}")
    for name in ("input", "output", "tmp"):
        os.mkdir(f"{_PLACE}/{name}", 0o755)
    descriptor = os.open(_PLACE, os.O_RDONLY | os.O_DIRECTORY)
    mount("input", inside, "tmpfs", _NOSUID_NODEV, "mode=0755")
    writable = os.open(inside, os.O_RDONLY | os.O_DIRECTORY)
    mount(inside, inside, "", _BIND, "")
    mount("", inside, "", _NOSUID_NODEV | _BIND | _REMOUNT | _RDONLY, "")
    channel.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor, writable]))])
    channel.recv(1)


if __name__ == "__main__":
    main()
