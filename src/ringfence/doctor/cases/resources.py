"""G, continued: processes, descriptors, and whose limits they are."""

from __future__ import annotations

import os
from pathlib import Path

from ringfence.core.model import Json
from ringfence.doctor.case import TIGHT, Case, Control, Trial
from ringfence.doctor.host_view import box_processes, is_first
from ringfence.doctor.judging import answered, limited, looked_at
from ringfence.doctor.props import Props

COUNTS = (
    Case(
        "G20",
        "fork until there are half as many processes again as allowed",
        "EAGAIN at the limit",
        """
        most, made = int(given["limits"]["processes"] * 1.5), 0
        def bomb():
            global made
            for _ in range(most):
                if os.fork() == 0:
                    time.sleep(a_while(3))
                    os._exit(0)
                made += 1
            return f"{made} processes"
        attempt(bomb)
        leave()
        """,
        owed=(answered("EAGAIN"), limited("pids")),
        limits=TIGHT,
    ),
    Case(
        "G21",
        "start threads until there are half as many again as processes are allowed",
        "refused at the limit: threads count",
        """
        import threading
        most, made = int(given["limits"]["processes"] * 1.5), 0
        stop = threading.Event()
        try:
            for _ in range(most):
                threading.Thread(target=stop.wait, args=(a_while(5),), daemon=True).start()
                made += 1
            say(True, f"{made} threads")
        except RuntimeError as exc:
            if sys.platform == "wasi":
                cannot("in WebAssembly there are no threads")
            say(False, f"{exc} after {made}")
        stop.set()
        leave()
        """,
        owed=(limited("pids"),),
        limits=TIGHT,
    ),
    Case(
        "G22",
        "open half as many files again as allowed",
        "EMFILE at the limit",
        """
        held = []
        def fill():
            for _ in range(int(given["limits"]["open_files"] * 1.5)):
                held.append(os.open(os.devnull if sys.platform != "wasi" else os.__file__, os.O_RDONLY))
            return f"{len(held)} open files"
        attempt(fill)
        """,
        owed=(answered("EMFILE"),),
        limits=TIGHT,
    ),
    Case(
        "G23",
        "raise one's own limits",
        "EPERM: they are hard",
        """
        import resource
        wrong = []
        checks = {"open files": (resource.RLIMIT_NOFILE, given["limits"]["open_files"]),
                  "processes": (resource.RLIMIT_NPROC, given["limits"]["processes"] + 4),
                  "file size": (resource.RLIMIT_FSIZE, given["limits"]["disk_bytes"] + 65536)}
        for name, (kind, most) in checks.items():
            hard = resource.getrlimit(kind)[1]
            if hard == resource.RLIM_INFINITY or hard > most:
                wrong.append(f"{name} {hard}")
        say(bool(wrong), ", ".join(wrong) or "none can be raised")
        """,
        limits=TIGHT,
    ),
    Case(
        "G24",
        "leave a core dump, with all that was in memory",
        "none: the limit stays 1, with which the kernel gives none to a program that collects them, either",
        """
        import resource
        hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        now = resource.getrlimit(resource.RLIMIT_CORE)
        say(not 0 <= hard <= 1 or now != (hard, hard), f"core files of up to {hard} bytes, then {now}")
        """,
    ),
    Case(
        "G25",
        "lock memory, so that it can never be taken back",
        "ENOMEM or EPERM",
        """
        libc = ctypes.CDLL(None, use_errno=True)
        held = buffer(MIB)
        def lock():
            if libc.mlock(held, ctypes.c_size_t(MIB)) == -1:
                raise OSError(ctypes.get_errno(), "")
        attempt(lock)
        """,
        owed=(answered("ENOMEM", "EPERM", "EAGAIN", "ENOSYS"),),
    ),
    Case(
        "G26",
        "take more pending signals, timers and message queues than one's share of the user's",
        "hard limits of its own",
        """
        import resource
        hard = resource.getrlimit(getattr(resource, "RLIMIT_SIGPENDING", 11))[1]
        queues = resource.getrlimit(getattr(resource, "RLIMIT_MSGQUEUE", 12))[1]
        say(hard < 0 or hard > 4096 or queues != 0, f"{hard} pending signals, {queues} bytes of message queues")
        """,
    ),
)


WATCHES = (
    Case(
        "G28",
        "take half of the file watchers that the host gives to a user",
        "a limit of its own, so that the host's own programs still get theirs",
        """
        held = 0
        try:
            while held < 64:
                call("inotify_init1", 0)
                held += 1
        except OSError as exc:
            pass
        say(held == 64, f"held {held}")
        """,
    ),
    Case(
        "G66",
        "join groups for multicast, list their sources, label flows: memory of the kernel's that nothing counts",
        "ENODEV",
        """
        import socket
        def join(family, level, option, value):
            with socket.socket(family, socket.SOCK_DGRAM) as each:
                each.setsockopt(level, option, value)
        one = (1).to_bytes(4, sys.byteorder)
        group = bytes((255, 2)) + bytes(13) + b"\x77"
        v4 = socket.inet_aton("224.0.0.77") + socket.inet_aton("127.0.0.1")
        label = group + bytes((0, 1, 2, 3)) + bytes((1, 255)) + (1).to_bytes(2, sys.byteorder) + bytes(8)
        any_of({
            "IP_ADD_MEMBERSHIP": lambda: join(socket.AF_INET, 0, 35, v4),
            "IP_MSFILTER": lambda: join(socket.AF_INET, 0, 41, v4 + one + bytes(4)),
            "IPV6_JOIN_GROUP": lambda: join(socket.AF_INET6, 41, 20, group + one),
            "IPV6_FLOWLABEL_MGR": lambda: join(socket.AF_INET6, 41, 32, label),
        })
        """,
    ),
    Case(
        "G62",
        "take memory for machine code that the host has little of, with filters for system calls of its own",
        "ENOMEM after a few",
        """
        filter_of_one = buffer(8, (6).to_bytes(2, "little") + bytes(2) + (0x7FFF0000).to_bytes(4, "little"))
        program = buffer(16, (1).to_bytes(8, "little") + ctypes.addressof(filter_of_one).to_bytes(8, "little"))
        ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)
        ways = (
            lambda: call("seccomp", 1, 0, program),
            lambda: call("prctl", 22, 2, program, 0, 0),
        )
        held = 0
        try:
            while held < 64:
                ways[held % 2]()
                held += 1
        except OSError as exc:
            say(False, f"{word(exc)} after {held}")
        else:
            say(True, f"installed {held}")
        """,
    ),
)


