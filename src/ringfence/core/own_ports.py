"""Ports of this machine's loopback that Ringfence itself listens on: no box may reach them, whatever its rules allow.

What a box sends leaves from a process of ours, so a gateway that it reached would take it for the user's own agent. A
mark stands beside each such port: an abstract socket, which goes with the process that made it and which no box sees.
"""

from __future__ import annotations

import errno
import os
import socket
import sys

from ringfence.core.errors import Unavailable

_SAME = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - what is dialled there is answered on the loopback


def _mark(address: str, port: int) -> bytes:
    return f"\0ringfence/listens/{os.getuid()}/{_SAME.get(address, address)}/{port}".encode()


def announce(address: str, port: int) -> socket.socket | None:
    """Mark a port that we listen on; the mark is there until it is closed. None on systems without boxes. Raises
    Unavailable: a port without its mark must not stay open."""
    if sys.platform != "linux":
        return None
    mark = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        mark.bind(_mark(address, port))
        mark.listen(1)
    except OSError as exc:
        mark.close()
        why = str(exc)
        if exc.errno == errno.EADDRINUSE:  # the port is ours, so whoever has its mark is another user
            why = "another user of this machine has taken the name that marks it; use another port"
        raise Unavailable("listen", f"cannot keep boxes from {address}:{port}: {why}") from None
    return mark


def is_ours(address: str, port: int) -> bool:
    """Whether a process of this user's has marked the port."""
    if sys.platform != "linux":
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as probe:
        try:
            probe.connect(_mark(address, port))
        except ConnectionRefusedError:
            return False
        except BlockingIOError:
            return True  # it is there, and others ask at the same time
    return True
