"""What the kernel keeps for a box beyond what any account shows is counted where there is much of it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import select
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence.sandbox.process.host import capabilities
from ringfence.sandbox.process.limits import uncounted
from ringfence.sandbox.process.seccomp.notifications import Account

SELF = os.getpid()


def test_datagrams_that_nobody_reads_are_memory() -> None:
    before = uncounted.datagrams(SELF)
    sender, held = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), []
    for _ in range(uncounted._FEW_BYTES // uncounted._received_bytes() + 1):
        receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        receiver.bind(("127.0.0.1", 0))
        sender.sendto(b"x" * 10_000, receiver.getsockname())
        held.append(receiver)
    try:
        assert uncounted.datagrams(SELF) - before >= 10_000 * len(held)
    finally:
        for each in (sender, *held):
            each.close()


def copies(sockets: list[socket.socket], each: int) -> None:
    """Have the kernel keep a copy of everything that these send, which nobody receives."""
    wanted = (socket.SOL_SOCKET, 37, (2).to_bytes(4, sys.byteorder))  # SO_TIMESTAMPING: when it was sent
    for sender in sockets:
        for _ in range(each):
            sender.sendmsg([b"x" * 30_000], [wanted], 0, ("127.0.0.1", 9))


def test_copies_of_what_was_sent_are_memory() -> None:
    before = uncounted.datagrams(SELF)
    senders = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(40)]
    try:
        copies(senders, 3)
        assert uncounted.datagrams(SELF) - before >= 40 * 30_000
    finally:
        for each in senders:
            each.close()


def test_sockets_that_no_list_shows_count_as_much_as_they_can_hold() -> None:
    before = uncounted.unlisted(SELF, 0)
    hidden = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(50)]
    try:
        assert uncounted.unlisted(SELF, 0) - before >= 50 * uncounted._received_bytes()
        assert uncounted.unlisted(SELF, 1 << 40) == 0
        for each in hidden:
            each.bind(("127.0.0.1", 0))
        assert uncounted.unlisted(SELF, 0) - before < 50 * uncounted._received_bytes()
    finally:
        for each in hidden:
            each.close()


def test_connections_in_which_something_waits_count_whole_where_they_could_be_too_many() -> None:
    held = []
    try:
        for number in range(20):
            each = socket.socket()
            each.bind(("127.0.0.1", 0))
            each.connect(each.getsockname())  # nobody listens
            held.append(each)
            if number % 2:
                each.send(b"x")
        least = 10 * uncounted._STREAM_BYTES
        assert uncounted.streams(SELF, 4 << 20) >= least
        assert uncounted.streams(SELF, 1 << 40) == 0
    finally:
        for each in held:
            each.close()


def test_connections_that_nobody_accepts_count_without_a_descriptor() -> None:
    with waiting(200):
        least = 200 * uncounted._SOCKET_BYTES
        assert uncounted.streams(SELF, least - 1) >= least


@contextlib.contextmanager
def waiting(count: int, data: bytes = b"", family: int = socket.AF_INET) -> Iterator[socket.socket]:
    """A server, and so many connections to it that were closed by the other end and wait to be accepted."""
    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    with socket.socket(family) as server:
        server.bind((host, 0))
        server.listen(256)
        for _ in range(count):
            with socket.create_connection(server.getsockname()[:2]) as client:
                client.sendall(data)
        yield server


def test_what_nobody_accepts_counts_where_a_group_counts_the_rest() -> None:
    least = 200 * uncounted._SOCKET_BYTES
    with waiting(200) as server:
        assert least <= uncounted.unaccepted(SELF, least - 1)
        assert uncounted.unaccepted(SELF, 1 << 40) == 0
        held = [server.accept()[0] for _ in range(200)]
        # From here on the group counts them.
        assert uncounted.unaccepted(SELF, least - 1) < least
        for each in held:
            each.close()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv6"])
def test_data_for_what_nobody_accepts_counts_as_much_as_it_may_take(family: int) -> None:
    if family == socket.AF_INET6 and not Path("/proc/net/if_inet6").exists():
        pytest.skip("there is no IPv6 here")
    most = 50 * uncounted._UNREAD_BYTES
    with waiting(50, b"x" * 1000, family):
        assert uncounted.unaccepted(SELF, most - 1) >= most
    with waiting(50, family=family):  # the end of a connection is no data, although the kernel counts it as a byte
        assert uncounted.unaccepted(SELF, most - 1) < most


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, the list of locks is read in one piece."""
    monkeypatch.setattr(uncounted, "_PIECE_SECONDS", float("inf"))


@pytest.mark.usefixtures("unhurried")
def test_few_locks_count_for_nothing_and_many_for_what_they_take(tmp_path: Path) -> None:
    with (tmp_path / "locked").open("w+") as file:
        for at in range(uncounted._FEW_LOCKS + 1):
            fcntl.lockf(file, fcntl.LOCK_EX, 1, at * 2)
        held = uncounted.Locks().held(lambda: (SELF,), 1 << 30)
        assert held > uncounted._FEW_LOCKS * uncounted._LOCK_BYTES
        assert uncounted.Locks().held(lambda: (2**22 + 1,), 1 << 30) == 0
    assert uncounted.Locks(str(tmp_path / "none")).held(lambda: (SELF,), 1 << 30) == 0


