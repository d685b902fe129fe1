"""A backend of one's own: boxes by `unshare`, without any engine. An example to begin from, and not one to rely on.

A guest is our agent as the first process of namespaces that util-linux makes: of processes, mounts, network, IPC and
names, in a user namespace, in which it is nobody. Its root is read-only; its one writable place is a file system in
memory. The agent then confines itself, by Landlock and a filter for system calls. There are no control groups: memory
is watched from outside, and whoever needs it limited by the kernel takes `process` or `oci`.

    python examples/unshare_engine.py            a program in such a box, and some promises, tried
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence
from pathlib import Path

from ringfence.compose.guests import engine_backend
from ringfence.core.box import BoxSpec, Program
from ringfence.core.errors import Unavailable
from ringfence.core.model import Json
from ringfence.doctor import CATALOGUE, CLASSES, Options, run
from ringfence.sandbox.guests.engine import Abilities, GuestShape, GuestUsage, boot
from ringfence.sandbox.guests.link import Link
from ringfence.sandbox.process.box_usage import descendants
from ringfence.sandbox.process.cgroups.cgroup import Counted

NAMESPACES = ("--user", "--map-root-user", "--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child")
AS_ROOT = """
set -e
mount -t tmpfs -o mode=755,size=1m box /mnt
mkdir /mnt/root /mnt/input
mount --bind "$ROOT" /mnt/root
if [ -n "$INPUT" ]; then mount --bind "$INPUT" /mnt/input; INPUT=/mnt/input; fi
ROOT=/mnt/root exec setpriv --reuid=65534 --regid=65534 --clear-groups -- "$@"
"""
"""What root does first: shows the folders where anybody may pass, and becomes a user who owns nothing."""
SET_UP = """
set -e
at=/tmp/root
mount -t tmpfs -o mode=755,size=1m box /tmp
mkdir $at
mount --bind "$ROOT" $at
mount -o remount,bind,ro,nosuid,nodev $at
mount -t proc -o nosuid,nodev,noexec,subset=pid,hidepid=invisible proc $at/proc
mount -t tmpfs -o nosuid,nodev,mode=755,size=$DISK,nr_inodes=$INODES box $at/workspace
mkdir $at/workspace/tmp
if [ -n "$INPUT" ]; then
  mkdir $at/workspace/input
  mount --bind "$INPUT" $at/workspace/input
  mount -o remount,bind,ro,nosuid,nodev $at/workspace/input
fi
for each in tmp var/tmp home/user; do mount --bind $at/workspace/tmp $at/$each; done
mount -t tmpfs -o nosuid,nodev,noexec,mode=755,size=64k box $at/dev
for each in null zero full random urandom; do
  : >$at/dev/$each
  mount --bind /dev/$each $at/dev/$each
  mount -o remount,bind,ro,nosuid,noexec $at/dev/$each
