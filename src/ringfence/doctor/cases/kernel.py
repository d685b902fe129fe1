"""K: the kernel's surface. Any answer of the kernel's own code, an EINVAL too, means that the call was reached."""

from __future__ import annotations

from ringfence.doctor.case import Case, Control
from ringfence.doctor.judging import answered, counted, refused

_FLOOD = 3000

# Identifier: the call, what it is for, and the program, which calls `reach` or `attempt`.
_CALLS: dict[str, tuple[str, str, str]] = {
    "K01": ("unshare", "make a user namespace, in which one is root", "reach('unshare', 0x10000000)"),
    "K02": ("unshare", "make a network namespace, to administer it", "reach('unshare', 0x40000000)"),
    "K03": ("unshare", "make a mount namespace", "reach('unshare', 0x00020000)"),
    "K04": ("unshare", "make a time namespace", "reach('unshare', 0x00000080)"),
    "K05": ("clone", "fork into a user namespace", "reach_fork('clone', 0x10000000 | 17, 0, 0, 0, 0)"),
    "K06": ("setns", "enter another namespace", "reach('setns', os.open('/proc/self/ns/uts', os.O_RDONLY), 0)"),
    "K08": (
        "clone",
        "make a child of one's own parent, which is no part of the box and never asked for one",
        "reach_fork('clone', 0x8000 | 17, 0, 0, 0, 0, sibling=True)",
    ),
    "K10": ("mount", "mount a file system", "reach('mount', b'none', b'tmp', b'tmpfs', 0, None)"),
    "K11": (
        "mount",
        "make the input folder writable by mounting it anew",
        "reach('mount', None, b'input', None, 0x1020, None)",
    ),
    "K12": ("umount2", "take a mount away, to see what lies beneath", "reach('umount2', b'/proc', 2)"),
    "K13": ("pivot_root", "swap the root", "reach('pivot_root', b'.', b'.')"),
    "K14": ("open_tree", "copy a tree of mounts", "reach('open_tree', -100, b'/', 1)"),
    "K15": ("move_mount", "move a mount", "reach('move_mount', -100, b'/', -100, b'tmp', 0)"),
    "K16": ("fsopen", "open a file system driver", "reach('fsopen', b'tmpfs', 0)"),
    "K17": ("fsmount", "mount what was opened", "reach('fsmount', -1, 0, 0)"),
    "K18": ("fspick", "reconfigure a mount", "reach('fspick', -100, b'/', 0)"),
    "K19": ("mount_setattr", "take read-only from a mount", "reach('mount_setattr', -100, b'/', 0, buffer(32), 32)"),
    "K20": ("chroot", "change the root", "reach('chroot', b'tmp')"),
    "K30": ("io_uring_setup", "set up io_uring, past every filter", "reach('io_uring_setup', 2, buffer(120))"),
    "K31": ("io_uring_enter", "submit to io_uring", "reach('io_uring_enter', -1, 0, 0, 0, None, 0)"),
    "K32": ("io_uring_register", "register with io_uring", "reach('io_uring_register', -1, 0, None, 0)"),
    "K33": ("bpf", "load a program into the kernel", "reach('bpf', 99, buffer(64), 64)"),
    "K34": (
        "perf_event_open",
        "watch the processor's counters",
        "reach('perf_event_open', buffer(128, struct.pack('IIQQQQQ', 1, 112, 0, 0, 0, 0, 0x60)), 0, -1, -1, 0)",
    ),
    "K35": ("userfaultfd", "stop the kernel in the middle of a copy", "reach('userfaultfd', 1)"),
    "K36": ("keyctl", "find credentials in the keyring", "reach('keyctl', 10, -3, b'user', b'rf-canary', 0)"),
    "K37": ("add_key", "add to the session keyring", "reach('add_key', b'user', b'rf-other', b'x', 1, -3)"),
    "K38": ("request_key", "search all keyrings", "reach('request_key', b'user', b'rf-canary', None, 0)"),
    "K39": ("fanotify_init", "watch every file of a file system", "reach('fanotify_init', 0x200, 0)"),
    "K40": (
        "name_to_handle_at",
        "get the handle of a file, which opens it from anywhere",
        "reach('name_to_handle_at', -100, b'.', buffer(136, struct.pack('I', 128)), buffer(4), 0)",
    ),
    "K41": (
        "open_by_handle_at",
        "open a file of the host by a guessed handle",
        "reach('open_by_handle_at', -1, buffer(136, struct.pack('II', 8, 1)), 0)",
    ),
    "K42": ("reboot", "restart the machine (with a wrong password)", "reach('reboot', 1, 2, 3, None)"),
    "K43": ("sethostname", "rename the machine", "reach('sethostname', b'other', 5)"),
    "K44": ("setdomainname", "rename the domain", "reach('setdomainname', b'other', 5)"),
    "K45": ("quotactl", "change quotas", "reach('quotactl', 0x80000000, b'/dev/none', 0, None)"),
    "K46": ("syslog", "read the kernel's log", "reach('syslog', 99, None, 0)"),
    "K47": ("adjtimex", "read and set the machine's clock", "reach('adjtimex', buffer(256))"),
    "K48": ("personality", "take the randomness out of addresses", "reach('personality', 0x0040000)"),
    "K49": ("kcmp", "compare what processes share", "reach('kcmp', os.getpid(), os.getpid(), 0, 0, 0)"),
    "K50": ("io_setup", "use up the machine's asynchronous I/O, of which there is one lot for all", """
        reach("io_setup", 64, buffer(8))
        """),
    "K51": ("migrate_pages", "move memory between nodes", "reach('migrate_pages', os.getpid(), 0, None, None)"),
    "K52": ("move_pages", "learn where memory lies", "reach('move_pages', 0, 0, None, None, None, 0)"),
    "K53": ("process_madvise", "advise on another's memory", "reach('process_madvise', -1, None, 0, 0, 0)"),
    "K54": ("listmount", "list mounts by number", """
        reach("listmount", buffer(32, struct.pack("IIQQ", 24, 0, 2**64 - 1, 0)), buffer(64), 8, 0)
        """),
    "K55": ("pidfd_getfd", "copy a descriptor out of a process", "reach('pidfd_getfd', -1, 0, 0)"),
    "K56": ("vmsplice", "give pages to a pipe and keep them", """
        read, write = os.pipe()
        held = buffer(4096, b"x")
        reach("vmsplice", write, iovec(ctypes.addressof(held), 4096), 1, 0)
        """),
}  # fmt: skip