@pytest.mark.usefixtures("unhurried")
def test_more_locks_than_an_honest_program_has_are_beyond_any_limit(tmp_path: Path) -> None:
    listed = tmp_path / "locks"
    listed.write_text("".join(f"{n}: POSIX  ADVISORY  WRITE 7 00:2a:5 {n} {n}\n" for n in range(6000)))
    assert uncounted.Locks(str(listed)).held(lambda: (7,), 1 << 40) > 1 << 40
    assert uncounted.Locks(str(listed)).held(lambda: (8,), 1 << 40) == 0


@pytest.mark.usefixtures("unhurried")
def test_a_waiter_for_a_lock_is_counted_by_its_own_process(tmp_path: Path) -> None:
    listed = tmp_path / "locks"
    held = "".join(f"{n}: POSIX  ADVISORY  WRITE 7 00:2a:5 {n} {n}\n" for n in range(1000))
    listed.write_text(
        held + "1000: -> POSIX  ADVISORY  WRITE 8 00:2a:5 0 0\n1001: OFDLCK ADVISORY  READ -1 0:0:1 0 0\n"
    )
    locks = uncounted.Locks(str(listed))
    assert locks.held(lambda: (8,), 1 << 40) == uncounted._LOCK_BYTES


@pytest.mark.usefixtures("unhurried")
def test_locks_of_one_file_that_was_opened_often_all_count(tmp_path: Path) -> None:
    listed = tmp_path / "locks"
    listed.write_text("".join(f"{n}: FLOCK  ADVISORY  READ 7 00:2a:5 0 EOF\n" for n in range(6000)))
    assert uncounted.Locks(str(listed)).held(lambda: (7,), 1 << 40) > 1 << 40


def test_a_long_list_of_locks_is_read_page_by_page_and_each_lock_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uncounted, "_PIECE_SECONDS", 0.0)
    monkeypatch.setattr(uncounted, "_READ_BYTES", 4096)
    monkeypatch.setattr(uncounted, "_BREATH", 0.0)
    listed = tmp_path / "locks"
    lines = [f"{n}: POSIX  ADVISORY  WRITE 7 00:2a:5 {n} {n}\n" for n in range(3000)]
    listed.write_text("".join(lines + lines[1000:2000]))
    locks = uncounted.Locks(str(listed))
    counts: list[int] = []
    while not counts or locks._list is not None:
        counts.append(locks.held(lambda: (7,), 1 << 40) // uncounted._LOCK_BYTES)
    assert counts[0] == 0 and counts == sorted(counts) and counts[-1] == 3000
    assert len(counts) >= listed.stat().st_size // 4096


def test_what_epoll_waits_for_is_counted() -> None:
    watched, targets = uncounted.Watched(), [os.eventfd(0) for _ in range(20)]
    with select.epoll() as watcher:
        for target in targets:
            watcher.register(target)
        try:
            assert watched.held(uncounted._FEW_WATCHERS, (SELF,), 1 << 30) == 0
            assert watched.held(uncounted._FEW_WATCHERS + 1, (SELF,), 1 << 30) >= 20 * uncounted._WATCH_BYTES
        finally:
            for target in targets:
                os.close(target)


def test_an_epoll_that_waits_for_nothing_is_seen() -> None:
    before = sum(1 for _ in uncounted.instances((SELF,)))
    with select.epoll():
        assert sum(1 for _ in uncounted.instances((SELF,))) == before + 1


def test_instances_of_epoll_that_are_gone_are_given_back() -> None:
    account = Account(0)
    assert all(account.watch() for _ in range(uncounted.MAX_WATCHERS))
    assert not account.watch()
    emptied = Account(0, lambda: setattr(emptied, "watchers", 0))
    emptied.watchers = uncounted.MAX_WATCHERS
    assert emptied.watch() and emptied.watchers == 1


def test_filters_that_are_gone_are_given_back() -> None:
    account = Account(0)
    assert all(account.filter() for _ in range(uncounted.MAX_FILTERS))
    assert not account.filter()
    emptied = Account(0, lambda: setattr(emptied, "filters", 0))
    emptied.filters = uncounted.MAX_FILTERS
    assert emptied.filter() and emptied.filters == 1


def test_filters_of_a_process_are_those_beyond_ours() -> None:
    """A process with as many as we have, or one more, which is its box's, has none of its own."""
    assert uncounted.filters((SELF,)) == 0
    assert uncounted.filters((1 << 22,)) == 0, "it is gone"


@pytest.mark.parametrize(
    ("soft", "hard", "given", "sends", "raised"),
    [
        (1024, 1024, 683, 1024, (1024, 1024)),
        (1024, 524288, 1024, 3072, (3072, 524288)),
        (65536, 65536, 1024, 65536, None),
        (1024, resource.RLIM_INFINITY, 1024, 3072, (3072, resource.RLIM_INFINITY)),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 1024, 1024, None),
    ],
)
def test_whoever_starts_a_box_may_send_more_descriptors_than_any_box(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, given: int, sends: int, raised: tuple[int, int] | None
) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: told.append(both))
    assert capabilities.descriptors(1024) == (given, sends)
    assert told == ([raised] if raised else [])


def test_what_a_socket_may_hold_is_known_where_the_kernels_settings_are_not_in_sight() -> None:
    """In a container with a network of its own, Linux 6.1 shows none of them."""
    held = {"rmem_default": uncounted._received_bytes(), "wmem_default": uncounted.sent_bytes()}
    for name, found in held.items():
        setting = Path("/proc/sys/net/core", name)
        assert found == (int(setting.read_text()) if setting.exists() else found) > 0