done
mkdir $at/dev/pts
mount -t devpts -o nosuid,noexec,newinstance,max=32,ptmxmode=0666,mode=0620 box $at/dev/pts
ln -s pts/ptmx $at/dev/ptmx
ln -s /proc/self/fd $at/dev/fd
mount -o remount,bind,ro,nosuid,nodev,noexec $at/dev
hostname box
exec unshare --user --map-user=1000 --map-group=1000 --root=$at --wd=/ -- "$@"
"""
"""Makes the box, as the root of the namespaces, and gives that up for a user namespace within."""
FIRST = """\
import resource
resource.setrlimit(resource.RLIMIT_NPROC, ({processes}, {processes}))
"""
"""What the first process does before it reads the agent."""


class UnshareEngine:
    """Starts guests. Implements `GuestEngine`."""

    name = "unshare"
    level = "process"
    abilities = Abilities(frozenset())
    """It runs programs, and that is all: whatever else a box is to have is refused."""

    def __init__(self) -> None:
        self._words: tuple[str, ...] = ()

    async def open(self) -> None:
        if self._words:
            return
        words = ("unshare", *NAMESPACES)
        if os.geteuid() == 0:
            words = ("unshare", "--mount", "sh", "-c", AS_ROOT, "sh", *words)
        for program in ("unshare", "setpriv", "mount"):
            if shutil.which(program) is None:
                raise Unavailable("no_backend", f"{program} is missing; install it: apt install util-linux mount")
        process = await asyncio.create_subprocess_exec(
            *words, "true", env=_environment("/", ""), stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE
        )
        _, said = await process.communicate()
        if process.returncode != 0:
            why = said.decode("utf-8", "replace").strip()
            raise Unavailable(
                "no_backend", f"unshare makes no namespaces here: {why}; `ringfence host` says what to do"
            )
        self._words = words

    async def start(self, shape: GuestShape) -> UnshareGuest:
        ours, theirs = socket.socketpair()
        limits = shape.limits
        with contextlib.ExitStack() as stack:
            stack.enter_context(theirs)
            number = theirs.fileno()
            first = FIRST.format(processes=limits.processes + 4)
            python = [*shape.root.agent, "-I", "-S", "-c", first + boot(number, number)]
            said = stack.enter_context(tempfile.TemporaryFile())
            try:
                process = await asyncio.create_subprocess_exec(
                    *(*self._words, "sh", "-c", SET_UP, "sh", *python),
                    env={
                        **_environment(str(shape.root.folder), "" if shape.input is None else str(shape.input)),
                        "DISK": str(limits.disk_bytes),
                        "INODES": str(limits.inodes),
                    },
                    stdin=DEVNULL,
                    stdout=DEVNULL,
                    stderr=said,
                    pass_fds=(number,),
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                raise
            return UnshareGuest(process, ours, os.dup(said.fileno()))

    async def close(self) -> None:
        """Nothing is kept."""


class UnshareGuest:
    """One box. Implements `Guest`."""

    hands_over = False
    """Its agent passes no descriptors on: refused system calls are not counted."""

    def __init__(self, process: Process, stream: socket.socket, said: int) -> None:
        self.stream = stream
        self.link: Link | None = None
        self.hardens: Json | None = {"unprivileged": True, "machine": os.uname().machine, "writable": ["/workspace"]}
        self.trouble: list[str] = []
        self._process = process
        self._said = said
        self._most = 0
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = loop.create_future()
        self._gone = loop.create_task(self._wait())

    async def _wait(self) -> None:
        await self._process.wait()
        said = os.pread(self._said, 4096, 0).decode("utf-8", "replace").strip()
        os.close(self._said)
        self._close_stream()
        self.ended.set_result(said or "it ended")

    def settle(self) -> None:
        """Before the agent is there, nothing is left to do from outside."""

    def look(self) -> None:
        """Nor is anything read back: the facts say so, by what is not in them."""

    @property
    def isolation(self) -> Json:
        limits = {"memory": {"by": "watchdog"}, "pids": {"by": "rlimit"}, "cpu": {"by": "watchdog"}}
        return {"engine": "unshare", "protections": {}, "limits": limits, "host_id": {"whose": "all"}}

    def usage(self) -> GuestUsage | None:
        """What all of its processes have, seen from outside."""
        memory = ticks = 0
        for pid in descendants(self._process.pid):
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += sum(map(int, fields[11:15]))
                memory += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
        return GuestUsage(memory, ticks * 1000 / os.sysconf("SC_CLK_TCK")) if memory else None

    def counted(self) -> Counted:
        """No control group counts anything."""
        return Counted(None, None, None, None)

    async def pause(self) -> None:
        raise Unavailable("not_supported", "backend unshare cannot pause boxes")

    async def resume(self) -> None:
        raise Unavailable("not_supported", "backend unshare cannot pause boxes")

    def _close_stream(self) -> None:
        if self.link is not None:
            self.link.close()
        else:
            self.stream.close()

    def kill(self) -> None:
        """With the process that waits outside, the first one inside is killed, and with that all of the box."""
        self._close_stream()
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)

    async def remove(self) -> Sequence[str]:
        self.kill()
        await asyncio.wait([self._gone])
        return self.trouble


def _environment(root: str, given: str) -> dict[str, str]:
    return {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "ROOT": root, "INPUT": given}


async def main() -> None:
    backend = engine_backend(UnshareEngine())
    try:
        source = b"import os; print(os.getuid(), sorted(os.listdir('/workspace')))"
        report = await backend.run(BoxSpec(Program("python", source)))
        print(report.stdout.text.strip())
        for kind in ("F", "A"):
            cases = tuple(case for case in CATALOGUE if case.kind == kind)
            found = await run(backend, Options(cases, controls=False))
            print(f"{CLASSES[kind]}: {found.kept} kept, {found.broken} broken, {found.not_counted} not counted")
            for result in found.results:
                if result.kept is False:
                    print(f"  {result.case.id}: {result.case.tried}: {result.got}")
    finally:
        await backend.close()


if __name__ == "__main__":
    asyncio.run(main())
