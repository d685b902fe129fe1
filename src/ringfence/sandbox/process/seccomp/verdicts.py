"""Which system calls a box may make, as data: each group with its reason.

Every call that we know by name has one verdict here; what we do not know does not exist in a box. No verdict looks at
memory, which another thread could change meanwhile: arguments are what is in the registers.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from ringfence.core.record import dataclass

WORD = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Ruling:
    """What happens to a call."""

    action: Literal["allow", "notify", "errno"]
    """`notify`: the supervisor answers, and refuses most; `errno`: the filter itself answers."""
    errno: int = 0
    """The error number for the caller."""


ALLOW = Ruling("allow")
NOTIFY = Ruling("notify", errno.EPERM)
ENOSYS = Ruling("errno", errno.ENOSYS)
EPERM = Ruling("errno", errno.EPERM)
EINVAL = Ruling("errno", errno.EINVAL)
DONE = Ruling("errno", 0)
OWN_FILTER = Ruling("notify", errno.ENOMEM)
"""A program's own filter for system calls. Its machine code is memory that no control group counts and that the host
has little of, and Linux (seen: 6.18) can stand still for good when very many filters are freed at once. So the
supervisor bounds their number in a box."""


@dataclass(frozen=True, slots=True)
class Arg:
    """One argument is among these values. The kernel reads only the lower half of an `int`, and so does this."""

    index: int
    among: Sequence[int]
    mask: int = WORD
    """The bits that are compared."""
    wide: bool = False
    """The argument has 64 bits, and the upper half must be zero."""

    def holds(self, args: Sequence[int]) -> bool:
        upper = args[self.index] >> 32
        lower = args[self.index] & WORD
        return not (self.wide and upper) and lower & self.mask in self.among


@dataclass(frozen=True, slots=True)
class ArgCase:
    """A verdict that applies if all these conditions hold."""

    when: tuple[Arg, ...]
    then: Ruling


@dataclass(frozen=True, slots=True)
class ArgRule:
    """A call that is judged by its arguments: by the first case that holds, else by the default."""

    cases: tuple[ArgCase, ...]
    otherwise: Ruling

    def judge(self, args: Sequence[int]) -> Ruling:
        return next((case.then for case in self.cases if all(arg.holds(args) for arg in case.when)), self.otherwise)


# ── Calls that are judged by their number alone: the reason, then the names ───────────────────────

_ALLOWED = {
    "files: what can be reached, and how, is for the mounts and Landlock to say": """
        open openat openat2 creat close close_range read write readv writev pread64 pwrite64 preadv pwritev preadv2
        pwritev2 lseek sendfile splice tee copy_file_range readahead fadvise64 fallocate truncate ftruncate fsync
        fdatasync sync_file_range flock dup dup2 dup3 pipe pipe2 umask
        stat fstat lstat newfstatat statx statfs fstatfs access faccessat faccessat2 readlink readlinkat getdents
        getdents64 getcwd chdir fchdir mkdir mkdirat rmdir rename renameat link linkat symlink symlinkat
        unlink unlinkat chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes futimesat utimensat
        setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr removexattr
        lremovexattr fremovexattr""",
    "waiting and watching": """
        poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd
        eventfd2 signalfd signalfd4 timerfd_create timerfd_settime timerfd_gettime inotify_init inotify_init1
        inotify_add_watch inotify_rm_watch""",
    "memory of the process itself; the limits say how much": """
        brk munmap mprotect mremap msync mincore mlock mlock2 munlock mlockall munlockall membarrier mseal
        pkey_mprotect pkey_alloc pkey_free map_shadow_stack getrandom""",
    "processes and threads of the box: its process namespace holds no others": """
        fork vfork execve execveat exit exit_group wait4 waitid getpid getppid gettid getpgrp getpgid setpgid getsid
        setsid kill tkill tgkill pidfd_open pidfd_send_signal set_tid_address set_robust_list get_robust_list futex
        futex_waitv rseq restart_syscall""",
    "signals": """
        rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait rt_sigqueueinfo rt_tgsigqueueinfo
        rt_sigsuspend sigaltstack pause""",
    "clocks and timers: to read and to be woken": """
        time gettimeofday clock_gettime clock_getres clock_nanosleep nanosleep alarm getitimer setitimer timer_create
        timer_settime timer_gettime timer_getoverrun timer_delete times""",
    "the user: with no capability and one mapped id a process cannot become another": """
        getuid geteuid getgid getegid getresuid getresgid getgroups setuid setgid setreuid setregid setresuid setresgid
        setfsuid setfsgid setgroups capget capset""",
    "asking about the machine, and taking less of it": """
        uname sysinfo getcpu getrusage getrlimit getpriority setpriority ioprio_get ioprio_set sched_yield
        sched_getaffinity sched_getattr sched_getparam sched_setparam sched_getscheduler sched_get_priority_max
        sched_get_priority_min sched_rr_get_interval""",
    "sockets: which kinds exist is decided where they are made, and the network namespace leads nowhere": """
        connect accept accept4 bind listen shutdown getsockname getpeername sendto recvfrom sendmsg recvmsg
        sendmmsg recvmmsg""",
    "System V and POSIX messages: the box has an IPC namespace of its own": """
        shmat shmctl shmdt semget semop semctl semtimedop msgget msgsnd msgrcv msgctl mq_open mq_unlink mq_timedsend
        mq_timedreceive mq_notify mq_getsetattr""",
    "confining oneself further, which can never loosen": """
        landlock_create_ruleset landlock_add_rule landlock_restrict_self""",
    "the host's own tracing: only a trampoline that the kernel put there gets through, a program gets a signal": """
        uretprobe uprobe""",
}

_NOTABLE = {
    "namespaces, mounts and roots: a box cannot leave or rebuild itself": """
        unshare setns mount umount2 pivot_root chroot open_tree open_tree_attr move_mount fsopen fsconfig fsmount fspick
        mount_setattr""",
    "the insides of other processes": """
        ptrace process_vm_readv process_vm_writev process_madvise pidfd_getfd kcmp""",
    "large or often broken parts of the kernel that honest programs do without": """
        bpf perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register fanotify_init fanotify_mark
        modify_ldt iopl ioperm lookup_dcookie""",
    "keyrings, which no namespace separates": """
        add_key request_key keyctl""",
    "files by handle, past every path": """
        name_to_handle_at open_by_handle_at""",
    "the machine itself": """
        kexec_load kexec_file_load init_module finit_module delete_module reboot swapon swapoff acct quotactl syslog
        vhangup sethostname setdomainname settimeofday clock_settime clock_adjtime adjtimex""",
}

_ABSENT = {
    "threads are made with clone, whose flags are in a register; C libraries fall back to it": """
        clone3""",
    "memory of particular nodes: a box has one": """
        mbind set_mempolicy set_mempolicy_home_node get_mempolicy migrate_pages move_pages""",
    "faster ways that programs do not count on": """
        io_setup io_destroy io_getevents io_pgetevents io_submit io_cancel vmsplice remap_file_pages process_mrelease
        memfd_secret rseq_slice_yield""",
    "too new to be counted on": """
        futex_wake futex_wait futex_requeue cachestat quotactl_fd statmount listmount listns lsm_get_self_attr
        lsm_set_self_attr lsm_list_modules setxattrat getxattrat listxattrat removexattrat file_getattr file_setattr""",
    "long gone, or never there": """
        uselib ustat sysfs _sysctl create_module get_kernel_syms query_module nfsservctl getpmsg putpmsg afs_syscall
        tuxcall security set_thread_area get_thread_area epoll_ctl_old epoll_wait_old vserver""",
}

_PLAIN = {
    "which cores a box has is one of its limits; honest programs try, so it is not counted": (
        EPERM,
        "sched_setaffinity",
    ),
    "its policy is in memory, where no filter can look": (EPERM, "sched_setattr"),
    "would write out the host's disks; a box has none of its own to write out": (DONE, "sync syncfs"),
}

# ── Calls that are judged by their arguments ──────────────────────────────────────────────────────

_NAMESPACES = 0x7E020000  # CLONE_NEW…; the one for time has no room in clone's flags
_BESIDE = 0x8000  # CLONE_PARENT: a child of the zygote, which did not make it
_AF_UNIX = 1
_AF_INET = 2
_AF_NETLINK = 16
_AF_INET6 = 10
_STREAM = 1
_DATAGRAM = 2
_SEQPACKET = 5
_KIND = 0xF  # the kind of a socket without the flags that may be added to it
_TCP = 6
_UDP = 17
_IPV6 = 41
_MPTCP = 262
_FILE_KIND = 0xF000
_NODES = (0, 0x8000, 0x1000, 0xC000)  # plain files, twice, FIFOs and sockets

_SOCKET = (
    ArgCase((Arg(0, (_AF_UNIX,)), Arg(1, (_STREAM, _DATAGRAM, _SEQPACKET), _KIND)), ALLOW),
    # The box has a loopback of its own.
    ArgCase((Arg(0, (_AF_INET, _AF_INET6)), Arg(1, (_STREAM, _DATAGRAM), _KIND), Arg(2, (0, _TCP, _UDP))), ALLOW),
    # C libraries ask for routes when they sort addresses, and some languages for multipath before plain TCP; both take
    # no for an answer, and it is no denial.
    ArgCase((Arg(0, (_AF_NETLINK,)), Arg(2, (0,))), Ruling("errno", errno.EAFNOSUPPORT)),
    ArgCase((Arg(0, (_AF_INET, _AF_INET6)), Arg(2, (_MPTCP,))), Ruling("errno", errno.EPROTONOSUPPORT)),
)

_SOCKET_OPTIONS = (
    # SO_ATTACH_FILTER, SO_ATTACH_BPF, SO_ATTACH_REUSEPORT_CBPF and …_EBPF are programs for the kernel.
    ArgCase((Arg(1, (1,)), Arg(2, (26, 50, 51, 52))), NOTIFY),
    # SO_LINGER makes the process that closes the socket last wait, which may be the supervisor. The caller
    # gets success.
    ArgCase((Arg(1, (1,)), Arg(2, (13,))), DONE),
    # SO_RCVBUF: what waits in a socket is not always charged to a control group, so that it stays as much as the host
    # gives by itself. The request is ignored without an error, as the kernel does with requests for too much.
    ArgCase((Arg(1, (1,)), Arg(2, (8,))), DONE),
    # SO_TIMESTAMPING, old and new, SO_ZEROCOPY, SO_TXTIME: each lets copies, or pages, of what was sent wait.
    ArgCase((Arg(1, (1,)), Arg(2, (37, 60, 61, 65))), Ruling("errno", errno.ENOPROTOOPT)),
    # None that is newer: with SO_PASSPIDFD a handle of the sender comes with every message, which is the supervisor on
    # a channel to it, and without SO_PASSRIGHTS such a channel takes no descriptors.
    ArgCase((Arg(1, (1,)), Arg(2, (*range(72), 74))), ALLOW),
    # To join groups for multicast, with their lists of sources, and labels of flows: all are memory that no control
    # group counts, and there is nobody to reach. The error is that of a machine without an interface for it.
    ArgCase((Arg(1, (0,)), Arg(2, (35, *range(37, 49)))), Ruling("errno", errno.ENODEV)),
    ArgCase((Arg(1, (_IPV6,)), Arg(2, (20, 27, 32, *range(42, 49)))), Ruling("errno", errno.ENODEV)),
    # Not the tables of the firewall, which begin at 64.
    ArgCase((Arg(1, (0,)), Arg(2, range(64))), ALLOW),
    ArgCase((Arg(1, (_IPV6,)), Arg(2, (*range(64), *range(66, 81)))), ALLOW),
    # Not TCP_MD5SIG, TCP_REPAIR, TCP_ULP, TCP_ZEROCOPY_RECEIVE, TCP_AO…: protocols within the protocol.
    ArgCase((Arg(1, (_TCP,)), Arg(2, (*range(1, 14), 16, 17, 18, *range(23, 29), 30, 33, 34, 36, 37))), ALLOW),
    # Not UDP_ENCAP.
    ArgCase((Arg(1, (_UDP,)), Arg(2, (1, *range(101, 105)))), ALLOW),
)

_IOCTLS = (
    0x5401,  # TCGETS: is this a terminal?
    0x540F,  # TIOCGPGRP
    0x5410,  # TIOCSPGRP: where there is no terminal, a bad descriptor gets its usual error
    0x5411,  # TIOCOUTQ
    0x5413,  # TIOCGWINSZ
    0x541B,  # FIONREAD
    0x5421,  # FIONBIO
    0x5450,  # FIONCLEX
    0x5451,  # FIOCLEX
    0x5452,  # FIOASYNC
    0x5460,  # FIOQSIZE
    0x8905,  # SIOCATMARK
    0x8910,  # SIOCGIFNAME
    0x8912,  # SIOCGIFCONF
    0x8933,  # SIOCGIFINDEX
    0x802C542A,  # TCGETS2
)
# TIOCSTI, TIOCLINUX, TIOCCONS, TIOCSETD: typing into, or taking over, a terminal.
_TERMINAL_TRICKS = (0x5412, 0x541C, 0x541D, 0x5423)

# Making terminals of the box's own, setting how one treats keys, waiting for pending output, choosing the job in front.
_TERMINAL = (
    *(0x5402, 0x5403, 0x5404),  # TCSETS, TCSETSW, TCSETSF
    *(0x402C542B, 0x402C542C, 0x402C542D),  # TCSETS2, TCSETSW2, TCSETSF2
    *(0x5409, 0x5425, 0x540A, 0x540B),  # TCSBRK, TCSBRKP, TCXONC, TCFLSH
    *(0x5414, 0x5422, 0x5429),  # TIOCSWINSZ, TIOCNOTTY, TIOCGSID
    *(0x80045430, 0x40045431, 0x80045439, 0x5441),  # TIOCGPTN, TIOCSPTLCK, TIOCGPTLCK, TIOCGPTPEER: making one
    *(0x5420, 0x80045438),  # TIOCPKT, TIOCGPKT: hearing what is done to it, at its other end
)
_TIOCSCTTY = 0x540E

_PRCTLS = (
    *(1, 2, 3, 4),  # PR_{SET,GET}_PDEATHSIG, PR_{GET,SET}_DUMPABLE
    *(7, 8),  # PR_{GET,SET}_KEEPCAPS
    *(15, 16),  # PR_{SET,GET}_NAME
    *(21, 22),  # PR_{GET,SET}_SECCOMP: strict mode; a filter is asked for above
    *(23, 25, 27),  # PR_CAPBSET_READ, PR_GET_TSC, PR_GET_SECUREBITS
    *(29, 30),  # PR_{SET,GET}_TIMERSLACK
    34,  # PR_MCE_KILL_GET
    *(36, 37),  # PR_{SET,GET}_CHILD_SUBREAPER
    *(38, 39),  # PR_{SET,GET}_NO_NEW_PRIVS
    40,  # PR_GET_TID_ADDRESS
    *(41, 42),  # PR_{SET,GET}_THP_DISABLE
    47,  # PR_CAP_AMBIENT: raises only what the process has
    *(50, 51, 63, 64),  # PR_{SVE,SME}_{SET,GET}_VL: widths of vectors
    52,  # PR_GET_SPECULATION_CTRL
    *(54, 60, 61),  # PR_PAC_…: keys of its own pointers
    *(55, 56),  # PR_{SET,GET}_TAGGED_ADDR_CTRL
    *(65, 66),  # PR_{SET,GET}_MDWE
    68,  # PR_GET_MEMORY_MERGE
    *(74, 75, 76),  # PR_…_SHADOW_STACK_STATUS
    0x41555856,  # PR_GET_AUXV
    0x53564D41,  # PR_SET_VMA: names of mappings
)
_RLIMIT_CORE = 4
_PR_SET_SECCOMP = 22
_PR_SET_MM = 35
_PR_SCHED_CORE = 62
_PR_SET_PTRACER = 0x59616D61

_ARCH_PRCTLS = (
    *range(0x1001, 0x1005),  # ARCH_{SET,GET}_{FS,GS}: thread-local storage
    0x1011,  # ARCH_GET_CPUID
    *range(0x1021, 0x1024),  # ARCH_{GET,REQ}_XCOMP_…: wide registers
    *(0x4001, 0x4003),  # ARCH_GET_{UNTAG_MASK,MAX_TAG_BITS}
    *(0x5001, 0x5002, 0x5003, 0x5005),  # ARCH_SHSTK_…: shadow stacks
)


_LEASES = ArgCase((Arg(1, (1024, 1040)),), Ruling("errno", errno.EACCES))
_HINTS = ArgCase((Arg(1, (1036, 1038)),), EINVAL)
_OFD_LOCKS = ArgCase((Arg(1, (37, 38)),), EINVAL)
# F_NOTIFY reports what the host and other boxes do in folders that all of them see; programs that watch files have
# inotify. With no event at all (bit 31 only means "repeatedly") it ends a watch, which no program has.
_FOLDER_SIGNALS = (ArgCase((Arg(1, (1026,)), Arg(2, (0,), 0x7FFFFFFF)), ALLOW), ArgCase((Arg(1, (1026,)),), EINVAL))


def _only(index: int, among: Sequence[int], otherwise: Ruling, mask: int = WORD) -> ArgRule:
    """Allowed with these values of one argument."""
    return ArgRule((ArgCase((Arg(index, among, mask),), ALLOW),), otherwise)


def _node(index: int) -> ArgRule:
    # No device of any kind: not even the empty one that any user may make, which an overlay takes for a
    # removed file.
    return _only(index, _NODES, NOTIFY, _FILE_KIND)


_CHECKED = {
    # A table of descriptors that outlives the process that put locks in it would hold locks without an owner
    # (CLONE_FILES without CLONE_THREAD).
    "clone": ArgRule(
        (ArgCase((Arg(0, (0x400,), 0x10400),), EINVAL), ArgCase((Arg(0, (0,), _NAMESPACES | _BESIDE),), ALLOW)), NOTIFY
    ),
    "socket": ArgRule(_SOCKET, NOTIFY),
    "socketpair": ArgRule(_SOCKET[:1], NOTIFY),
    # Not SO_PEERPIDFD: the other end of a channel is the supervisor, of which a box must have no handle.
    "getsockopt": ArgRule((ArgCase((Arg(1, (1,)), Arg(2, (77,))), Ruling("errno", errno.ENOPROTOOPT)),), ALLOW),
    "setsockopt": ArgRule(_SOCKET_OPTIONS, Ruling("errno", errno.ENOPROTOOPT)),
    # A box has no devices but terminals; what is no device answers the same. Taking a terminal from another session
    # (another argument) is not offered.
    "ioctl": ArgRule(
        (
            ArgCase((Arg(1, (*_IOCTLS, *_TERMINAL)),), ALLOW),
            ArgCase((Arg(1, (_TIOCSCTTY,)), Arg(2, (0,), wide=True)), ALLOW),
            ArgCase((Arg(1, _TERMINAL_TRICKS),), NOTIFY),
        ),
        Ruling("errno", errno.ENOTTY),
    ),
    "prctl": ArgRule(
        (
            ArgCase((Arg(0, (_PR_SET_SECCOMP,)), Arg(1, (2,))), OWN_FILTER),
            ArgCase((Arg(0, _PRCTLS),), ALLOW),
            ArgCase((Arg(0, (_PR_SET_MM, _PR_SCHED_CORE, _PR_SET_PTRACER)),), NOTIFY),
        ),
        EINVAL,
    ),
    "arch_prctl": _only(0, _ARCH_PRCTLS, EINVAL),
    # Strict mode, a filter with SECCOMP_FILTER_FLAG_TSYNC and …_TSYNC_ESRCH at most, and what is there to know: no
    # listener beside ours, and no flag that makes every refusal a line in the host's log.
    "seccomp": ArgRule(
        (ArgCase((Arg(0, (0, 2, 3)),), ALLOW), ArgCase((Arg(0, (1,)), Arg(1, (0,), WORD ^ 0x11)), OWN_FILTER)), EINVAL
    ),
    # Asking, and the plain one: no fixed addresses, no readable memory that is executable unasked.
    "personality": _only(0, (0, WORD), NOTIFY),
    "mknod": _node(1),
    "mknodat": _node(2),
    # Not RENAME_WHITEOUT, which leaves such a device behind; file systems that have none answer so.
    "renameat2": _only(4, (0,), EINVAL, 4),
    # Huge pages come from a pool of the host's that no memory limit counts (MAP_HUGETLB, SHM_HUGETLB, MFD_HUGETLB).
    "mmap": ArgRule((ArgCase((Arg(3, (0x40000,), 0x40000),), Ruling("errno", errno.ENOMEM)),), ALLOW),
    "shmget": _only(2, (0,), Ruling("errno", errno.ENOMEM), 0x800),
    "memfd_create": _only(1, (0,), EINVAL, WORD ^ 0x1B),
    # Not MADV_MERGEABLE: sharing pages with other users reveals what is in them.
    "madvise": ArgRule((ArgCase((Arg(2, (12,)),), EINVAL),), ALLOW),
    # Not F_SETLEASE and F_SETDELEG: a process that writes to a file of the host would wait for the box. Not F_OFD_SETLK
    # and F_OFD_SETLKW: the kernel does not name the owner of such a lock, so we could not count them. Not F_SET_RW_HINT
    # and F_SET_FILE_RW_HINT: a hint stays with a file of the host that a box can read, for the next box to see.
    "fcntl": ArgRule((_LEASES, _HINTS, _OFD_LOCKS, *_FOLDER_SIGNALS), ALLOW),
    # SCHED_OTHER, SCHED_BATCH and SCHED_IDLE, also with SCHED_RESET_ON_FORK; never ahead of the host.
    "sched_setscheduler": _only(1, (0, 3, 5), EPERM, WORD ^ 0x40000000),
    # RLIMIT_CORE stays 1: with 0, which many programs set, the kernel would give a dump to a program of the host
    # that collects them (`|…` in core_pattern). The caller gets success; not where it asks for the old limit at once.
    "setrlimit": ArgRule((ArgCase((Arg(0, (_RLIMIT_CORE,)),), DONE),), ALLOW),
    # Process 1 is the box's own, under the same user: its limits are not for the program to set.
    "prlimit64": ArgRule(
        (
            ArgCase((Arg(2, (0,), wide=True),), ALLOW),
            ArgCase((Arg(0, (1,)),), NOTIFY),
            ArgCase((Arg(1, (_RLIMIT_CORE,)), Arg(3, (0,), wide=True)), DONE),
            ArgCase((Arg(1, (_RLIMIT_CORE,)),), EPERM),
        ),
        ALLOW,
    ),
}


def _judged() -> Mapping[str, Ruling | ArgRule]:
    """By name; the groups are disjoint, which the tests check."""
    judged: dict[str, Ruling | ArgRule] = dict(_CHECKED)
    for groups, every in ((_ALLOWED, ALLOW), (_NOTABLE, NOTIFY), (_ABSENT, ENOSYS)):
        judged.update((name, every) for names in groups.values() for name in names.split())
    judged.update((name, each) for each, names in _PLAIN.values() for name in names.split())
    return MappingProxyType(judged)


POLICY = _judged()
"""The verdict of every known call, by name."""

SHARED_MAPPING = Ruling("notify", errno.ENOMEM)
"""The supervisor adds up how much of it a box makes, and allows it within the box's memory limit."""

