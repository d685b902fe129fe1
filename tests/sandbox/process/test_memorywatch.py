"""How a file of cgroup v2 tells that it changed. All of them tell alike, so a real one without controllers serves."""

from __future__ import annotations

import os
import select
import subprocess
from collections.abc import Iterator

import pytest

from ringfence.sandbox.process.cgroup import Cgroups, Group
from ringfence.sandbox.process.memorywatch import watch_file

HERE = Cgroups.detect()


@pytest.fixture
def group() -> Iterator[Group]:
    if "kill" not in HERE._folders:
        pytest.skip("no group of cgroup v2 can be made on this host")
    made = HERE.make("watched")
    yield made
    made.kill()
    made.remove(patience=5)


def readable(descriptor: int, seconds: float) -> bool:
    return bool(select.select([descriptor], [], [], seconds)[0])


def test_news_is_told_once_and_again_after_it_was_noted(group: Group) -> None:
    watch = watch_file(group._folders["kill"].path + "/cgroup.events")
    child = subprocess.Popen(["sleep", "600"])
    try:
        assert not readable(watch.fd, 0.02)
        group.add(child.pid)
        assert readable(watch.fd, 5)
        watch.settle()
        assert not readable(watch.fd, 0.02)
        child.kill()
        child.wait()
        assert readable(watch.fd, 5)
    finally:
        child.kill()
        child.wait()
        watch.close()


def test_descriptors_are_closed(group: Group) -> None:
    before = len(os.listdir("/proc/self/fd"))
    watch_file(group._folders["kill"].path + "/cgroup.events").close()
    with pytest.raises(PermissionError):
        watch_file("/proc/self/status")
    assert len(os.listdir("/proc/self/fd")) == before
