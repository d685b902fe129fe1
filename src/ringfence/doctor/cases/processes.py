"""P: other processes, and how long one's own live."""

from __future__ import annotations

from ringfence.doctor.case import BRIEF, TIGHT, Case, Control
from ringfence.doctor.judging import (
    answered,
    either,
    ended_as,
    left_behind,
    limited,
    misreported,
    outlasted,
    refused,
    revealed,
    victim_hurt,
)

_VICTIM = Control(features=frozenset({"victim"}))
_SHARED = Control(share=frozenset({"pid"}))
_NOT_THERE = "ESRCH or ENOENT: no process outside has a number here"
_HELD = 7
_INTACT = "the program's own exit status is reported, and nothing else"

OTHERS = (
    Case(
        "P01",
        "list the processes of the host",
        "its own only",
        """
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        others = [pid for pid in pids if pid not in (1, os.getpid())]
        say(bool(others) or os.path.exists(f"/proc/{given['harness']}/stat"), f"sees {sorted(pids)[:8]}")
        """,
        control=_VICTIM,
    ),
    Case(
        "P02",
        "read the environment of a process of the host",
        _NOT_THERE,
        "attempt(lambda: open(f\"/proc/{given['victim']}/environ\").read())",
        revealed,
        props=("victim",),
        control=_VICTIM,
    ),
    Case(
        "P03",
        "read the memory of a process of the host",
        _NOT_THERE,
        "attempt(lambda: memory_of(given['victim'], b'rf-', b'canary-'))",
        props=("victim",),
        control=_VICTIM,
    ),
    Case(
        "P04",
        "read the memory of another process by process_vm_readv",
        "EPERM, and in the facts",
        """
        pid = os.fork()
        if pid == 0:
            time.sleep(a_while(10))
            os._exit(0)
        held = buffer(64, b"secret")
        target = buffer(64)
        reach("process_vm_readv", pid, iovec(ctypes.addressof(target), 6), 1, iovec(ctypes.addressof(held), 6), 1, 0)
        os.kill(pid, 9)
        """,
        owed=(refused("process_vm_readv"),),
    ),
    Case(
        "P05",
        "write into another process by process_vm_writev",
        "EPERM, and in the facts",
        """
        held = buffer(64, b"secret")
        ours = buffer(64, b"other!")
        source, target = iovec(ctypes.addressof(ours), 6), iovec(ctypes.addressof(held), 6)
        reach("process_vm_writev", os.getpid(), source, 1, target, 1, 0)
        """,
        owed=(refused("process_vm_writev"),),
    ),
    Case(
        "P06",
        "end a process of the host",
        _NOT_THERE,
        "attempt(lambda: os.kill(given['victim'], 9))",
        victim_hurt,
        owed=(answered("ESRCH", "EPERM"),),
        props=("victim",),
        control=_VICTIM,
    ),
    Case(
        "P07",
        "kill every process in reach with kill(-1)",
        "no process is in reach; the victim and the harness live",
        """
        if alone():
            attempt(lambda: os.kill(-1, 9))
            say(False, "nobody")
        else:
            say(True, "others are in reach")
        """,
        victim_hurt,
        props=("victim",),
        control=_VICTIM,
    ),
    Case(
        "P08",
        "signal a process of the host through a descriptor of it",
        "ESRCH, ENOSYS or EPERM",
        """
        def send():
            call("pidfd_send_signal", call("pidfd_open", given["victim"], 0), 9, None, 0)
        attempt(send)
        """,
        victim_hurt,
        props=("victim",),
        control=_VICTIM,
    ),
    Case(
        "P09",
        "take an open file from another process",
        "EPERM or ENOSYS",
        """
        def take():
            call("pidfd_getfd", call("pidfd_open", given["victim"], 0), 1, 0)
        attempt(take)
        """,
        props=("victim",),
        control=_VICTIM,
    ),
    Case(
        "P10",
        "attach to a process of the host as a debugger",
        "EPERM, and in the facts",
        "reach('ptrace', 0x4206, given['victim'], 0, 0)",
        owed=(refused("ptrace"),),
        props=("victim",),
        control=_VICTIM,
    ),
    Case(
        "P11",
        "be debugged oneself, which is how tricks with setuid programs start",
        "EPERM, and in the facts",
        "reach('ptrace', 0, 0, 0, 0)",
        owed=(refused("ptrace"),),
    ),
    Case(
        "P12",
        "belong to a session or process group of the host, which signals and terminals reach",
        "a session of the box's own",
        """
        say(os.getsid(0) == 0 or os.getpgrp() == 0, f"session {os.getsid(0)}, group {os.getpgrp()}")
        """,
    ),
)

