"""Starts gateways quickly: the program is imported once here, and each gateway is a fork that runs its command line.

What is killed, traced or starved is then a real process of the real program; only its second of imports is saved.
One JSON object per line comes on stdin: `{"argv", "env", "log"}`, with `exec` for a start like a user's own, `tmpfs`
for a small disk, and `stopped` to wait for a SIGCONT; the process id goes out. The exit code is left beside the log.
The zygote ends with its stdin, and every gateway with it.

    python zygote.py
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from typing import Any, NoReturn

import ringfence.cli.serve  # noqa: F401 - the command line loads a verb when it is named; here before any fork
from ringfence.cli import audit, serve
from ringfence.cli.main import main

IMPORTED = (audit, serve)
"""The verbs are imported by name when they are asked for; here before that."""
LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG = 1
PR_SET_PTRACER = 0x59616D61
"""Lets any process of ours trace this one, where the system otherwise allows that to parents alone."""
CLONE_NEWNS = 0x20000
MS_REC_PRIVATE = 0x4000 | 0x40000


def become(order: dict[str, Any]) -> NoReturn:
    """In the fork: be that gateway, and nothing else any more."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        LIBC.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
        LIBC.prctl(PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)
        nothing = os.open(os.devnull, os.O_RDONLY)
        said = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for source, target in ((nothing, 0), (said, 1), (said, 2)):
            os.dup2(source, target)
        os.environ.update(order["env"])
        if order.get("tmpfs"):
            mount_tmpfs(**order["tmpfs"])
        if order.get("stopped"):
            os.kill(os.getpid(), signal.SIGSTOP)
        if order.get("exec"):
            os.execv(sys.executable, [sys.executable, "-m", "ringfence.cli.main", *order["argv"]])
        sys.argv = ["ringfence", *order["argv"]]
        main()
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else 1
    except BaseException:  # the edge of the process: what went wrong belongs in its log
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        with open(f"{order['log']}.code", "x") as left:
            left.write(str(code))
        os._exit(code)


def mount_tmpfs(path: str, size: int) -> None:
    """A small disk of its own at `path`, which no other process sees and which goes with the gateway."""
    options = f"size={size},mode=700".encode()
    for failed in (
        LIBC.unshare(CLONE_NEWNS),
        LIBC.mount(b"none", b"/", None, ctypes.c_ulong(MS_REC_PRIVATE), None),
        LIBC.mount(b"tmpfs", path.encode(), b"tmpfs", ctypes.c_ulong(0), options),
    ):
        if failed:
            raise OSError(ctypes.get_errno(), f"no small disk at {path}")


def serve_orders() -> None:
    # The kernel buries the forks: nobody here waits for them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    LIBC.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            become(order)
        print(pid, flush=True)


if __name__ == "__main__":
    serve_orders()
