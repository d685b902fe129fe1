"""A guest that runs: QEMU in the background, and the line to the agent in it."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hosts.guests import Guest, Machine
from hosts.image import native, python_disk, root_image
from hosts.kernel import Kernel, cpio, kernel
from hosts.places import CACHE, Trouble, find, fresh, run, say

_INSIDE = Path(__file__).parent / "inside"
# A guest is given up when nothing has come from it for so long. Emulation is slow, but it always moves.
SILENCE = 1200.0
_MEMORY = os.environ.get("HOSTS_MEMORY", "3072")
_PROGRAM = {"amd64": "qemu-system-x86_64", "arm64": "qemu-system-aarch64"}
# Units that cost an emulated machine minutes and that no box depends on.
_NOT_NEEDED = (
    "systemd-udev-trigger.service",
    "getty@tty1.service",
    "systemd-timesyncd.service",
    "systemd-update-utmp.service",
)
# An emulated processor's own counter is good enough for a clock; the kernel would read a device for every time of day.
_CLOCK = {"amd64": "tsc=reliable clocksource=tsc ", "arm64": ""}
_CONSOLE = {"amd64": "ttyS0", "arm64": "ttyAMA0"}


@cache
def accelerated(machine: Machine) -> bool:
    """Whether KVM works here for that machine: tried, since a device that is there may refuse."""
    if not native(machine) or not os.access("/dev/kvm", os.R_OK | os.W_OK) or not _by_processor(machine):
        return False
    probe = [find(_PROGRAM[machine]) or _PROGRAM[machine], "-accel", "kvm", "-cpu", "host", "-display", "none", "-S"]
    board = "virt" if machine == "arm64" else "q35"
    started = subprocess.Popen(
        [*probe, "-M", board, "-m", "64", "-monitor", "none", "-serial", "none", "-nodefaults"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        return started.wait(timeout=5) is None
    except subprocess.TimeoutExpired:
        return True
    finally:
        started.kill()
        started.wait()


def _by_processor(machine: Machine) -> bool:
    """Without the processor's help KVM (as PVM) runs only kernels made for it, and others slower than emulation."""
    if machine == "arm64":
        return True
    found = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return bool(found and {"vmx", "svm"} & set(found[1].split()))


def _board(machine: Machine) -> list[str]:
    if accelerated(machine):
        how = ["-accel", "kvm", "-cpu", "host"]
    elif machine == "arm64":
        # Without pointer authentication and vectors, which are costly to emulate and which no box depends on. On the
        # older processors that QEMU knows, the kernel works around faults at every system call: five times as slow.
        how = ["-accel", "tcg", "-cpu", "max,pauth=off,sve=off"]
    else:
        # Its processors take turns: side by side, one may still execute code that another has patched, and the kernel
        # patches itself as it runs. Without a fifth level of page tables: few machines have it, and it costs time.
        how = ["-accel", "tcg,thread=single", "-cpu", "max,la57=off"]
    return [*how, "-M", "virt,gic-version=max" if machine == "arm64" else "q35"]


def _disk(file: Path, form: str, serial: str, writable: bool = False) -> list[str]:
    settings = f"file={file},format={form},if=none,id={serial},cache=unsafe"
    if not writable:
        settings += ",readonly=on"
    return ["-drive", settings, "-device", f"virtio-blk-pci,drive={serial},serial={serial}"]


