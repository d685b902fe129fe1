"""The zygote: a small process with one thread that has everything ready which boxes share, and forks a box per order.

It never sees what a box is to run: orders go straight from the supervisor into the box, over a socket that only passes
through here. `start` is the program that it is started as.

Every box is a copy of this process, so it loads as little as it can: the C modules beneath `socket` and `signal` where
those would do, and `marshal` for messages of the supervisor, which it trusts. Its own messages are plain words, since
the supervisor must be able to read them without trusting the sender.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import _socket as socket
import errno
import gc
import marshal
import os
import select
import struct
import sys

from ringfence.sandbox.process.guest import c_output, runner
from ringfence.sandbox.process.zygote import confine, kernel, landlock, machine, memory, native, plan, template, worker
from ringfence.sandbox.process.zygote.confine import INSIDE_ID
from ringfence.sandbox.process.zygote.template import CERTIFICATES

TYPE_CHECKING = False
if TYPE_CHECKING:
    import resource
    from typing import Any

_SPACES = kernel.NEWUSER | kernel.NEWNS | kernel.NEWIPC | kernel.NEWUTS | kernel.NEWNET | kernel.NEWCGROUP
_FREEZE_AFTER = 8
"""Boxes. After so many, more are likely to come."""
_MAX_SITES = 16
_USUAL = (
    "bisect",
    "collections",
    "copy",
    "datetime",
    "functools",
    "heapq",
    "itertools",
    "json",
    "math",
    "re",
    "string",
)
"""Modules that programs import most, loaded once for all boxes. None starts a thread, has random numbers or keeps
anything of this process, and all of them together make a fork no dearer; `typing` and `dataclasses` would."""
_REHEARSALS = 4
"""So often must the interpreter see code before it is specialised and not written to any more."""
_RUN = "/run"
_FOLDER = "/run/ringfence"
_BACKLOG = 512
_CHUNK = 1 << 20


def serve(control: int) -> socket.socket:
    """Be a zygote until the supervisor is gone. Returns only in a box: the channel to the supervisor."""
    zygote = Zygote(socket.socket(fileno=_make_room(control)))
    zygote.prepare()
    return zygote.serve()


class Zygote:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._filter: kernel.Filter | None = None
        self._landlock = 0
        self._root = os.getuid() == 0
        self._own_ids = False
        """Each box has an id of its own on the host."""
        self._boxes: dict[int, _Box] = {}
        """By the ids of their processes."""
        self._staying: dict[int, _Box] = {}
        """Boxes that more processes may be started in, by their numbers."""
        self._sites: dict[bytes, confine.BuildSite] = {}
        self._last_capability = 0
        self._machine: machine.MachineFiles | None = None
        self._made = 0
        self._objects_frozen = False
        self._pins = memory.Pins()
        self._wake, self._woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._first = native.First()
        self._own = -1
        """Our own process."""
        self._supervisor = os.pidfd_open(os.getppid())
        """Another process may have inherited the supervisor's end of the control socket, and keep it open."""

    # ── Start ──

    def prepare(self) -> None:
        """Build all that boxes share, and report it."""
        contents: list[bytes] = []
        for descriptor in worker.receive(self._control)[1]:
            with open(descriptor, "rb") as file:
                contents.append(file.read())
        config = marshal.loads(contents[0])  # noqa: S302 - it comes from the supervisor
        self._filter = kernel.prepare_filter(contents[1])
        choice = marshal.loads(contents[2]) if len(contents) > 2 else None  # noqa: S302 - from the supervisor, too
        wanted = [*config["mounts"], *config["image"]]
        clones: list[int] = []
        while self._root and len(clones) < len(wanted):
            clones += worker.receive(self._control)[1]
        self._landlock = landlock.version()
        self._own_ids = config["own_ids"]
        with open("/proc/sys/kernel/cap_last_cap", encoding="ascii") as file:
            self._last_capability = int(file.read())
        self._pins.wanted = not config["stays"] and not config["image"]
        worker.add_warmup(config["warmup"])
        if config["stays"]:
            worker.load_cells()
        if config["image"]:
            import warnings  # noqa: F401, PLC0415 - `os` needs it to look for a program, and soon cannot find it
        if config["rehearses"] and not config["image"]:
            for name in _USUAL:
                __import__(name)
        held, mounts = self._enter(config["trees"], template.mounts(wanted, clones))
        self._become_first_process()
        without = frozenset(config["without"])
        places = template.Places(config["places"], config["home"], config["python"])
        if not config["image"]:
            template.build(held, mounts, without, places, choice)
        else:
            # What an image has where our interpreter lies is not for it, parts of packages that are loaded included:
            # a codec is looked for whenever a line of source is shown. What is built in can be had as before.
            del sys.meta_path[2:]
            template.build_from_image(mounts.pop(), mounts, without, places)
        self._machine = machine.MachineFiles(subset="subset" not in without)
        seen = template.inherit(without)
        # What was installed for a box goes before what lies beside the interpreter, and after its own library.
        at = next((n for n, path in enumerate(sys.path) if path.endswith("-packages")), len(sys.path))
        sys.path[at:at] = config["packages"]
        for name in ("_ast", *config["preload"]):
            _preload(name)
        if config["setup"]:
            _run_setup(config["setup"])
        if choice is not None:
            template.seal(choice, without)
        for _ in range(_REHEARSALS if config["rehearses"] else 0):
            worker.rehearse()
        os.environ.update(config["env"])
        _reset_signals()
        signal.signal(signal.SIGCHLD, _nothing)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        kernel.set_flags(isolated=0, ignore_environment=0, no_user_site=0, safe_path=False)
        runner.name_a_parent()
        c_output.find_libraries()
        runner.forget_ourselves()
        sys.path.remove(sys.argv[1])
        if config["image"]:
            sys.path.clear()
        sys.path_importer_cache.clear()
        _require_one_thread()
        if config["rehearses"]:
            gc.collect()  # for one box alone it takes longer than it saves
        gc.freeze()
        gc.disable()
        if config["preload"]:
            self._freeze_objects()  # boxes of this kind are dear, and their zygote is slow to start anyway
        self._say(" ".join(["ready", str(self._landlock), *seen]))

    def _enter(
        self, trees: list[str], mounts: list[template.Mounted]
    ) -> tuple[list[template.HeldTree], list[template.Mounted]]:
        """Enter a user namespace in which the host's root does not exist."""
        user = os.getuid()
        group = os.getgid()
        kernel.unshare(_SPACES)
        held = template.hold(trees) if trees else []
        for mount in mounts:
            mount.hold()
        if self._own_ids:
            # Several ids can only be mapped from outside.
            self._say(f"map {os.getpid()}")
            worker.receive(self._control)
            if problem := _take_ids(of_user=not self._root):
                self._say(f"unmapped {problem}")
                worker.receive(self._control)  # until we are ended
        else:
            for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
                _write(f"/proc/self/{name}", text)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
        _write("/proc/self/oom_score_adj", "1000")  # boxes go first when the whole machine runs out of memory
        return held, mounts

    def _become_first_process(self) -> None:
        """Go on as the first process of a pid namespace: the kernel ends everything in it with that one.

        To enter the namespace of a box and return takes capabilities over our own as well.
        """
        zygote = kernel.fork_beside(kernel.NEWPID)
        if zygote:
            handle = os.pidfd_open(zygote)
            self._say(f"zygote {zygote}", [handle])
            os._exit(0)
        self._own = os.pidfd_open(os.getpid())

    # ── Orders ──

    def serve(self) -> socket.socket:
        """Serve until the supervisor is gone. Returns in a process that is to run a program: its channel."""
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
                elif (channel := self._obey(*worker.receive(self._control))) is not None:
                    return channel
                else:
                    self._improve()

    def _improve(self) -> None:
        """Make boxes cheaper, a little after each one."""
        if not self._objects_frozen:
            if self._made >= _FREEZE_AFTER:
                self._freeze_objects()
        elif self._pins.wanted and self._sites:
            site = next(reversed(self._sites.values()))
            try:
                memory.share_code()
                self._pins.call_witness(lambda: worker.bear_witness(site))
            except Exception:  # any failure only means that boxes get no cheaper
                self._pins.wanted = False

    def _freeze_objects(self) -> None:
        """Take all objects from the collector. For a single box that would take longer than it saves."""
        self._objects_frozen = True
        gc.unfreeze()
        memory.make_everything_immortal()
        gc.freeze()

    def _obey(self, order: dict[str, Any], given: list[int]) -> socket.socket | None:
        """Make a box, or one more process in a box. Returns its channel in that process, else None."""
        if "request" in order:
            self._serve_request(order, given)
            return None
        number = order["box"]
        process = order.get("process", 0)
        box = None
        try:
            box = self._make_first_process(order) if process == 0 else self._staying[number]
            site = self._site(order, box, len(given) - 1, fresh=process == 0)
            who = order["slot"] if self._own_ids else 0
            site.prepare([given[0], box.handle, *given[1:]], confine.own(box.first, who))
            pid = self._fork_into(box)
        except (OSError, LookupError) as exc:
            worker.close(given)
            if box is not None and process == 0:
                self._give_up(box)
            self._say(f"failed {number} {process} {exc}")
            return None
        if pid == 0:
            return worker.confine_process(site)
        worker.close(given)
        self._made += 1
        self._boxes[pid] = box
        box.inside[pid] = process
        self._report_process(box, pid)
        return None

    def _serve_request(self, order: dict[str, Any], given: list[int]) -> None:
        """Do something for a box that exists."""
        if order["request"] == "end":
            self._end(order["box"])
            return
        try:
            if order["request"] != "trust":
                port = order.get("port", 0)
                made = _listen_in_box(given[0], port) if port else _socket_in_box(given[0])
                self._say(f"done {order['box']}", [made.fileno()])
                made.close()
            else:
                _install_certificates(*given)
                self._say(f"done {order['box']}")
        except OSError as exc:
            self._say(f"undone {order['box']} {exc}")
        worker.close(given)

    def _end(self, number: int) -> None:
        """End a box of which the supervisor has no handle yet."""
        for box in self._boxes.values():
            if box.number == number and box.first:
                os.kill(box.first, 9)

    def _make_first_process(self, order: dict[str, Any]) -> _Box:
        """Start the first process of a box."""
        spaces = confine.flags(frozenset(order["without"]))
        first = self._first.start(spaces)
        try:
            box = _Box(order["box"], spaces, first)
        except OSError:
            os.kill(first, 9)
            os.waitpid(first, 0)
            raise
        self._boxes[box.first] = box
        if order.get("stays"):
            box.stays = True
            self._staying[box.number] = box
        return box

    def _give_up(self, box: _Box) -> None:
        """Remove a box that could not be made: the supervisor does not know its first process."""
        os.kill(box.first, 9)
        os.close(box.handle)
        self._staying.pop(box.number, None)
        box.stays = False

    def _site(self, order: dict[str, Any], box: _Box, entrances: int, *, fresh: bool) -> confine.BuildSite:
        """The plan of the order; boxes of one kind share it."""
        assert self._machine is not None
        covers = self._machine.covers()  # a module that is loaded may add a name, or take one away
        key = marshal.dumps((order["shape"], order["without"], entrances, fresh, covers))
        site = self._sites.get(key)
        if site is None:
            if len(self._sites) >= _MAX_SITES:
                self._sites.clear()
            site = confine.BuildSite(order["shape"], box.spaces & ~kernel.NEWPID, entrances)
            site.filter = self._filter
            site.landlock_version = self._landlock
            site.last_capability = self._last_capability
            site.covers = covers
            site.machine = self._machine.sized(order["shape"]["memory_bytes"], order["shape"]["processors"])
            site.own_id = self._own_ids
            site.idmaps_workspace = self._own_ids and not self._root and fresh
            self._sites[key] = confine.plan(site, frozenset(order["without"]), fresh=fresh)
        return site

    def _fork_into(self, box: _Box) -> int:
        """Fork into the pid namespace of the box; returns 0 there. The process enters the other namespaces itself."""
        if self._pins.look():
            worker.copied[0] = True
        if not box.spaces & kernel.NEWPID:
            return kernel.fork()
        kernel.call("setns", box.handle, kernel.NEWPID)
        pid = -1
        try:
            pid = kernel.fork()
        finally:
            if pid:  # also where the fork failed, as in a box that is just ending
                kernel.call("setns", self._own, kernel.NEWPID)
        return pid

    def _report_process(self, box: _Box, pid: int) -> None:
        if box.stays:
            handle = os.pidfd_open(pid)
            self._say(f"process {box.number} {box.inside[pid]}", [handle])
            os.close(handle)
        else:
            os.close(box.handle)

    def _reap(self) -> None:
        while self._boxes:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                return
            box = self._boxes.pop(pid, None)
            if box is None:
                self._pins.lost(pid)
                continue  # not a process that we started: it must not end us
            if pid == box.first:
                box.first = 0
                for each in box.inside:
                    os.kill(each, 9)  # the kernel did it, but for a box without a pid namespace
            else:
                self._report_exit(box, pid, status, usage)
            if not box.first and not box.inside:
                self._say(f"ended {box.number} {box.last}")
                if box.stays:
                    del self._staying[box.number]
                    os.close(box.handle)

    def _report_exit(self, box: _Box, pid: int, status: int, usage: resource.struct_rusage) -> None:
        cpu = usage.ru_utime + usage.ru_stime
        blocks = usage.ru_inblock + usage.ru_oublock
        number = box.inside.pop(pid)
        box.last = f"{status} {cpu:.6f} {usage.ru_maxrss * 1024} {blocks * 512}"
        if box.stays:
            self._say(f"left {box.number} {number} {box.last}")
        elif box.first:
            os.kill(box.first, 9)  # and with it all that the program left behind

    def _say(self, text: str, descriptors: list[int] | None = None) -> None:
        worker.send(self._control, text, descriptors or [])


