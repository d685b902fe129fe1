"""G: memory, all of a box's together. Every bomb is half as large again as the limit, and stops there."""

from __future__ import annotations

from ringfence.box import Limits
from ringfence.promises.case import TIGHT, Case, Judge, Trial, claimed
from ringfence.promises.judging import answered, limited

_DEFAULT = Limits(wall_seconds=20.0)
_ENDED = "ended=oom, or the allocation fails with limit=memory"
_REFUSED = ("EPERM", "ENOSYS", "EACCES", "ENOSPC", "EINVAL", "ENOMEM", "EOPNOTSUPP", "ENOTSUP")
"""The last two are one: a kernel whose file system has no attributes of users."""
_START = """
want = int(given["limits"]["memory_bytes"] * 1.5)
def bomb(fill):
    try:
        held = fill()
    except OSError as exc:
        say(False, word(exc))
    except MemoryError:
        say(False, "MemoryError")
    else:
        time.sleep(a_while(0.4))  # whoever watches by looking needs a moment
        say(True, held)
"""


def _stopped(trial: Trial) -> str | None:
    """The facts say that memory was the limit; unless the means itself is refused."""
    report, detail = trial.report, str((trial.claim or {}).get("detail", ""))
    if report.limit == "memory" and report.ended in ("oom", "exited", "signalled"):
        return None
    if report.ended == "exited" and detail in _REFUSED:
        return None
    return f"the facts say ended={report.ended!r}, limit={report.limit!r}; the program {detail!r}"


def _bomb(id: str, tried: str, program: str, hit: Judge = claimed, limits: Limits = TIGHT) -> Case:
    return Case(id, tried, _ENDED, _START + program, hit, owed=(_stopped,), silent=True, limits=limits)


