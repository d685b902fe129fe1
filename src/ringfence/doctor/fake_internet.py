"""Plays the outside for boxes that have a network: names, addresses and servers, all of them at one listener here.

Whatever address is dialled, nothing leaves this host: the connection ends at the listener, which keeps all that it is
sent. So the harness itself sees whom a box got through to, and with what.
"""

from __future__ import annotations

import asyncio
import gzip
import re
import secrets
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from ringfence.core.box import InstallIndex, Installs, NetworkRule, Serve
from ringfence.core.brokering import OutboundRequest
from ringfence.core.errors import Refused, Unavailable
from ringfence.core.model import SecretSpec
from ringfence.core.ports import Access, InstalledPackages
from ringfence.egress import names
from ringfence.egress.dial import Streams
from ringfence.egress.tls import Authority
from ringfence.egress.tunnel import BadHello, parse_hello
from ringfence.governance.broker import BoxSecrets, VaultBroker
from ringfence.governance.route import ProxyServer
from ringfence.packages.index import BoxIndex, IndexFile, Wheel
from ringfence.secrets.sources import SourceValue
from ringfence.secrets.vault import Vault, VaultEntry

ALLOWED = "allowed.example"
PUBLIC = "5.5.5.5"
"""An address of the public Internet, which here is as good as any other."""
EVIL = "evil.example"
FORGED = "forged.example"
MISTAKEN = "mistaken.example"
"""Servers of these names cannot prove it: no authority vouches for one, the other shows another's certificate."""
TOKEN = "HARNESS_TOKEN"  # noqa: S105 - the name of a variable
PORT = 3128
"""Where a box finds its way out."""

_MAX_HEAD = 1 << 20
_PATIENCE = 5.0
_OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
_ELSEWHERE = b"HTTP/1.1 302 Found\r\nLocation: http://" + EVIL.encode() + b"/redirected\r\nContent-Length: 0\r\n\r\n"
_RANGE = re.compile(rb"\r\nrange: *bytes=([0-9]+)-([0-9]+)", re.IGNORECASE)
_LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]+)", re.IGNORECASE)

Answers = dict[str, Sequence[Sequence[str]]]
"""By name: what a resolver answers the first time, the second, and so on; the last from then on."""
NAMES: Answers = {ALLOWED: [[PUBLIC]], EVIL: [["6.6.6.6"]]}