class _Box:
    """A box that exists."""

    def __init__(self, number: int, spaces: int, first: int) -> None:
        self.number = number
        """Given by the supervisor."""
        self.spaces = spaces
        self.first = first
        """The id of its first process, until that is reaped."""
        self.handle = os.pidfd_open(first)
        self.inside: dict[int, int] = {}
        """Further processes that were started here: id to the number that the supervisor gave them."""
        self.stays = False
        """It stays until it is killed; other boxes end with their program."""
        self.last = "0 0 0 0"
        """The exit of the process that ended last."""


def _make_room(control: int) -> int:
    """Keep the places free that plans move descriptors to, whatever is opened here. Returns where `control` is now."""
    moved = os.dup(control)  # the lowest free number; the one it came with is the supervisor's, and may be any
    os.close(control)
    nothing = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    for place in plan.PLACES:
        os.dup2(nothing, place, inheritable=False)
    os.close(nothing)
    return moved


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    os.write(descriptor, text.encode())
    os.close(descriptor)


def _nothing(number: int, frame: object) -> None:
    """A handler must exist for the wake-up descriptor to be written."""


# ── Start ─────────────────────────────────────────────────────────────────────────────────────────


def _take_ids(*, of_user: bool) -> str:
    """Become root of our own user namespace, where ids were mapped, with no rights outside of it.

    `of_user`: for boxes of an ordinary user, try the id-mapped mount that makes their files that user's.
    Returns why it is not possible.
    """
    try:
        os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        if of_user:
            kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
            _try_idmapped_tmpfs()
    except OSError as exc:
        return f"ids were mapped, and are of no use: {exc.strerror}"
    return ""