CASES = (
    _bomb(
        "G01",
        "fill memory from one process",
        """
held = []
def fill():
    while len(held) * MIB < want:
        held.append(b"x" * MIB)
    return f"holds {len(held)} MiB"
bomb(fill)
""",
    ),
    _bomb(
        "G02",
        "fill 300 MiB at the default limits",
        """
held = []
def fill():
    while len(held) < 300:
        held.append(b"x" * MIB)
    return f"holds {len(held)} MiB"
bomb(fill)
""",
        limits=_DEFAULT,
    ),
    _bomb(
        "G03",
        "fill memory from several processes, none of which is large",
        """
share = want // 8
pids = []
go, gone = os.pipe()
for _ in range(8):
    pid = os.fork()
    if pid == 0:
        held = b"x" * share
        os.write(gone, b"1")
        time.sleep(a_while(8))
        os._exit(0)
    pids.append(pid)
told = 0
end = time.monotonic() + a_while(6)
os.set_blocking(go, False)
while told < 8 and time.monotonic() < end:
    try:
        told += len(os.read(go, 8))
    except BlockingIOError:
        time.sleep(0.02)
time.sleep(a_while(0.3))
alive = sum(os.waitpid(pid, os.WNOHANG)[0] == 0 for pid in pids)
say(alive == told == 8, f"{told} of {alive} processes hold {share // MIB} MiB")
leave()
""",
    ),
    _bomb(
        "G04",
        "fill memory through anonymous files",
        """
def fill():
    held = 0
    while held < want:
        file = call("memfd_create", b"rf", 0)
        for _ in range(16):
            os.write(file, b"x" * MIB)
            held += MIB
    return f"holds {held // MIB} MiB"
bomb(fill)
""",
    ),
    _bomb(
        "G05",
        "fill memory that is shared and anonymous, which limits of a process do not count",
        """
import mmap
def fill():
    held = []
    while len(held) * 8 * MIB < want:
        held.append(mmap.mmap(-1, 8 * MIB))
        for at in range(0, 8 * MIB, 4096):
            held[-1][at] = 1
    return f"holds {len(held) * 8} MiB"
bomb(fill)
""",
    ),
    _bomb(
        "G06",
        "fill memory through System V segments, which outlive a process",
        """
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
def fill():
    held = 0
    while held < want:
        segment = call("shmget", 0, 8 * MIB, 0o1600)
        address = ctypes.c_void_p(libc.shmat(segment, None, 0))
        ctypes.memset(address, 1, 8 * MIB)
        libc.shmdt(address)
        held += 8 * MIB
    return f"holds {held // MIB} MiB"
bomb(fill)
""",
    ),
    _bomb(
        "G07",
        "fill the kernel's memory with what is under way in sockets",
        """
import socket
share, pids = want // 12, []
go, gone = os.pipe()
wait, waited = os.pipe()
def fill():
    held, total = [], 0
    while total < share:
        pair = socket.socketpair()
        held.append(pair)
        for end in pair:
            end.setblocking(False)
            try:
                while True:
                    total += end.send(b"x" * 65536)
            except BlockingIOError:
                pass
    return held
for _ in range(12):
    pid = os.fork()
    if pid == 0:
        held = []
        try:
            held = fill()
        except OSError:
            os._exit(3)
        # All of them hold theirs at the same time, however long each took.
        os.close(waited)
        os.write(gone, b"1")
        os.close(gone)
        os.read(wait, 1)
        os._exit(0)
    pids.append(pid)
os.close(gone)
while os.read(go, 12):
    pass
time.sleep(a_while(0.4))
os.close(waited)
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
say(codes == [0] * 12, f"{codes.count(0)} of 12 processes held {share // MIB} MiB each in sockets")
""",
        limits=_DEFAULT,
    ),
    _bomb(
        "G08",
        "fill the kernel's memory with page tables, one touched page in every two megabytes",
        """
import mmap
def fill():
    # Each touched page costs itself and a page of the table.
    wanted = want // 8192
    held = []
    while wanted > 0:
        area = mmap.mmap(-1, 2048 * 2 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
        area.madvise(15)
        for at in range(0, 2048 * 2 * MIB, 2 * MIB):
            area[at] = 1
        held.append(area)
        wanted -= 2048
    return f"holds {len(held) * 2048} tables"
bomb(fill)
""",
    ),
    _bomb(
        "G09",
        "hide data in extended attributes, which no quota of blocks counts",
        """
def fill():
    held = 0
    for number in range(4000):
        name = f"tmp/file-{number}"
        open(name, "w").close()
        for part in range(2):
            os.setxattr(name, f"user.part{part}", b"x" * 60000)
            held += 60000
        if held > want // 4:
            return f"holds {held // MIB} MiB"
bomb(fill)
""",
    ),
    Case(
        "G10",
        "fill memory through one's own input, opened again for writing",
        "it cannot be opened or written, or ended=oom",
        _START
        + """
def fill():
    file = os.open("/proc/self/fd/0", os.O_RDWR)
    for _ in range(want // MIB):
        os.write(file, b"x" * MIB)
    return f"holds {want // MIB} MiB"
bomb(fill)
""",
        owed=(_stopped,),
        silent=True,
        limits=_DEFAULT,
        stdin=b"given",
    ),
    _bomb(
        "G11",
        "fill the disk first and memory then, at the default limits",
        """
def disk():
    with open("tmp/big", "wb") as file:
        for _ in range(400):
            file.write(b"x" * MIB)
disk()
held = []
def fill():
    while len(held) < 300:
        held.append(b"x" * MIB)
    return f"holds {len(held)} MiB beside 400 MiB of disk"
bomb(fill)
""",
        limits=_DEFAULT,
    ),
    Case(
        "G12",
        "fill most of the memory first and the disk then, at the default limits",
        "ENOSPC at the disk limit: what lies in the workspace is not counted as memory",
        """
        held = [b"x" * MIB for _ in range(200)]
        def fill():
            with open("tmp/big", "wb", buffering=0) as file:
                for _ in range(600):
                    file.write(held[0])
            return f"wrote 600 MiB beside {len(held)} MiB of memory"
        attempt(fill)
        """,
        owed=(limited("disk"), answered("ENOSPC", "EFBIG")),
        limits=_DEFAULT,
    ),
)