SHARED_WITH_A_FILE = ArgCase((Arg(3, (0x01, 0x03), 0x2F),), Ruling("notify"))
"""MAP_SHARED or MAP_SHARED_VALIDATE without MAP_ANONYMOUS: the supervisor takes note of it and allows it, since what is
written there leaves no trace in the times of the file."""

WATCHERS = ("epoll_create", "epoll_create1")

FILTERS = {"seccomp": 1, "prctl": _PR_SET_SECCOMP}
"""The calls that may install a filter, and their first argument where they do."""

UNCOUNTED: Mapping[str, Ruling | ArgRule] = MappingProxyType(
    {
        **dict.fromkeys(("memfd_create", "shmget", "semget", "msgget"), ENOSYS),
        # A ruleset takes any number of rules, megabytes behind one descriptor, and nothing shows how many.
        "landlock_create_ruleset": ENOSYS,
        # Memory that is shared, and of no file, stays when it is unmapped from all but one page: no file of any
        # process tells how much there is (MAP_SHARED with MAP_ANONYMOUS). Huge pages as in `POLICY`.
        "mmap": ArgRule(
            (
                ArgCase((Arg(3, (0x40000,), 0x40000),), Ruling("errno", errno.ENOMEM)),
                # MAP_GROWSDOWN is not of the memory that RLIMIT_DATA bounds.
                ArgCase((Arg(3, (0x100,), 0x100),), Ruling("errno", errno.ENOMEM)),
                ArgCase((Arg(3, (0x21,), 0x2F),), SHARED_MAPPING),
            ),
            ALLOW,
        ),
        # SO_SNDBUF: likewise, where no group counts what was sent and is not read yet.
        "setsockopt": ArgRule(
            (ArgCase((Arg(1, (1,)), Arg(2, (7,))), DONE), *_SOCKET_OPTIONS), Ruling("errno", errno.ENOPROTOOPT)
        ),
        # F_SETPIPE_SZ: as for a user who has too many large pipes already.
        "fcntl": ArgRule(
            (
                ArgCase((Arg(1, (1031,)),), EPERM),
                _LEASES,
                _HINTS,
                _OFD_LOCKS,
                *_FOLDER_SIGNALS,
            ),
            ALLOW,
        ),
        # The supervisor counts what is waited for where there are many.
        **dict.fromkeys(WATCHERS, Ruling("notify", errno.EMFILE)),
    }
)
"""Replaces verdicts of `POLICY` where no control group counts memory, for memory that no process's account shows."""


