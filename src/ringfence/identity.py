"""Who is calling, and who may answer.

The caller over the gateway is an *agent*; only a *person* approves. On one machine both belong to one account, so
a caller on loopback must be of the gateway's own user; it is then the local agent. On Linux the kernel tells whose a
connection is; elsewhere whoever knows what only that user can read proves it.
"""

from __future__ import annotations

import secrets
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

from ringfence import system
from ringfence.audit.keys import kept
from ringfence.errors import StoreError
from ringfence.model import EVERY_ROLE, Person, Principal

LOCAL_AGENT = "local"
TOKEN = "local-token"  # noqa: S105 - the name of its file
_LEAST_TOKEN = 40

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI2s2s16s16sI8s")


def os_user() -> str:
    """Name of the account that this process runs as."""
    return system.user_name()


def person_of(people: Mapping[str, Person], user: str) -> Person | None:
    """The person behind an account. Without `people:` the local user has every role."""
    if not people:
        return Person(name=user, roles=EVERY_ROLE, os_user=user)
    return next((p for p in people.values() if p.os_user == user), None)


def local_agent(people: Mapping[str, Person], user: str) -> Principal:
    """The agent of whoever runs the gateway."""
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
    """That of this user, if there is one."""
    return local_token(folder) if (folder / TOKEN).exists() else None


def peer_uid(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """The user who owns the far end of a TCP connection on this host, as the kernel has it; None if unknown."""
    try:
        family = socket.AF_INET6 if ":" in client[0] else socket.AF_INET
        source = socket.inet_pton(family, client[0]).ljust(16, b"\0")
        target = socket.inet_pton(family, server[0]).ljust(16, b"\0")
        body = _REQUEST.pack(
            family,
            socket.IPPROTO_TCP,
            0,
            0,
            0xFFFFFFFF,
            struct.pack("!H", client[1]),
            struct.pack("!H", server[1]),
            source,
            target,
            0,
            b"\xff" * 8,
        )
        head = _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0)
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as diag:
            diag.settimeout(1.0)
            diag.send(head + body)
            answer = diag.recv(4096)
    except (OSError, ValueError, AttributeError, struct.error):
        return None
    if len(answer) < _HEADER.size + 72 or _HEADER.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:
        return None
    # struct inet_diag_msg: 4 bytes, the 48-byte socket id, expires, rqueue, wqueue, then the uid.
    return int(struct.unpack_from("=I", answer, _HEADER.size + 4 + 48 + 12)[0])
