"""G: memory, all of a box's together. Every bomb is half as large again as the limit, and stops there."""

from __future__ import annotations

from ringfence.core.box import Limits
from ringfence.doctor.case import TIGHT, Case, Judge, Trial, claimed
from ringfence.doctor.judging import answered, limited, refusals

# Bombs of what no control group charges are stopped by a watcher, and on a machine that is busy it looks late.
_DEFAULT = Limits(wall_seconds=90.0)
_MANY_FILES = Limits(wall_seconds=20.0, memory_bytes=96 << 20)
_ENDED = "ended=oom, or the allocation fails with limit=memory"
_REFUSED = ("EPERM", "ENOSYS", "EACCES", "ENOSPC", "EINVAL", "ENOMEM", "EMFILE", "EOPNOTSUPP", "ENOTSUP")
"""The last two are one: a kernel whose file system has no attributes of users."""
_START = """
want = int(given["limits"]["memory_bytes"] * 1.5)
def hold(seconds):
    # A watcher that polls needs a moment, and longer on a busy machine: in a box we stay until we are stopped.
    time.sleep(max(a_while(seconds), 0.6 * given["limits"]["wall_seconds"] if given["watched"] else 0))
def bomb(fill):
    try:
        held = fill()
    except OSError as exc:
        say(False, word(exc))
    except MemoryError:
        say(False, "MemoryError")
    else:
        hold(1.5)
        say(True, held)
def in_processes(count, fill):
    # Each of so many processes calls fill(its number), and all hold what they filled at the same time. Returned: how
    # many held it, and their exit codes; 3 where the kernel refused.
    filled, filled_end = os.pipe()
    wait, wait_end = os.pipe()
    pids = []
    for worker in range(count):
        pid = os.fork()
        if pid == 0:
            try:
                held = fill(worker)
            except OSError:
                os._exit(3)
            # All of them hold theirs at the same time, however long each took.
            os.close(wait_end)
            os.write(filled_end, b"1")
            os.close(filled_end)
            os.read(wait, 1)
            os._exit(0)
        pids.append(pid)
    os.close(filled_end)
    done = b""
    while more := os.read(filled, count):
        done += more
    # All of them want half as much again as the limit: with less than two thirds of it, none is exceeded.
    if 3 * len(done) >= 2 * count:
        hold(4)
    os.close(wait_end)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return codes.count(0), codes
"""


