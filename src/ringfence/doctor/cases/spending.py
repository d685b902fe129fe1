"""G, continued: disk, time and output."""

from __future__ import annotations

import math

from ringfence.doctor.case import BRIEF, FEW_CYCLES, QUARTER_CORE, TIGHT, Case, Trial, claimed
from ringfence.doctor.judging import NeedsMoreTime, answered, ended_as, ending, limited, means, outlasted

DISK = (
    Case(
        "G30",
        "write half as much again as the disk holds",
        "ENOSPC, and limit=disk",
        """
        def fill():
            for number in range(9):
                with open(f"tmp/part-{number}", "wb", buffering=0) as file:
                    for _ in range(given["limits"]["disk_bytes"] // 6 // MIB):
                        file.write(b"x" * MIB)
            return "wrote it all"
        attempt(fill)
        """,
        owed=(answered("ENOSPC"), limited("disk")),
        limits=TIGHT,
    ),
    Case(
        "G31",
        "write 600 MiB at the default limits",
        "ENOSPC or EFBIG at 512 MiB",
        """
        def fill():
            with open("tmp/big", "wb", buffering=0) as file:
                for _ in range(600):
                    file.write(b"x" * MIB)
            return "wrote it all"
        attempt(fill)  # the file stays, so that the disk is still full when the box is looked at for the last time
        """,
        owed=(answered("ENOSPC", "EFBIG"), limited("disk", "file_size")),
    ),
    Case(
        "G32",
        "make a sparse file of a petabyte",
        "EFBIG: no file is longer than the disk",
        """
        def make():
            with open("output/sparse", "wb") as file:
                file.truncate(1 << 50)
        attempt(make)
        """,
        owed=(answered("EFBIG"),),
    ),
    Case(
        "G33",
        "reserve space that the disk does not have",
        "ENOSPC or EFBIG",
        """
        def reserve():
            with open("tmp/reserved", "wb") as file:
                os.posix_fallocate(file.fileno(), 0, int(given["limits"]["disk_bytes"] * 1.5))
        attempt(reserve)
        """,
        owed=(answered("ENOSPC", "EFBIG"),),
        limits=TIGHT,
    ),
    Case(
        "G34",
        "make half as many files again as there may be",
        "ENOSPC, and limit=inodes",
        """
        def fill():
            for number in range(int(given["limits"]["inodes"] * 1.5)):
                os.close(os.open(f"tmp/{number}", os.O_CREAT | os.O_WRONLY))
            return "made them all"
        attempt(fill)
        """,
        owed=(answered("ENOSPC"), limited("inodes", "disk")),
        limits=TIGHT,
    ),
    Case(
        "G35",
        "make folders and links instead of files",
        "ENOSPC: they count too",
        """
        def fill():
            for number in range(int(given["limits"]["inodes"] * 0.75)):
                os.mkdir(f"tmp/d{number}")
                os.symlink("x" * 200, f"tmp/l{number}")
            return "made them all"
        attempt(fill)
        """,
        owed=(answered("ENOSPC"),),
        limits=TIGHT,
    ),
    Case(
        "G36",
        "fill /dev/shm, which is memory on most machines",
        "ENOSPC at the disk limit: it is part of the workspace",
        """
        def fill():
            with open("/dev/shm/big", "wb", buffering=0) as file:
                for _ in range(int(given["limits"]["memory_bytes"] * 1.5) // MIB):
                    file.write(b"x" * MIB)
            return "wrote it all"
        attempt(fill)
        """,
        owed=(answered("ENOSPC", "EFBIG", "ENOENT", "EACCES"),),
        limits=TIGHT,
    ),
    Case(
        "G37",
        "hold the space of files that were deleted",
        "ENOSPC: it counts until the last descriptor is closed",
        """
        held = []
        def fill():
            for number in range(36):
                file = open(f"tmp/{number}", "wb", buffering=0)
                os.unlink(f"tmp/{number}")
                file.write(b"x" * (given["limits"]["disk_bytes"] // 24))
                held.append(file)
            return "holds it all"
        attempt(fill)
        """,
        owed=(answered("ENOSPC"),),
        limits=TIGHT,
    ),
)


_BURNED = 3.3
"""So many times what it may have: a kernel that limits each process by itself does so at twice, and ends it after
another second."""


def _burned(trial: Trial) -> str | None:
    """Much more processor time than it may have. Where no kernel counts for a whole box, the supervisor has to poll."""
    used = trial.report.usage.cpu_ms
    detail = claimed(trial)
    if detail:
        return NeedsMoreTime(detail)
    most = (trial.limits.cpu_seconds or 0) * 1000 * _BURNED
    return NeedsMoreTime(f"{used:.0f} ms of processor time") if used is not None and used > most else None


def _said_or_met_it(trial: Trial) -> str | None:
    """On a slow machine it may meet a limit before it could say that there is one."""
    if trial.report.limit == "cpu" or "done" in (trial.claim or {}):
        return None
    return f"the program did not say what came of it ({ending(trial)})"


def _share(trial: Trial) -> str | None:
    """Its share of a core, as it measured it by its own processor time. Without control groups cores are whole."""
    share = (trial.claim or {}).get("share")
    if not isinstance(share, float):
        return None
    allowed = math.ceil(trial.limits.cpu_cores) if means(trial, "cpu") == "affinity" else trial.limits.cpu_cores
    return f"it had {share:.2f} cores" if share > allowed + 0.2 else None


