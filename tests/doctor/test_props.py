"""Props: they notice what is done to them, and nothing of them stays."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ringfence.doctor.props import Props
from ringfence.doctor.stage import Stage


@pytest.fixture
def props(stage: Stage) -> Iterator[Props]:
    made = stage.props(("tree", "output"))
    yield made
    made.close()


@pytest.mark.parametrize(
    "act",
    [
        lambda file: file.write_text("other"),
        lambda file: file.chmod(0o600),
        lambda file: os.utime(file, (1, 1)),
        lambda file: file.unlink(),
        lambda file: os.link(file, file.with_name("second")),
        lambda file: file.with_name("new").touch(),
        lambda file: file.rename(file.with_name("moved")),
    ],
    ids=["write", "chmod", "utime", "unlink", "link", "create", "rename"],
)
@pytest.mark.parametrize("where", ["canary", "tree"])
def test_every_change_is_noticed(props: Props, where: str, act: Callable[[Path], object]) -> None:
    assert props.changes() is None
    act(Path(props.given[where]))
    assert props.changes() is not None


def test_canaries_are_open_to_all_so_that_only_the_box_stands_before_them(props: Props) -> None:
    file = Path(props.given["canary"])
    assert file.stat().st_mode & 0o777 == 0o666 and file.parent.stat().st_mode & 0o777 == 0o777
    # An ordinary user's control is the user: only root's has to get past folders of somebody else.
    if os.geteuid() == 0:
        assert all(folder.stat().st_mode & 0o001 for folder in file.parents)


def test_what_was_given_away_is_gone_afterwards(stage: Stage) -> None:
    made = stage.props(("tcp", "udp", "unix", "abstract", "victim", "shm", "sem", "msg", "mq", "tree", "output"))
    given, folder = made.given, made.folder
    libc = ctypes.CDLL(None, use_errno=True)
    made.close()
    assert not folder.exists()
    assert not Path(f"/proc/{given['victim']}").exists()
    for call in (libc.shmget, libc.semget):
        assert call(given["key"], 0, 0) == -1
    with socket.socket(socket.AF_UNIX) as way, pytest.raises(ConnectionRefusedError):
        way.connect(f"\0{given['abstract']}")


def test_a_planted_link_leads_to_the_canary_and_is_not_taken_for_a_result(props: Props) -> None:
    props.plant("result.txt")
    assert props.output is not None and (props.output / "result.txt").is_symlink()
    assert props.collected() == {}
