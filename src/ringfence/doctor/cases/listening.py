"""N: waiting for connections, which a program may do in its own box; nothing outside can make one."""

from __future__ import annotations

import errno
import socket

from ringfence.core.model import Json
from ringfence.doctor.case import Case, Control
from ringfence.doctor.judging import seen
from ringfence.doctor.props import Props

_SHARED = Control(share=frozenset({"net"}))

_LISTEN = """
import socket
listening = []
for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
    way = socket.socket(family)
    try:
        way.bind((address, listening[0].getsockname()[1] if listening else 0))
        way.listen()
    except OSError:
        continue  # IPv6 serves IPv4 too, or is not there
    listening.append(way)
port = listening[0].getsockname()[1]
"""


def _take(props: Props, facts: Json) -> Json:
    """Is a port that the box listens on gone for programs of the host?"""
    with socket.socket() as way:
        try:
            way.bind(("127.0.0.1", facts["port"]))
        except OSError as exc:
            return {"taken": f"port {facts['port']}"} if exc.errno == errno.EADDRINUSE else {}
    return {}


CASES = (
    Case(
        "N70",
        "connect to what listens in another box, on every address",
        "ECONNREFUSED: each box has a loopback of its own",
        """
        import socket
        def connect(name):
            with socket.socket(socket.AF_INET6 if ":" in name else socket.AF_INET) as way:
                way.settimeout(a_while(2))
                way.connect((name, given["neighbour"]["port"]))
        any_of({name: lambda name=name: connect(name) for name in ("127.0.0.1", "0.0.0.0", "::1", "::")})
        """,
        beside=_LISTEN + "ready(port=port)",
        control=_SHARED,
    ),
    Case(
        "N71",
        "take a port away from programs of the host by listening on it",
        "the host's port is free: the box's ports are its own",
        _LISTEN + "ready(port=port)\nsay(False, 'listened, and the host can have the port')",
        seen("taken", "no program of the host can have"),
        observe=_take,
        control=_SHARED,
    ),
    Case(
        "N76",
        "have a handle of the process at the other end of a socket, which may be the supervisor",
        "ENOPROTOOPT: there is no such handle",
        """
        import socket
        with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
            server.bind("\\0rf-peer-" + given["marker"])
            server.listen()
            client.connect(server.getsockname())
            def handle():
                try:
                    client.setsockopt(socket.SOL_SOCKET, 76, 1)  # SO_PASSPIDFD: one with each message
                except OSError:
                    client.getsockopt(socket.SOL_SOCKET, 77, 4)  # SO_PEERPIDFD
            attempt(handle)
        """,
    ),
    Case(
        "N77",
        "make the process that closes a socket last wait for its peer; it may be the supervisor with a copy",
        "it is reported as done, and no close waits",
        """
import socket, struct
with socket.socket() as held:
    held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 30))
    on = struct.unpack("ii", held.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8))[0]
    say(on, "it would wait" if on else "it would not wait")
""",
    ),
)