CALLS = tuple(
    Case(id, f"{what} ({name})", "EPERM and in the facts, or ENOSYS", program, owed=(refused(name),))
    for id, (name, what, program) in _CALLS.items()
)

ROUND_ABOUT = (
    Case(
        "K59",
        "make a process that opens a file wait, by a lease on it",
        "EACCES: there are no leases",
        """
        import fcntl
        file = os.open("output/leased", os.O_RDWR | os.O_CREAT)
        attempt(lambda: [fcntl.fcntl(file, 1024, kind) for kind in (fcntl.F_WRLCK, fcntl.F_UNLCK)][0] or None)
        """,
        owed=(answered("EACCES"),),
    ),
    Case(
        "K77",
        "leave a mark with a file of the host for others to see, by a hint on it",
        "EINVAL: files take no hints",
        """
        import fcntl
        file = os.open("/bin/sh", os.O_RDONLY)
        attempt(lambda: fcntl.fcntl(file, 1036, struct.pack("Q", 0)) and None)
        """,
        owed=(answered("EINVAL"),),
    ),
    Case(
        "K60",
        "fork into a user namespace by clone3, whose flags no filter sees",
        "ENOSYS",
        "reach_fork('clone3', buffer(88, struct.pack('QQQQQ', 0x10000000, 0, 0, 0, 17)), 88)",
    ),
    Case(
        "K61",
        "make a refused call from machine code of one's own",
        "it runs, and is refused all the same",
        """
        import mmap
        which = number("unshare")
        if os.uname().machine == "aarch64":
            words = [0xD2800008 | which << 5, 0xD4000001, 0xD65F03C0]
            code = struct.pack("III", *words)
        else:
            code = b"\\xb8" + struct.pack("I", which) + b"\\x0f\\x05\\xc3"
        page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE)
        page.write(code)
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        # Only then to be executed: what was written before, the kernel shows to every cache.
        ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), 5)
        result = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_long)(address)(0x10000000)
        say(result not in (-1, -38), f"{result}")
        """,
        owed=(refused("unshare"),),
    ),
    Case(
        "K62",
        "make a refused call from another thread",
        "refused there too",
        """
        import threading
        thread = threading.Thread(target=lambda: reach("unshare", 0x04000000))
        thread.start()
        thread.join()
        """,
        owed=(refused("unshare"),),
    ),
    Case(
        "K63",
        "make a refused call from a program that was started anew",
        "refused there too",
        """
        import subprocess
        if not os.path.exists("/usr/bin/unshare"):
            cannot("there is no /usr/bin/unshare")
        made = subprocess.run(["/usr/bin/unshare", "--user", "--map-root-user", "/bin/true"], capture_output=True)
        say(made.returncode == 0, made.stderr.decode().strip() or made.returncode)
        """,
    ),
    Case(
        "K64",
        "install a filter of one's own that allows everything, and then make a refused call",
        "a filter can only be tightened",
        """
        allow = buffer(8, struct.pack("HBBI", 6, 0, 0, 0x7FFF0000))
        program = buffer(16, struct.pack("HxxxxxxQ", 1, ctypes.addressof(allow)))
        try:
            call("prctl", 38, 1, 0, 0, 0)
            call("seccomp", 1, 0, program)
        except OSError:
            pass
        reach("unshare", 0x04000000)
        """,
        owed=(refused("unshare"),),
    ),
    Case(
        "K65",
        "restrict oneself by Landlock and gain a file by it",
        "a ruleset can only be tightened",
        """
        try:
            rules = call("landlock_create_ruleset", buffer(8, struct.pack("Q", 1)), 8, 0)
            call("prctl", 38, 1, 0, 0, 0)
            call("landlock_restrict_self", rules, 0)
        except OSError:
            pass
        # Its mode and its mount would let it: of all that stands in the way, this is Landlock's alone.
        attempt(lambda: os.close(os.open("/proc/self/comm", os.O_WRONLY)))
        """,
        owed=(answered("EACCES"),),
        rests_on="landlock",
    ),
    Case(
        "K07",
        "get a handle on the namespace that owns one's own",
        "ENOTTY or EPERM",
        """
        import fcntl
        def ask():
            os.close(fcntl.ioctl(os.open("/proc/self/ns/net", os.O_RDONLY), 0xB701))
        attempt(ask)
        """,
    ),
    Case(
        "K57",
        "load a filter program into the kernel through a socket",
        "EPERM",
        """
        import socket
        allow = buffer(8, struct.pack("HBBI", 6, 0, 0, 0xFFFF))
        def attach():
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as way:
                way.setsockopt(socket.SOL_SOCKET, 26, struct.pack("HxxxxxxQ", 1, ctypes.addressof(allow)))
        attempt(attach)
        """,
    ),
    Case(
        "K58",
        "have one's memory merged with that of strangers, to learn what is in theirs",
        "EINVAL or EPERM",
        """
        import mmap
        held = mmap.mmap(-1, 65536, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        attempt(lambda: held.madvise(12))
        """,
    ),
    Case(
        "K66",
        "flood the supervisor with refused calls",
        "each is refused and counted, and the run is not held up",
        f"""
        done = 0
        for _ in range({_FLOOD}):
            try:
                os.close(call("io_uring_setup", 2, buffer(120)))
                done += 1
            except OSError:
                pass
        say(done > 0, f"{{done}} of {_FLOOD} succeeded")
        """,
        owed=(counted("io_uring_setup", _FLOOD),),
    ),
    Case(
        "K67",
        "flood it from many threads at once",
        "each is refused and counted",
        f"""
        import threading
        done = []
        def flood():
            for _ in range({_FLOOD // 10}):
                try:
                    os.close(call("io_uring_setup", 2, buffer(120)))
                    done.append(1)
                except OSError:
                    pass
        threads = [threading.Thread(target=flood) for _ in range(10)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        say(bool(done), f"{{len(done)}} of {_FLOOD} succeeded")
        """,
        owed=(counted("io_uring_setup", _FLOOD),),
    ),
    Case(
        "K68",
        "call what the kernel of tomorrow may have",
        "ENOSYS: what is not known is not there",
        """
        libc = ctypes.CDLL(None, use_errno=True)
        answers = set()
        for one in (*range(470, 520), 1000, 4000):
            libc.syscall(ctypes.c_long(one), 0, 0, 0, 0, 0, 0)
            answers.add(errno.errorcode.get(ctypes.get_errno(), "none"))
        say(answers != {"ENOSYS"}, ", ".join(sorted(answers)))
        """,
        control=Control(impossible="a call that no kernel has yet cannot succeed"),
    ),
)