def command(machine: Machine, booted: Kernel, words: str, log: Path) -> list[str]:
    """QEMU with a kernel; the disks and the line come after."""
    console = f"console={_CONSOLE[machine]} panic=-1 {_CLOCK[machine]}{words}"
    return [
        find(_PROGRAM[machine]) or _PROGRAM[machine],
        *_board(machine),
        *("-smp", "2", "-m", _MEMORY, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *("-serial", f"file:{log}", "-kernel", str(booted.image), "-append", console),
        *("-device", "virtio-rng-pci", "-nic", "none"),
    ]


def _nice() -> None:
    os.nice(5)


def finish(machine: Machine, suite: str, image: Path) -> None:
    """The second half of an installation, done by an emulated machine."""
    booted = kernel(suite, machine)
    log = image.with_suffix(".console")
    words = "rw hosts.init=/settle.sh"
    initrd = image.with_suffix(".initrd")
    initrd.write_bytes(booted.initrd.read_bytes() + _overlay())
    start = [*command(machine, booted, words, log), "-initrd", str(initrd)]
    process = subprocess.Popen([*start, *_disk(image, "raw", "root", writable=True)], preexec_fn=_nice)
    try:
        seen, moved = (0.0, 0.0), time.monotonic()
        while process.poll() is None:
            time.sleep(2)
            now = (log.stat().st_mtime if log.exists() else 0.0, image.stat().st_mtime)
            if now != seen:
                seen, moved = now, time.monotonic()
            if time.monotonic() - moved > SILENCE:
                raise Trouble(f"the installation does not move; see {log}")
    finally:
        process.kill()
        process.wait()
    if "hosts: settled" not in log.read_text(errors="replace"):
        raise Trouble(f"the installation failed; see {log}")


def _overlay() -> bytes:
    """Our files in the guest, beside its distribution's."""
    lib = "overlay/usr/local/lib/hosts"
    files = {
        f"{lib}/{file.name}": (0o100755, file.read_bytes()) for file in sorted(_INSIDE.iterdir()) if file.is_file()
    }
    unit = (_INSIDE / "agent.service").read_bytes()
    wants = "overlay/etc/systemd/system/multi-user.target.wants"
    files[f"{wants}/hosts-agent.service"] = (0o120777, b"/etc/systemd/system/hosts-agent.service")
    files["overlay/etc/systemd/system/hosts-agent.service"] = (0o100644, unit)
    # No unit may fail for the slowness of its machine.
    patient = b"[Manager]\nDefaultTimeoutStartSec=infinity\nDefaultTimeoutStopSec=infinity\n"
    for manager in ("system", "user"):
        files[f"overlay/etc/systemd/{manager}.conf.d/hosts.conf"] = (0o100644, patient)
    path = b"PATH=/opt/ringfence/bin:/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin\n"
    files["overlay/etc/profile.d/ringfence.sh"] = (0o100644, path)
    files["init"] = (0o100755, (_INSIDE / "first.sh").read_bytes())
    return cpio(files)


def disks(guest: Guest, source: Path) -> tuple[Path, Path, Kernel]:
    """What a guest is started from, made at its first use."""
    root = root_image(guest, lambda image: finish(guest.machine, guest.release, image))
    return root, python_disk(guest.release, guest.machine, source), kernel(guest.suite, guest.machine)


@dataclass
class Ended:
    code: int
    out: str
    err: str


class Running:
    """A guest in the background; any number of processes may use it, one at a time."""

    def __init__(self, name: str) -> None:
        self.place = CACHE / "running" / name
        self.log = self.place / "console.log"
        self._pid = self.place / "pid"

    @property
    def alive(self) -> bool:
        try:
            pid = int(self._pid.read_text())
            return str(self.place) in Path(f"/proc/{pid}/cmdline").read_text()
        except (OSError, ValueError):
            return False

    def start(self, guest: Guest, source: Path) -> None:
        root, python, booted = disks(guest, source)
        fresh(self.place)
        (self.place / "initrd").write_bytes(booted.initrd.read_bytes() + _overlay())
        overlay = self.place / "root.qcow2"
        run(["qemu-img", "create", "-q", "-f", "qcow2", "-b", root, "-F", "raw", overlay])
        masked = " ".join(
            f"systemd.mask={unit}" for unit in (*_NOT_NEEDED, f"serial-getty@{_CONSOLE[guest.machine]}.service")
        )
        words = f"rw hosts.init={guest.init} systemd.show_status=auto systemd.log_color=0 {masked} {guest.words}"
        line = f"socket,id=line,path={self.place}/line,server=on,wait=off"
        started = [
            *command(guest.machine, booted, words, self.log),
            *("-initrd", str(self.place / "initrd")),
            *_disk(overlay, "qcow2", "root", writable=True),
            *_disk(booted.modules, "raw", "modules"),
            *_disk(python, "raw", "python"),
            *("-device", "virtio-serial-pci", "-chardev", line),
            *("-device", "virtserialport,chardev=line,name=ringfence.hosts"),
        ]
        with (self.place / "qemu.log").open("wb") as complaints:
            process = subprocess.Popen(
                started,
                stdin=subprocess.DEVNULL,
                stdout=complaints,
                stderr=complaints,
                start_new_session=True,
                preexec_fn=_nice,
            )
        self._pid.write_text(str(process.pid))
        # A program that was started a moment ago has no command line yet, by which it is known.
        while process.poll() is None and not self.alive:
            time.sleep(0.05)
        say(f"{guest.name}: {booted.release} starts (console: {self.log})")

    def stop(self) -> None:
        if not self.alive:
            return
        pid = int(self._pid.read_text())
        # Its disk is thrown away, so there is nothing to tidy up.
        os.kill(pid, signal.SIGKILL)
        while self.alive:
            time.sleep(0.1)

    @contextmanager
    def line(self) -> Iterator[Line]:
        """The line to the agent, once it answers; others wait for theirs."""
        with (self.place / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with socket.socket(socket.AF_UNIX) as connected:
                self._connect(connected)
                line = Line(connected, self)
                line.greet()
                yield line

    def _connect(self, connected: socket.socket) -> None:
        # The address of a socket is short, and a checkout may be deep.
        folder = os.open(self.place, os.O_PATH)
        try:
            for _ in range(200):
                try:
                    connected.connect(f"/proc/self/fd/{folder}/line")
                    return
                except OSError:
                    if not self.alive and (self.place / "qemu.log").exists():
                        raise Trouble(f"QEMU ended: {(self.place / 'qemu.log').read_text()[-2000:]}") from None
                    time.sleep(0.1)
        finally:
            os.close(folder)
        raise Trouble(f"nobody listens at {self.place}/line")


class Line:
    def __init__(self, connected: socket.socket, running: Running) -> None:
        self._socket, self._running = connected, running
        self._pending = b""
        self._socket.settimeout(5)

    def _send(self, **order: Any) -> None:
        self._socket.settimeout(SILENCE)
        self._socket.sendall(json.dumps(order).encode() + b"\n")
        self._socket.settimeout(5)

    def _answers(self) -> Iterator[dict[str, Any]]:
        """What the agent says. A guest that shows no sign of work for long is given up."""
        moved, shown = time.monotonic(), -1
        while True:
            try:
                more = self._socket.recv(1 << 16)
            except TimeoutError:
                more = None
            size = self._running.log.stat().st_size if self._running.log.exists() else 0
            if size != shown:
                moved, shown = time.monotonic(), size
            if more == b"" or not self._running.alive:
                raise Trouble(f"the guest is gone; see {self._running.log}")
            if more is None:
                if time.monotonic() - moved > SILENCE:
                    raise Trouble(f"the guest shows no sign of work; see {self._running.log}")
                continue
            self._pending += more
            *lines, self._pending = self._pending.split(b"\n")
            for line in lines:
                try:
                    answer = json.loads(line)
                except ValueError:
                    continue
                # A guest that waits says so too: only work counts as movement.
                if answer.get("busy", 1 << 20) > 20:
                    moved = time.monotonic()
                yield answer

    def greet(self) -> None:
        nonce = uuid.uuid4().hex
        self._socket.sendall(b"\n")
        self._send(do="ping", nonce=nonce)
        for answer in self._answers():
            if answer.get("pong") == nonce:
                return

    def put(self, path: str, content: bytes) -> None:
        step = 1 << 18
        for start in range(0, max(len(content), 1), step):
            data = base64.b64encode(content[start : start + step]).decode()
            self._send(do="put", path=path, data=data, more=start > 0)
            self._settled()

    def _settled(self) -> None:
        for answer in self._answers():
            if "problem" in answer:
                raise Trouble(f"in the guest: {answer['problem']}")
            if answer.get("done"):
                return

    def call(
        self, argv: Sequence[str], show: Callable[[str, bytes], None] | None = None, cwd: str = "/", **env: str
    ) -> Ended:
        """Run a command in the guest as root, and pass on what it prints."""
        self._send(do="exec", argv=list(argv), cwd=cwd, env=env)
        said = {"out": b"", "err": b""}
        for answer in self._answers():
            if "problem" in answer:
                raise Trouble(f"in the guest: {answer['problem']}")
            if "exit" in answer:
                out, err = (said[name].decode(errors="replace") for name in ("out", "err"))
                return Ended(answer["exit"], out, err)
            if "stream" in answer:
                data = base64.b64decode(answer["data"])
                said[answer["stream"]] += data
                if show:
                    show(answer["stream"], data)
        raise AssertionError
