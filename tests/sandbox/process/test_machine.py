"""What a box sees of a machine: its limits as the sizes, and nothing of how large or busy the host is."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ringfence.core.box import MIB, BoxReport, BoxSpec, Limits, Program
from ringfence.core.sessions import Command, StaySpec
from ringfence.sandbox.process import baseline
from ringfence.sandbox.process.backend import ProcessBackend
from ringfence.sandbox.process.cgroups.cgroup import Cgroups
from tests.sandbox import comparing

pytestmark = pytest.mark.anyio

MEMORY = 384 * MIB


@pytest.fixture(scope="module", params=["by the kernel", "one by one"])
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[ProcessBackend]:
    """By how names in /proc are hidden: from Linux 7 on the kernel does not do it for a /proc that was whole."""
    async for made in comparing.opened(without=() if request.param == "by the kernel" else ("subset",)):
        yield made


async def run(backend: ProcessBackend, source: str, **limits: Any) -> BoxReport:
    spec = BoxSpec(Program("python", source.encode()), Limits(**{"memory_bytes": MEMORY, **limits}))
    report = await backend.run(spec)
    assert report.exit_status == 0, report.stderr.text
    return report


async def command(backend: ProcessBackend, *argv: str, **limits: Any) -> BoxReport:
    spec = BoxSpec(Program("command", argv=argv), Limits(**{"memory_bytes": MEMORY, **limits}))
    return await backend.run(spec)


READ = """
import json, os
names = ("meminfo", "stat", "cpuinfo", "uptime", "mounts", "version", "loadavg", "filesystems")
shown = {name: open(f"/proc/{name}").read() for name in names}
shown["listed"] = sorted(os.listdir("/proc"))
shown["cpus"] = [os.cpu_count(), *(open(f"/sys/devices/system/cpu/{name}").read() for name in ("online", "possible"))]
print(json.dumps(shown))
"""


async def test_the_sizes_are_the_limits(backend: ProcessBackend) -> None:
    shown = json.loads((await run(backend, READ)).stdout.text)
    total = f"{MEMORY // 1024} kB"
    lines = dict(line.split(":", 1) for line in shown["meminfo"].splitlines())
    assert {lines[name].strip() for name in ("MemTotal", "MemFree", "MemAvailable")} == {total}
    assert shown["cpuinfo"].count("processor\t: ") == 1
    assert [line.split()[0] for line in shown["stat"].splitlines()[:3]] == ["cpu", "cpu0", "intr"]
    assert shown["cpus"] == [1, "0\n", "0\n"]
    assert shown["loadavg"].startswith("0.00 0.00 0.00 ")
    assert " /workspace tmpfs rw," in shown["mounts"]
    assert shown["version"].startswith(f"Linux version {os.uname().release} (box) ")
    assert float(shown["uptime"].split()[0]) > 0 and shown["uptime"].endswith(" 0.00\n")
    assert {"self", "thread-self"} <= set(shown["listed"])


async def test_boxes_of_one_zygote_differ_by_their_limits(backend: ProcessBackend) -> None:
    source = "print(open('/proc/meminfo').readline().split()[1], open('/proc/stat').read().count('cpu'))"
    every = len(os.sched_getaffinity(0))
    for memory, cores, shown in ((64, 1.0, 1), (96, float(every), every), (64, every + 7.5, every)):
        report = await run(backend, source, memory_bytes=memory * MIB, cpu_cores=cores)
        assert report.stdout.text == f"{memory * 1024} {1 + shown}\n"


async def test_a_session_has_them_too(backend: ProcessBackend) -> None:
    box = await backend.open(StaySpec(limits=Limits(memory_bytes=MEMORY)))
    try:
        running = await box.command(Command(("head", "-1", "/proc/meminfo")), lambda *_: None)
        assert (await running.over()).stdout.text.split() == ["MemTotal:", str(MEMORY // 1024), "kB"]
    finally:
        await box.end()


CHANGE = """
import errno, os
def tried(act, *words):
    try:
        act(*words)
        return "done"
    except OSError as exc:
        return errno.errorcode[exc.errno]
for path in ("/proc/meminfo", "/proc/version", "/sys/devices/system/cpu/online", "/proc/uptime", "/proc/mounts"):
    print(tried(os.chmod, path, 0o666), tried(open, path, "w"), tried(os.unlink, path))
print(tried(os.chmod, "/sys/devices/system/cpu", 0o777), tried(os.mkdir, "/sys/devices/system/cpu/cpu7"))
"""


async def test_no_box_can_change_what_others_see(backend: ProcessBackend) -> None:
    assert "done" not in (await run(backend, CHANGE)).stdout.text


HIDDEN = """
import os
for name in os.environ["NAMES"].split():
    for path in (f"/proc/{name}", f"/proc/./{name}", f"/proc/self/../{name}", f"/proc/1/../{name}"):
        if os.path.islink(path): continue  # to something else of the box
        if os.path.isdir(path):
            if os.listdir(path): print(path)
            continue
        try: print(path, os.open(path, os.O_RDONLY))
        except OSError: pass
        try: print(path, os.chmod(path, 0o777))
        except OSError: pass
