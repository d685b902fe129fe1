"""X: the environment, secrets, and what a process inherits by accident."""

from __future__ import annotations

import os
import socket

from ringfence.core.model import Json
from ringfence.doctor.case import Case, Control, Trial, claimed
from ringfence.doctor.host_view import box_processes, is_first, parent_of
from ringfence.doctor.judging import claimed_after, looked_at, seen
from ringfence.doctor.props import Props
from ringfence.doctor.stage import BLOCKED, GROUP, IGNORED, UMASK, VARIABLE

_SHARED = {"uts": Control(share=frozenset({"uts"})), "cgroup": Control(share=frozenset({"cgroup"}))}


def _host_name(trial: Trial) -> str | None:
    name = str((trial.claim or {}).get("detail"))
    return f"it is called {name}, as the host is" if name == socket.gethostname() else claimed(trial)


def _host_sizes(trial: Trial) -> str | None:
    """What files of the system say in the box is what they say here."""
    told = (trial.claim or {}).get("told", {})
    for name, text in told.items():
        try:
            with open(f"/proc/{name}") as file:
                ours = file.read()
        except OSError:
            continue
        if name == "meminfo":
            text, ours = text.partition("\n")[0], ours.partition("\n")[0]
        if text == ours or name in _HOSTS_ALONE:
            return f"/proc/{name} is the host's"
    return claimed(trial)


_HOSTS_ALONE = ("cmdline", "diskstats", "interrupts", "modules", "sys/kernel/random/boot_id", "vmstat")
"""Files that a box cannot have of its own."""


def _same_twice(trial: Trial) -> str | None:
    """Two boxes, one after the other, came to the same value."""
    first = (trial.claim or {}).get("detail")
    second = (trial.after or {}).get("detail")
    return f"both got {first}" if first and first == second else None


def _neighbours(props: Props, facts: Json) -> Json:
    """The other box, as the host counts it."""
    inside = box_processes(facts["neighbour"])
    outside = {parent_of(process) for process in inside} - set(inside)
    return {"processes": [int(process.name) for process in {*inside, *outside}]}


def _knows_processes(trial: Trial) -> str | None:
    shared = set((trial.claim or {}).get("numbers", ())) & set(trial.seen.get("processes", ()))
    return f"process {min(shared)} of another box" if shared else None


def _ids(props: Props, facts: Json) -> Json:
    """Who a box is on the host: its user id there, where that tells anything."""
    found = _users(facts)
    ours = str(os.geteuid())
    if os.geteuid() != 0 and found <= {ours}:
        return {"processes": len(box_processes(facts))}  # without subordinate ids a user has one to give
    neighbour = facts.get("neighbour") or {}
    others = _users(neighbour) if neighbour else set()
    shared = found & {ours, *others}
    return {"shared id": ", ".join(sorted(shared)), "processes": len(found)}


def _users(facts: Json) -> set[str]:
    """The users of all processes in a box, but for the first process if it is the backend's own."""
    inside = box_processes(facts)
    return {str(_user(str(process))) for process in inside if len(inside) == 1 or not is_first(process)} - {"0"}


def _root(props: Props, facts: Json) -> Json:
    inside = box_processes(facts)
    found = [process for process in inside if _user(str(process)) == 0]
    return {"root": f"process {found[0].name}" if found else "", "processes": len(inside)}


def _user(process: str) -> int:
    with open(f"{process}/status") as file:
        return next((int(line.split()[1]) for line in file if line.startswith("Uid:")), -1)


