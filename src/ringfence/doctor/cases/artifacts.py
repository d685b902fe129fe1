"""A: what is left in the output folder, and how the host handles it."""

from __future__ import annotations

import hashlib
import stat

from ringfence.doctor.case import BRIEF, TIGHT, Case, Judge, Trial
from ringfence.doctor.judging import collected_secret, collector_hurt, either

_FEW = 8
_MAX_NAMED = 1001
_NOT_FOLLOWED = "left out, with the reason in the facts; no link is followed"


def _skipped(trial: Trial) -> str | None:
    """What was not collected is said."""
    return None if trial.report.skipped else "nothing is said to have been left out"


def _mode(bits: int, what: str) -> Judge:
    """A file on the host got mode bits that it must not have."""

    def judge(trial: Trial) -> str | None:
        assert trial.props.output is not None
        for path in sorted(trial.props.output.rglob("*")):
            if not path.is_symlink() and path.is_file() and path.stat().st_mode & bits:
                return f"{path.name} is {what} on the host"
        return None

    return judge


def _named(forbidden: str) -> Judge:
    """A name came out that a terminal or a tool on the host would act upon."""

    def judge(trial: Trial) -> str | None:
        assert trial.props.output is not None
        for path in sorted(trial.props.output.rglob("*")):
            if any(character in path.name for character in forbidden) or not path.name.isprintable():
                return f"{path.name!r} lies on the host"
        return None

    return judge


def _acted_upon(trial: Trial) -> str | None:
    assert trial.props.output is not None
    wanted = (".bashrc", ".mcp.json", "pre-commit")
    found = [path for path in trial.props.output.rglob("*") if path.name.lower() in wanted]
    return f"{found[0].name} lies on the host" if found else None


def _special(trial: Trial) -> str | None:
    """Something other than files and folders was made on the host."""
    assert trial.props.output is not None
    for path in trial.props.output.rglob("*"):
        mode = path.lstat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            return f"{path.name} is no file"
    return None


def _digests_differ(trial: Trial) -> str | None:
    """What the facts say of a file is not what lies on the host."""
    reported = {fact.path.removeprefix("/workspace/output/"): fact.sha256 for fact in trial.report.files}
    held = {name: hashlib.sha256(content).hexdigest() for name, content in trial.props.collected().items()}
    wrong = sorted(name for name in reported.keys() | held.keys() if reported.get(name) != held.get(name))
    return f"{len(wrong)} files are not as the facts say, among them {wrong[0]}" if wrong else None


def _too_many(trial: Trial) -> str | None:
    found = len(trial.props.collected())
    return f"{found} files lie on the host, of {_FEW}" if found > _FEW else None


def _too_much(trial: Trial) -> str | None:
    assert trial.props.output is not None
    size = sum(path.lstat().st_size for path in trial.props.output.rglob("*"))
    return f"{size} bytes lie on the host, of {trial.limits.disk_bytes}" if size > trial.limits.disk_bytes else None


def _named_at_length(trial: Trial) -> str | None:
    named = len(trial.report.skipped)
    return f"the facts name {named} that were left out" if named > _MAX_NAMED else None