def _try_idmapped_tmpfs() -> None:
    """Make a tmpfs and map its ids. Raises OSError where the kernel cannot."""
    pid, hold = _user_namespace()
    try:
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/{pid}/{name}", "w", encoding="ascii") as file:
                file.write(f"{INSIDE_ID} 1 1")
        space = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        kernel.mount("idmapped", template.BASE, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV)
        copy = kernel.call("open_tree", kernel.AT_FDCWD, template.BASE.encode(), kernel.OPEN_TREE_CLONE | os.O_CLOEXEC)
        wanted = struct.pack("QQQQ", kernel.ATTR_IDMAP, 0, 0, space)
        kernel.call("mount_setattr", copy, b"", kernel.AT_EMPTY_PATH, wanted, len(wanted))
        kernel.call("umount2", template.BASE.encode(), kernel.MNT_DETACH)
        worker.close([copy, space])
    finally:
        os.close(hold)
        os.waitpid(pid, 0)


def _user_namespace() -> tuple[int, int]:
    """A child in a user namespace of its own, and a descriptor: the child ends when that is closed. So it does when we
    are killed, which are not the first process of a pid namespace yet."""
    waits, hold = os.pipe2(os.O_CLOEXEC)
    reads, ready = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if not pid:
        try:
            os.close(hold)
            kernel.unshare(kernel.NEWUSER)
            os.write(ready, b"r")
            os.read(waits, 1)
        finally:
            os._exit(0)
    worker.close([waits, ready])
    is_ready = os.read(reads, 1) == b"r"
    os.close(reads)
    if not is_ready:
        os.close(hold)
        os.waitpid(pid, 0)
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))
    return pid, hold