FIRST = (
    Case(
        "P20",
        "look into the box's first process: its environment, memory, files and folders",
        "ENOENT or EACCES: it is not dumpable, and hidden",
        """
        any_of({name: lambda name=name: (os.listdir if name == "fd" else os.readlink if name in ("exe", "cwd") else
                lambda path: open(path, "rb").read(16))(f"/proc/1/{name}")
                for name in ("environ", "maps", "auxv", "exe", "cwd", "fd")})
        """,
    ),
    Case(
        "P21",
        "own the files in /proc that stand for the box's first process",
        "they belong to no user of the box: it is not dumpable",
        """
        def owner():
            found = os.stat("/proc/1/mem").st_uid
            if found != os.getuid():
                raise OSError(errno.EACCES, "")
            return f"they belong to {found}"
        attempt(owner)
        """,
    ),
    Case(
        "P22",
        "write into the memory of the box's first process",
        "ENOENT or EACCES",
        "attempt(lambda: os.close(os.open('/proc/1/mem', os.O_WRONLY)))",
    ),
    Case(
        "P23",
        "end the box's first process, and with it the account of the run",
        _INTACT,
        """
        for number in range(1, 65) if alone() else ():
            try:
                os.kill(1, number)
            except OSError:
                pass
        time.sleep(a_while(0.1))
        os._exit(7)
        """,
        misreported(ended="exited", exit_status=_HELD),
        silent=True,
    ),
    Case(
        "P24",
        "take descriptors from the box's first process by setting its limits",
        "EPERM, and in the facts",
        "reach('prlimit64', 1, 7, buffer(16, struct.pack('QQ', 0, 0)), None) if alone() else say(True, 'not alone')",
        owed=(refused("prlimit64"),),
    ),
    Case(
        "P25",
        "leave more orphans than there may be processes, for the box's first process to bury",
        "it buries them: the limit of processes is not used up",
        """
        def orphan():
            # Its parent ends at once, with 3 where no orphan could be made.
            pid = os.fork()
            if pid == 0:
                try:
                    os.fork()
                except OSError:
                    os._exit(3)
                os._exit(0)
            if os.waitpid(pid, 0)[1]:
                raise OSError(errno.EAGAIN, "")
        made, patience = 0, 40
        while made < 100 and patience:
            try:
                orphan()
                made += 1
            except OSError:
                patience -= 1
                time.sleep(a_while(0.05))
        say(not patience, f"EAGAIN after {made} orphans" if not patience else f"{made} orphans buried")
        """,
        limits=TIGHT,
    ),
)

STAYING = (
    Case(
        "P30",
        "live on as a daemon: fork twice, start a session, let the parent end",
        "gone with the run",
        """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                for number in range(3):
                    os.close(number)
                os.execv("/bin/sleep", ["sleep", "5." + given["marker"]])
            os._exit(0)
        time.sleep(a_while(0.15))
        say(False, "ended first")
        """,
        left_behind,
        limits=BRIEF,
        control=_SHARED,
    ),
    Case(
        "P31",
        "live on and hold the output open, so that a reader that waits for its end waits for ever",
        "the run ends with its program",
        """
        if os.fork() == 0:
            os.setsid()
            os.execv("/bin/sleep", ["sleep", "5." + given["marker"]])
        time.sleep(a_while(0.05))
        say(False, "ended first")
        """,
        left_behind,
        limits=BRIEF,
        control=_SHARED,
    ),
    Case(
        "P32",
        "fork in a race with one's own end",
        "nothing is left",
        """
        for _ in range(6):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    os.execv("/bin/sleep", ["sleep", "5." + given["marker"]])
                os._exit(0)
        say(False, "ended in the middle of it")
        leave()
        """,
        left_behind,
        limits=BRIEF,
        control=_SHARED,
    ),
    Case(
        "P33",
        "outlast the clock by ignoring every signal",
        "killed on time: ended=timeout",
        """
        import signal
        for number in range(1, 65):
            try:
                signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError):
                pass
        while True:
            time.sleep(1)
        """,
        outlasted,
        owed=(ended_as("timeout"), limited("wall", ended=("timeout",))),
        silent=True,
        limits=BRIEF,
    ),
    Case(
        "P34",
        "outlast the clock while stopped",
        "killed on time: ended=timeout",
        """
        if os.fork() == 0:
            os.kill(os.getppid(), 19)
            os.kill(os.getpid(), 19)
        while True:
            time.sleep(1)
        """,
        outlasted,
        owed=(ended_as("timeout"), limited("wall", ended=("timeout",))),
        silent=True,
        limits=BRIEF,
    ),
    Case(
        "P35",
        "outlast the clock in a parent that waits in vfork",
        "killed on time: ended=timeout",
        """
        if call("clone", 0x4000 | 17, 0, 0, 0, 0) == 0:
            while True:
                time.sleep(1)
        """,
        outlasted,
        owed=(ended_as("timeout"), limited("wall", ended=("timeout",))),
        silent=True,
        limits=BRIEF,
    ),
    Case(
        "P36",
        "outlast the clock after closing every stream",
        "killed on time: ended=timeout",
        """
        for number in range(3):
            os.close(number)
        while True:
            time.sleep(1)
        """,
        outlasted,
        owed=(ended_as("timeout"),),
        silent=True,
        limits=BRIEF,
    ),
    Case(
        "P37",
        "outlast the clock in a chain of processes, each forking the next",
        "killed on time, all of them",
        """
        end = time.monotonic() + 8 * given["limits"]["wall_seconds"]
        while time.monotonic() < end:
            pid = os.fork()
            if pid:
                os._exit(0) if os.getpid() != given.setdefault("me", os.getpid()) else None
                while True:
                    time.sleep(1)
            given.setdefault("me", 0)
            time.sleep(0.02)
        """,
        either(left_behind, outlasted),
        owed=(ended_as("timeout"),),
        silent=True,
        limits=BRIEF,
    ),
)

CASES = OTHERS + FIRST + STAYING