"""


async def test_nothing_else_of_the_kernels_is_found_by_its_name(backend: ProcessBackend) -> None:
    shown = {"meminfo", "stat", "cpuinfo", "uptime", "mounts", "version", "loadavg", "filesystems"}
    others = [
        name for name in os.listdir("/proc") if not name.isdigit() and name not in {*shown, "self", "thread-self"}
    ]
    assert {"cmdline", "kallsyms", "sys"} <= set(others)
    names = " ".join([*others, "sys/kernel", "sys/kernel/random/boot_id"])
    program = Program("python", HIDDEN.encode())
    report = await backend.run(BoxSpec(program, env={"NAMES": names}))
    assert (report.exit_status, report.stdout.text) == (0, "")


PROGRAMS = {
    "free": (("free", "-b"), str(MEMORY)),
    "uptime": (("uptime",), "load average: 0.00, 0.00, 0.00"),
    "lscpu": (("lscpu",), "CPU(s):"),
    "ps": (("ps", "aux"), "ps aux"),
    "df": (("df", "/workspace"), "/workspace"),
    "grep": (("grep", "-c", "ID=", "/etc/os-release"), ""),
}


@pytest.mark.parametrize("name", PROGRAMS)
async def test_programs_that_ask_about_the_machine_work(backend: ProcessBackend, name: str) -> None:
    argv, said = PROGRAMS[name]
    if shutil.which(name) is None or (name == "grep" and not Path("/etc/os-release").exists()):
        pytest.skip(f"there is no {name}")
    report = await command(backend, *argv)
    assert (report.exit_status, report.stderr.text) == (0, "")
    assert said in report.stdout.text


async def test_nodes_view_of_the_machine(backend: ProcessBackend) -> None:
    if shutil.which("node", path="/usr/local/bin:/usr/bin:/bin") is None:
        pytest.skip("there is no node of the system's")
    source = "const o = require('os'); console.log(o.cpus().length, o.totalmem(), o.loadavg()[0], o.uptime() > 0)"
    report = await command(backend, "node", "-e", source, memory_bytes=1024 * MIB)
    assert report.stdout.text == f"1 {1024 * MIB} 0 true\n", report.stderr.text
    source = """
    import os, {networkInterfaces} from "os"
    console.log(networkInterfaces().lo[0].cidr, Object.keys(os.networkInterfaces()))
    """
    report = await command(backend, "node", "--input-type=module", "-e", source, memory_bytes=1024 * MIB)
    assert report.stdout.text == "127.0.0.1/8 [ 'lo' ]\n", report.stderr.text


async def test_psutils_view_of_the_machine(backend: ProcessBackend) -> None:
    psutil = pytest.importorskip("psutil")
    source = """
import psutil, time
memory = psutil.virtual_memory()
print(memory.total, memory.percent, psutil.cpu_count(), psutil.cpu_percent())
print(abs(psutil.Process().create_time() - time.time()) < 3600, psutil.boot_time() < time.time(), psutil.pid_exists(1))
print("/workspace" in [each.mountpoint for each in psutil.disk_partitions(all=True)])
"""
    tree = Path(psutil.__file__).parents[1]
    spec = BoxSpec(Program("python", source.encode()), Limits(memory_bytes=MEMORY), packages=(tree,))
    report = await backend.run(spec)
    shown = [f"{MEMORY} 0.0 1 0.0", "True True False", "True"]
    assert report.stdout.text.splitlines() == shown, report.stderr.text


THREADS = """
import threading
over = threading.Event()
threads = [threading.Thread(target=over.wait) for _ in range(100)]
for thread in threads: thread.start()
over.set()
print(len(threads))
"""


async def test_a_hundred_threads_work_at_the_default_limits(backend: ProcessBackend) -> None:
    report = await backend.run(BoxSpec(Program("python", THREADS.encode())))
    if not Cgroups.detect().available:
        pytest.skip("without control groups the stacks of a hundred threads are more than a process may have")
    assert (report.stdout.text, report.limit) == ("100\n", None), report.stderr.text


TORCH = """
import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(20):
    loss = ((model(torch.ones(64, 10)) - 1) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(torch.get_num_threads(), loss.item() < 1)
print(sum(batch.sum().item() for (batch,) in DataLoader(TensorDataset(torch.arange(64.0)), 8, num_workers=2)))
"""


async def test_torch_trains_and_loads_with_workers(backend: ProcessBackend) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed beside the tests: pip install torch")
    limits = Limits(memory_bytes=2048 * MIB, wall_seconds=600)
    tree = Path(torch.__file__).parents[1]
    report = await backend.run(BoxSpec(Program("python", TORCH.encode()), limits, packages=(tree,)))
    assert (report.stdout.text, report.limit) == ("1 True\n2016.0\n", None), report.stderr.text


async def test_there_is_a_python_where_the_host_has_only_python3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baseline, "has_program", lambda name, path: False)
    place = "/etc/programs/python"
    shell = f"{place} -c 'import sys; print(*sys.version_info[:2])'; ln -sf /bin/sh {place} || echo kept"
    expected = f"{sys.version_info[0]} {sys.version_info[1]}\nkept\n"
    async for backend in comparing.opened():
        assert (await command(backend, "sh", "-c", shell)).stdout.text == expected
        assert ":/etc/programs" in (await command(backend, "sh", "-c", "echo $PATH")).stdout.text
        box = await backend.open(StaySpec())
        try:
            running = await box.command(Command(("sh", "-c", shell)), lambda *_: None)
            assert (await running.over()).stdout.text == expected
        finally:
            await box.end()


async def test_a_list_of_arguments_may_have_two_megabytes(backend: ProcessBackend) -> None:
    """As on a host; Linux allows 128 KiB for a single one."""
    words = ("x" * 100_000,) * 20
    counting = b"import sys; print(len(sys.argv), sum(map(len, sys.argv)) >= 2_000_000)"
    report = await backend.run(BoxSpec(Program("python", counting, argv=words), Limits()))
    assert report.stdout.text == "21 True\n", report.stderr.text
    report = await command(backend, "sh", "-c", "echo $#", "sh", *words)
    assert report.stdout.text == "20\n", report.stderr.text
