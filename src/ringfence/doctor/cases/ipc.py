"""S: sockets, shared memory and descriptors that others hold. And the namespaces themselves."""

from __future__ import annotations

from ringfence.doctor.case import Case, Control, Judge, Space, Trial, claimed
from ringfence.doctor.host_view import outer_namespaces
from ringfence.doctor.judging import looked_at, reached, revealed

_SHARED_IPC = Control(share=frozenset({"ipc"}))
_SHARED_NET = Control(share=frozenset({"net"}))
_OWN = "ENOENT: the box's own are empty"

_UNIX = """
import socket
def connect(name):
    with socket.socket(socket.AF_UNIX) as way:
        way.connect(name)
"""

REACHING = (
    Case(
        "S01",
        "connect to a socket file of the host, as an agent's or an engine's would be",
        "ENOENT",
        _UNIX + "attempt(lambda: connect(given['socket']))",
        reached("unix"),
        props=("unix",),
    ),
    Case(
        "S02",
        "connect to an abstract socket of the host",
        "ECONNREFUSED or EPERM",
        _UNIX + "attempt(lambda: connect('\\0' + given['abstract']))",
        reached("abstract"),
        props=("abstract",),
        control=_SHARED_NET,
    ),
    Case(
        "S03",
        "connect to an abstract socket of another box",
        "ECONNREFUSED or EPERM",
        _UNIX + "attempt(lambda: connect('\\0rf-' + str(given['limits']['wall_seconds']) + given['marker']))",
        beside=_UNIX
        + """
listener = socket.socket(socket.AF_UNIX)
listener.bind("\\0rf-" + str(given["limits"]["wall_seconds"]) + given["marker"])
listener.listen()
ready()
""",
        control=_SHARED_NET,
    ),
    Case(
        "S04",
        "see the names of the host's sockets",
        "none of them",
        """
        text = open("/proc/self/net/unix").read()
        say(given["abstract"] in text, "it is listed" if given["abstract"] in text else "not listed")
        """,
        props=("abstract",),
        control=_SHARED_NET,
    ),
    Case(
        "S10",
        "read shared memory of the host",
        _OWN,
        """
        libc = ctypes.CDLL(None, use_errno=True)
        libc.shmat.restype = ctypes.c_void_p
        def read():
            segment = call("shmget", given["key"], 0, 0)
            return ctypes.string_at(libc.shmat(segment, None, 0o10000), 10).decode()
        attempt(read)
        """,
        revealed,
        props=("shm",),
        control=_SHARED_IPC,
    ),
    Case(
        "S11",
        "use semaphores of the host",
        _OWN,
        "attempt(lambda: call('semget', given['key'], 0, 0) and None)",
        props=("sem",),
        control=_SHARED_IPC,
    ),
    Case(
        "S12",
        "use a message queue of the host",
        _OWN,
        "attempt(lambda: call('msgget', given['key'], 0) and None)",
        props=("msg",),
        control=_SHARED_IPC,
    ),
    Case(
        "S13",
        "open a POSIX message queue of the host",
        _OWN,
        "attempt(lambda: call('mq_open', given['queue'].encode(), os.O_RDWR, 0, None) and None)",
        props=("mq",),
        control=_SHARED_IPC,
    ),
    Case(
        "S14",
        "find shared memory that an earlier box left",
        _OWN,
        """
        try:
            call("shmget", int(given["marker"]) + 1, 4096, 0o1666)
            say(False, "left")
        except OSError as exc:
            say(False, word(exc))
        """,
        lambda trial: str(trial.after.get("detail")) if trial.after and trial.after.get("done") else None,
        then="attempt(lambda: call('shmget', int(given['marker']) + 1, 0, 0) and None)",
    ),
    Case(
        "S20",
        "use descriptors that the supervisor had open",
        "none but the three streams",
        """
        found = []
        for number in range(3, 1024):
            try:
                mode = os.fstat(number).st_mode
            except OSError:
                continue
            if sys.platform == "wasi" and stat.S_ISDIR(mode):
                continue  # the number of one of its own folders
            try:
                found.append(f"{number}: {os.readlink(f'/proc/self/fd/{number}')}")
            except OSError:
                found.append(str(number))
        say(bool(found), ", ".join(found[:4]) or "none")
        """,
    ),
    Case(
        "S21",
        "go out through a folder that another process left open (its number guessed as working folder)",
        "no descriptor leads out",
        """
        def out(number):
            os.chdir(f"/proc/self/fd/{number}")
            if not os.getcwd().startswith(given.get("workspace", "/workspace")):
                return open("inherited").read()
            raise OSError(errno.ENOENT, "")
        any_of({str(number): lambda number=number: out(number) for number in range(3, 40)})
        """,
    ),
    Case(
        "S22",
        "send descriptors to the supervisor over the output, until it has none left",
        "ENOTSOCK: the streams carry bytes alone",
        """
        import array, socket
        def send():
            with socket.socket(fileno=os.dup(1)) as way:
                way.sendmsg([b"\\n"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 8))])
        attempt(send)
        """,
        control=Control(features=frozenset({"socket"})),
    ),
)


def _own(space: Space) -> Judge:
    """Compared with the harness's own, and with those of the process that boxes are made by."""

    def judge(trial: Trial) -> str | None:
        namespace = (trial.claim or {}).get("spaces", {}).get(space)
        if namespace == trial.props.namespace(space):
            return f"{namespace} is the host's"
        if namespace in trial.seen.get("outside", {}).get(space, ()):
            return f"{namespace} is that of the process that makes boxes"
        return claimed(trial)

    return judge


_SPACES: dict[str, tuple[Space, str]] = {
    "S30": ("user", "user"),
    "S31": ("pid", "process id"),
    "S32": ("mnt", "mount"),
    "S33": ("ipc", "IPC"),
    "S34": ("uts", "host name"),
    "S35": ("net", "network"),
    "S36": ("cgroup", "control group"),
}
NAMESPACES = tuple(
    Case(
        id,
        f"share a {name} namespace with the host, or with what boxes are made by",
        "one of its own",
        f"""
        ready()
        name = os.readlink("/proc/self/ns/{space}")
        say(False, name, spaces={{"{space}": name}})
        """,
        _own(space),
        owed=(looked_at,),
        observe=outer_namespaces,
        control=Control(share=frozenset({space})),
    )
    for id, (space, name) in _SPACES.items()
)

CASES = REACHING + NAMESPACES
