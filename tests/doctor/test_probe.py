"""What stands in front of every program: numbers of system calls, and how it says what came of it."""

from __future__ import annotations

import errno
import json
import os

import pytest

from ringfence.doctor import probe
from ringfence.sandbox.process.seccomp.syscalls import numbers_of


@pytest.mark.parametrize(("machine", "at"), [("x86_64", 0), ("aarch64", 1)])
def test_numbers_agree_with_the_filter_s_own(machine: str, at: int) -> None:
    """Two tables, written apart: a mistake in either shows."""
    theirs = numbers_of(machine)
    for name, found in probe._NUMBERS.items():
        assert (found if isinstance(found, int) else found[at]) == theirs[name], name


def said(capfd: pytest.CaptureFixture[str]) -> dict[str, object]:
    return json.loads(capfd.readouterr().out.strip().splitlines()[-1])


def test_an_error_of_the_system_is_told_by_name(capfd: pytest.CaptureFixture[str]) -> None:
    probe.attempt(lambda: os.stat("/no/such/path"))
    assert said(capfd) == {"done": False, "detail": "ENOENT"}


def test_success_is_admitted(capfd: pytest.CaptureFixture[str]) -> None:
    probe.attempt(lambda: None)
    assert said(capfd) == {"done": True, "detail": "succeeded"}


@pytest.mark.parametrize(("number", "done"), [(errno.EPERM, False), (errno.ENOSYS, False), (errno.EINVAL, True)])
def test_a_call_counts_as_reached_unless_it_was_refused(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: int, done: bool
) -> None:
    def call(name: str, *arguments: object) -> int:
        raise OSError(number, name)

    monkeypatch.setattr(probe, "call", call)
    probe.reach("bpf")
    assert said(capfd)["done"] is done


def test_of_several_ways_one_is_enough(capfd: pytest.CaptureFixture[str]) -> None:
    probe.any_of({"no": lambda: os.stat("/no/such/path"), "yes": lambda: os.stat("/")})
    assert said(capfd) == {"done": True, "detail": "yes"}
    probe.any_of({"no": lambda: os.stat("/no/such/path")})
    assert said(capfd) == {"done": False, "detail": "no ENOENT"}


def test_memory_is_searched_in_two_parts_so_that_the_search_does_not_find_itself() -> None:
    held = bytes(reversed(b"eldeen-eht"))
    assert probe.memory_of("self", b"the-", b"needle") != ""
    del held
    assert probe.memory_of("self", b"no-such-", bytes(reversed(b"eldeen"))) == ""


def test_mounts_are_those_in_sight() -> None:
    found = probe.mounts()
    assert len({mount["at"] for mount in found}) == len(found)
    assert any(mount["at"] == "/" for mount in found)
