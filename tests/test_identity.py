"""Who calls and who may answer: the kernel's word on a connection's owner, and the people of a configuration."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from ringfence import identity
from ringfence.model import EVERY_ROLE, Person
from tests import tooling

PEOPLE = {
    "alice": Person("alice", frozenset({"manager"}), os_user="al"),
    "bob": Person("bob", frozenset({"auditor"})),
}


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
        far, near = served.getpeername()[:2], served.getsockname()[:2]
        assert identity.peer_uid(far, near) == os.getuid()
        assert identity.peer_uid(far, (near[0], near[1] ^ 1)) is None, "no such connection"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_connection_of_another_user_is_told_apart() -> None:
    code = (
        "import os, socket, sys; os.setuid(12345); s = socket.socket(); s.connect(('127.0.0.1', int(sys.argv[1])));"
        "sys.stdin.read()"
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with subprocess.Popen([sys.executable, "-c", code, str(port)], stdin=subprocess.PIPE) as other:
            listener.settimeout(20)
            served, far = listener.accept()
            with served:
                assert identity.peer_uid(far, served.getsockname()) == 12345
            assert other.stdin is not None
            other.stdin.close()


@pytest.mark.parametrize(
    "client",
    [("127.0.0.1", 1), ("::1", 1), ("not an address", 1), ("", 0), ("127.0.0.1", 70000), ("127.0.0.1", -1)],
)
def test_what_cannot_be_told_is_nobody(client: tuple[str, int]) -> None:
    server = ("::1" if ":" in client[0] else "127.0.0.1", tooling.free_port())
    assert identity.peer_uid(client, server) is None


def test_without_netlink_nobody_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "AF_NETLINK")
    assert identity.peer_uid(("127.0.0.1", 1), ("127.0.0.1", 2)) is None


def test_this_account_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert identity.os_user()
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    assert identity.os_user() == "uid-4000000"


def test_without_people_the_local_user_has_every_role() -> None:
    person = identity.person_of({}, "carol")
    assert person == Person("carol", EVERY_ROLE, "carol")
    assert person.holds(("manager", "auditor|director"))


def test_with_people_only_those_named_are_anybody() -> None:
    assert identity.person_of(PEOPLE, "al") == PEOPLE["alice"]
    assert identity.person_of(PEOPLE, "alice") is None, "the account counts, not the name"
    assert identity.person_of(PEOPLE, "bob") is None, "bob has no account here"


@pytest.mark.parametrize(("people", "user", "person"), [({}, "al", "al"), (PEOPLE, "al", "alice"), (PEOPLE, "x", "x")])
def test_the_local_agent_acts_for_whoever_runs_the_gateway(people: dict[str, Person], user: str, person: str) -> None:
    agent = identity.local_agent(people, user)
    assert (agent.agent, agent.person, agent.kind, agent.roles) == ("local", person, "agent", frozenset())