_STATE: dict[str, tuple[str, str, str]] = {
    "K70": ("hold capabilities, effective or permitted", "none", "('CapEff', 'CapPrm')"),
    "K71": ("hold inheritable or ambient capabilities", "none", "('CapInh', 'CapAmb')"),
    "K72": ("get capabilities by starting a program", "the bounding set is empty", "('CapBnd',)"),
}
STATE = (
    *(
        Case(
            id,
            tried,
            expected,
            f"""
            held = status(*{names})
            any_held = any(int(value or "1", 16) for value in held.values())
            say(any_held, ", ".join(f"{{name}} {{value}}" for name, value in held.items()))
            """,
        )
        for id, (tried, expected, names) in _STATE.items()
    ),
    Case(
        "K73",
        "be without no_new_privs, so that a setuid program could give privileges",
        "it is set",
        "found = status('NoNewPrivs')['NoNewPrivs']\nsay(found != '1', f'NoNewPrivs {found}')",
    ),
    Case(
        "K74",
        "be without a system call filter",
        "a filter is on",
        "found = status('Seccomp')['Seccomp']\nsay(found != '2', f'Seccomp {found}')",
    ),
    Case(
        "K75",
        "have an id that gives capabilities: securebits",
        "locked: no id means anything to the kernel",
        """
        try:
            bits = call("prctl", 27, 0, 0, 0, 0)
            say(bits & 0xEF != 0xEF, f"securebits {bits:#x}")
        except OSError as exc:
            say(False, word(exc))
        """,
    ),
    Case(
        "K76",
        "become another user",
        "EPERM or EINVAL: no other id exists in the box",
        """
        held = open("/proc/self/uid_map").read().split()
        say(held[0] == "0" or os.getuid() == 0, f"is {os.getuid()}, map {' '.join(held)}")
        """,
    ),
)

CASES = CALLS + ROUND_ABOUT + STATE
