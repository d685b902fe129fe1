"""Groups of cgroup v2, on a fake tree of plain files: the rules of v2 that matter here are played by `Kernel`."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ringfence.sandbox.process.cgroups import cgroup, hierarchy
from ringfence.sandbox.process.cgroups.cgroup import Cgroups, Group
from ringfence.sandbox.process.cgroups.cgroupfs import write

MIB = 1024 * 1024
FILES = {
    "": {"cgroup.procs": "", "cgroup.type": "domain\n", "cgroup.freeze": "0\n", "cgroup.kill": "", "cgroup.events": ""},
    "any": {"cpu.stat": "usage_usec 0\nuser_usec 0\nsystem_usec 0\n"},
    "memory": {
        "memory.max": "max\n",
        "memory.high": "max\n",
        "memory.swap.max": "max\n",
        "memory.peak": "0\n",
        "memory.events": "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\n",
        "memory.stat": "anon 0\nfile 0\nkernel 0\nshmem 0\nslab_reclaimable 0\n",
    },
    "pids": {"pids.max": "max\n", "pids.events": "max 0\n", "pids.peak": "0\n"},
    "cpu": {"cpu.max": "max 100000\n"},
}


class Kernel:
    """A hierarchy below `top` in which this process sits in /app."""

    def __init__(self, tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
        self.top = tmp_path / "cgroup"
        self.own = self.top / "app"
        self.proc = tmp_path / "proc"
        self.refuses: dict[str, int] = {}
        """Which controllers are not handed on, with the error that says so."""
        self.child_type = "domain"
        self.own.mkdir(parents=True)
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "self" / "cgroup").write_text("0::/app\n")
        (self.proc / "self" / "mountinfo").write_text(f"30 23 0:26 / {self.top} rw shared:4 - cgroup2 cgroup2 rw\n")
        (self.own / "cgroup.procs").write_text(f"1\n{os.getpid()}\n")
        (self.own / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
        (self.own / "cgroup.subtree_control").touch()
        self.really_mkdir, self.really_rmdir, self.really_write = os.mkdir, os.rmdir, write
        patch.setattr(os, "mkdir", self.mkdir)
        patch.setattr(os, "rmdir", self.rmdir)
        patch.setattr(hierarchy, "write", self.write)

    def handed_on(self) -> list[str]:
        return (self.own / "cgroup.subtree_control").read_text().split()

    def mkdir(self, path: str, *rest: object) -> None:
        self.really_mkdir(path)
        if Path(path).parent == self.own:
            for controller in ("", "any", *self.handed_on()):
                for name, text in FILES[controller].items():
                    Path(path, name).write_text(text)
            if self.handed_on():
                Path(path, "cgroup.type").write_text(self.child_type + "\n")

    def rmdir(self, path: str) -> None:
        if Path(path).parent == self.own:
            if Path(path, "cgroup.procs").read_text():
                raise OSError(errno.EBUSY, "Device or resource busy", path)
            for file in Path(path).iterdir():
                file.unlink()
        self.really_rmdir(path)

    def write(self, path: str, text: str) -> None:
        assert path == str(self.own / "cgroup.subtree_control"), "only our own group hands on"
        sign, controller = text[0], text[1:]
        if sign == "+" and controller in self.refuses:
            raise OSError(self.refuses[controller], os.strerror(self.refuses[controller]))
        kept = [name for name in self.handed_on() if name != controller]
        self.really_write(path, " ".join(kept + [controller] * (sign == "+")))


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(tmp_path, monkeypatch)


def detect(kernel: Kernel) -> Cgroups:
    return Cgroups.detect(str(kernel.proc))


def made(kernel: Kernel) -> tuple[Group, Path]:
    group = detect(kernel).make("box")
    assert len(group.paths) == 1
    return group, Path(group.paths[0])


def put(path: Path, **files: str) -> None:
    for name, text in files.items():
        (path / name.replace("_", ".", 1)).write_text(text)


def test_a_group_that_hands_its_controllers_on_serves_for_all(kernel: Kernel) -> None:
    found = detect(kernel)
    assert found.available == {"memory", "pids", "cpu", "freezer"}
    assert found.why == {}
    assert kernel.handed_on() == ["memory", "pids", "cpu"]
    assert not [name for name in os.listdir(kernel.own) if name.startswith("ringfence")]


def test_what_is_handed_on_already_is_not_asked_for_again(kernel: Kernel) -> None:
    (kernel.own / "cgroup.subtree_control").write_text("memory pids cpu")
    kernel.refuses = dict.fromkeys(("memory", "pids", "cpu"), errno.EBUSY)
    assert detect(kernel).available == {"memory", "pids", "cpu", "freezer"}


def test_a_group_that_holds_processes_hands_nothing_on(kernel: Kernel) -> None:
    kernel.refuses = {"memory": errno.EBUSY, "pids": errno.EOPNOTSUPP, "cpu": errno.EACCES}
    found = detect(kernel)
    assert found.available == {"freezer"}
    assert "holds processes" in found.why["memory"]
    assert "holds processes" in found.why["pids"]
    assert found.why["cpu"] == "it cannot be handed on to groups below our own: Permission denied"


def test_what_is_not_delegated_is_said(kernel: Kernel) -> None:
    (kernel.own / "cgroup.controllers").write_text("pids\n")
    found = detect(kernel)
    assert found.available == {"pids", "freezer"}
    assert found.why == dict.fromkeys(("memory", "cpu"), "it is not delegated to our own group")


def test_handing_on_is_taken_back_where_it_spoils_the_groups_below(kernel: Kernel) -> None:
    kernel.refuses = {"memory": errno.EBUSY}
    kernel.child_type = "domain invalid"
    found = detect(kernel)
    assert found.available == {"freezer"}
    assert "'domain invalid'" in found.why["pids"]
    assert kernel.handed_on() == []


def test_a_group_that_is_not_ours_is_left_alone(kernel: Kernel) -> None:
    (kernel.own / "cgroup.procs").write_text("1\n")
    found = detect(kernel)
    assert found.available == frozenset()
    assert set(found.why.values()) == {"our own group is not to be seen where its hierarchy is mounted"}
    assert kernel.handed_on() == []


def test_limits_are_put_into_the_files_of_v2(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    group, path = made(kernel)
    group.limit(memory_bytes=256 * MIB, hard_bytes=768 * MIB, processes=64, cpu_cores=1.5)
    group.add(4321)
    values = {"memory.max": f"{768 * MIB}", "memory.swap.max": "0", "pids.max": "64", "cpu.max": "150000 100000"}
    assert {name: (path / name).read_text() for name in values} == values
    assert (path / "cgroup.procs").read_text() == "4321"
    group.limit(memory_bytes=256 * MIB, hard_bytes=768 * MIB, processes=64, cpu_cores=4)
    assert (path / "cpu.max").read_text() == "max 100000"


def test_what_the_files_of_v2_tell(kernel: Kernel) -> None:
    group, path = made(kernel)
    put(
        path,
        memory_stat="anon 100\nfile 5000\nkernel 30\nkernel_stack 9\nshmem 7\nslab_reclaimable 10\n",
        memory_peak="6000\n",
        memory_events="low 0\nhigh 4\nmax 3\noom 2\noom_kill 1\n",
        pids_events="max 5\n",
        pids_peak="9\n",
        cpu_stat="usage_usec 1500\nnr_periods 9\nnr_throttled 2\nthrottled_usec 2500\n",
        cgroup_events="populated 1\nfrozen 1\n",
    )
    assert (group.usage(), group.oom_kills()) == (127, 1)
    assert (group.pids_denied(), group.pids_peak()) == (5, 9)
    assert group.cpu_ms() == 1.5
    assert group.frozen() is True


def test_memory_is_given_back_where_the_host_has_a_place_for_it(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    group, path = made(kernel)
    swaps = tmp_path / "swaps"
    monkeypatch.setattr(cgroup, "SWAPS", str(swaps))
    assert not group.gives_back(), "no swap that could be read"
    swaps.write_text("Filename Type Size Used Priority\n")
    put(path, memory_reclaim="", memory_current="5000\n", memory_swap_current="0\n")
    (path / "memory.swap.current").write_text("0\n")
    assert not group.gives_back(), "no swap"
    swaps.write_text("Filename Type Size Used Priority\n/swap file 1000 0 -2\n")
    assert group.gives_back()
    order = []

    def reclaiming(file: str, text: str) -> None:
        order.append((Path(file).name, text))
        if file.endswith("memory.reclaim"):
            (path / "memory.current").write_text("1000\n")
            (path / "memory.swap.current").write_text("4000\n")
            raise OSError(errno.EAGAIN, "not all of it")

    monkeypatch.setattr(cgroup, "write", reclaiming)
    assert group.give_back() == 4000
    assert order == [("memory.swap.max", "max"), ("memory.reclaim", "5000"), ("memory.swap.max", "0")]
    put(path, memory_stat="anon 100\nfile 0\nkernel 0\nshmem 7\n")
    assert group.usage_parts() == (4007, 100), "it is still its own"


def test_what_an_older_kernel_does_not_tell_is_none(kernel: Kernel) -> None:
    group, path = made(kernel)
    for name in ("pids.peak", "pids.events"):
        (path / name).unlink()
    assert (group.pids_peak(), group.pids_denied()) == (None, None)


def test_killing_and_freezing_are_one_write(kernel: Kernel) -> None:
    group, path = made(kernel)
    group.freeze()
    assert (path / "cgroup.freeze").read_text() == "1"
    group.thaw()
    assert (path / "cgroup.freeze").read_text() == "0"
    group.kill()
    assert (path / "cgroup.kill").read_text() == "1"


def test_a_group_is_made_anew_to_be_used_again(kernel: Kernel) -> None:
    group, path = made(kernel)
    group.limit(memory_bytes=256 * MIB, hard_bytes=768 * MIB, processes=64, cpu_cores=1)
    put(path, memory_peak="6000\n", memory_events="oom_kill 1\n", cpu_stat="usage_usec 1500\n")
    group.reset()
    assert (group.oom_kills(), group.cpu_ms()) == (0, 0.0)
    assert (path / "memory.max").read_text() == str(768 * MIB)
    put(path, cgroup_procs="77\n")
    with pytest.raises(OSError, match="busy"):
        group.reset()
    with pytest.raises(OSError, match="busy"):
        group.remove(patience=0)
    put(path, cgroup_procs="")
    group.remove()
    assert not path.exists()


def test_groups_without_any_controller_still_kill_and_count(kernel: Kernel) -> None:
    (kernel.own / "cgroup.controllers").write_text("\n")
    group, path = made(kernel)
    group.limit(memory_bytes=256 * MIB, hard_bytes=768 * MIB, processes=64, cpu_cores=1)
    told = (group.usage(), group.oom_kills(), group.pids_denied(), group.pids_peak())
    assert told == (None,) * 4
    assert group.cpu_ms() == 0.0
    group.kill()
    assert (path / "cgroup.kill").read_text() == "1"
    group.reset()
