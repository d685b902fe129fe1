"""What comes before a request: whose connection it is, how many there are, how long and how large they may be."""

from __future__ import annotations

import grp
import os
import pwd
import socket
import ssl
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.to_thread
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from ringfence.core import system
from ringfence.core.errors import Unavailable
from ringfence.front import listen
from ringfence.front.http import HttpFront
from ringfence.front.identify import PEER
from ringfence.front.listen import Admission, GatewayApp, Listener, open_socket, tls_context, unix_socket
from ringfence.front.refusals import Refusal, Refusals

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not hasattr(socket, "AF_NETLINK"), reason="the kernel says nothing of peers here"),
]


class Counted(Refusals):
    """What was refused, for a test to look at."""

    def __init__(self) -> None:
        super().__init__()
        self.reasons: list[str] = []

    def count(self, refused: Refusal) -> None:
        self.reasons.append(refused.reason)


class Plain:
    """An application that says who called."""

    def __init__(self, refusals: Refusals) -> None:
        self.refusals = refusals
        self.served = 0
        self.headers: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.served += 1
        while (await receive()).get("more_body"):
            pass
        self.headers = [name for name, _ in scope["headers"]]
        body = f"user {scope.get(PEER)}".encode()
        head = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": body, "more_body": False})


class Place:
    def __init__(self, port: int, app: Plain, refusals: Counted) -> None:
        self.port = port
        self.app = app
        self.refusals = refusals

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    async def said(self, *pieces: bytes) -> bytes:
        """What is answered to these, up to the end of the connection."""

        def speak() -> bytes:
            with self.connect() as one:
                heard = b""
                try:
                    for piece in pieces:
                        one.sendall(piece)
                    while data := one.recv(65536):
                        heard += data
                except ConnectionError:
                    pass  # it was cut off while there was more to read
                return heard

        return await anyio.to_thread.run_sync(speak, abandon_on_cancel=True)


@asynccontextmanager
async def listening() -> AsyncIterator[Place]:
    refusals = Counted()
    app = Plain(refusals)
    listener = Listener(app)  # type: ignore[arg-type]
    where = open_socket("127.0.0.1", 0)
    async with anyio.create_task_group() as group:
        group.start_soon(listener.run_on, [where])
        while not listener.started:
            await anyio.sleep(0.01)
        yield Place(where.getsockname()[1], app, refusals)
        listener.stop()


HEAD = b"POST /mcp HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"


