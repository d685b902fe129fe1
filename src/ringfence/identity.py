"""Who is calling, and who may answer.

The caller over the gateway is an *agent*; only a *person* approves. On one machine both belong to one account, so
a caller on loopback must be of the gateway's own user; it is then the local agent. On Linux the kernel tells whose a
connection is; elsewhere a client proves it by knowing what only that user can read.
"""

from __future__ import annotations

import secrets
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

from ringfence.audit.keys import kept
from ringfence.core import system
from ringfence.core.errors import StoreError
from ringfence.core.model import EVERY_ROLE, Person, Principal

LOCAL_AGENT = "local"
TOKEN = "local-token"  # noqa: S105 - the name of its file
_LEAST_TOKEN = 40

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


def os_user() -> str:
    """Name of the account that this process runs as."""
    return system.user_name()


def person_of(people: Mapping[str, Person], user: str) -> Person | None:
    """The person behind an account. Without `people:` the local user has every role."""
    if not people:
        return Person(name=user, roles=EVERY_ROLE, os_user=user)
    return next((p for p in people.values() if p.os_user == user), None)


def local_agent(people: Mapping[str, Person], user: str) -> Principal:
    """The agent of the user who runs the gateway."""
    person = person_of(people, user)
    return Principal(agent=LOCAL_AGENT, person=person.name if person is not None else user)


def local_token(folder: Path) -> str:
    """What a caller of our own user proves itself by where the kernel tells nothing: made once, for its owner to read.

    Raises StoreError for one that others can reach.
    """
    made = kept(folder, TOKEN, lambda: secrets.token_urlsafe(32).encode())
    if len(made) < _LEAST_TOKEN or not made.isascii():
        raise StoreError(f"{folder / TOKEN} holds no token; remove it and start again")
    return made.decode("ascii").strip()


def known_token(folder: Path) -> str | None:
    """The token of this user, if there is one."""
    return local_token(folder) if (folder / TOKEN).exists() else None


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