def _stopped(trial: Trial) -> str | None:
    """The facts say that memory was the limit; unless the means itself is refused."""
    report = trial.report
    detail = str((trial.claim or {}).get("detail", ""))
    if report.limit == "memory" and report.ended in ("oom", "exited", "signalled"):
        return None
    if report.ended == "exited" and detail in refusals(trial, _REFUSED):
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
        time.sleep(given["limits"]["wall_seconds"])
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
hold(0.3)
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
share = want // 12
def fill(worker):
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
holding, codes = in_processes(12, fill)
say(holding == 12, f"{holding} of 12 processes held {share // MIB} MiB each in sockets")
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
    _bomb(
        "G13",
        "fill shared memory and let go of its pages, which stay, but count for no process",
        """
import mmap
def fill():
    held = []
    while len(held) * 8 * MIB < want:
        held.append(mmap.mmap(-1, 8 * MIB))
        for at in range(0, 8 * MIB, 4096):
            held[-1][at] = 1
        held[-1].madvise(mmap.MADV_DONTNEED)
    kept = sum(area[at] for area in held for at in range(0, 8 * MIB, 4096))
    return f"holds {kept * 4096 // MIB} MiB"
bomb(fill)
""",
    ),
    _bomb(
        "G14",
        "fill memory in a process whose maps cannot be read",
        """
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(4, 0, 0, 0, 0)
held = []
def fill():
    while len(held) * MIB < want:
        held.append(b"x" * MIB)
    return f"holds {len(held)} MiB"
bomb(fill)
""",
    ),
    _bomb(
        "G15",
        "fill memory from a second thread, when the first has ended and its process looks like a dead one",
        """
import threading
libc = ctypes.CDLL(None, use_errno=True)
held = []
def fill():
    while len(held) * MIB < want:
        held.append(b"x" * MIB)
    return f"holds {len(held)} MiB"
def later():
    time.sleep(a_while(0.1))
    bomb(fill)
    leave()
threading.Thread(target=later).start()
libc.syscall(93 if os.uname().machine == "aarch64" else 60, 0)
""",
    ),
    _bomb(
        "G16",
        "fill the kernel's memory with datagrams that no program reads",
        """
import resource, socket
share = want // 4
def fill(worker):
    held, total, payload = [], 0, b"x" * 32768
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    while total < share:
        receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * MIB)
        receiver.bind(("127.0.0.1", 0))
        held.append(receiver)
        # What does not fit is dropped without a word; the socket says what it holds (SO_MEMINFO).
        for _ in range(receiver.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // len(payload) + 1):
            sender.sendto(payload, receiver.getsockname())
        total += int.from_bytes(receiver.getsockopt(socket.SOL_SOCKET, 55, 36)[:4], sys.byteorder)
    return held
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
holding, codes = in_processes(4, fill)
say(holding == 4, f"{holding} of 4 processes held {share // MIB} MiB each in datagrams")
""",
        limits=_DEFAULT,
    ),
    _bomb(
        "G64",
        "fill the kernel's memory with copies of what was sent, kept until a program asks when that was",
        """
import resource, socket
share = want // 4
def fill(worker):
    held, total, payload = [], 0, b"x" * 32768
    when = (socket.SOL_SOCKET, 37, (2).to_bytes(4, sys.byteorder))  # SO_TIMESTAMPING with one message
    while total < share:
        sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        held.append(sender)
        before, now = -1, 0
        while now > before:
            sender.sendmsg([payload], [when], 0, ("127.0.0.1", 9))
            before, now = now, int.from_bytes(sender.getsockopt(socket.SOL_SOCKET, 55, 36)[:4], sys.byteorder)
        total += now
    return held
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
holding, codes = in_processes(4, fill)
say(holding == 4, f"{holding} of 4 processes held {share // MIB} MiB each in copies")
""",
        limits=_DEFAULT,
    ),
    _bomb(
        "G65",
        "keep pages of files that were cut, in sockets",
        """
import socket
share = want // 4
def fill(worker):
    held, total = [], 0
    file = os.open(f"tmp/{worker}", os.O_RDWR | os.O_CREAT)
    while total < share:
        held.append(socket.socketpair())
        held[-1][0].setblocking(False)
        os.pwrite(file, b"x" * MIB, 0)
        total += os.sendfile(held[-1][0].fileno(), file, 0, MIB)
        os.ftruncate(file, 0)
    return held
holding, codes = in_processes(4, fill)
say(holding == 4, f"{holding} of 4 processes held {share // MIB} MiB each in pages")
""",
        limits=_DEFAULT,
    ),
    _bomb(
        "G17",
        "fill the kernel's memory with pipes",
        """
import fcntl
share = want // 12
def fill(worker):
    held, total = [], 0
    while total < share:
        ends = os.pipe()
        held.append(ends)
        try:
            fcntl.fcntl(ends[1], 1031, MIB)
        except OSError:
            pass
        os.set_blocking(ends[1], False)
        try:
            while True:
                total += os.write(ends[1], b"x" * 65536)
        except BlockingIOError:
            pass
    return held
holding, codes = in_processes(12, fill)
# The kernel gives a user's pipes one page each when there are many, so that descriptors come to an end first.
held = f"{holding} of 12 processes held {share // MIB} MiB each in pipes"
say(holding == 12, "EMFILE" if 3 in codes else held)
""",
        limits=_DEFAULT,
    ),
    _bomb(
        "G18",
        "fill the kernel's memory with locks on parts of files",
        """
import fcntl
# A lock takes some 200 bytes; so many on one file that the kernel still finds its way quickly.
each, files = 3000, want // 200 // 3000
share = files // 8 + 1
def fill(worker):
    held = []
    for number in range(share):
        held.append(os.open(f"tmp/{worker}-{number}", os.O_RDWR | os.O_CREAT))
        for at in range(each):
            fcntl.lockf(held[-1], fcntl.LOCK_EX, 1, (each - at) * 2)
    return held
holding, codes = in_processes(8, fill)
say(holding == 8, f"{holding} of 8 processes held {share * each} locks each")
""",
    ),
    _bomb(
        "G29",
        "fill the kernel's memory with connections that nobody accepts, which have no descriptor",
        """
import socket
share = want // 2000 // 8
def fill(worker):
    held, made = [], 0
    for _ in range(40):
        server = socket.socket()
        server.bind(("127.0.0.1", 0))
        server.listen(1 << 16)
        held.append(server)
        try:
            for _ in range(4000):
                with socket.socket() as client:
                    client.setblocking(False)
                    client.connect_ex(server.getsockname())
                    made += client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
                if made >= share:
                    return held
        except OSError as exc:
            if exc.errno != errno.EADDRNOTAVAIL:
                raise
    return held
holding, codes = in_processes(8, fill)
say(holding == 8, f"{holding} of 8 processes held {share} connections each")
""",
    ),
    _bomb(
        "G63",
        "fill the kernel's memory with data in connections that nobody accepts",
        """
import socket
PIECE = 32 << 10
share = want // 8
def fill(worker):
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen(1 << 12)
    for _ in range(share // PIECE + 1):
        with socket.socket() as client:
            client.settimeout(a_while(10))
            client.connect(server.getsockname())
            client.sendall(b"x" * PIECE)
    return server
holding, codes = in_processes(8, fill)
say(holding == 8, f"{holding} of 8 processes held {share >> 20} MiB each")
""",
    ),
    _bomb(
        "G19",
        "fill memory that grows downwards, as a stack does",
        """
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
def fill():
    held = 0
    while held < want:
        area = libc.mmap(None, 8 * MIB, 3, 0x122, -1, 0)
        if area == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), "")
        ctypes.memset(area, 1, 8 * MIB)
        held += 8 * MIB
    return f"holds {held // MIB} MiB"
bomb(fill)
""",
    ),
    _bomb(
        "G27",
        "fill the kernel's memory with what is to be waited for",
        """
import resource
most = min(1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]) - 24
def fill(worker):
    import select
    watchers = [select.epoll() for _ in range(most // 2)]
    targets = [os.eventfd(0) for _ in range(most // 2)]
    for watcher in watchers:
        for target in targets:
            watcher.register(target)
    return watchers, targets
holding, codes = in_processes(8, fill)
held = f"{holding} of 8 processes held {(most // 2) ** 2} watches each"
say(holding == 8, "EMFILE" if 3 in codes else held)
""",
        limits=_MANY_FILES,
    ),
)