CASES = (
    Case(
        "X01",
        "read a secret from the supervisor's environment",
        "only names that were declared are there",
        f"""
        found = os.environ.get({VARIABLE!r})
        say(found is not None, "it is there" if found else ", ".join(sorted(os.environ)))
        """,
    ),
    Case(
        "X02",
        "read it from the environment that processes were started with",
        "not there",
        f"""
        found = []
        for pid in [name for name in os.listdir("/proc") if name.isdigit()] + ["self"]:
            try:
                if {VARIABLE!r}.encode() in open(f"/proc/{{pid}}/environ", "rb").read():
                    found.append(pid)
            except OSError:
                pass
        say(bool(found), "in process " + ", ".join(found) if found else "nowhere")
        """,
    ),
    Case(
        "X03",
        "find secrets of the supervisor in one's own memory",
        "none: what a box is a copy of never saw one",
        """
        found = memory_of("self", b"rf-", b"canary-")
        say(bool(found), f"in {found}" if found else "nowhere")
        """,
    ),
    Case(
        "X04",
        "find what an earlier program was given in one's own memory",
        "nowhere: orders never pass through what boxes are copies of",
        "held = 'the-payload-of-the-first'\nsay(False, 'ran')",
        claimed_after,
        then="""
        found = memory_of("self", b"the-payload-", b"of-the-first")
        say(bool(found), f"in {found}" if found else "nowhere")
        """,
    ),
    Case(
        "X16",
        "find the host's process numbers of other boxes in what the interpreter was forked with",
        "none: what a box is a copy of does not know them, or forgot",
        """
        numbers, known = set(), {}
        def walk(value, depth):
            if isinstance(value, int):
                numbers.add(int(value))
            elif depth == 0 or id(value) in known:
                return
            elif isinstance(value, (dict, list, tuple, set, frozenset)):
                known[id(value)] = value
                for item in [*value] + ([*value.values()] if isinstance(value, dict) else []):
                    walk(item, depth - 1)
            elif hasattr(value, "__dict__") and not isinstance(value, (type, type(sys))):
                walk(dict(vars(value)), depth - 1)
        ready(neighbour=given["neighbour"])
        frame = sys._getframe().f_back
        while frame is not None:
            walk(dict(frame.f_locals), 4)
            walk(dict(frame.f_globals), 4)
            frame = frame.f_back
        say(False, f"{len(numbers)} numbers", numbers=sorted(numbers))
        """,
        _knows_processes,
        owed=(looked_at,),
        beside="ready()",
        observe=_neighbours,
    ),
    Case(
        "X05",
        "learn the name of the host",
        "a name that all boxes have",
        "say(False, os.uname().nodename)",
        _host_name,
        control=_SHARED["uts"],
    ),
    Case(
        "X17",
        "learn from /proc how large and how busy the host is, and how it was started",
        "sizes are the limits of the box; the rest is absent",
        f"""
        told = {{}}
        for name in ("meminfo", "version", "stat", *{_HOSTS_ALONE!r}):
            try:
                told[name] = open(f"/proc/{{name}}").read()[:4000]
            except OSError:
                pass
        say(False, ", ".join(told) or "nothing", told=told)
        """,
        _host_sizes,
    ),
    Case(
        "X06",
        "learn where in the host's control groups one is, and who made the box",
        "no path of the host's, and no process number",
        """
        text = open("/proc/self/cgroup").read()
        paths = sorted({line.split(":", 2)[2] for line in text.splitlines()})
        told = [path for path in paths if str(given["harness"]) in path or path.count("/") > 1]
        say(bool(told), ", ".join(told or paths))
        """,
        control=_SHARED["cgroup"],
    ),
    Case(
        "X07",
        "keep the supplementary groups of the process that started it",
        "none that mean anything",
        f"""
        groups = os.getgroups()
        overflow = 65534
        say({GROUP} in groups or overflow in groups, f"groups {{groups}}")
        """,
    ),
    Case(
        "X08",
        "inherit the umask of the process that started it",
        "one of its own",
        f"found = os.umask(0o022)\nsay(found == {UMASK}, f'umask {{found:03o}}')",
    ),
    Case(
        "X09",
        "inherit ignored and blocked signals",
        "none",
        f"""
        held = status("SigBlk", "SigIgn")
        blocked, ignored = int(held["SigBlk"], 16), int(held["SigIgn"], 16)
        wrong = [name for name, found in (("blocked", blocked >> {int(BLOCKED) - 1} & 1),
                                          ("ignored", ignored >> {int(IGNORED) - 1} & 1)) if found]
        say(bool(wrong), ", ".join(wrong) or "none")
        """,
    ),
    Case(
        "X15",
        "inherit the right to run before others",
        "none: both limits are 0",
        """
        import resource
        held = [resource.getrlimit(kind)[1] for kind in (resource.RLIMIT_RTPRIO, resource.RLIMIT_NICE)]
        say(any(held), f"real-time priority {held[0]}, nice {held[1]}")
        """,
    ),
    Case(
        "X10",
        "be somewhere on the host: the working folder",
        "/workspace",
        """
        where = os.getcwd()
        say(where != "/workspace" or os.readlink("/proc/self/cwd") != "/workspace", where)
        """,
    ),
    Case(
        "X11",
        "draw the same random numbers as another box",
        "other numbers",
        "import random\nsay(False, random.getrandbits(64))",
        _same_twice,
        then="import random\nsay(False, random.getrandbits(64))",
    ),
    Case(
        "X12",
        "foresee the addresses and hashes of another box, where a fresh layout was asked for",
        "other addresses, other hashes",
        "say(False, f'{id(int):#x} {hash(\"ringfence\")}')",
        _same_twice,
        then="say(False, f'{id(int):#x} {hash(\"ringfence\")}')",
        layout="fresh",
    ),
    Case(
        "X13",
        "be the host's root",
        "no process of the box is user 0 on the host",
        """
        ready()
        held = open("/proc/self/uid_map").read().split()
        say(held[2] != "1", f"map {' '.join(held)}")
        """,
        seen("root", "a process of the box is root on the host"),
        owed=(looked_at,),
        observe=_root,
        control=Control(impossible="a control never runs as root"),
    ),
    Case(
        "X14",
        "be the same user on the host as another box or as the supervisor, where there can be one for each",
        "a user id of its own",
        "ready(neighbour=given['neighbour'])\nsay(False, 'looked at from outside')",
        seen("shared id", "user on the host"),
        beside="ready()",
        owed=(looked_at,),
        observe=_ids,
    ),
)
