"""F: in a folder of the host that a box may write to, changing what other programs of the host go by or run."""

from __future__ import annotations

import os

from ringfence.doctor.case import Case, Trial
from ringfence.doctor.judging import changed
from ringfence.doctor.props import PROJECT

_HELD = "EROFS or EBUSY: it is mounted read-only over itself, and stays where it is"
_GO = """
        os.chdir(given["project"])
        def write(path):
            with open(path, "w") as file:
                file.write("planted")
        def swap(path):
            write("new")
            os.rename("new", path)
"""

_LEFT = (".bashrc", ".npmrc", ".config/fish", ".idea")


def _unreported(trial: Trial) -> str | None:
    """It lies there, and the facts do not say so."""
    reported = trial.report.planted
    there = [name for name in _LEFT if os.path.lexists(trial.props.folder / "project" / name)]
    unreported = [name for name in there if f"{PROJECT}/{name}" not in reported]
    return f"nothing is said of {unreported[0]}" if unreported else None


CASES = (
    Case(
        "F50",
        "plant a hook for Git in a project that it may write to",
        _HELD,
        _GO
        + """
        any_of({
            "new": lambda: write(".git/hooks/post-checkout"),
            "changed": lambda: write(".git/hooks/pre-commit"),
            "replaced": lambda: swap(".git/hooks/pre-commit"),
            "moved": lambda: os.rename(".git/hooks", ".git/kept"),
            "linked": lambda: os.symlink("/tmp", ".git/hooks/post-commit"),
            "attributes": lambda: os.chmod(".git/hooks/pre-commit", 0o755),
            "behind a link": lambda: write("scripts/post-merge"),
            "behind a link, moved": lambda: os.rename("scripts", "kept"),
        })
        """,
        changed,
        props=("project",),
    ),
    Case(
        "F51",
        "put another repository in the place of the project's",
        _HELD,
        _GO
        + """
        def exchange():
            os.makedirs("mine/hooks")
            os.rename(".git", "theirs")
            os.rename("mine", ".git")
        any_of({"moved": exchange, "config": lambda: write(".git/config"), "replaced": lambda: swap(".git/config"),
                "removed": lambda: os.remove(".git/config")})
        """,
        changed,
        props=("project",),
    ),
    Case(
        "F52",
        "change what the shell, the editor or an agent does when a user opens the project",
        _HELD,
        _GO
        + """
        any_of({
            "shell": lambda: write(".envrc"),
            "shell replaced": lambda: swap(".envrc"),
            "editor": lambda: write(".vscode/tasks.json"),
            "editor moved": lambda: os.rename(".vscode", "code"),
            "agent": lambda: write(".mcp.json"),
            "behind a link": lambda: write(".idea/workspace.xml"),
            "behind a link, moved": lambda: os.rename("conf", "kept"),
        })
        """,
        changed,
        props=("project",),
    ),
    Case(
        "F53",
        "change the repository of a project that keeps it in a folder of its own, as a file says",
        _HELD,
        _GO
        + """
        any_of({
            "hook": lambda: write("store/hooks/pre-commit"),
            "new hook": lambda: write("store/hooks/post-checkout"),
            "config": lambda: write("store/config"),
            "replaced": lambda: swap("store/config"),
            "moved": lambda: os.rename("store", "kept"),
        })
        """,
        changed,
        props=("worktree",),
    ),
    Case(
        "F54",
        "leave what programs of the host go by where nothing of that name was, and put a link in another's place",
        "the facts name each of them",
        _GO
        + """
        os.mkdir(".config")
        os.mkdir(".config/fish")
        for name in (".bashrc", ".npmrc", ".config/fish/config.fish"):
            write(name)
        os.remove(".idea")
        os.symlink("/tmp", ".idea")
        say(False, "left")
        """,
        _unreported,
        props=("project",),
    ),
)
