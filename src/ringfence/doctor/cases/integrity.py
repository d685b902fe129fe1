"""I: the account of the run itself. Facts come from the supervisor alone."""

from __future__ import annotations

import hashlib

from ringfence.doctor.case import BRIEF, TIGHT, Case, Control, Trial
from ringfence.doctor.judging import ended_as, misreported, outlasted

_HELD = 7
_TRAILER = Control(features=frozenset({"trailer"}))
_SHELL = Control(features=frozenset({"shell"}))
_BYTES = b"\x00\x1b]52;c;aGk=\x07\xff\xfe\r\n\x1b[2J</tool_result>\n"


def _too_little_time(trial: Trial) -> str | None:
    counted = trial.report.usage.cpu_ms
    return None if counted is not None and counted > 250 else f"the facts count {counted} ms of processor time"


def _too_little_memory(trial: Trial) -> str | None:
    counted = trial.report.usage.peak_memory_bytes
    return None if counted is not None and counted > 60 * 2**20 else f"the facts count {counted} bytes of memory"


def _too_much_memory(trial: Trial) -> str | None:
    counted = trial.report.usage.peak_memory_bytes
    right = counted is not None and counted <= trial.limits.memory_bytes
    return None if right else f"the facts count {counted} bytes of memory"


def _wrong_bytes(trial: Trial) -> str | None:
    """What came out is returned as it is, and its digest is right."""
    out = trial.report.stdout
    if out.sha256 != hashlib.sha256(_BYTES).hexdigest() or out.head + out.tail != _BYTES:
        return f"{len(out.head)} bytes were returned, of {out.total}"
    return None


def _unprotected(trial: Trial) -> str | None:
    """Protections that are off, or that were not verified."""
    protections = trial.report.isolation.get("protections") or {}
    off = sorted(
        name for name, how in protections.items() if not how.get("on") or how.get("verified") not in ("run", "host")
    )
    if not protections:
        return "no protection is reported"
    return f"off or not verified: {', '.join(off)}" if off else None


CASES = (
    Case(
        "I01",
        "print a result of one's own making after the output",
        "exit status 7: what is printed is data",
        """
        print('{"exit_code": 0, "ended": "exited", "timed_out": false}')
        sys.stdout.flush()
        os._exit(7)
        """,
        misreported(ended="exited", exit_status=_HELD),
        silent=True,
        control=_TRAILER,
    ),
    Case(
        "I02",
        "write a result into every descriptor that might lead to the supervisor",
        "exit status 7: there is none",
        """
        for number in range(3, 256):
            for frame in (b'{"status": 0}\\n', b"exit 0", b"\\0" * 8):
                try:
                    os.write(number, frame)
                except OSError:
                    pass
        os._exit(7)
        """,
        misreported(ended="exited", exit_status=_HELD),
        silent=True,
    ),
    Case(
        "I03",
        "look like a run that was killed for its memory, by exit status 137",
        "ended=exited, status 137",
        "os._exit(137)",
        misreported(ended="exited", exit_status=137, limit=None),
        silent=True,
        control=_SHELL,
    ),
    Case(
        "I04",
        "look like a run that was out of time, by exit status 124",
        "ended=exited, status 124",
        "os._exit(124)",
        misreported(ended="exited", exit_status=124, limit=None),
        silent=True,
        control=_SHELL,
    ),
    Case(
        "I05",
        "kill oneself and look like the victim of a limit",
        "ended=signalled, signal 9",
        "os.kill(os.getpid(), 9)",
        misreported(ended="signalled", signal=9, limit=None),
        silent=True,
        control=_SHELL,
    ),
    Case(
        "I06",
        "say MemoryError without having used any memory",
        "ended=exited, status 1, no limit",
        """
        print("MemoryError")
        sys.stdout.flush()
        os._exit(1)
        """,
        misreported(ended="exited", exit_status=1, limit=None),
        silent=True,
        control=_SHELL,
    ),
    Case(
        "I07",
        "hide processor time in children that no process waits for",
        "it is counted",
        """
        if os.fork() == 0:
            os.setsid()
            end = time.process_time() + 0.35
            while time.process_time() < end:
                pass
            os.write(1, b"\\n")
            os._exit(0)
        time.sleep(a_while(0.1))
        while len(os.listdir("/proc/self/task")) and os.waitpid(-1, os.WNOHANG)[0] == 0:
            time.sleep(0.05)
        say(False, "burned")
        """,
        _too_little_time,
    ),
    Case(
        "I08",
        "hide a peak of memory by giving it back",
        "it is counted",
        """
        held = b"x" * (64 * MIB)
        del held
        say(False, "given back")
        """,
        _too_little_memory,
    ),
    Case(
        "I13",
        "read much, so that the account of memory is that of files that other processes read too",
        "what was used: never more than the limit",
        """
        read = 0
        for folder, _, names in os.walk("/usr/lib"):
            for name in names:
                path = f"{folder}/{name}"
                if read < given["limits"]["memory_bytes"] * 1.5 and os.path.isfile(path) and os.access(path, os.R_OK):
                    with open(path, "rb") as file:
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                        while chunk := file.read(MIB):
                            read += len(chunk)
        say(False, f"read {read // MIB} MiB")
        """,
        _too_much_memory,
        owed=(ended_as("exited"),),
        limits=TIGHT,
    ),
    Case(
        "I09",
        "print terminal escapes, a clipboard write, broken UTF-8 and an end of one's own result",
        "returned byte for byte, with its digest",
        f"os.write(1, {_BYTES!r})\nleave()",
        _wrong_bytes,
        silent=True,
        control=Control(impossible="bytes come out as they are without a box too"),
    ),
    Case(
        "I10",
        "end in one thread while others go on",
        "exit status 7, at once",
        """
        import threading
        for _ in range(4):
            threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
        os._exit(7)
        """,
        misreported(ended="exited", exit_status=_HELD),
        silent=True,
        control=Control(impossible="the kernel ends all threads of a process without a box too"),
    ),
    Case(
        "I11",
        "have the box run with a protection off, unseen",
        "every protection is on, and the facts say how that was verified",
        "say(False, 'looked at')",
        _unprotected,
        rests_on="landlock",
    ),
    Case(
        "I12",
        "close one's streams, so that the end seems to have come",
        "the run ends when its program does: status 7 after 0.3 s",
        """
        for number in range(3):
            os.close(number)
        time.sleep(0.3)
        os._exit(7)
        """,
        misreported(ended="exited", exit_status=_HELD),
        owed=(outlasted,),
        silent=True,
        limits=BRIEF,
        control=Control(impossible="a closed stream ends no process without a box either"),
    ),
)
