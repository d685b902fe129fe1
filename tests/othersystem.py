"""Another operating system, as far as Python's standard library shows it: run one of our programs as if on macOS or
Windows, with the names gone that CPython does not have there.

    python tests/othersystem.py darwin ringfence --help
    python tests/othersystem.py win32 -c 'import ringfence'

The standard library and what others wrote are loaded first, as they are here; what is loaded afterwards, all of ours,
sees stand-ins for `os`, `socket` and the rest that lack what the other system lacks, and no `/proc`. What a stand-in
cannot show are rules of file systems (names, modes, files in use).
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import importlib
import os
import re
import runpy
import struct
import sys
import types
from collections.abc import Callable
from typing import Any

# What is loaded before the system changes. Whatever one of these wants of Linux, it may have.
_OTHERS = (
    *("asyncio", "asyncio.subprocess", "concurrent.futures", "ctypes.util", "email.message", "getpass", "hashlib"),
    *("http.client", "importlib.metadata", "importlib.resources", "json", "logging", "mmap", "multiprocessing"),
    *("pathlib", "platform", "queue", "random", "secrets", "selectors", "shutil", "socketserver", "sqlite3", "ssl"),
    *("subprocess", "tarfile", "tempfile", "threading", "urllib.request", "uuid", "zipfile", "pdb", "unittest.mock"),
    *("aiohttp", "anyio", "anyio._backends._asyncio", "cel_expr_python.cel", "click", "cryptography.x509", "idna"),
    *("cryptography.hazmat.primitives.asymmetric.ed25519", "cryptography.hazmat.primitives.serialization"),
    *("httptools", "jsonschema_rs", "mcp", "mcp.client.session", "mcp.server.runner", "mcp.server.subscriptions"),
    *("mcp.shared.jsonrpc_dispatcher", "pydantic", "re2", "ruamel.yaml", "starlette.responses", "typer", "uvicorn"),
    *("uvicorn.protocols.http.httptools_impl", "uvicorn.loops.auto", "uvicorn.lifespan.off"),
)

# Names that are in CPython on Linux and not on macOS, as regular expressions over a module's names.
_NOT_ON_DARWIN = {
    "os": (
        r"pidfd_open|PIDFD_\w+|P_PIDFD|memfd_create|MFD_\w+|unshare|setns|CLONE_\w+|eventfd\w*|EFD_\w+|timerfd_\w+"
        r"|TFD_\w+|pipe2|sched_(get|set)(affinity|scheduler|param)|sched_rr_get_interval|sched_param"
        r"|SCHED_(BATCH|IDLE|RESET_ON_FORK|DEADLINE|NORMAL)|O_(PATH|TMPFILE|DIRECT|NOATIME|LARGEFILE|RSYNC)"
        r"|getrandom|GRND_\w+|posix_fallocate|posix_fadvise|POSIX_FADV_\w+|(get|set|list|remove)xattr|XATTR_\w+"
        r"|copy_file_range|splice|SPLICE_\w+|fdatasync|preadv|pwritev|RWF_\w+|(get|set)res[ug]id|waitid"
        r"|waitid_result|RTLD_DEEPBIND"
    ),
    "fcntl": r"F_(ADD_SEALS|GET_SEALS|SEAL_\w+|OFD_\w+|[GS]ETPIPE_SZ|NOTIFY|[GS]ETLEASE|[GS]ETSIG|[GS]ETOWN_EX)"
    r"|DN_\w+|FICLONE\w*",
    "socket": (
        r"(AF|PF)_(NETLINK|PACKET|VSOCK|ALG|CAN|TIPC|QIPCRTR|RDS)|(NETLINK|PACKET|VMADDR|ALG|CAN|TIPC)_\w+"
        r"|SO_(PEERCRED|PASSCRED|PASSSEC|PEERSEC|MARK|BINDTODEVICE|DOMAIN|PROTOCOL|PRIORITY|INCOMING_CPU|VM_\w+)"
        r"|SOCK_(CLOEXEC|NONBLOCK)|SCM_CREDENTIALS|MSG_(CMSG_CLOEXEC|ERRQUEUE|MORE|CONFIRM|FASTOPEN|NOSIGNAL)"
        r"|TCP_(CORK|DEFER_ACCEPT|QUICKACK|USER_TIMEOUT|SYNCNT|LINGER2|WINDOW_CLAMP|CONGESTION|KEEPIDLE)|IP_TRANSPARENT"
    ),
    "select": r"epoll|EPOLL\w+",
    "signal": r"pidfd_send_signal|sigwaitinfo|sigtimedwait|SIG(RTMIN|RTMAX|PWR|STKFLT|POLL|CLD)",
    "resource": r"prlimit|RLIMIT_(MSGQUEUE|NICE|RTPRIO|RTTIME|SIGPENDING|OFILE)|RUSAGE_THREAD",
    "mmap": r"MAP_(POPULATE|DENYWRITE|EXECUTABLE|STACK)"
    r"|MADV_(DONTFORK|DOFORK|HUGEPAGE|NOHUGEPAGE|DONTDUMP|DODUMP|REMOVE)",
    "time": r"CLOCK_(BOOTTIME|TAI|REALTIME_COARSE)|pthread_getcpuclockid",
    "errno": r"ENOMEDIUM|EMEDIUMTYPE|EREMOTEIO|EUCLEAN|ENOKEY|EKEY\w+",
}

# What Windows lacks besides.
_NOT_ON_WIN32 = {
    "os": (
        r"(get|set)(e|re|res)?[ug]id|(get|set)groups|initgroups|getgrouplist|(get|set)p?pgid|getpgrp|setpgrp|(get|set)sid"
        r"|fork|forkpty|openpty|login_tty|posix_openpt|grantpt|unlockpt|ptsname|ttyname|ctermid|tc[gs]etpgrp|killpg|wait"
        r"|wait[34]|W[A-Z]+|P_(ALL|PID|PGID)|(l|f)?chown|fchdir|fchmod|chroot|mkfifo|mknod|major|minor|makedev|pread|pwrite"
        r"|readv|writev|sendfile|SF_\w+|lockf|F_(LOCK|TLOCK|ULOCK|TEST)|O_(CLOEXEC|NOFOLLOW|DIRECTORY|NONBLOCK|NOCTTY"
        r"|D?SYNC|ASYNC|NDELAY|ACCMODE)|f?pathconf|sysconf|confstr|\w+_names|f?statvfs|ST_\w+|nice|(get|set)priority|PRIO_\w+"
        r"|uname|posix_spawnp?|POSIX_SPAWN_\w+|sched_\w+|SCHED_\w+|sync|getloadavg|register_at_fork|RTLD_\w+|EX_(?!OK)\w+"
        r"|NGROUPS_MAX|TMP_MAX|(get|set)_blocking|wait_status_to_exitcode|environb|getenvb"
    ),
    "socket": r"AF_UNIX|CMSG_(LEN|SPACE)|SCM_\w+|sethostname|send_fds|recv_fds"
    r"|MSG_(DONTWAIT|EOR|NOSIGNAL|TRUNC)|SO_REUSEPORT",
    "select": r"poll|POLL\w+|PIPE_BUF|kqueue|kevent",
    "signal": (
        r"SIG(?!(ABRT|FPE|ILL|INT|SEGV|TERM|_DFL|_IGN)$)[A-Z0-9_]+|pthread_\w+|sigpending|sigwait|pause|alarm|[gs]etitimer"
        r"|siginterrupt|ITIMER_\w+|struct_siginfo|Sigmasks"
    ),
    "time": r"(clock_[gs]ettime|clock_getres)(_ns)?|CLOCK_\w+|tzset",
}
_NO_MODULES = {
    "darwin": ("spwd", "crypt"),
    "win32": (
        *("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "posix", "syslog", "readline", "curses"),
        *("spwd", "crypt", "nis", "uvloop"),
    ),
}


class _Lacking(types.ModuleType):
    """A module without some of its names."""

    def __init__(self, real: types.ModuleType, gone: str, instead: dict[str, Any]) -> None:
        super().__init__(real.__name__, real.__doc__)
        vars(self)["_real"], vars(self)["_gone"] = real, re.compile(gone)
        vars(self).update({n: getattr(real, n) for n in ("__spec__", "__path__", "__file__") if hasattr(real, n)})
        vars(self).update(instead)

    def __getattr__(self, name: str) -> Any:
        if self._gone.fullmatch(name):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} on {sys.platform}")
        return getattr(self._real, name)

    def __dir__(self) -> list[str]:
        return [name for name in dir(self._real) if not self._gone.fullmatch(name)]


def _without_proc(function: Callable[..., Any], *, folders: bool = True) -> Callable[..., Any]:
    """For a function that takes a path first: there is no /proc and no /sys; on Windows no folder can be opened."""

    def lacking(path: Any, *args: Any, **named: Any) -> Any:
        text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
        if re.match(r"/(proc|sys)(/|$)", text):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), text)
        if not folders:
            if any(name in named for name in ("dir_fd", "src_dir_fd", "dst_dir_fd")):
                raise NotImplementedError("dir_fd unavailable on this platform")
            if text and os.path.isdir(text):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), text)
        return function(path, *args, **named)

    return lacking


def _unavailable(*args: Any, **named: Any) -> Any:
    raise NotImplementedError


def become(system: str) -> None:
    """From now on, whatever is loaded is on that system."""
    for name in _OTHERS:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            if name.partition(".")[0] in sys.stdlib_module_names:
                raise
    # A process that was forked for this may have ours, of before the system changed.
    for name in [name for name in sys.modules if name.partition(".")[0] == "ringfence"]:
        del sys.modules[name]
    gone = dict(_NOT_ON_DARWIN)
    windows = system == "win32"
    if windows:
        gone = {name: f"{gone.get(name, '(?!)')}|{_NOT_ON_WIN32.get(name, '(?!)')}" for name in {*gone, *_NOT_ON_WIN32}}
        _change_loop()
    for name, pattern in gone.items():
        if name in _NO_MODULES[system]:
            continue
        real = importlib.import_module(name)
        instead: dict[str, Any] = {}
        if name == "os":
            instead = {n: _without_proc(getattr(os, n)) for n in ("stat", "listdir", "readlink", "scandir", "lstat")}
            instead["open"] = _without_proc(os.open, folders=not windows)
            instead["name"] = "nt" if windows else "posix"
            if windows:
                instead |= {"supports_dir_fd": set(), "O_BINARY": 0, "getlogin": lambda: "user"}
        sys.modules[name] = _Lacking(real, pattern, instead)
    if windows:
        sys.modules["msvcrt"] = _msvcrt()
    for name in _NO_MODULES[system]:
        sys.modules[name] = None  # type: ignore[assignment]
    builtins.open = _without_proc(open)
    ctypes.CDLL = _library(windows)  # type: ignore[assignment, misc]
    sys.platform = system
    sys.abiflags = ""


def _library(windows: bool) -> Callable[..., Any]:
    """On macOS the C library is there, without what only Linux has; on Windows none has no name."""
    real = ctypes.CDLL

    class Library(real):  # type: ignore[misc, valid-type]
        def __init__(self, name: Any, *args: Any, **named: Any) -> None:
            if name is None and windows:
                raise TypeError("bad argument type for built-in operation")
            if name is not None and "libc.so" in str(name):
                raise OSError(f"{name}: image not found")
            super().__init__(name, *args, **named)

        def __getattr__(self, name: str) -> Any:
            if re.match(r"(inotify_|io_uring|unshare|setns|prctl|epoll|pivot_root|mount|umount2|memfd|eventfd)", name):
                raise AttributeError(name)
            return super().__getattr__(name)

    return Library


def _msvcrt() -> types.ModuleType:
    """A lock is on a range of bytes from the current place on, and belongs to whoever opened the file."""
    made, system = types.ModuleType("msvcrt"), importlib.import_module("fcntl")
    real = getattr(system, "_real", system)

    def locking(descriptor: int, mode: int, size: int) -> None:
        start = os.lseek(descriptor, 0, os.SEEK_CUR)
        order = struct.pack("hhqqi4x", real.F_WRLCK, os.SEEK_SET, start, size, 0)
        try:
            real.fcntl(descriptor, real.F_OFD_SETLK, order)
        except BlockingIOError:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES)) from None

    vars(made).update(LK_NBLCK=2, locking=locking)
    return made


def _change_loop() -> None:
    import asyncio
    from asyncio import unix_events

    loop = unix_events._UnixSelectorEventLoop
    for name in ("add_signal_handler", "remove_signal_handler", "create_unix_server", "create_unix_connection"):
        setattr(loop, name, _unavailable)
    assert asyncio.DefaultEventLoopPolicy is not None


def main() -> None:
    system, what, *rest = sys.argv[1:]
    sys.path.pop(0)  # this folder
    become(system)
    if what == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<command>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = [what, *rest]
        runpy.run_module("ringfence.cli.main", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