def _kept_out(trial: Trial) -> str | None:
    """The box that came second did not get to say anything."""
    return None if trial.claim else f"no other box could run: ended={trial.report.ended!r}"


def _beside_hog(id: str, tried: str, hog: str) -> Case:
    control = Control(impossible="it is about two boxes of one user")
    return Case(
        id, tried, "the other box runs as ever", "say(False, 'it runs')", _kept_out, beside=hog, control=control
    )


BESIDE = (
    _beside_hog(
        "G46",
        "have as many descriptors under way between processes as a user may, while another box is started",
        """
        import socket
        held, file = [], os.open("/dev/null", os.O_RDONLY)
        try:
            while True:
                pair = socket.socketpair()
                held.append(pair)
                pair[0].setblocking(False)
                try:
                    while True:
                        socket.send_fds(pair[0], [b"x"], [file] * 250)
                except BlockingIOError:
                    pass
        except OSError:
            pass
        ready()
        """,
    ),
    _beside_hog(
        "G47",
        "take as many watches of descriptors as there are, while another box is started",
        """
        import select
        held = []
        try:
            while True:
                held.append(select.epoll())
                for number in range(3, 20):
                    try:
                        held[-1].register(number)
                    except OSError:
                        pass
        except OSError:
            pass
        ready()
        """,
    ),
    _beside_hog(
        "G48",
        "take as many pipes and pending signals as a user may, while another box is started",
        """
        import fcntl
        held = []
        try:
            while len(held) < 600:
                held.append(os.pipe())
                try:
                    fcntl.fcntl(held[-1][1], 1031, MIB)
                except OSError:
                    pass
        except OSError:
            pass
        libc = ctypes.CDLL(None, use_errno=True)
        import signal
        signal.pthread_sigmask(signal.SIG_BLOCK, [40])
        for _ in range(20000):
            value = ctypes.c_void_p(1)
            if libc.sigqueue(os.getpid(), 40, value) == -1:
                break
        ready()
        """,
    ),
)

_CONTROLLERS = ("memory", "pids", "cpu")


def _groups(text: str) -> dict[str, str]:
    """Controller to path, as /proc/PID/cgroup tells; `` is the unified hierarchy."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        _, names, path = line.split(":", 2)
        found |= dict.fromkeys(names.split(","), path)
    return found


def _ungrouped(props: Props, facts: Json) -> Json:
    """Controllers in which we may make groups, and in which the box has none of its own."""
    ours = _groups(Path("/proc/self/cgroup").read_text())
    missing: set[str] = set()
    inside = box_processes(facts)
    for process in inside:
        if len(inside) > 1 and is_first(process):
            continue  # whatever the backend keeps there: no program ever runs in it
        theirs = _groups((process / "cgroup").read_text())
        missing |= {name for name in _CONTROLLERS if theirs.get(name, theirs.get("")) == ours.get(name, ours.get(""))}
    wrong = sorted(name for name in missing if _ours_to_make(name, ours))
    return {"ungrouped": ", ".join(wrong), "processes": len(inside)}


def _ours_to_make(controller: str, ours: dict[str, str]) -> bool:
    """May this process make a control group for a box? In the hierarchy of the controller, or in the unified one."""
    if controller in ours:
        return os.access(f"/sys/fs/cgroup/{controller}{ours[controller]}", os.W_OK)
    folder = Path(f"/sys/fs/cgroup{ours.get('', '/')}")
    listed = folder / "cgroup.subtree_control"
    return os.access(folder, os.W_OK) and listed.is_file() and controller in listed.read_text().split()


def _ungrouped_though_possible(trial: Trial) -> str | None:
    found = trial.seen.get("ungrouped")
    return f"shares the control group of the host for {found}" if found else None


GROUPS: tuple[Case, ...] = (
    Case(
        "G60",
        "share the control groups of the process that started it, whose limits are not the box's",
        "a group of its own for memory, processes and processor time",
        "ready()\nsay(False, 'looked at from outside')",
        _ungrouped_though_possible,
        owed=(looked_at,),
        observe=_ungrouped,
    ),
    Case(
        "G61",
        "leave or loosen its control group through the file system of groups",
        "ENOENT: it is not there",
        "there('/sys/fs/cgroup', '/sys/fs/cgroup/memory', '/sys/fs/cgroup/cgroup.procs', '/cgroup')",
    ),
)

CASES = COUNTS + WATCHES + BESIDE + GROUPS
