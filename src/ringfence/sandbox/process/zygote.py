"""The zygote: a small process with one thread that has everything ready which boxes share, and forks a box per order.

It never sees what a box is to run: orders go straight from the supervisor into the box, over a socket that only passes
through here. `start` is the program that it is started as.

Every box is a copy of this process, so it loads as little as it can: the C modules beneath `socket` and `signal` where
those would do, and `marshal` for what the supervisor, whom it trusts, tells it. What it says itself is plain words,
since the supervisor must be able to read it without trusting anybody.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import _socket as socket
import gc
import marshal
import os
import select
import struct
import sys

from ringfence.sandbox.process import confine, guest, immortal, kernel, landlock, template

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_SPACES = kernel.NEWUSER | kernel.NEWNS | kernel.NEWIPC | kernel.NEWUTS | kernel.NEWNET | kernel.NEWCGROUP
_MESSAGE_BYTES = 65536
_LENGTH = bytearray(1)
_SETTLED_AFTER = 8
"""Boxes. Whoever wanted so many will want more."""
_REHEARSALS = 4
"""So often the interpreter has to see code before it has settled on how to run it, and writes no more into it."""
_REHEARSAL = "import builtins\nfor _ in (): print(_)\n"


def serve(control: int) -> socket.socket:
    """Be a zygote until the supervisor is gone. Returns only where a program is to run: the way to the supervisor."""
    zygote = Zygote(socket.socket(fileno=control))
    zygote.prepare()
    return zygote.serve()


class Zygote:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._filter: kernel.Filter | None = None
        self._landlock = 0
        self._root = os.getuid() == 0
        self._boxes: dict[int, int] = {}
        """Process id to the number that the supervisor gave the box."""
        self._made = 0
        self._settled = False
        self._wake, self._woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._life, self._alive = os.pipe2(os.O_CLOEXEC)
        """Nobody writes here; its end is noticed when we are gone."""
        self._supervisor = os.pidfd_open(os.getppid())
        """Another process may have inherited the supervisor's end of the control socket, and keep it open."""

    # ── Once ──

    def prepare(self) -> None:
        """Build all that boxes share, and say so."""
        config, descriptors = _receive(self._control)
        with open(descriptors[0], "rb") as file:
            self._filter = kernel.prepare_filter(file.read())
        self._landlock = landlock.version()
        held = self._enter(config["trees"])
        template.build(held, frozenset(config["without"]))
        sys.path += config["packages"]
        for name in config["preload"]:
            _preload(name)
        for _ in range(_REHEARSALS):
            _rehearse()
        os.environ.update(config["env"])
        _forget_signals()
        signal.signal(signal.SIGCHLD, _nothing)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        kernel.set_flags(isolated=0, ignore_environment=0, no_user_site=0, safe_path=False)
        guest.forget_ourselves()
        sys.path.remove(sys.argv[1])
        sys.path_importer_cache.clear()
        _one_thread()
        gc.collect()
        gc.freeze()
        gc.disable()
        if config["preload"]:
            self._settle()  # boxes of this kind are dear, and their zygote is slow to start anyway
        self._say(f"ready {self._landlock}")

    def _enter(self, trees: list[str]) -> list[template.Held]:
        """Into a user namespace in which the host's root does not exist."""
        user, group = os.getuid(), os.getgid()
        kernel.unshare(_SPACES)
        held = template.hold(trees)
        if self._root:
            # Several ids can only be mapped from outside, by the supervisor.
            self._say(f"map {os.getpid()}")
            _receive(self._control)
            os.setgroups([])
            os.setresgid(0, 0, 0)
            os.setresuid(0, 0, 0)
            # Taking on a box's id for a moment must not cost us our capabilities.
            kernel.prctl(kernel.PR_SET_SECUREBITS, 4)
        else:
            for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
                _write(f"/proc/self/{name}", text)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
        _write("/proc/self/oom_score_adj", "1000")  # boxes go first when the whole machine runs out of memory
        return held

    # ── For every box ──

    def serve(self) -> socket.socket:
        """Until the supervisor is gone. Returns in a process that a program is to run in: its way to the supervisor."""
        poll = select.poll()
        poll.register(self._control.fileno(), select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        poll.register(self._supervisor, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._wake:
                    os.read(self._wake, 4096)
                    self._reap()
                elif descriptor == self._supervisor:
                    os._exit(0)
                elif (channel := self._spawn(*_receive(self._control))) is not None:
                    return channel
                elif self._made >= _SETTLED_AFTER and not self._settled:
                    self._settle()

    def _settle(self) -> None:
        """Make boxes cheaper. For a single one that would take longer than it saves."""
        self._settled = True
        gc.unfreeze()
        immortal.make_everything_last()
        gc.freeze()

    def _spawn(self, order: dict[str, Any], descriptors: list[int]) -> socket.socket | None:
        without = frozenset(order["without"])
        outer = order["slot"] if self._root else 0
        number = order["box"]
        try:
            self._become(outer)
            pid = kernel.clone(confine.flags(without))
        except OSError as exc:
            self._become(0)
            _close(descriptors)
            self._say(f"failed {number} {exc}")
            return None
        if pid == 0:
            return self._be_a_box(order, descriptors, outer, without)
        self._become(0)
        _close(descriptors)
        self._made += 1
        self._boxes[pid] = number
        handle = os.pidfd_open(pid)
        self._say(f"box {number} {pid}", [handle])
        os.close(handle)
        return None

    def _become(self, identity: int) -> None:
        """A process can only map the id that it has; so the child must be born with the box's."""
        if self._root:
            os.setegid(identity)
            os.seteuid(identity)
            kernel.prctl(kernel.PR_SET_DUMPABLE, 1)

    def _reap(self) -> None:
        while self._boxes:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            number = self._boxes.pop(pid, None)
            if number is not None:
                cpu = usage.ru_utime + usage.ru_stime
                blocks = usage.ru_inblock + usage.ru_oublock
                self._say(f"ended {number} {status} {cpu:.6f} {usage.ru_maxrss * 1024} {blocks * 512}")

    def _say(self, text: str, descriptors: list[int] | None = None) -> None:
        _send(self._control, text, descriptors or [])

    # ── In the box's first process ──

    def _be_a_box(self, order: dict[str, Any], given: list[int], outer: int, without: frozenset[str]) -> socket.socket:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            channel = socket.socket(fileno=given[0])
            _close_others(self._life, *given)
            site = confine.Site(order["shape"], outer, self._life)
            site.filter, site.landlock_version, site.entrances = self._filter, self._landlock, given[1:]
            try:
                confine.close(site, without)
            except (OSError, ValueError) as exc:
                _send(channel, f"failed {exc}", [])
                os._exit(1)
            os.close(self._life)
            return _init(channel, site)
        except BaseException:  # nothing of ours may go on in a process that should have been a box
            os._exit(1)


def _init(channel: socket.socket, site: confine.Site) -> socket.socket:
    """Start the worker, in which this returns; wait for everybody, tell how it ended. Its end is the end of the box."""
    names = sorted(site.descriptors)
    given = [site.descriptors[name] for name in names]
    _send(channel, " ".join(["seen", *site.seen]), [])
    _send(channel, " ".join(["closed", *names]), given)
    _close(given)
    worker = os.fork()
    if worker == 0:
        return channel
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the kernel keeps what is not handled here from the first process
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == worker:
            _send(channel, f"exit {status}", [])
            os._exit(0)


def program(channel: socket.socket) -> guest.Program:
    """What to run, in the process that it is to run in. Does not return for a command."""
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
    os.chdir("/workspace")
    _rehearse()
    order, descriptors = _receive(channel)
    for target in (0, 1, 2):
        os.dup2(descriptors[target], target)
    source = order.get("source", b"")
    if len(descriptors) > 3:
        source = os.pread(descriptors[3], os.fstat(descriptors[3]).st_size, 0)
    _send(channel, "begun", [])
    channel.detach()
    by_descriptor = order["kind"] == "fresh" and order["name"] == "-c"
    if by_descriptor:
        os.dup2(descriptors[3], 3)
        os.set_inheritable(3, True)
    kernel.close_from(4 if by_descriptor else 3)
    os.environ.update(order["env"])
    if order["kind"] == "fresh" and not by_descriptor:
        guest.put(source, order["name"])
    if order["kind"] != "python":
        _execute(order["argv"])
    return guest.Program(source, order["name"], order["argv"])


def _rehearse() -> None:
    """Do everything once for nothing: pages that a program is going to write are copied while nobody waits."""
    marshal.loads(marshal.dumps({"kind": "", "argv": [""], "env": {"A": "b"}}))  # noqa: S302 - a constant
    os.environ["A"] = "b"
    del os.environ["A"]
    exec(compile(_REHEARSAL, "<string>", "exec", dont_inherit=True), {})  # noqa: S102 - a constant
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()  # boxes are forks of one process: what was random in it must not be the same in all
    gc.enable()
    gc.collect()


def _execute(argv: list[str]) -> None:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # the interpreter ignores them; a program expects the default
    try:
        os.execvp(argv[0], argv)  # noqa: S606 - a shell is started only where one was asked for
    except OSError as exc:
        os.write(2, f"{argv[0]}: {exc.strerror}\n".encode())
        os._exit(127 if isinstance(exc, FileNotFoundError) else 126)


# ── Small things ──


def _receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    # A buffer for the longest order would cost every box more than asking first.
    size = channel.recv_into(_LENGTH, 1, socket.MSG_PEEK | socket.MSG_TRUNC)
    data, ancillary, _, _ = channel.recvmsg(size, socket.CMSG_SPACE(32)) if size else (b"", [], 0, None)
    if not data:
        os._exit(0)  # the supervisor is gone, and with us go all boxes
    descriptors: list[int] = []
    for _, _, packed in ancillary:
        descriptors += struct.unpack(f"{len(packed) // 4}i", packed)
    return marshal.loads(data), descriptors  # noqa: S302 - it comes from the supervisor


def _send(channel: socket.socket, text: str, descriptors: list[int]) -> None:
    packed = struct.pack(f"{len(descriptors)}i", *descriptors)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)] if descriptors else []
    channel.sendmsg([text.encode()[:_MESSAGE_BYTES]], ancillary)


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    os.write(descriptor, text.encode())
    os.close(descriptor)


def _close_others(*kept: int) -> None:
    """All but these and the standard three."""
    first = 3
    for descriptor in sorted(kept):
        kernel.close_from(first, descriptor - 1)
        first = descriptor + 1
    kernel.close_from(first)


def _preload(name: str) -> None:
    with template.Inside():
        try:
            __import__(name)
        except ImportError:
            return


def _one_thread() -> None:
    tasks = len(os.listdir("/proc/self/task"))
    if tasks != 1:
        raise SystemExit(f"the zygote has {tasks} threads; what was preloaded started them")


def _forget_signals() -> None:
    """Whatever the supervisor ignored or blocked; what the interpreter itself handles stays as it is."""
    for number in signal.valid_signals():
        if signal.getsignal(number) == signal.SIG_IGN and number not in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _nothing(number: int, frame: object) -> None:
    """A handler must exist for the wake-up descriptor to be written."""
