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
import sys

from ringfence.sandbox.process import (
    confine,
    errands,
    guest,
    immortal,
    kernel,
    landlock,
    native,
    pins,
    plan,
    preparing,
    template,
    worker,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    import resource
    from typing import Any

_SPACES = kernel.NEWUSER | kernel.NEWNS | kernel.NEWIPC | kernel.NEWUTS | kernel.NEWNET | kernel.NEWCGROUP
_SETTLED_AFTER = 8
"""Boxes. Whoever wanted so many will want more."""
_MOST_SITES = 16
_REHEARSALS = 4
"""So often the interpreter has to see code before it has settled on how to run it, and writes no more into it."""


def serve(control: int) -> socket.socket:
    """Be a zygote until the supervisor is gone. Returns only where a program is to run: the way to the supervisor."""
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
        """Those that more processes may be started in, by their numbers."""
        self._sites: dict[bytes, confine.Site] = {}
        self._last_capability = 0
        self._made = 0
        self._settled = False
        self._pins = pins.Pins()
        self._wake, self._woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._first = native.First()
        self._own = -1
        """Our own process."""
        self._supervisor = os.pidfd_open(os.getppid())
        """Another process may have inherited the supervisor's end of the control socket, and keep it open."""

    # ── Once ──

    def prepare(self) -> None:
        """Build all that boxes share, and say so."""
        config, descriptors = worker.receive(self._control)
        with open(descriptors[0], "rb") as file:
            self._filter = kernel.prepare_filter(file.read())
        choice = None
        if len(descriptors) > 1:
            template.load_cabinet()
            with open(descriptors[1], "rb") as file:
                choice = marshal.load(file)  # noqa: S302 - it comes from the supervisor
        wanted = [*config["mounts"], *config["image"]]
        clones = [worker.receive(self._control)[1][0] for _ in wanted] if self._root else []
        self._landlock, self._own_ids = landlock.version(), config["own_ids"]
        with open("/proc/sys/kernel/cap_last_cap", encoding="ascii") as file:
            self._last_capability = int(file.read())
        self._pins.wanted = not config["stays"] and not config["image"]
        if config["stays"]:
            worker.load_cells()
        imaged = preparing.load_image() if config["image"] else None
        held, mounts = self._enter(config["trees"], template.mounts(wanted, clones))
        self._settle_in()
        without = frozenset(config["without"])
        if imaged is None:
            template.build(held, mounts, without, choice)
        else:
            # What an image has where our interpreter lies is not for it, parts of packages that are loaded included:
            # a codec is looked for whenever a line of source is shown. What is built in can be had as before.
            del sys.meta_path[2:]
            imaged.build(mounts.pop(), mounts, without)
        seen = template.inherit(without)
        # What was installed for a box goes before what lies beside the interpreter, and after its own library.
        at = next((n for n, path in enumerate(sys.path) if path.endswith("-packages")), len(sys.path))
        sys.path[at:at] = config["packages"]
        for name in config["preload"]:
            preparing.preload(name)
        if config["setup"]:
            preparing.set_up(config["setup"])
        if choice is not None:
            template.seal(choice, without)
        for _ in range(_REHEARSALS):
            worker.rehearse()
        os.environ.update(config["env"])
        preparing.forget_signals()
        signal.signal(signal.SIGCHLD, _nothing)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        kernel.set_flags(isolated=0, ignore_environment=0, no_user_site=0, safe_path=False)
        guest.forget_ourselves()
        sys.path.remove(sys.argv[1])
        if imaged is not None:
            sys.path.clear()
        sys.path_importer_cache.clear()
        preparing.one_thread()
        gc.collect()
        gc.freeze()
        gc.disable()
        if config["preload"]:
            self._settle()  # boxes of this kind are dear, and their zygote is slow to start anyway
        self._say(" ".join(["ready", str(self._landlock), *seen]))

    def _enter(
        self, trees: list[str], mounts: list[template.Mounted]
    ) -> tuple[list[template.Held], list[template.Mounted]]:
        """Into a user namespace in which the host's root does not exist."""
        user, group = os.getuid(), os.getgid()
        kernel.unshare(_SPACES)
        held = template.hold(trees) if trees else []
        for mount in mounts:
            mount.hold()
        if self._own_ids:
            # Several ids can only be mapped from outside.
            self._say(f"map {os.getpid()}")
            worker.receive(self._control)
            if problem := preparing.take_ids(None if self._root else self._first):
                self._say(f"unmapped {problem}")
                worker.receive(self._control)  # until we are ended
        else:
            for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
                _write(f"/proc/self/{name}", text)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
        _write("/proc/self/oom_score_adj", "1000")  # boxes go first when the whole machine runs out of memory
        return held, mounts

    def _settle_in(self) -> None:
        """Go on as the first process of a pid namespace: with that one the kernel ends everything in it.

        To enter a box's, and return, one must have capabilities over one's own, too.
        """
        zygote = kernel.fork_beside(kernel.NEWPID)
        if zygote:
            handle = os.pidfd_open(zygote)
            self._say(f"zygote {zygote}", [handle])
            os._exit(0)
        self._own = os.pidfd_open(os.getpid())

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
                elif (channel := self._obey(*worker.receive(self._control))) is not None:
                    return channel
                else:
                    self._improve()

    def _improve(self) -> None:
        """Make boxes cheaper, a little after each one."""
        if not self._settled:
            if self._made >= _SETTLED_AFTER:
                self._settle()
        elif self._pins.wanted and self._sites:
            site = next(reversed(self._sites.values()))
            try:
                pins.share_code()
                self._pins.call_witness(lambda: worker.bear_witness(site))
            except Exception:  # whatever it was: boxes get no cheaper, and that is all
                self._pins.wanted = False

    def _settle(self) -> None:
        """For a single box that would take longer than it saves."""
        self._settled = True
        gc.unfreeze()
        immortal.make_everything_last()
        gc.freeze()

    def _obey(self, order: dict[str, Any], given: list[int]) -> socket.socket | None:
        """Make a box, or one more process in a box that is there. Returns in that process."""
        if "errand" in order:
            self._run_errand(order, given)
            return None
        number, process = order["box"], order.get("process", 0)
        box = None
        try:
            box = self._found(order) if process == 0 else self._staying[number]
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
            return worker.close_up(site)
        worker.close(given)
        self._made += 1
        self._boxes[pid] = box
        box.inside[pid] = process
        self._tell(box, pid)
        return None

    def _run_errand(self, order: dict[str, Any], given: list[int]) -> None:
        """Something for a box that waits to be told what to run."""
        if order["errand"] == "end":
            self._end(order["box"])
            return
        try:
            if order["errand"] != "trust":
                port = order.get("port", 0)
                made = errands.listen(given[0], port) if port else errands.reach(given[0])
                self._say(f"done {order['box']}", [made.fileno()])
                made.close()
            else:
                errands.trust(*given)
                self._say(f"done {order['box']}")
        except OSError as exc:
            self._say(f"undone {order['box']} {exc}")
        worker.close(given)

    def _end(self, number: int) -> None:
        """A box that has not told the supervisor how to end it."""
        for box in self._boxes.values():
            if box.number == number and box.first:
                os.kill(box.first, 9)

    def _found(self, order: dict[str, Any]) -> _Box:
        """A box that has only its first process yet."""
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
        """One that could not be made: nobody else knows of its first process."""
        os.kill(box.first, 9)
        os.close(box.handle)
        self._staying.pop(box.number, None)
        box.stays = False

    def _site(self, order: dict[str, Any], box: _Box, entrances: int, *, fresh: bool) -> confine.Site:
        """What has to be done in it; boxes of one kind share it."""
        key = marshal.dumps((order["shape"], order["without"], entrances, fresh))
        site = self._sites.get(key)
        if site is None:
            if len(self._sites) >= _MOST_SITES:
                self._sites.clear()
            site = confine.Site(order["shape"], box.spaces & ~kernel.NEWPID, entrances)
            site.filter, site.landlock_version = self._filter, self._landlock
            site.last_capability = self._last_capability
            site.own_id, site.lends = self._own_ids, self._own_ids and not self._root and fresh
            self._sites[key] = confine.plan(site, frozenset(order["without"]), fresh=fresh)
        return site

    def _fork_into(self, box: _Box) -> int:
        """A process in the pid namespace of the box, 0 there; the others it enters by itself."""
        if self._pins.look():
            worker.copied[0] = True
        if not box.spaces & kernel.NEWPID:
            return kernel.fork()
        kernel.call("setns", box.handle, kernel.NEWPID)
        pid = -1
        try:
            pid = kernel.fork()
        finally:
            if pid:  # also where it failed, as it does in a box that is just ending: the next one is another's
                kernel.call("setns", self._own, kernel.NEWPID)
        return pid

    def _tell(self, box: _Box, pid: int) -> None:
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
                continue  # nobody of ours: whatever it is, it must not be our end
            if pid == box.first:
                box.first = 0
                for each in box.inside:
                    os.kill(each, 9)  # the kernel did it, but for a box without a pid namespace
            else:
                self._left(box, pid, status, usage)
            if not box.first and not box.inside:
                self._say(f"ended {box.number} {box.last}")
                if box.stays:
                    del self._staying[box.number]
                    os.close(box.handle)

    def _left(self, box: _Box, pid: int, status: int, usage: resource.struct_rusage) -> None:
        cpu = usage.ru_utime + usage.ru_stime
        blocks = usage.ru_inblock + usage.ru_oublock
        number = box.inside.pop(pid)
        box.last = f"{status} {cpu:.6f} {usage.ru_maxrss * 1024} {blocks * 512}"
        if box.stays:
            self._say(f"left {box.number} {number} {box.last}")
        elif box.first:
            os.kill(box.first, 9)  # and so all that the program has left

    def _say(self, text: str, descriptors: list[int] | None = None) -> None:
        worker.send(self._control, text, descriptors or [])


class _Box:
    """One that lives."""

    def __init__(self, number: int, spaces: int, first: int) -> None:
        self.number = number
        """Which the supervisor gave it."""
        self.spaces = spaces
        self.first = first
        """The id of its first process, until that is reaped."""
        self.handle = os.pidfd_open(first)
        self.inside: dict[int, int] = {}
        """Further processes that were started here: id to the number that the supervisor gave them."""
        self.stays = False
        """Until it is killed; another one goes with its program."""
        self.last = "0 0 0 0"
        """How the process ended that ended last."""


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