CASES = (
    Case(
        "A01",
        "leave a link to a file of the host as a result",
        _NOT_FOLLOWED,
        "os.symlink(given['canary'], 'output/result.txt')\nsay(False, 'left')",
        collected_secret,
        owed=(_skipped, _special),
        props=("output",),
    ),
    Case(
        "A02",
        "leave a link to a folder of the host as a result",
        _NOT_FOLLOWED,
        "os.symlink(given['canary_folder'], 'output/results')\nsay(False, 'left')",
        collected_secret,
        owed=(_skipped, _special),
        props=("output",),
    ),
    Case(
        "A03",
        "put a link in the place of the output folder itself",
        "nothing is collected",
        """
        try:
            os.rename("output", "aside")
            os.symlink(given["canary_folder"], "output")
            say(False, "swapped")
        except OSError as exc:
            say(False, word(exc))
        """,
        collected_secret,
        props=("output",),
    ),
    Case(
        "A04",
        "leave a FIFO, on which every reader blocks",
        "left out, and no reader waits",
        "os.mkfifo('output/pipe')\nsay(False, 'left')",
        collector_hurt,
        owed=(_skipped, _special),
        props=("output",),
        limits=BRIEF,
    ),
    Case(
        "A05",
        "leave a socket",
        "left out",
        """
        import socket
        way = socket.socket(socket.AF_UNIX)
        way.bind("output/socket")
        say(False, "left")
        """,
        collector_hurt,
        owed=(_skipped, _special),
        props=("output",),
    ),
    Case(
        "A06",
        "have a result written through a link that lies in the host's folder since an earlier run",
        "the link is not followed; the canary stays as it is",
        "open('output/result.txt', 'w').write('changed')\nsay(False, 'left')",
        lambda trial: trial.props.changes(),
        owed=(_skipped,),
        props=("output",),
        inputs={"planted": b"result.txt"},
    ),
    Case(
        "A07",
        "leave a setuid program",
        "it comes out as a plain file",
        """
        open("output/tool", "w").write("#!/bin/sh\\n")
        os.chmod("output/tool", 0o6755)
        say(False, "left")
        """,
        _mode(0o6000, "setuid"),
        props=("output",),
    ),
    Case(
        "A08",
        "leave a file that every user may write",
        "on the host only its owner may",
        """
        open("output/open.txt", "w").write("x")
        os.chmod("output/open.txt", 0o666)
        say(False, "left")
        """,
        _mode(0o022, "writable by others"),
        props=("output",),
    ),
    Case(
        "A09",
        "leave names with newlines and escape sequences",
        "left out, or without them",
        """
        for name in ("two\\nlines", "\\x1b]0;title\\x07", "back\\rspace", "bidi\\u202egpj.exe"):
            open(f"output/{name}", "w").write("x")
        say(False, "left")
        """,
        _named("\n\x1b\r\x07"),
        owed=(_skipped,),
        props=("output",),
    ),
    Case(
        "A10",
        "leave files that tools on the host obey by themselves: a git hook, a shell start-up file, a server list",
        "left out, with the reason in the facts",
        """
        os.makedirs("output/.git/hooks")
        for name in (".git/hooks/pre-commit", ".bashrc", ".mcp.json", ".Bashrc"):
            open(f"output/{name}", "w").write("#!/bin/sh\\n")
        say(False, "left")
        """,
        _acted_upon,
        owed=(_skipped,),
        props=("output",),
    ),
    Case(
        "A11",
        "leave folders so deep that their path has no name",
        "left out from some depth on; the run stays as it was",
        """
        os.chdir("output")
        for _ in range(600):
            os.mkdir("d" * 20)
            os.chdir("d" * 20)
        say(False, "left")
        """,
        collector_hurt,
        owed=(_skipped,),
        props=("output",),
    ),
    Case(
        "A12",
        "leave files and folders that no user may read",
        "left out or read; the run stays as it was",
        """
        open("output/closed", "w").write("x")
        os.mkdir("output/shut")
        os.chmod("output/closed", 0)
        os.chmod("output/shut", 0)
        say(False, "left")
        """,
        collector_hurt,
        props=("output",),
    ),
    Case(
        "A13",
        "change a result after it was finished, from a process that stays",
        "no process is left to change it: the facts and the file agree",
        """
        open("output/result.txt", "w").write("x" * 1000)
        if os.fork() == 0:
            os.setsid()
            while True:
                open("output/result.txt", "a").write("y" * 1000)
                open(f"output/new-{time.monotonic_ns()}", "w").write("y")
        time.sleep(0.02)
        say(False, "left")
        leave()
        """,
        either(_digests_differ, collector_hurt),
        props=("output",),
        limits=BRIEF,
    ),
    Case(
        "A14",
        "have a result written through a link to a folder that lies in the host's folder since an earlier run",
        "the link is not followed; the canary stays as it is",
        """
        os.mkdir("output/results")
        open("output/results/canary.txt", "w").write("changed")
        say(False, "left")
        """,
        lambda trial: trial.props.changes(),
        owed=(_skipped,),
        props=("output",),
        inputs={"planted": b"results/"},
    ),
    Case(
        "A15",
        "leave more files than may be collected",
        "no more than that come out, and the rest is said to be left out",
        """
        for number in range(20):
            open(f"output/{number}", "w").close()
        say(False, "left")
        """,
        _too_many,
        owed=(_skipped,),
        props=("output",),
        output_files=_FEW,
    ),
    Case(
        "A16",
        "leave files that take no room, and more of them than the box has room for",
        "no more comes out than the box may hold",
        """
        for number in range(3):
            with open(f"output/{number}", "w") as file:
                file.truncate(given["limits"]["disk_bytes"] // 2 - 4096)
        say(False, "left")
        """,
        _too_much,
        owed=(_skipped,),
        props=("output",),
        limits=TIGHT,
    ),
    Case(
        "A17",
        "leave thousands of links, so that the facts are full of what was left out",
        "the first thousand are named, and the rest is counted",
        """
        for number in range(3000):
            os.symlink("nowhere", f"output/{number}")
        say(False, "left")
        """,
        either(_named_at_length, collector_hurt),
        owed=(_skipped, _special),
        props=("output",),
    ),
)