# ── In a box that writes to folders of the host: a file that gives its owner's rights away would stay there ──

_MARKS = 0o6000  # set-user-id, set-group-id
_CREATES = 0o100 | 0o20000000  # O_CREAT, and what tells O_TMPFILE from O_DIRECTORY; else the mode is not looked at


def _unmarked(index: int) -> ArgRule:
    return _only(index, (0,), NOTIFY, _MARKS)


def _opens(flags: int, mode: int) -> ArgRule:
    return ArgRule((ArgCase((Arg(flags, (0,), _CREATES),), ALLOW), ArgCase((Arg(mode, (0,), _MARKS),), ALLOW)), NOTIFY)


def _node_unmarked(index: int) -> ArgRule:
    plain = ArgCase((Arg(index, _NODES, _FILE_KIND), Arg(index, (0,), _MARKS)), ALLOW)
    return ArgRule((plain,), NOTIFY)


UNMARKED: Mapping[str, Ruling | ArgRule] = MappingProxyType(
    {
        "chmod": _unmarked(1),
        "fchmod": _unmarked(1),
        "fchmodat": _unmarked(2),
        "fchmodat2": _unmarked(2),
        "creat": _unmarked(1),
        "open": _opens(1, 2),
        "openat": _opens(2, 3),
        # Its mode is in memory, where no filter can look; C libraries fall back to openat.
        "openat2": ENOSYS,
        "mknod": _node_unmarked(1),
        "mknodat": _node_unmarked(2),
    }
)
"""Replaces verdicts of `POLICY`."""
