"""What we know of the kernel by heart is what its headers say, on both machines."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import pytest

from ringfence.doctor import launcher
from ringfence.identity import peers
from ringfence.sandbox.files import paths, watch
from ringfence.sandbox.process.seccomp import bpf, filter, notifications, verdicts
from ringfence.sandbox.process.seccomp.syscalls import NUMBERS
from ringfence.sandbox.process.seccomp.verdicts import WORD, Arg, ArgRule
from ringfence.sandbox.process.zygote import kernel, landlock, native, template, worker
from tests.sandbox.process import headers, interpreter

machines = pytest.mark.parametrize("machine", NUMBERS)


@machines
def test_every_system_call_has_the_number_that_it_has_there(machine: str) -> None:
    theirs, ours = headers.numbers(machine), NUMBERS[machine]
    # Headers may be older or newer than our table.
    newest = min(max(theirs.values()), max(ours.values()))
    known = {name: number for name, number in theirs.items() if number <= newest}
    assert len(known) > 300
    later = {"uretprobe": 335, "uprobe": 336}  # took numbers that had been left out
    assert later | known == later | {name: number for name, number in ours.items() if number <= newest}


@machines
def test_numbers_that_stand_elsewhere_are_the_same(machine: str) -> None:
    theirs = headers.numbers(machine)
    assert launcher._KEYCTL[machine] == (theirs["keyctl"], theirs["add_key"])
    assert {name: theirs[name] for name in kernel._NUMBERS[machine]} == kernel._NUMBERS[machine]


# ── Constants and structures ──

FILES = """
    asm/unistd.h asm/ioctls.h asm/termbits.h asm/socket.h asm/fcntl.h asm/mman.h asm/signal.h asm/resource.h
    linux/audit.h linux/bpf_common.h linux/capability.h linux/fcntl.h linux/filter.h linux/in.h linux/inet_diag.h
    linux/inotify.h linux/keyctl.h linux/landlock.h linux/memfd.h linux/mman.h linux/mount.h linux/netlink.h
    linux/openat2.h linux/prctl.h linux/sched.h linux/seccomp.h linux/securebits.h linux/sock_diag.h linux/sockios.h
    linux/stat.h"""
SPACES = ("NS", "CGROUP", "UTS", "IPC", "USER", "PID", "NET")


def named(names: str, values: Iterable[int]) -> dict[str, int]:
    return dict(zip(names.split(), values, strict=True))


def masks(name: str) -> list[int]:
    """The bits that count of each argument that is looked at."""
    rule = verdicts.POLICY[name]
    assert isinstance(rule, ArgRule)
    return [arg.mask for case in rule.cases for arg in case.when]


def among(name: str, case: int, place: int = 0) -> Sequence[int]:
    """The values that one case knows of an argument."""
    rule = verdicts.POLICY[name]
    assert isinstance(rule, ArgRule)
    arg: Arg = rule.cases[case].when[place]
    return arg.among


def of_the_policy() -> dict[str, int]:
    ioctls = """
        TCGETS TIOCGPGRP TIOCSPGRP TIOCOUTQ TIOCGWINSZ FIONREAD FIONBIO FIONCLEX FIOCLEX FIOASYNC FIOQSIZE SIOCATMARK
        SIOCGIFNAME SIOCGIFCONF SIOCGIFINDEX TCGETS2"""
    terminal = """
        TCSETS TCSETSW TCSETSF TCSETS2 TCSETSW2 TCSETSF2 TCSBRK TCSBRKP TCXONC TCFLSH TIOCSWINSZ TIOCNOTTY TIOCGSID
        TIOCGPTN TIOCSPTLCK TIOCGPTLCK TIOCGPTPEER TIOCPKT TIOCGPKT"""
    prctls = """
        PR_SET_PDEATHSIG PR_GET_PDEATHSIG PR_GET_DUMPABLE PR_SET_DUMPABLE PR_GET_KEEPCAPS PR_SET_KEEPCAPS PR_SET_NAME
        PR_GET_NAME PR_GET_SECCOMP PR_SET_SECCOMP PR_CAPBSET_READ PR_GET_TSC PR_GET_SECUREBITS PR_SET_TIMERSLACK
        PR_GET_TIMERSLACK PR_MCE_KILL_GET PR_SET_CHILD_SUBREAPER PR_GET_CHILD_SUBREAPER PR_SET_NO_NEW_PRIVS
        PR_GET_NO_NEW_PRIVS PR_GET_TID_ADDRESS PR_SET_THP_DISABLE PR_GET_THP_DISABLE PR_CAP_AMBIENT PR_SVE_SET_VL
        PR_SVE_GET_VL PR_SME_SET_VL PR_SME_GET_VL PR_GET_SPECULATION_CTRL PR_PAC_RESET_KEYS PR_PAC_SET_ENABLED_KEYS
        PR_PAC_GET_ENABLED_KEYS PR_SET_TAGGED_ADDR_CTRL PR_GET_TAGGED_ADDR_CTRL PR_SET_MDWE PR_GET_MDWE
        PR_GET_MEMORY_MERGE PR_GET_SHADOW_STACK_STATUS PR_SET_SHADOW_STACK_STATUS PR_LOCK_SHADOW_STACK_STATUS
        PR_GET_AUXV PR_SET_VMA"""
    return {
        **named(ioctls, verdicts._IOCTLS),
        **named("TIOCSTI TIOCLINUX TIOCCONS TIOCSETD", verdicts._TERMINAL_TRICKS),
        **named(terminal, verdicts._TERMINAL),
        **named("TIOCSCTTY", [verdicts._TIOCSCTTY]),
        **named(prctls, verdicts._PRCTLS),
        "PR_SET_MM": verdicts._PR_SET_MM,
        "PR_SCHED_CORE": verdicts._PR_SCHED_CORE,
        "PR_SET_PTRACER": verdicts._PR_SET_PTRACER,
        "|".join(f"CLONE_NEW{space}" for space in SPACES): verdicts._NAMESPACES,
        "CLONE_PARENT": verdicts._BESIDE,
        **named("IPPROTO_TCP IPPROTO_UDP IPPROTO_IPV6", (verdicts._TCP, verdicts._UDP, verdicts._IPV6)),
        "IPPROTO_MPTCP": verdicts._MPTCP,
        "SOL_SOCKET": among("setsockopt", 0)[0],
        **named(
            "SO_ATTACH_FILTER SO_ATTACH_BPF SO_ATTACH_REUSEPORT_CBPF SO_ATTACH_REUSEPORT_EBPF",
            among("setsockopt", 0, 1),
        ),
        "SO_LINGER": among("setsockopt", 1, 1)[0],
        "SO_PEERPIDFD": among("getsockopt", 0, 1)[0],
        "MAP_HUGETLB": masks("mmap")[0],
        "MFD_CLOEXEC|MFD_ALLOW_SEALING|MFD_NOEXEC_SEAL|MFD_EXEC": WORD ^ masks("memfd_create")[0],
        "MADV_MERGEABLE": among("madvise", 0)[0],
        **named("F_SETLEASE F_SETDELEG", among("fcntl", 0)),
        **named("SCHED_NORMAL SCHED_BATCH SCHED_IDLE", among("sched_setscheduler", 0)),
        "SCHED_RESET_ON_FORK": WORD ^ masks("sched_setscheduler")[0],
        "SECCOMP_FILTER_FLAG_TSYNC|SECCOMP_FILTER_FLAG_TSYNC_ESRCH": WORD ^ masks("seccomp")[2],
        "O_CREAT|__O_TMPFILE": verdicts._CREATES,
        "S_ISUID|S_ISGID": verdicts._MARKS,
        "S_IFMT": verdicts._FILE_KIND,
    }


def of_the_filter() -> dict[str, int]:
    return {
        "SECCOMP_RET_KILL_PROCESS": filter._KILL_PROCESS,
        "SECCOMP_RET_ERRNO": filter._RET_ERRNO,
        "SECCOMP_RET_USER_NOTIF": filter._USER_NOTIF,
        "SECCOMP_RET_ALLOW": filter._RET_ALLOW,
        "__builtin_offsetof(struct seccomp_data, nr)": filter._NUMBER,
        "__builtin_offsetof(struct seccomp_data, arch)": filter._ARCH,
        "__builtin_offsetof(struct seccomp_data, args)": filter._ARGS,
        "sizeof(struct seccomp_data)": struct.calcsize("=IIQ6Q"),
        "sizeof(struct sock_filter)": struct.calcsize("=HBBI"),
        "BPF_LD|BPF_W|BPF_ABS": bpf._LOAD,
        "BPF_ALU|BPF_AND|BPF_K": bpf._AND,
        "BPF_RET|BPF_K": bpf._RETURN,
        "BPF_JMP|BPF_JA": bpf._GO,
        "BPF_JMP|BPF_JEQ|BPF_K": bpf._IF_EQUAL,
        "BPF_JMP|BPF_JGE|BPF_K": bpf._IF_NOT_LESS,
        "SECCOMP_IOCTL_NOTIF_RECV": notifications._RECEIVE,
        "SECCOMP_IOCTL_NOTIF_SEND": notifications._SEND,
        "sizeof(struct seccomp_notif)": 80,
        "__builtin_offsetof(struct seccomp_notif, data)": struct.calcsize("=QII"),
        "__builtin_offsetof(struct seccomp_notif, data.args)": 32,
        "sizeof(struct seccomp_notif_resp)": struct.calcsize("=QqiI"),
        "__builtin_offsetof(struct seccomp_notif_resp, error)": struct.calcsize("=Qq"),
    }


def of_confinement() -> dict[str, int]:
    bits = """
        NOROOT NOROOT_LOCKED NO_SETUID_FIXUP NO_SETUID_FIXUP_LOCKED KEEP_CAPS_LOCKED NO_CAP_AMBIENT_RAISE
        NO_CAP_AMBIENT_RAISE_LOCKED"""
    rights = """
        EXECUTE WRITE_FILE READ_FILE READ_DIR REMOVE_DIR REMOVE_FILE MAKE_CHAR MAKE_DIR MAKE_REG MAKE_SOCK MAKE_FIFO
        MAKE_BLOCK MAKE_SYM REFER TRUNCATE IOCTL_DEV"""
    return {
        **{f"CLONE_NEW{name}": getattr(kernel, f"NEW{name}") for name in SPACES},
        "CLONE_PARENT": kernel._SAME_PARENT,
        "CLONE_VM": native._SHARE_MEMORY,
        "SIGCHLD": native._SIGCHLD,
        "PROT_READ|PROT_WRITE|PROT_EXEC": native._READ | native._WRITE | native._EXECUTE,
        "MAP_PRIVATE": native._PRIVATE,
        "MAP_ANONYMOUS": native._ANONYMOUS,
        **{f"LANDLOCK_ACCESS_FS_{name}": getattr(landlock, name) for name in rights.split()},
        "LANDLOCK_CREATE_RULESET_VERSION": 1,
        "LANDLOCK_RULE_PATH_BENEATH": landlock.PATH_BENEATH,
        "sizeof(struct landlock_path_beneath_attr)": len(landlock.rule(5, 1, 1)),
        "MS_NOSUID|MS_NODEV|MS_NOEXEC": kernel.MS_NOSUID | kernel.MS_NODEV | 8,
        **named("MS_BIND MS_REC MS_PRIVATE", (kernel.MS_BIND, kernel.MS_REC, kernel.MS_PRIVATE)),
        "MS_MOVE": template._MS_MOVE,
        **{f"MOUNT_ATTR_{name}": getattr(kernel, f"ATTR_{name}") for name in ["RDONLY", "NOSUID", "NODEV", "NOEXEC"]},
        "MOUNT_ATTR_IDMAP": kernel.ATTR_IDMAP,
        "sizeof(struct mount_attr)": struct.calcsize("QQQQ"),
        **named("AT_EMPTY_PATH AT_RECURSIVE", (kernel.AT_EMPTY_PATH, kernel.AT_RECURSIVE)),
        **named("OPEN_TREE_CLONE MOVE_MOUNT_F_EMPTY_PATH", (kernel.OPEN_TREE_CLONE, kernel.MOVE_MOUNT_F_EMPTY_PATH)),
        **named("RESOLVE_NO_MAGICLINKS RESOLVE_BENEATH", (paths._NO_MAGIC_LINKS, paths._BENEATH)),
        "RESOLVE_NO_SYMLINKS": 0x04,
        "sizeof(struct open_how)": struct.calcsize("QQQ"),
        **named("PR_SET_DUMPABLE PR_CAPBSET_DROP", (kernel.PR_SET_DUMPABLE, kernel.PR_CAPBSET_DROP)),
        **named("PR_SET_SECUREBITS PR_SET_NO_NEW_PRIVS", (kernel.PR_SET_SECUREBITS, kernel.PR_SET_NO_NEW_PRIVS)),
        **named("PR_CAP_AMBIENT PR_CAP_AMBIENT_CLEAR_ALL", (kernel.PR_CAP_AMBIENT, kernel.PR_CAP_AMBIENT_CLEAR_ALL)),
        "|".join(f"SECBIT_{bit}" for bit in bits.split()): 0xEF,
        "_LINUX_CAPABILITY_VERSION_3": 0x20080522,
        "KEYCTL_JOIN_SESSION_KEYRING": launcher._JOIN_SESSION_KEYRING,
        **named("SIOCGIFFLAGS SIOCSIFFLAGS", (launcher._SIOCGIFFLAGS, launcher._SIOCSIFFLAGS)),
        "TIOCSCTTY": worker._TIOCSCTTY,
        "RLIMIT_SIGPENDING": 11,
        "O_CLOEXEC": 0o2000000,
    }


def of_the_rest() -> dict[str, int]:
    events = "MODIFY MOVED_FROM MOVED_TO CREATE DELETE"
    return {
        "|".join(f"IN_{name}" for name in (*events.split(), "ONLYDIR", "EXCL_UNLINK")): watch._MASK,
        **named("IN_Q_OVERFLOW IN_IGNORED IN_ISDIR", (watch._OVERFLOW, watch._IGNORED, watch._ISDIR)),
        "sizeof(struct inotify_event)": watch._HEADER.size,
        "sizeof(struct flock)": struct.calcsize("hhqqi4x"),
        "__builtin_offsetof(struct flock, l_start)": struct.calcsize("hhq") - 8,
        "sizeof(struct nlmsghdr)": peers._HEADER.size,
        "sizeof(struct inet_diag_req_v2)": peers._REQUEST.size,
        "__builtin_offsetof(struct inet_diag_msg, idiag_uid)": 4 + 48 + 12,
        "NETLINK_SOCK_DIAG": peers._NETLINK_SOCK_DIAG,
        "SOCK_DIAG_BY_FAMILY": peers._SOCK_DIAG_BY_FAMILY,
    }


@machines
@pytest.mark.parametrize("values", [of_the_policy, of_the_filter, of_confinement, of_the_rest])
def test_constants_are_those_of_the_headers(machine: str, values) -> None:
    assert headers.disagreements(machine, FILES.split(), values()) == ""


def test_what_one_machine_alone_has_is_that_of_its_headers() -> None:
    arch_prctls = """
        ARCH_SET_GS ARCH_SET_FS ARCH_GET_FS ARCH_GET_GS ARCH_GET_CPUID ARCH_GET_XCOMP_SUPP ARCH_GET_XCOMP_PERM
        ARCH_REQ_XCOMP_PERM ARCH_GET_UNTAG_MASK ARCH_GET_MAX_TAG_BITS ARCH_SHSTK_ENABLE ARCH_SHSTK_DISABLE
        ARCH_SHSTK_LOCK ARCH_SHSTK_STATUS"""
    intel = named(arch_prctls, verdicts._ARCH_PRCTLS) | {"__X32_SYSCALL_BIT": 0x40000000}
    intel |= {"AUDIT_ARCH_X86_64": filter._AUDIT_ARCH["x86_64"]}
    arm = {"AUDIT_ARCH_AARCH64": filter._AUDIT_ARCH["aarch64"]}
    assert headers.disagreements("x86_64", ["asm/prctl.h", "asm/unistd.h", "linux/audit.h"], intel) == ""
    assert headers.disagreements("aarch64", ["linux/audit.h"], arm) == ""
    assert interpreter.ARCHITECTURES == filter._AUDIT_ARCH


def test_a_value_that_is_not_that_of_the_headers_is_told() -> None:
    assert 'static assertion failed: "SIGCHLD"' in headers.disagreements("x86_64", ["asm/signal.h"], {"SIGCHLD": 18})
