"""The process of a box that runs a program: once confined, it waits for its order. Runs in the zygote's children."""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import _socket as socket
import atexit
import gc
import marshal
import os
import resource
import struct
import sys

from ringfence.sandbox.process.guest import runner
from ringfence.sandbox.process.zygote import confine, kernel
from ringfence.sandbox.process.zygote.plan import CHANNEL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType, ModuleType
    from typing import Any

_MESSAGE_BYTES = 65536
_TIOCSCTTY = 0x540E
_NULL_DEVICE = os.makedev(1, 3)
_WITNESS_SECONDS = 10
_PEEKED = bytearray(1)
_ARGUMENTS = kernel.arguments()
_REHEARSAL = "import builtins\nfor _ in (): print(_)\n"


def confine_process(site: confine.BuildSite) -> socket.socket:
    """Confine the process that is to run a program. Returns its channel to the supervisor."""
    try:
        seen = site.carry_out()
        _warm_up()
        channel = _announced(socket.socket(fileno=CHANNEL), site.descriptors, seen)
        if site.open_files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (site.open_files, site.open_files))
        return channel
    except OSError as exc:
        send(socket.socket(fileno=CHANNEL), f"failed {exc}", [])
        os._exit(1)
    except BaseException:  # a process that is not confined must not go on
        os._exit(1)


def _announced(channel: socket.socket, descriptors: dict[str, int], seen: list[str]) -> socket.socket:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    names = sorted(descriptors)
    given = [descriptors[name] for name in names]
    send(channel, " ".join(["closed", *names]) + "\n" + " ".join(seen), given)
    close(given)
    return channel


_warmups: list[tuple[CodeType, dict[str, Any]]] = []
_before_warmup: list[int] = []
"""The descriptors from before, in a box that was warmed up: what was made ready there keeps its own."""


def add_warmup(source: str) -> None:
    """Have every box of this zygote run this before it is ready. Threads are welcome: no box is forked from a box."""
    if source:
        _warmups.append((compile(source, "<warmup>", "exec", dont_inherit=True), {"__name__": "warmup"}))


def _warm_up() -> None:
    """Raises OSError."""
    for code, names in _warmups:
        _before_warmup.extend(filter(_is_open, map(int, os.listdir("/proc/self/fd"))))
        try:
            exec(code, names)  # noqa: S102 - it comes from the supervisor
        except Exception as exc:
            raise OSError(f"what was to be ready in it is not: {exc}") from exc


_cells: list[ModuleType] = []
copied = [False]
"""Whether the pages that boxes write to were copied at the fork, so that no box has to rehearse."""
names: dict[str, object] = {}
"""Names that the set-up code of a template made; a session's interpreters start with them."""


def load_cells() -> None:
    """Load `repl` in a zygote whose boxes stay; other boxes do not need it."""
    from ringfence.sandbox.process.guest import repl  # noqa: PLC0415 - most zygotes do not need it

    _cells.append(repl)


def program(channel: socket.socket) -> runner.GuestProgram:
    """Receive the order and prepare its program. Does not return for a command, nor for a session's cells."""
    _begin()
    ready = None if _cells else runner.GuestProgram()
    order, descriptors = receive(channel)
    if "long" in order:
        file = descriptors.pop()
        order = marshal.loads(os.pread(file, os.fstat(file).st_size, 0))  # noqa: S302 - it comes from the supervisor
        os.close(file)
    for target in (0, 1, 2):
        os.dup2(descriptors[target], target)
    if os.fstat(0).st_rdev == _NULL_DEVICE:
        _take_own_null()
    if order["kind"] == "cells":
        send(channel, "begun", [])
        close(descriptors)
        os.environ.update(order["env"])
        _cells[0].serve(channel, names)
    if order["kind"] == "exec_interpreter":
        _exec_interpreter(channel, order, descriptors)
    source = order.get("source", b"")
    if len(descriptors) > 3:
        source = os.pread(descriptors[3], os.fstat(descriptors[3]).st_size, 0)
    if "terminal" in order:
        _take_terminal()
    send(channel, "begun", [])
    channel.detach()
    by_descriptor = order["kind"] == "fresh" and order["name"] == "-c"
    if by_descriptor:
        os.dup2(descriptors[3], 3)
        os.set_inheritable(3, True)
    if _before_warmup:
        close([each for each in {*_before_warmup, *descriptors} - {0, 1, 2} if _is_open(each)])
    else:
        kernel.close_from(4 if by_descriptor else 3)
    if order["env"]:
        os.environ.update(order["env"])
    if order["kind"] == "fresh" and not by_descriptor:
        runner.put(source, order["name"])
    if order["kind"] != "python":
        _execute(order["argv"], order.get("cwd", "."))
    return (ready or runner.GuestProgram()).take(source, order["name"], order["argv"], cell=order.get("cell", False))