@pytest.fixture
def strange(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes is of another user."""
    monkeypatch.setattr(listen, "peer_uid", lambda connection: os.getuid() + 1)


# ── size ──────────────────────────────────────────────────────────────────────────────────────────


async def test_a_large_body_behind_small_headers_is_read() -> None:
    async with listening() as place:
        size = 3 * listen.OWN_TERMS.head_bytes
        told = await place.said(HEAD + b"Content-Length: %d\r\n\r\n" % size, b"x" * size)
        assert told.startswith(b"HTTP/1.1 200") and told.endswith(b"user %d" % os.getuid())
        two = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n" + HEAD + b"Content-Length: 2\r\n\r\nab"
        assert (await place.said(two)).count(b"HTTP/1.1 200") == 2
        assert place.refusals.reasons == []


@pytest.mark.parametrize(
    "endless", [b"X-Long: " + b"x" * 65536, b"a: b\r\n" * 10_000, b"/" * 65536, b"\r\n" * 32768], ids=lambda x: x[:8]
)
async def test_headers_without_an_end_are_cut_off(endless: bytes) -> None:
    async with listening() as place:
        beginning = b"" if endless.startswith(b"\r\n") else b"GET /" if endless.startswith(b"/") else HEAD
        told = await place.said(beginning, *[endless] * 64)
        assert told == b"" or told.startswith(b"HTTP/1.1 431")
        assert place.refusals.reasons == ["head_too_large"] and place.app.served == 0


CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n"


@pytest.mark.parametrize(
    "endless",
    [b"0\r\nX-Long: " + b"x" * 65536, b"0\r\n" + b"a: b\r\n" * 12_000, b"5;" + b"x" * 65536, b"1\r\nx\r\n" * 12_000],
    ids=["a field", "fields", "an extension", "crumbs"],
)
async def test_what_is_wrapped_around_a_body_has_an_end(endless: bytes) -> None:
    async with listening() as place:
        more = endless if endless.startswith(b"1") else endless[-60_000:]
        assert await place.said(CHUNKED, endless, *[more] * 64) == b""
        assert place.refusals.reasons == ["head_too_large"]


async def test_fields_after_a_body_are_no_headers_of_the_request() -> None:
    async with listening() as place:
        assert (await place.said(CHUNKED + b"0\r\nHost: y\r\nOrigin: z\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert place.app.headers == [b"host", b"connection", b"transfer-encoding"]
        assert place.refusals.reasons == []


async def test_small_chunks_are_a_body_like_any_other() -> None:
    async with listening() as place:
        told = await place.said(CHUNKED, b"2\r\nxy\r\n" * 60_000, b"0\r\n\r\n")
        assert told.startswith(b"HTTP/1.1 200") and place.refusals.reasons == []


async def test_no_more_requests_are_taken_in_while_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: list[int] = []
    real = listen.PeerProtocol.on_headers_complete

    def complete(self: listen.PeerProtocol) -> None:
        real(self)
        waiting.append(len(self.pipeline))

    monkeypatch.setattr(listen.PeerProtocol, "on_headers_complete", complete)
    one = b"GET /a HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 1000 + b"\r\n\r\n"
    async with listening() as place:
        told = await place.said(one * 3000, HEAD + b"\r\n")
        assert told.count(b"HTTP/1.1 200") == 3001
    assert max(waiting) * len(one) < 600_000, "what came at once, and no more"


async def test_what_is_no_http_is_refused_and_counted() -> None:
    async with listening() as place:
        assert (await place.said(b"\x16\x03\x01" * 10)).startswith(b"HTTP/1.1 400")
        assert place.refusals.reasons == ["bad_http"]


async def test_nothing_but_http_is_spoken() -> None:
    async with listening() as place:
        upgrade = b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: aGVsbG8gd29ybGQhISE=\r\n"
        asked = b"GET /mcp HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\n" + upgrade + b"\r\n"
        assert b" 101 " not in await place.said(asked)


# ── time ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("beginning", [b"", b"POST /mcp HT", HEAD, HEAD + b"X-Slow: "])
async def test_who_does_not_get_to_a_request_is_hung_up_on(monkeypatch: pytest.MonkeyPatch, beginning: bytes) -> None:
    monkeypatch.setattr(listen, "OWN_TERMS", listen._Terms(head_bytes=1000, head_seconds=0.1))
    async with listening() as place:
        told = await place.said(beginning)
        assert told.startswith(b"HTTP/1.1 408") if beginning else told == b""
        assert place.refusals.reasons == (["too_slow"] if beginning else [])


async def test_the_second_request_of_a_connection_is_hurried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "OWN_TERMS", listen._Terms(head_bytes=1000, head_seconds=0.1))
    async with listening() as place:
        told = await place.said(b"GET /a HTTP/1.1\r\nHost: x\r\n\r\nGET /b")
        assert told.startswith(b"HTTP/1.1 200") and b"HTTP/1.1 408" in told
        assert place.refusals.reasons == ["too_slow"] and place.app.served == 1


# ── number ────────────────────────────────────────────────────────────────────────────────────────


def test_strangers_take_nothing_from_our_own_user() -> None:
    refusals = Counted()
    admission = Admission(refusals, 1000)
    assert sum(admission.enter(65534) for _ in range(2100)) == listen.MAX_OF_A_STRANGER
    assert sum(admission.enter(uid) for uid in range(2000, 3000)) == listen.MAX_STRANGERS - listen.MAX_OF_A_STRANGER
    assert not admission.enter(None)
    assert sum(admission.enter(1000) for _ in range(2100)) == listen.MAX_OWN
    assert set(refusals.reasons) == {"too_many_connections"}
    admission.leave(65534)
    assert admission.enter(None) and not admission.enter(65534), "one place was free, and is taken"


def test_where_the_kernel_does_not_tell_nobody_is_a_stranger() -> None:
    admission = Admission(Counted(), None)
    assert all(admission.enter(None) for _ in range(listen.MAX_OWN)) and not admission.enter(None)


async def test_idle_connections_of_another_user_are_few_and_do_not_last(
    monkeypatch: pytest.MonkeyPatch, strange: None
) -> None:
    monkeypatch.setattr(listen, "STRANGE_TERMS", listen._Terms(head_bytes=1000, head_seconds=0.1, once=True))
    async with listening() as place:

        def idle() -> None:
            with place.connect() as one, suppress(ConnectionError):
                assert one.recv(1) == b""

        async with anyio.create_task_group() as group:
            for _ in range(2 * listen.MAX_OF_A_STRANGER):
                group.start_soon(anyio.to_thread.run_sync, idle)
        assert set(place.refusals.reasons) <= {"too_many_connections", "too_slow"}
        assert len(place.refusals.reasons) == 2 * listen.MAX_OF_A_STRANGER


async def test_a_stranger_is_heard_once(strange: None) -> None:
    async with listening() as place:
        told = await place.said(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 20)
        assert told.count(b"HTTP/1.1 200") == 1
        told = await place.said(b"GET / HTTP/1.1\r\nX: " + b"x" * 16_384)
        assert told == b"" or told.startswith(b"HTTP/1.1 431")
        assert place.refusals.reasons == ["head_too_large"]


async def test_places_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "MAX_OWN", 2)
    async with listening() as place:
        for _ in range(6):
            assert (await place.said(HEAD + b"\r\n")).startswith(b"HTTP/1.1 200")
        with place.connect(), place.connect():
            with anyio.fail_after(60):
                while (told := await place.said(HEAD + b"\r\n")).startswith(b"HTTP/1.1 200"):
                    await anyio.sleep(0.01)  # the two may not have been noticed yet
            assert told == b"" or told.startswith(b"HTTP/1.1 503")


# ── paths ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("path", "host", "status", "reasons"),
    [
        ("/healthz", "127.0.0.1:8000", 200, []),
        ("/healthz", "evil.example", 421, ["foreign_host"]),
        ("/console", "127.0.0.1:8000", 404, ["unknown_path"]),
        ("/console/x", "evil.example", 421, ["foreign_host"]),
        ("/nowhere", "127.0.0.1:8000", 404, ["unknown_path"]),
        ("/nowhere", "evil.example", 421, ["foreign_host"]),
    ],
)
async def test_every_refusal_of_a_path_is_counted(path: str, host: str, status: int, reasons: list[str]) -> None:
    refusals = Counted()
    front = HttpFront(SimpleNamespace(refusals=refusals), lambda scope: None, frozenset({"127.0.0.1"}), 8000)  # type: ignore[arg-type]
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "method": "GET", "path": path, "headers": [(b"host", host.encode())]}
    await GatewayApp(front)(scope, receive, send)
    assert sent[0]["status"] == status
    assert refusals.reasons == reasons


# ── a unix socket ─────────────────────────────────────────────────────────────────────────────────


def test_a_socket_is_its_owners_alone_and_goes_with_its_listener(tmp_path: Path) -> None:
    path = tmp_path / "new" / "gateway.sock"
    before = os.umask(0)
    try:
        with unix_socket(path):
            assert stat.S_IMODE(path.lstat().st_mode) == 0o600
            assert stat.S_IMODE(path.parent.lstat().st_mode) == 0o700
    finally:
        os.umask(before)
    assert not path.exists()


def test_what_a_crash_left_is_cleared_away_and_who_listens_is_not(tmp_path: Path) -> None:
    path = tmp_path / "gateway.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
        left.listen()
        with pytest.raises(Unavailable, match="something listens"), unix_socket(path):
            pass
        assert path.exists()
    with unix_socket(path) as listener, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        listener.accept()[0].close()


def test_a_socket_that_took_the_place_of_ours_stays(tmp_path: Path) -> None:
    path = tmp_path / "gateway.sock"
    with unix_socket(path), socket.socket(socket.AF_UNIX) as other:
        path.unlink()
        other.bind(str(path))
    assert path.exists()


@pytest.mark.parametrize("what", ["file", "folder", "link"])
def test_what_is_no_socket_stays(tmp_path: Path, what: str) -> None:
    path = tmp_path / "gateway.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "real"))
    if what == "file":
        path.write_text("kept")
    elif what == "folder":
        path.mkdir()
    else:
        path.symlink_to("real")
    with pytest.raises(Unavailable, match="not a socket of yours"), unix_socket(path):
        pass
    assert path.is_symlink() or path.exists()


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    (shared / "mine").mkdir(parents=True)
    for mode in (0o1777, 0o777, 0o770):
        shared.chmod(mode)
        with pytest.raises(Unavailable, match="a folder of your own"), unix_socket(shared / "gateway.sock"):
            pass
    shared.chmod(0o777)
    with pytest.raises(Unavailable, match="a folder of your own"), unix_socket(shared / "mine" / "gateway.sock"):
        pass
    shared.chmod(0o1777)
    with unix_socket(shared / "mine" / "gateway.sock"):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
@pytest.mark.parametrize("mode", [0o755, 0o1755, 0o1777])
def test_a_folder_above_that_belongs_to_another_user_is_refused(tmp_path: Path, mode: int) -> None:
    """Its owner may rename what lies in it, whatever its mode says."""
    above = tmp_path / "above"
    (above / "mine").mkdir(parents=True, mode=0o700)
    above.chmod(mode)
    with unix_socket(above / "mine" / "gateway.sock"):
        pass
    os.chown(above, 65534, -1)
    with pytest.raises(Unavailable, match="a folder of your own"), unix_socket(above / "mine" / "gateway.sock"):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link to another user")
def test_a_link_on_the_way_that_belongs_to_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "mine")
    with unix_socket(link / "gateway.sock"):
        pass
    os.chown(link, 65534, -1, follow_symlinks=False)
    with pytest.raises(Unavailable, match="a folder of your own"), unix_socket(link / "gateway.sock"):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_where_a_link_leads_is_looked_at_too(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    (theirs / "mine").mkdir(parents=True, mode=0o700)
    (tmp_path / "link").symlink_to(theirs / "mine")
    os.chown(theirs, 65534, -1)
    with pytest.raises(Unavailable, match="a folder of your own"), unix_socket(tmp_path / "link" / "gateway.sock"):
        pass


def test_a_folder_on_the_way_that_a_group_can_write_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    (shared / "mine").mkdir(parents=True, mode=0o700)
    shared.chmod(0o775)
    others = grp.struct_group(("others", "x", shared.stat().st_gid, []))
    monkeypatch.setattr(grp, "getgrgid", lambda _: others)
    with pytest.raises(Unavailable, match="a folder of your own"), unix_socket(shared / "mine" / "gateway.sock"):
        pass
    account = pwd.getpwuid(os.geteuid())
    group = grp.struct_group((account.pw_name, "x", account.pw_gid, []))
    monkeypatch.setattr(grp, "getgrgid", lambda _: group)
    os.chown(shared, -1, account.pw_gid)
    with unix_socket(shared / "mine" / "gateway.sock"):
        pass


def test_a_socket_that_somebody_keeps_locked_is_one_clear_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listen, "_LOCK_SECONDS", 0.0)
    held = os.open(tmp_path / "gateway.sock.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        assert system.lock(held)
        with pytest.raises(Unavailable, match="has locked"), unix_socket(tmp_path / "gateway.sock"):
            pass
    finally:
        os.close(held)
    with unix_socket(tmp_path / "gateway.sock"):
        assert [each.name for each in tmp_path.iterdir()] == ["gateway.sock"]


def test_whoever_locks_the_folder_keeps_nobody_from_listening(tmp_path: Path) -> None:
    held = os.open(tmp_path, os.O_RDONLY)
    try:
        assert system.lock(held)
        with unix_socket(tmp_path / "gateway.sock"):
            pass
    finally:
        os.close(held)


# ── Who may show a token, and proxies ──


def test_whoever_may_show_a_token_is_heard_and_counted_apart() -> None:
    counted = Counted()
    admission = Admission(counted, 1000, tokens=True)
    assert admission.is_heard(None) and admission.is_heard(7) and not admission.is_own(None)
    assert all(admission.enter(None, "192.0.2.1") for _ in range(listen.MAX_OF_A_HOLDER))
    assert (
        not admission.enter(None, "192.0.2.1")
        and admission.enter(None, "192.0.2.2")
        and admission.enter(7, "127.0.0.1")
    )
    for number in range(20):
        for _ in range(listen.MAX_OF_A_HOLDER):
            admission.enter(None, f"198.51.100.{number}")
    assert admission._strangers == listen.MAX_HOLDERS and admission.enter(1000, "127.0.0.1"), "our own user has places"
    admission.leave(None, "192.0.2.1")
    assert admission.enter(None, "192.0.2.1")
    assert set(counted.reasons) == {"too_many_connections"}


def test_nobody_but_the_declared_proxy_is_let_in() -> None:
    counted = Counted()
    admission = Admission(counted, 1000, tokens=True, only=("10.0.0.0/30", "2001:db8::5"))
    seen = {
        each: admission.enter(None, each) for each in ("10.0.0.2", "::ffff:10.0.0.3", "10.0.0.4", "2001:db8::5", "")
    }
    assert list(seen.values()) == [True, True, False, True, False]
    assert not admission.enter(1000, "127.0.0.1"), "our own programs go through it as well"
    assert set(counted.reasons) == {"not_the_proxy"}


def certified(folder: Path) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = made.serial_number(1).not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
    cert, kept = folder / "cert.pem", folder / "key.pem"
    cert.write_bytes(made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    plain = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    kept.write_bytes(key.private_bytes(*plain))
    kept.chmod(0o600)
    return cert, kept


async def test_over_tls_the_same_is_served_and_in_clear_nothing(tmp_path: Path) -> None:
    cert, key = certified(tmp_path)
    refusals = Counted()
    listening = open_socket("127.0.0.1", 0)
    port = listening.getsockname()[1]
    listener = Listener(Plain(refusals), tokens=True, tls=tls_context(cert, key))  # type: ignore[arg-type]

    def ask() -> tuple[str | None, bytes]:
        trust = ssl.create_default_context(cafile=str(cert))
        with (
            socket.create_connection(("127.0.0.1", port), timeout=60) as plain,
            trust.wrap_socket(plain, server_hostname="localhost") as one,
        ):
            one.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            heard = b""
            while data := one.recv(65536):
                heard += data
            return one.version(), heard

    def in_clear() -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as one, suppress(OSError):
            one.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            return one.recv(65536)
        return b""

    async with anyio.create_task_group() as group:
        group.start_soon(listener.run_on, [listening])
        while not listener.started:
            await anyio.sleep(0.01)
        version, heard = await anyio.to_thread.run_sync(ask)
        assert version == "TLSv1.3" and f"user {os.getuid()}".encode() in heard
        assert b"HTTP" not in await anyio.to_thread.run_sync(in_clear)
        listener.stop()


def test_a_certificate_that_cannot_be_used_says_what_to_do(tmp_path: Path) -> None:
    cert, key = certified(tmp_path)
    key.chmod(0o644)
    with pytest.raises(Unavailable, match=f"chmod 600 {key}"):
        tls_context(cert, key)
    key.chmod(0o600)
    with pytest.raises(Unavailable, match=r"missing\.pem cannot be read"):
        tls_context(cert, tmp_path / "missing.pem")
    key.write_text("no key")
    with pytest.raises(Unavailable, match="cannot be used"):
        tls_context(cert, key)
