"""Whose a connection within this host is, by the kernel's word."""

from __future__ import annotations

import socket
import struct

from ringfence.core import system

PEER = "ringfence.peer"
"""Where the scope of a request says which user made its connection; None where the kernel does not tell."""
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI36sI8s")
_ANSWER = struct.Struct("=BBxx36s12x12xII")
"""`struct inet_diag_msg`: family and state, timer, the two ends of the socket and what the kernel knows it by, timers
and queues, its user and its inode."""
_CREDENTIALS = struct.Struct("3i")
_ESTABLISHED = 1
_FIN_WAIT1 = 4
_FIN_WAIT2 = 5
_CLOSE_WAIT = 8
_THEIRS = frozenset({_ESTABLISHED, _FIN_WAIT1, _FIN_WAIT2, _CLOSE_WAIT})
"""States of a socket that a program may still hold, both its ways open or one of them."""
_OURS = frozenset({_ESTABLISHED, _CLOSE_WAIT})


def peer_uid(connection: socket.socket) -> int | None:
    """The user at the far end of a connection within this host, as the kernel has it; None where there is any doubt."""
    try:
        if connection.family == getattr(socket, "AF_UNIX", None):
            return _unix_peer(connection)
        return _tcp_peer(connection)
    except (OSError, ValueError, AttributeError, struct.error):
        return None


def _unix_peer(connection: socket.socket) -> int | None:
    """Who connected: the kernel noted it then. A box cannot connect by TCP, and so may not by a socket in a folder."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, uid, _ = _CREDENTIALS.unpack(found)
    return int(uid) if system.same_network(process) else None


def _tcp_peer(connection: socket.socket) -> int | None:
    far = connection.getpeername()[:2]
    near = connection.getsockname()[:2]
    uid = _owner(far, near)
    # Only while our own end lives can no other process have a connection between these two addresses.
    alive = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in _OURS
    return uid if alive else None


def _owner(local: tuple[str, int], remote: tuple[str, int]) -> int | None:
    """Which user's socket has these two ends, if any.

    A socket that its program has closed belongs to no user any more: the kernel finishes the connection by itself, and
    says user 0 of it. And where there is no such connection, it describes the socket that listens at the first address.
    """
    family = socket.AF_INET6 if ":" in local[0] else socket.AF_INET
    ends = _ends(family, local, remote)
    body = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF, ends, 0, b"\xff" * 8)
    head = _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as diag:
        diag.settimeout(1.0)
        diag.send(head + body)
        answer = diag.recv(4096)
    if len(answer) < _HEADER.size + _ANSWER.size or _HEADER.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:
        return None
    answered_family, state, found, uid, inode = _ANSWER.unpack_from(answer, _HEADER.size)
    if (
        answered_family != family
    ):  # a socket for both families, as some runtimes make them, has the same addresses as IPv6 maps them
        ends = _ends(answered_family, (f"::ffff:{local[0]}", local[1]), (f"::ffff:{remote[0]}", remote[1]))
    return int(uid) if state in _THEIRS and inode != 0 and found == ends else None


def _ends(family: int, local: tuple[str, int], remote: tuple[str, int]) -> bytes:
    addresses = (socket.inet_pton(family, local[0]), socket.inet_pton(family, remote[0]))
    return struct.pack("!HH16s16s", local[1], remote[1], *addresses)
