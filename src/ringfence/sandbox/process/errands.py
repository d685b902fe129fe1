"""What a zygote does for a box that is there already. Nothing that runs in the box has a hand in it: the zygote has no
number there, and what it does it does before the box is told what to run.
"""

from __future__ import annotations

import _socket as socket
import os

from ringfence.sandbox.process import kernel
from ringfence.sandbox.process.confine import INSIDE_ID

TRUST = "/run/ringfence/ca.pem"
"""Where a box finds whom to trust for TLS."""
_RUN, _FOLDER = "/run", "/run/ringfence"
_WAITING = 512
_CHUNK = 1 << 20


def listen(handle: int, port: int) -> socket.socket:
    """A listening socket in the network namespace of a box; `handle` is of its first process. Raises OSError."""
    listener = reach(handle)
    # Neither SO_REUSEADDR nor SO_REUSEPORT: as long as it is there, nobody else can have this port.
    listener.bind(("127.0.0.1", port))
    listener.listen(_WAITING)
    return listener


def reach(handle: int) -> socket.socket:
    """A socket in the network namespace of a box, where it stays whoever has it. Raises OSError."""
    own = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        kernel.call("setns", handle, kernel.NEWNET)
        try:
            return socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        finally:
            _back(own)
    finally:
        os.close(own)


def _back(own: int) -> None:
    try:
        kernel.call("setns", own, kernel.NEWNET)
    except OSError:
        os._exit(1)  # what is forked from now on would begin in a namespace of somebody else


def trust(handle: int, given: int) -> None:
    """Put what this descriptor has to read where a box looks for whom to trust. Raises OSError."""
    pid = os.fork()
    if pid:
        if status := os.waitpid(pid, 0)[1]:
            number = status >> 8
            raise OSError(number, f"certificates cannot be put into it: {os.strerror(number)}")
        return
    try:
        _put(handle, given)
        os._exit(0)
    except OSError as exc:
        os._exit(exc.errno or 1)
    finally:
        os._exit(1)


def _put(handle: int, given: int) -> None:
    kernel.call("setns", handle, kernel.NEWUSER | kernel.NEWNS)
    os.setresgid(INSIDE_ID, INSIDE_ID, INSIDE_ID)
    os.setresuid(INSIDE_ID, INSIDE_ID, INSIDE_ID)
    size = os.fstat(given).st_size
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("trust", _RUN, "tmpfs", flags, f"mode=0755,size={size + 65536},nr_inodes=8")
    os.mkdir(_FOLDER, 0o755)
    target = os.open(TRUST, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444)
    while os.sendfile(target, given, None, _CHUNK):
        pass
    os.close(target)
    kernel.set_mount(_RUN, kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NODEV | kernel.ATTR_NOEXEC)
