"""The supervisor's end of a zygote: starts it, orders boxes from it, and receives its reports."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import marshal
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Any

import ringfence
from ringfence.core.aio import call_when_done
from ringfence.core.box import Limits
from ringfence.core.errors import Unavailable
from ringfence.core.model import Json
from ringfence.core.record import dataclass
from ringfence.core.system import interpreter
from ringfence.sandbox.process import baseline, ids
from ringfence.sandbox.process.baseline import SHARED_SLOT, Baseline
from ringfence.sandbox.process.box import Box, BoxMember, ProcessExit, SharedServices, new_channel, receive
from ringfence.sandbox.process.host.info import with_launcher
from ringfence.sandbox.process.ids import Block
from ringfence.sandbox.process.memory_file import memory_file
from ringfence.sandbox.process.zygote.confine import Shape

log = logging.getLogger(__name__)

_SOURCE_ROOT = str(Path(ringfence.__file__).parent.parent)
_PROGRAM = str(Path(__file__).with_name("zygote") / "start.py")
RECYCLE_AFTER = 2000
"""Boxes from one zygote; then a new one takes its place, so that nothing can grow in it without end."""
_NOTICE = 100  # so many boxes before that, the new one is started
_AGAIN_SECONDS = 0.002
_DESCRIPTORS_AT_ONCE = 8  # so many a zygote reads from one message
_LAST_WORDS = 2000
_ENVIRONMENT = {"LANG": "C.UTF-8"}
"""Read once, at the start; so it is the same for all boxes."""
_ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")
"""Only a process with a single thread can be forked."""


class _Killed(Unavailable):
    """A zygote died before it was ready, without a message: one that fails by itself says why."""


@dataclass(slots=True)
class ZygoteHandle:
    """One zygote process."""

    baseline: Baseline
    shared: SharedServices
    rehearses: bool = True
    """It goes through the making of a box before the first: worth it where several are made."""
    landlock: int = 0
    made: int = 0
    alive: bool = False
    stopping: bool = False
    pid: int = 0
    seen: list[str] = field(default_factory=list)
    """Steps that were read back, once for all its boxes."""
    _handle: int = -1
    _process: subprocess.Popen[bytes] | None = None
    _control: socket.socket | None = None
    host_id: Json = field(default_factory=dict)
    """The `host_id` fact of its boxes."""
    _block: Block | None = None
    _mapping: asyncio.Task[None] | None = None
    _boxes: dict[int, Box] = field(default_factory=dict)
    _free: list[int] = field(default_factory=list)
    _ready: asyncio.Future[int] | None = None
    _errors: int = -1
    _last_words: bytearray = field(default_factory=bytearray)

    async def start(self) -> None:
        """Raises Unavailable with the zygote's own words where this host does not allow it."""
        try:
            await self._start_with_ids()
        except _Killed:  # another process killed it, or memory ran out: that says nothing about this host
            await self._start_with_ids()

    async def _start_with_ids(self) -> None:
        for last in (False, True):
            self._block, self.host_id = ids.take(self.baseline, self.shared.groups)
            try:
                return await self._start()
            except ids.Unmapped as exc:  # once, it may have been killed meanwhile; twice, this host refuses it
                self._block = None
                if last:
                    self.host_id = ids.shared(str(exc))
        await self._start()

    async def _start(self) -> None:
        self._ready = asyncio.get_running_loop().create_future()
        self.pid = 0
        self._handle = -1
        self._last_words = bytearray()
        self._free = list(range((self._block.size if self._block else 512) - 1, 0, -1))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors, errors = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            os.set_blocking(errors, True)
            command = with_launcher([str(interpreter()), "-I", _PROGRAM, _SOURCE_ROOT, str(theirs.fileno())])
            self._process = subprocess.Popen(  # noqa: ASYNC220 - it returns as soon as the child is there
                command,
                env=_ENVIRONMENT | (_ONE_THREAD if self.baseline.preload else {}),
                cwd="/",
                pass_fds=[theirs.fileno()],
                # Pipes, as boxes have: an interpreter checks the kind of its streams only once.
                stdin=subprocess.PIPE,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
                # A stricter one of ours would close folders that boxes look into.
                umask=-1 if "umask" in self.baseline.without else 0o022,
            )
            assert self._process.stdin is not None
            self._process.stdin.close()
        except OSError as exc:
            ours.close()
            os.close(self._errors)
            if self._block is not None:
                self._block.release()
            raise Unavailable("no_zygote", f"no process can be started: {exc}") from None
        finally:
            theirs.close()
            os.close(errors)
        ours.setblocking(False)
        starter = self._process.pid
        self._control = ours
        self.alive = True
        self.shared.hub.add(ours.fileno(), self._receive)
        self.shared.hub.add(self._errors, self._read_errors)
        try:
            self._configure()
        except ConnectionError:
            self._died()
        except BaseException:
            self.stop()
            raise
        try:
            self.landlock = await self.shared.pace.start(self._ready, lambda: {starter, self.pid or starter})
        except TimeoutError:
            self.stop()
            raise Unavailable("no_zygote", "the zygote was not ready, and did nothing more for it") from None

    def _configure(self) -> None:
        config = baseline.configuration(self.baseline, own_ids=self._block is not None)
        config["rehearses"] = self.rehearses
        programs = self.baseline.programs
        parts = ("folders", "hidden", "sealed", "spared")
        chosen = [] if programs is None else [marshal.dumps({name: getattr(programs, name) for name in parts})]
        # Paths of mounts can be longer in sum than a socket takes.
        contents = (marshal.dumps(config), baseline.call_filter(self.baseline), *chosen)
        files = [memory_file(data) for data in contents]
        try:
            self._send_message({}, files)
        finally:
            for descriptor in files:
                os.close(descriptor)
        self._hand_over_mounts()

    def _hand_over_mounts(self) -> None:
        """Send the mounts, as many in a message as the zygote reads at once: its socket must have room for all of
        them before it reads. Only root can clone a mount; other zygotes open them themselves. Raises Unavailable."""
        if self._block is None or os.geteuid() != 0 or not self.baseline.uses_host_mounts:
            return
        from ringfence.sandbox.process import mounting  # noqa: PLC0415 - most boxes have none

        clones = mounting.clone(self.baseline.mounts, self._block.base + SHARED_SLOT, self.baseline.image)
        try:
            for first in range(0, len(clones), _DESCRIPTORS_AT_ONCE):
                self._send_message({}, clones[first : first + _DESCRIPTORS_AT_ONCE])
        finally:
            for descriptor in clones:
                os.close(descriptor)

    def _send_message(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        assert self._control is not None
        socket.send_fds(self._control, [marshal.dumps(message)], list(descriptors))

    # ── Boxes ──

    @property
    def full(self) -> bool:
        return not self._free

    @property
    def worn(self) -> bool:
        return self.made >= RECYCLE_AFTER

    @property
    def tired(self) -> bool:
        return self.made >= RECYCLE_AFTER - _NOTICE

    @property
    def live(self) -> int:
        return len(self._boxes)

    def owns(self, box: Box) -> bool:
        """Whether the box is one of its live boxes."""
        return self._boxes.get(box.number) is box

    @property
    def making(self) -> int:
        """The number of its boxes that are not closed yet."""
        return sum(box.is_being_made for box in self._boxes.values())

    async def spawn(self, limits: Limits, shape: Shape) -> Box:
        """Make a box that is closed and waits for its order. Raises Unavailable."""
        box = self.start_box(limits, shape)
        try:
            await box.closed()
        except BaseException:
            box.kill()
            box.ended.add_done_callback(lambda _: box.remove())
            raise
        return box

    def start_box(self, limits: Limits, shape: Shape, after: asyncio.Future[Any] | None = None) -> Box:
        """Start to make a box. The zygote gets the order when `after` is done, or soon after. Raises Unavailable."""
        if not self.alive or not self._free:
            raise Unavailable("no_zygote", "the zygote is gone" if not self.alive else "the zygote has no slot left")
        stays = self.baseline.stays
        folders = enumerate(shape.get("folders", ()))
        volumes = {f"folder{number}": size for number, (_, size, read_only) in folders if not read_only}
        ours, theirs = new_channel()
        try:
            group = self.shared.groups.take(limits, pauses=stays, in_volumes=sum(volumes.values()))
        except OSError as exc:
            ours.close()
            theirs.close()
            raise Unavailable("no_group", f"there is no control group for a box: {exc}") from None
        self.made += 1
        slot = self._free.pop()
        box = Box(self.made, slot, ours, limits, self.shared)
        box.group = group
        box.written = ("disk" if shape.get("places") else "workspace", *volumes)
        box.inherited = self.seen
        box.host_id_fact = self.host_id
        if self._block is not None and os.geteuid() == 0:
            box.host_id = self._block.base + self._slot(box)
        box.tell_zygote = partial(self._send_request, box)
        box.makers = self._making
        self._boxes[box.number] = box
        if stays:
            box.members[0] = BoxMember(0, self.shared.hub, box.account)
        send = partial(self._send_order, box, {"shape": shape, "stays": stays}, theirs)
        call_when_done(after, send)
        return box

    def _making(self) -> Iterator[int]:
        """Its own process, and what it has started that is no box yet."""
        from ringfence.sandbox.process.box_usage import descendants  # noqa: PLC0415 - only where a box is late

        ready = {process for box in self._boxes.values() if box.first for process in descendants(box.first)}
        return (process for process in descendants(self.pid) if process not in ready)

    def enter(self, box: Box, shape: Shape, number: int) -> BoxMember:
        """Start one more process in a box that stays. Raises Unavailable."""
        if not self.alive or box.ended.done():
            raise Unavailable("no_box", "the box is gone")
        ours, theirs = new_channel()
        member = box.members[number] = BoxMember(number, self.shared.hub, box.account)
        member.listen(ours)
        self._send_order(box, {"shape": shape, "process": number}, theirs)
        return member

    def _slot(self, box: Box) -> int:
        """Index of its id in the zygote's block. Mounts are mapped to one id, so boxes that see them share it."""
        return SHARED_SLOT if self.baseline.mounts else box.slot

    def _send_request(self, box: Box, order: dict[str, Any], descriptors: list[int]) -> None:
        if not self.alive:
            raise OSError("the zygote is gone")
        self._send_message(order | {"box": box.number}, descriptors)

    def _send_order(self, box: Box, order: dict[str, Any], theirs: socket.socket) -> None:
        if not self.alive:
            return theirs.close()  # it died meanwhile, and the box with it
        order |= {"box": box.number, "slot": self._slot(box), "without": list(self.baseline.without)}
        entrances: list[int] = []
        try:
            entrances = box.group.entrances() if box.group is not None else []
            self._send_message(order, [theirs.fileno(), *entrances])
        except BlockingIOError:  # its socket is full
            asyncio.get_running_loop().call_later(_AGAIN_SECONDS, self._send_order, box, order, theirs)
            return
        except ConnectionError:
            self._died()  # it died a moment ago; waiting for the box will show that
        except OSError as exc:
            self._handle_message("failed", [str(box.number), str(order.get("process", 0)), str(exc)], [])
        finally:
            if box.group is not None:
                box.group.entered(entrances)
        theirs.close()

    # ── Messages of the zygote ──

    def _receive(self) -> None:
        """Read one message; the hub calls again if there are more."""
        assert self._control is not None
        try:
            data, descriptors, _ = receive(self._control)
        except BlockingIOError:
            return
        except OSError:
            data = b""
            descriptors = []
        if not data:
            self._died()
            return
        word, _, rest = data.decode("utf-8", "replace").partition(" ")
        self._handle_message(word, rest.split(" "), descriptors)

    def _handle_message(self, word: str, rest: list[str], descriptors: list[int]) -> None:
        if word == "zygote":
            self.pid = int(rest[0])
            self._handle = descriptors[0]
        elif word == "map":
            self._mapping = asyncio.get_running_loop().create_task(self._map(int(rest[0])))
        elif word == "unmapped":
            self._do_without(" ".join(rest))
        elif word == "ready":
            self.seen = rest[1:]
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(int(rest[0]))
        elif (box := self._boxes.get(int(rest[0]))) is None:
            for descriptor in descriptors:
                os.close(descriptor)
        elif word in ("done", "undone"):
            box.request_done(descriptors, None if word == "done" else " ".join(rest[1:]))
        elif word in ("process", "left") or (word == "failed" and int(rest[1])):
            self._handle_process_message(box, word, rest, descriptors)
        elif word == "failed":
            box.fail(" ".join(rest[2:]))
            self._release(box)
            box.over(None)
        elif word == "ended":
            box.over(ProcessExit.parse(rest[1:]))
            self._release(box)

    async def _map(self, process: int) -> None:
        assert self._block is not None
        try:
            await ids.map_into(process, self._block)
            if self.alive:
                self._send_message({})
        except ids.Unmapped as exc:
            self._do_without(str(exc))
        except OSError:
            self._died()

    def _do_without(self, why: str) -> None:
        """Go on without ids for its boxes: this process is ended, and `start` makes another."""
        if self.alive and self._ready is not None and not self._ready.done():
            self._release_process()
            self._ready.set_exception(ids.Unmapped(why))
            self._ready.exception()

    def _handle_process_message(self, box: Box, word: str, rest: list[str], descriptors: list[int]) -> None:
        """Handle a message about one of several processes in a box."""
        number = int(rest[1])
        member = box.members.get(number) if word == "process" else box.members.pop(number, None)
        if member is None:
            for descriptor in descriptors:
                os.close(descriptor)
        elif word == "process":
            member.born(descriptors[0])
        else:
            if word == "failed":
                member.fail(" ".join(rest[2:]))
            member.left(ProcessExit.parse(rest[2:]) if word == "left" else None)
            box.outlived(member)

    def _release(self, box: Box) -> None:
        del self._boxes[box.number]
        # Where tear-down fails this is never called: the slot and its host id are not given to another box.
        box.on_removed = lambda: self._free.append(box.slot)

    def _read_errors(self) -> None:
        with contextlib.suppress(BlockingIOError):
            chunk = os.read(self._errors, 65536)
            if chunk:
                self._last_words = (self._last_words + chunk)[-_LAST_WORDS:]
            else:
                self.shared.hub.remove(self._errors)

    # ── End ──

    def _died(self) -> None:
        """It died, or was stopped; the kernel has killed its boxes."""
        if not self.alive:
            return
        self._read_errors()
        self._release_process()
        lines = self._last_words.decode("utf-8", "replace").strip().splitlines()
        words = lines[-1] if lines else "it said nothing"
        if self._ready is not None and not self._ready.done():
            kind = Unavailable if lines else _Killed
            self._ready.set_exception(kind("no_zygote", f"no box can be made on this host: {words}"))
            self._ready.exception()  # the caller that waited may be gone
        elif self._boxes and not self.stopping:
            log.error("a zygote died with %d boxes: %s", len(self._boxes), words)
        for box in list(self._boxes.values()):
            box.fail("its zygote died")
            box.over(None)
        self._boxes.clear()

    def stop(self) -> None:
        """End it, and with it every box it made."""
        if self.alive:
            self.stopping = True
            self._died()

    def _release_process(self) -> None:
        self.alive = False
        assert self._control is not None and self._process is not None
        self.shared.hub.remove(self._control.fileno())
        self.shared.hub.remove(self._errors)
        self._control.close()
        os.close(self._errors)
        self._process.kill()  # it only started the zygote and has exited, unless it failed
        self._process.wait()
        if self._handle >= 0:
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # another thread waits for all children of this process
                os.waitid(os.P_PIDFD, self._handle, os.WEXITED)
            os.close(self._handle)
        if self._block is not None:
            self._block.release()