class FakeInternet:
    """The names, servers and proxies of one trial."""

    def __init__(self, answers: Answers, pace: float = 1.0) -> None:
        self._patience = _PATIENCE * pace
        self.dialled: list[tuple[str, int]] = []
        self.asked: list[str] = []
        self.requests: list[bytes] = []
        """The first lines of all requests that were read."""
        self.token = "brokered-" + secrets.token_hex(16)
        self.issued: BoxSecrets | None = None
        """What boxes have for the token, where they have it."""
        self._got = bytearray()
        self._answers = {**NAMES, **answers}
        self._lock = threading.Lock()
        self._authority = Authority()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._naive = socket.create_server(("127.0.0.1", 0))
        self._closed = False
        for listener, serve in ((self._listener, self._serve), (self._naive, self._relay)):
            threading.Thread(target=self._accept, args=(listener, serve), daemon=True).start()

    @property
    def naive_port(self) -> int:
        """The port of a proxy that checks nothing, for controls."""
        return int(self._naive.getsockname()[1])

    @property
    def got(self) -> bytes:
        """All that came, as it came or, where TLS ended here, decrypted."""
        with self._lock:
            return bytes(self._got)

    def serve(self, rules: Sequence[NetworkRule]) -> Serve:
        """The way out of a box, with this as its outside."""
        trust = ssl.create_default_context(cadata=self._authority.pem.decode())
        served = rules if self.issued is None else self.issued.rules(rules)
        return ProxyServer(self._resolve, trust, self._dial, lambda: _FakeInstaller(self.asked)).by(served, self.issued)

    async def lend(self) -> None:
        """From now on boxes have a placeholder for the token, which is for GET and HEAD to the allowed host."""
        spec = SecretSpec(
            "token", "env", {"name": TOKEN}, hosts=(f"{ALLOWED}:80", f"{ALLOWED}:443"), header="Authorization"
        )

        async def read(_: SecretSpec, __: SourceValue | None) -> SourceValue:
            return SourceValue(self.token)

        async def allowed(_: SecretSpec, __: OutboundRequest, ___: Access, ____: Refused | None = None) -> None:
            return None

        broker = VaultBroker(Vault([VaultEntry(spec)], {"env": read}), "harness", allowed)
        self.issued = await broker.issue(Access("both", secrets=("token",), capability="harness"))

    def close(self) -> None:
        self._closed = True
        for listener in (self._listener, self._naive):
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    # ── For a real proxy ──

    async def _resolve(self, name: str) -> Sequence[str]:
        return self._answer(name)

    def _answer(self, name: str) -> Sequence[str]:
        with self._lock:
            self.asked.append(name)
            times = self.asked.count(name)
        known = self._answers.get(name)
        if known is None:
            raise OSError(f"{name} is not known")
        return known[min(times, len(known)) - 1]

    async def _dial(self, address: str, port: int, tls: ssl.SSLContext | None, name: str | None) -> Streams:
        with self._lock:
            self.dialled.append((address, port))
        return await asyncio.open_connection(*self._listener.getsockname(), ssl=tls, server_hostname=name)

    # ── The servers out there ──

    def _accept(self, listener: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        while not self._closed:
            try:
                way, _ = listener.accept()
            except OSError:
                return
            way.settimeout(self._patience)
            threading.Thread(target=self._guarded, args=(serve, way), daemon=True).start()

    def _guarded(self, serve: Callable[[socket.socket], None], way: socket.socket) -> None:
        with way, suppress(OSError, ValueError):
            serve(way)

    def _serve(self, way: socket.socket) -> None:
        """HTTP, plain or in TLS, as a server that believes Transfer-Encoding before Content-Length."""
        first = way.recv(3, socket.MSG_PEEK)
        if first.startswith(b"\x16\x03"):
            greeting = way.recv(16384, socket.MSG_PEEK)
            self._keep(greeting)
            with self._context(greeting).wrap_socket(way, server_side=True) as secured:
                self._speak(secured)
        else:
            self._speak(way)

    def _context(self, greeting: bytes) -> ssl.SSLContext:
        """The TLS context of the server that is asked for."""
        with suppress(BadHello):
            found = parse_hello(greeting)
            if found is not None and found.name == EVIL:
                return self._authority.context(names.host(EVIL))
            if found is not None and found.name == FORGED:
                return Authority().context(names.host(FORGED))
            if found is not None and found.name == MISTAKEN:
                shown = self._authority.context(names.host(f"not-{MISTAKEN}"))
                shown.sni_callback = None
                return shown
        return self._authority.context(names.host(ALLOWED))

    def _speak(self, way: socket.socket) -> None:
        buffer = b""
        while len(buffer) < _MAX_HEAD:
            while b"\r\n\r\n" not in buffer:
                data = way.recv(65536)
                if not data:
                    return
                self._keep(data)
                buffer += data
            head, _, buffer = buffer.partition(b"\r\n\r\n")
            with self._lock:
                self.requests.append(head.partition(b"\r\n")[0])
            if b"chunked" in head.lower():
                buffer = buffer.partition(b"0\r\n\r\n")[2]
            elif length := _LENGTH.search(head):
                while len(buffer) < int(length[1]):
                    data = way.recv(65536)
                    if not data:
                        return
                    self._keep(data)
                    buffer += data
                buffer = buffer[int(length[1]) :]
            way.sendall(_answer(head))
            if b"\r\nconnection: close" in head.lower():
                return

    def _keep(self, data: bytes) -> None:
        with self._lock:
            self._got += data

    # ── A proxy that checks nothing ──

    def _relay(self, way: socket.socket) -> None:
        """A naive relay: resolve once to check and once more to dial, take any spelling, and send on what comes."""
        head = b""
        while b"\r\n" not in head:
            data = way.recv(65536)
            if not data:
                return
            head += data
        line, _, rest = head.partition(b"\r\n")
        method, target, _ = (line + b"  ").split(b" ", 2)
        tunnel = method == b"CONNECT"
        place = target if tunnel else target.partition(b"//")[2].partition(b"/")[0]
        name, _, port = place.rpartition(b"@")[2].decode("latin-1").partition(":")
        host = name
        for _ in range(2):
            with suppress(OSError):
                host = self._answer(name)[0]
        with self._lock:
            self.dialled.append((host, int(port or 80) if (port or "80").isdigit() else 80))
        with socket.create_connection(self._listener.getsockname(), self._patience) as onwards:
            if tunnel:
                way.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                onwards.sendall(rest.partition(b"\r\n\r\n")[2])
            else:
                path = b"/" + target.partition(b"//")[2].partition(b"/")[2]
                onwards.sendall(method + b" " + path + b" HTTP/1.1\r\n" + rest)
            back = threading.Thread(target=_pump, args=(onwards, way), daemon=True)
            back.start()
            _pump(way, onwards)
            back.join(self._patience)


class _FakeInstaller:
    """Implements `ports.PackageInstaller` as far as programs in boxes use it; it only records what they ask for."""

    def __init__(self, asked: list[str]) -> None:
        self._asked = asked

    def check(self, names: tuple[str, ...], within: tuple[str, ...] | None = None) -> None:
        raise Unavailable("no_packages", "nothing is installed for these boxes")

    async def install(self, names: tuple[str, ...]) -> InstalledPackages:
        raise Unavailable("no_packages", "nothing is installed for these boxes")

    def index(self, installs: Installs) -> InstallIndex:
        return BoxIndex(_Registries(self._asked), installs)


class _Registries:
    """Stands for the registries behind a box's index: there is one file in them."""

    def __init__(self, asked: list[str]) -> None:
        self._asked = asked

    async def offers(self, name: str) -> tuple[IndexFile, ...]:
        self._asked.append(ALLOWED if name == "allowed" else name)
        return (IndexFile(name, "1.0", f"{name}-1.0-py3-none-any.whl", "a" * 64),)

    async def wheel(self, offer: IndexFile) -> Wheel:
        raise Unavailable("no_packages", f"{offer.file} is not here")

    def expect(self, names: Iterable[str]) -> None:
        self._asked.extend(names)


def _answer(head: bytes) -> bytes:
    if head.startswith(b"GET /redirect "):
        return _ELSEWHERE
    if b" /echo" not in head:
        return _OK
    # As services for debugging do: the answer repeats what came, in the body and in a header.
    said = head.hex().encode() if b"?hex" in head else head
    if piece := _RANGE.search(head):
        said = said[int(piece[1]) : int(piece[2]) + 1]
    packed = b"Content-Encoding: gzip\r\n" if b"?gzip" in head else b""
    said = gzip.compress(said) if packed else said
    token = re.search(rb"(?im)^authorization: *([^\r]*)", head)
    echo = b"HTTP/1.1 200 OK\r\nX-Echo: %b\r\n%bContent-Length: %d\r\n\r\n"
    echo %= (token[1] if token else b"", packed, len(said))
    return echo + (b"" if head.startswith(b"HEAD") else said)


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
