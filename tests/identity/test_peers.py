"""The kernel's word on a connection's owner."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

from ringfence import identity
from ringfence.identity import peers


def loopback(family: socket.AddressFamily, host: str) -> tuple[socket.socket, socket.socket, socket.socket]:
    """A listening socket, the client's end of a connection to it, and the server's end."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((host, 0))
    except OSError as exc:
        listener.close()
        pytest.skip(f"{host} cannot be bound here: {exc}")
    listener.listen()
    client = socket.socket(family, socket.SOCK_STREAM)
    client.connect(listener.getsockname()[:2])
    return listener, client, listener.accept()[0]


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_the_owner_of_a_connection_is_told_by_the_kernel(family: socket.AddressFamily, host: str) -> None:
    listener, client, served = loopback(family, host)
    with listener, client, served:
        assert identity.peer_uid(served) == os.getuid()
        client.shutdown(socket.SHUT_WR)
        assert served.recv(1) == b""
        assert identity.peer_uid(served) == os.getuid(), "half closed, and still held by its program"
        assert identity.peer_uid(listener) is None, "it is connected to nobody"


def test_a_client_whose_socket_is_for_both_families_is_known() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as client:
        try:
            client.connect(("::ffff:127.0.0.1", listener.getsockname()[1]))
        except OSError as exc:
            pytest.skip(f"there is no IPv6 here: {exc}")
        served, _ = listener.accept()
        with served:
            assert identity.peer_uid(served) == os.getuid()
            client.close()
            assert identity.peer_uid(served) is None


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
@pytest.mark.parametrize("linger", [None, 0])
def test_a_connection_that_its_client_has_closed_is_nobodys(
    family: socket.AddressFamily, host: str, linger: int | None
) -> None:
    listener, client, served = loopback(family, host)
    with listener, client, served:
        client.sendall(b"x")
        if linger is not None:  # it is torn down at once, and only what it sent is left
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, linger))
        client.close()
        assert identity.peer_uid(served) is None


def test_whoever_listens_at_the_address_of_a_client_that_is_gone_is_not_taken_for_it() -> None:
    listener, client, served = loopback(socket.AF_INET, "127.0.0.1")
    with listener, served, socket.socket() as other:
        place = client.getsockname()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        other.bind(place)
        other.listen()
        assert peers._owner(place, served.getsockname()) is None
        assert identity.peer_uid(served) is None


def test_whoever_has_the_addresses_of_a_connection_that_is_over_is_not_taken_for_it() -> None:
    listener, client, served = loopback(socket.AF_INET, "127.0.0.1")
    with listener, served, socket.socket() as next_one:
        place = client.getsockname()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        next_one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        next_one.bind(place)
        next_one.connect(listener.getsockname())
        with listener.accept()[0] as newer:
            assert identity.peer_uid(newer) == os.getuid()
            assert peers._owner(place, listener.getsockname()) == os.getuid()
            assert identity.peer_uid(served) is None, "it has the same two ends, and is another connection"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("stays", [True, False])
def test_a_connection_of_another_user_is_told_apart(stays: bool) -> None:
    code = (
        "import os, socket, sys; os.setuid(12345); s = socket.socket(); s.connect(('127.0.0.1', int(sys.argv[1])));"
        "s.sendall(b'x'); stays = sys.argv[2] == 'True'; stays or s.close(); print(flush=True); sys.stdin.read()"
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        words = [sys.executable, "-c", code, str(listener.getsockname()[1]), str(stays)]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdin is not None and other.stdout is not None
            other.stdout.readline()
            with listener.accept()[0] as served:
                assert identity.peer_uid(served) == (12345 if stays else None)
            other.stdin.close()


def came(listener: socket.socket, before: str = "") -> int | None:
    """Who a process is taken for that connects to a unix socket of ours, after it has done what `before` says."""
    code = (
        f"import os, socket, sys; s = socket.socket(socket.AF_UNIX)\n{before}\ns.connect(sys.argv[1]); sys.stdin.read()"
    )
    words = [sys.executable, "-c", code, listener.getsockname()]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as other:
        assert other.stdin is not None
        listener.settimeout(60)
        with listener.accept()[0] as served:
            try:
                return identity.peer_uid(served)
            finally:
                other.stdin.close()


@pytest.fixture
def at_a_path() -> Iterator[socket.socket]:
    """Where everybody gets to."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        os.chmod(folder, 0o755)
        listener.bind(f"{folder}/socket")
        os.chmod(f"{folder}/socket", 0o777)
        listener.listen()
        yield listener


def test_who_comes_by_a_unix_socket_is_told_by_the_kernel(at_a_path: socket.socket) -> None:
    assert came(at_a_path) == os.getuid()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_who_comes_by_a_unix_socket_is_told_apart(at_a_path: socket.socket) -> None:
    assert came(at_a_path, "os.setuid(12345)") == 12345


@pytest.mark.skipif(not hasattr(os, "unshare"), reason="this Python cannot leave a namespace")
def test_a_program_in_another_network_is_nobody_though_it_finds_the_socket(at_a_path: socket.socket) -> None:
    try:
        assert came(at_a_path, "os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNET)") is None
    except TimeoutError:
        pytest.skip("this host gives no namespaces to ordinary programs")


def test_without_netlink_nobody_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    listener, client, served = loopback(socket.AF_INET, "127.0.0.1")
    monkeypatch.delattr(socket, "AF_NETLINK")
    with listener, client, served:
        assert identity.peer_uid(served) is None
