"""The stage: what a supervisor carries while the suite runs, and not a moment longer."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ringfence.doctor.stage import GROUP, IGNORED, UMASK, VARIABLE, Stage


def umask() -> int:
    found = os.umask(0o022)
    os.umask(found)
    return found


def descriptors() -> set[str]:
    return {os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _there(name)}


def _there(name: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{name}")


def test_everything_is_as_it_was_afterwards() -> None:
    before = (umask(), os.getgroups(), signal.getsignal(IGNORED), signal.pthread_sigmask(signal.SIG_BLOCK, []))
    with Stage() as stage:
        folder = stage.props(()).folder.parent
        assert umask() == UMASK and os.environ[VARIABLE] == stage.secret
        assert (GROUP in os.getgroups()) == (os.geteuid() == 0)
        assert any(path.endswith("/inherited") for path in descriptors())
    after = (umask(), os.getgroups(), signal.getsignal(IGNORED), signal.pthread_sigmask(signal.SIG_BLOCK, []))
    assert after == before and VARIABLE not in os.environ and not folder.exists()
    assert not any(path.startswith(str(folder)) for path in descriptors())


def test_it_is_left_as_it_was_after_an_error_too() -> None:
    folders: list[Path] = []

    def failing() -> None:
        with Stage() as stage:
            folders.append(stage.props(()).folder)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert VARIABLE not in os.environ and not folders[0].exists()