def _preload(name: str) -> None:
    with template.Inside():
        try:
            __import__(name)
        except ImportError:
            return


def _run_setup(source: str) -> None:
    """Run the operator's set-up code of a template; every session of the template starts with its names."""
    with template.Inside():
        exec(compile(source, "<template>", "exec", dont_inherit=True), worker.names)  # noqa: S102 - the operator's
    worker.names.pop("__builtins__", None)


def _require_one_thread() -> None:
    tasks = len(os.listdir("/proc/self/task"))
    if tasks != 1:
        raise SystemExit(f"the zygote has {tasks} threads; what was preloaded started them")


def _reset_signals() -> None:
    """Undo what the supervisor ignored or blocked; handlers of the interpreter stay."""
    for number in signal.valid_signals():
        if signal.getsignal(number) == signal.SIG_IGN and number not in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


# ── Requests for a box that exists ────────────────────────────────────────────────────────────────
# Nothing that runs in the box can interfere: the zygote has no number there.


def _listen_in_box(handle: int, port: int) -> socket.socket:
    """A listening socket in the network namespace of a box; `handle` is of its first process. Raises OSError."""
    listener = _socket_in_box(handle)
    # Neither SO_REUSEADDR nor SO_REUSEPORT: as long as it is there, no other socket can have this port.
    listener.bind(("127.0.0.1", port))
    listener.listen(_BACKLOG)
    return listener