def _take_own_null() -> None:
    """Read nothing from the box's own /dev/null: the host's cannot be opened again, as /dev/stdin."""
    try:
        nothing = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return  # it has none, and reads nothing from the host's
    os.dup2(nothing, 0)
    os.close(nothing)


def _begin() -> None:
    # The arguments of the zygote name the folder that we are installed in.
    kernel.overwrite(_ARGUMENTS, b"python3")
    sys.orig_argv = [sys.executable]
    if not copied[0]:
        rehearse()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()  # boxes are forks of one process and must not share its random state
    gc.enable()


def rehearse() -> None:
    """Do everything once, so that pages that a program is going to write are copied while no run waits."""
    marshal.loads(marshal.dumps({"kind": "", "argv": [""], "env": {"A": "b"}}))  # noqa: S302 - a constant
    os.environ["A"] = "b"
    del os.environ["A"]
    exec(compile(_REHEARSAL, "<string>", "exec", dont_inherit=True), {})  # noqa: S102 - a constant
    gc.enable()
    gc.collect()


def bear_witness(site: confine.BuildSite) -> None:
    """Do all that a box does, with a program that does nothing. There is no box, so preloaded code must not run."""
    signal.alarm(_WITNESS_SECONDS)  # until it stands still
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reads, writes = os.pipe()
    channel = _announced(ours, {name: os.dup(writes) for name in site.descriptors}, site.rehearse())
    order = {"kind": "python", "name": "-c", "argv": [], "env": {}, "source": _REHEARSAL.encode(), "cell": True}
    packed = struct.pack("3i", reads, writes, writes)
    theirs.sendmsg([marshal.dumps(order)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)])
    ready = program(channel)
    exec(ready.code(), ready.namespace)  # noqa: S102 - a constant
    atexit._clear()
    threading: Any = sys.modules.get("threading")
    if threading is not None:
        threading._threading_atexits.clear()
    ready.finish()


def _exec_interpreter(channel: socket.socket, order: dict[str, Any], given: list[int]) -> None:
    """Exec another interpreter, which serves cells: descriptor 3 is its code, 4 its channel to the supervisor."""
    send(channel, "begun", [])
    for descriptor, place in ((given[3], 3), (channel.detach(), 4)):
        os.dup2(descriptor, place)
        os.set_inheritable(place, True)
    kernel.close_from(5)
    os.environ.update(order["env"])
    _execute(order["argv"], ".")


def _take_terminal() -> None:
    """Make the terminal that it was given its controlling one, so that it can choose the job in front."""
    try:
        kernel.call("ioctl", 0, _TIOCSCTTY, 0)
    except OSError:
        return  # then the terminal delivers no signals


def _execute(argv: list[str], folder: str) -> None:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # the interpreter ignores them; a program expects the default
    try:
        os.chdir(folder)
    except OSError as exc:
        os.write(2, f"{folder}: {exc.strerror}\n".encode())
        os._exit(126)
    try:
        os.execvp(argv[0], argv)  # noqa: S606 - a shell is started only where one was asked for
    except OSError as exc:
        os.write(2, f"{argv[0]}: {exc.strerror}\n".encode())
        os._exit(127 if isinstance(exc, FileNotFoundError) else 126)


# ── Messages ──────────────────────────────────────────────────────────────────────────────────────


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """An order of the supervisor, which we trust, and the descriptors that came with it."""
    # A buffer for the longest order would cost every box more than asking first.
    size = channel.recv_into(_PEEKED, 1, socket.MSG_PEEK | socket.MSG_TRUNC)
    data, ancillary, _, _ = channel.recvmsg(size, socket.CMSG_SPACE(32)) if size else (b"", [], 0, None)
    if not data:
        os._exit(0)  # the supervisor is gone, and all boxes end with this process
    descriptors: list[int] = []
    for _, _, packed in ancillary:
        descriptors += struct.unpack(f"{len(packed) // 4}i", packed)
    return marshal.loads(data), descriptors  # noqa: S302 - it comes from the supervisor


def send(channel: socket.socket, text: str, descriptors: list[int]) -> None:
    """Send plain words, since the supervisor must be able to read them without trusting the sender."""
    packed = struct.pack(f"{len(descriptors)}i", *descriptors)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)] if descriptors else []
    channel.sendmsg([text.encode()[:_MESSAGE_BYTES]], ancillary)


def close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:  # the one that listed them, or one that was sent
        return False
    return True