TIME = (
    Case(
        "G40",
        "burn more processor time than allowed",
        "ended for limit=cpu",
        """
        # In WebAssembly there is one clock: the processor may have been another's for much of this time.
        end = time.process_time() + (3.5 if sys.platform != "wasi" else a_while(14))
        while time.process_time() < end:
            pass
        say(True, f"burned {time.process_time():.1f} s")
        """,
        _burned,
        owed=(limited("cpu", ended=("timeout", "signalled")),),
        silent=True,
        limits=FEW_CYCLES,
    ),
    Case(
        "G41",
        "burn it in several processes, none of which is over the limit",
        "ended for limit=cpu: it is one limit for all",
        """
        for _ in range(4):
            if os.fork() == 0:
                end = time.process_time() + 0.9
                while time.process_time() < end:
                    pass
                os._exit(0)
        for _ in range(4):
            os.wait()
        say(True, "burned 3.6 s")
        """,
        _burned,
        owed=(limited("cpu", ended=("timeout", "signalled")),),
        silent=True,
        limits=FEW_CYCLES,
    ),
    Case(
        "G42",
        "use two cores where a quarter of one was given",
        "a quarter; one where only whole cores can be given",
        """
        import resource
        began = time.monotonic()
        for _ in range(2):
            if os.fork() == 0:
                while time.monotonic() < began + 1.2:
                    pass
                os._exit(0)
        os.wait()
        os.wait()
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        share = (used.ru_utime + used.ru_stime) / (time.monotonic() - began)
        say(False, f"had {share:.2f} cores", share=share)
        """,
        _share,
        limits=QUARTER_CORE,
    ),
    Case(
        "G49",
        "burn it in a chain of orphans, each of which ends before the supervisor has looked at it for long",
        "ended for limit=cpu: what has ended counts",
        """
        first, left = os.getpid(), 30
        told, telling = os.pipe()
        while left:
            if os.fork():
                break
            os.setsid()
            end = time.process_time() + 0.12
            while time.process_time() < end:
                pass
            left -= 1
        if os.getpid() != first:
            if left == 0:
                os.write(telling, b"1")
            os._exit(0)
        os.close(telling)
        say(bool(os.read(told, 1)), "burned 3.6 s")
        """,
        _burned,
        owed=(limited("cpu", ended=("timeout", "signalled")),),
        silent=True,
        limits=FEW_CYCLES,
    ),
    Case(
        "G45",
        "be without a limit of processor time of its own, in each process",
        "a hard limit a little above what was asked for",
        """
        import resource
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        say(hard < 0 or hard > given["limits"]["cpu_seconds"] * 2 + 2, f"{hard} seconds")
        """,
        owed=(_said_or_met_it,),
        silent=True,
        limits=FEW_CYCLES,
    ),
    Case(
        "G43",
        "sleep for ever",
        "killed on time: ended=timeout",
        "time.sleep(8 * given['limits']['wall_seconds'])",
        outlasted,
        owed=(ended_as("timeout"), limited("wall", ended=("timeout",))),
        silent=True,
        limits=BRIEF,
    ),
    Case(
        "G44",
        "compute for ever in one call that cannot be interrupted",
        "killed on time: ended=timeout",
        """
        import re
        re.match("(a+)+$", "a" * 60 + "b")
        """,
        outlasted,
        owed=(ended_as("timeout"), limited("wall", ended=("timeout",))),
        silent=True,
        limits=BRIEF,
    ),
)


def _kept_small(trial: Trial) -> str | None:
    """What is returned of a flood is what was asked for and no more."""
    most = 2 * trial.limits.capture_bytes + 1024
    kept = sum(len(part) for out in (trial.report.stdout, trial.report.stderr) for part in (out.head, out.tail))
    return f"{kept} bytes of output were kept" if kept > most else None


def _flood(id: str, tried: str, program: str) -> Case:
    return Case(
        id,
        tried,
        "ended=output at the limit, with head, tail, count and hash",
        "most = int(given['limits']['output_bytes'] * 1.5)\n" + program,
        _wrote_it_all,
        owed=(ended_as("output"), limited("output", ended=("output",)), _kept_small),
        silent=True,
        limits=TIGHT,
    )


def _wrote_it_all(trial: Trial) -> str | None:
    """It said all that it had to say, and was not stopped."""
    if trial.report.ended == "output":
        return None
    total = trial.report.stdout.total + trial.report.stderr.total
    return f"{total} bytes came out" if total >= trial.limits.output_bytes * 1.45 else None


OUTPUT = (
    _flood("G50", "flood stdout without a single newline", "os.write(1, b'\\0\\xff' * (most // 2))\n"),
    _flood("G51", "flood stderr", "import sys\nsys.stderr.write('x\\n' * (most // 2))\n"),
    _flood(
        "G52",
        "flood both streams from several processes",
        """
for _ in range(4):
    if os.fork() == 0:
        for _ in range(most // 8 // 1024 + 1):
            os.write(1, b"o" * 1024)
            os.write(2, b"e" * 1024)
        os._exit(0)
for _ in range(4):
    os.wait()
""",
    ),
)


CASES = DISK + TIME + OUTPUT