def _socket_in_box(handle: int) -> socket.socket:
    """A socket in the network namespace of a box, whichever process uses it. Raises OSError."""
    own = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        kernel.call("setns", handle, kernel.NEWNET)
        try:
            return socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        finally:
            _return_to_network(own)
    finally:
        os.close(own)


def _return_to_network(own: int) -> None:
    try:
        kernel.call("setns", own, kernel.NEWNET)
    except OSError:
        os._exit(1)  # everything forked from now on would start in the namespace of a box


def _install_certificates(handle: int, given: int) -> None:
    """Copy the file `given` to where a box looks for trusted authorities. Raises OSError."""
    pid = os.fork()
    if pid:
        if status := os.waitpid(pid, 0)[1]:
            number = status >> 8
            raise OSError(number, f"certificates cannot be put into it: {os.strerror(number)}")
        return
    try:
        _write_certificates(handle, given)
        os._exit(0)
    except OSError as exc:
        os._exit(exc.errno or 1)
    finally:
        os._exit(1)


def _write_certificates(handle: int, given: int) -> None:
    kernel.call("setns", handle, kernel.NEWUSER | kernel.NEWNS)
    os.setresgid(INSIDE_ID, INSIDE_ID, INSIDE_ID)
    os.setresuid(INSIDE_ID, INSIDE_ID, INSIDE_ID)
    size = os.fstat(given).st_size
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("trust", _RUN, "tmpfs", flags, f"mode=0755,size={size + 65536},nr_inodes=8")
    os.mkdir(_FOLDER, 0o755)
    target = os.open(CERTIFICATES, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444)
    while os.sendfile(target, given, None, _CHUNK):
        pass
    os.close(target)
    kernel.set_mount(_RUN, kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NODEV | kernel.ATTR_NOEXEC)
