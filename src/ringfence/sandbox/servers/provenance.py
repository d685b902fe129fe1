"""By whose word something of the host is found for a box, and whether that word is enough to show it.

The words of a command were seen by the person who accepts it. What a file says (where a link leads, what a `#!` line
names) nobody saw, and a project's files may be anyone's: so it may lead to

1. what every box sees: the system's folders; what a mount of the operator's shows under this very name;
2. what belongs to the file: its folder, or the `node_modules`, virtual environment or prefix that it lies in;
3. what the user installed: programs in the folders of PATH, and Pythons, which virtual environments are made from.

Anything else is refused by its name, so that a person can name it instead. What lies in a folder of PATH that is none
of a project is the user's own word, and so is a linked folder in a home.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from ringfence.core.box import Mount, within
from ringfence.core.record import dataclass

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ALTERNATIVES = "/etc/alternatives"
"""Where links of /usr/bin lead on, by the word of the administrator."""
_TOPS = (".git", "pyproject.toml", "setup.py", "setup.cfg")
"""What lies at the top of a project that has a virtual environment in it."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """What of the host is not shown to a box because a program lies beside it."""

    private: Callable[[str], str | None] | None
    """Says what credentials a folder or file holds: it is not shown at all. None: nothing is going to be shown, and
    all that would be found is wanted."""
    apart: tuple[str, ...] = ()
    """Folders and files of ours, by their real paths: what lies around one is shown without it."""

    def holds(self, path: str) -> str | None:
        return None if self.private is None else self.private(path)


class Provenance:
    """Whether what was named, or what a file says, may be shown. The methods raise ValueError if not."""

    def __init__(self, path: str, cwd: str, hidden: Hidden, mounts: Sequence[Mount]) -> None:
        self._hidden = hidden
        self._cwd = cwd
        self._mounted = tuple(mount.host for mount in mounts if mount.host == mount.at)
        self._listed = {os.path.realpath(folder) for folder in path.split(":") if os.path.isabs(folder)}
        usual = {os.path.realpath(folder) for folder in DEFAULT_PATH.split(":")}
        # In the PATH of `npm run` or of an activated environment there are folders of the project itself.
        self._users = {each for each in self._listed if not self._of_project(each)} | usual | {_ALTERNATIVES}

    def is_mounted(self, path: str) -> bool:
        """Whether a mount of the operator's shows it, under this name."""
        return any(within(path, folder) for folder in self._mounted)

    def is_listed(self, program: str) -> bool:
        """Whether it lies directly in a folder of PATH."""
        return os.path.realpath(os.path.dirname(program)) in self._listed

    def named(self, path: str) -> None:
        """A word of the command. What it names was seen, and not where links on its way lead."""
        if self._hidden.private is None:
            return
        if not self.is_listed(path):
            for folder in reversed(upwards(os.path.dirname(path))):
                outside = within(self._cwd, folder) or self._is_a_home(os.path.dirname(folder))
                if os.path.islink(folder) and not outside:
                    self.said(folder, os.path.join(os.path.dirname(folder), os.readlink(folder)))
        self._followed(_place(path))

    def refers_to_its_project(self, project: str, by: str | None) -> bool:
        """Whether the files of a virtual environment may name folders that lie beside it; `by`: the script that led to
        it, over PATH. An environment may be all that there is of a project, and what lies beside it another one."""
        if self._hidden.private is None:
            return True
        return (by is None or within(by, project)) and any(os.path.lexists(f"{project}/{top}") for top in _TOPS)

    def said(self, by: str, path: str) -> None:
        """What the file `by` names."""
        if self._hidden.private is None:
            return
        place = _place(path)
        if not self._may(_place(by), place):
            text = f"{by} leads to {place}, which is not shown because a file says so"
            raise ValueError(f"{text}: name that file itself, or mount it")
        self._followed(place)

    def _followed(self, place: str) -> None:
        if os.path.islink(place):
            self.said(place, os.path.join(os.path.dirname(place), os.readlink(place)))

    def _may(self, by: str, place: str) -> bool:
        if any(within(place, each) and not within(by, each) for each in self._hidden.apart):
            return False
        folder = os.path.dirname(by)
        return (
            folder in self._users
            or is_system(place)
            or self.is_mounted(place)
            or within(place, self._whole(folder))
            or (self.is_listed(place) and is_program(place))
            or (python_of(place) is not None and self._hidden.holds(os.path.dirname(os.path.dirname(place))) is None)
        )

    def _whole(self, folder: str) -> str:
        """What a file in this folder belongs to."""
        prefix = prefix_of(f"{folder}/file")
        whole = outermost(folder, "node_modules") or environment_of(f"{folder}/file") or prefix or folder
        return folder if whole == "/" or self._hidden.holds(whole) is not None else whole

    def _is_a_home(self, folder: str) -> bool:
        """Whether credentials lie in it, as they do in a home folder and in those around it, and not it in them; and it
        is none that the command runs in."""
        inner = f"{folder.rstrip('/')}/no name of anything"
        around = self._hidden.holds(folder) is not None and self._hidden.holds(inner) is None
        return around and (self._cwd == "/" or not within(folder, self._cwd))

    def _of_project(self, folder: str) -> bool:
        cwd = os.path.realpath(self._cwd)
        ours = within(folder, cwd) and self._hidden.holds(cwd) is None and cwd != "/"
        return ours or outermost(folder, "node_modules") is not None or environment_of(f"{folder}/file") is not None


def _place(path: str) -> str:
    """Where a file or link itself lies, behind the links on its way."""
    folder, name = os.path.split(path.rstrip("/"))
    return os.path.realpath(path) if name in ("", ".", "..") else os.path.join(os.path.realpath(folder), name)


# ── What lies around files ────────────────────────────────────────────────────────────────────────


def is_system(path: str) -> bool:
    return any(within(path, folder) for folder in SYSTEM)


def is_program(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)


def upwards(folder: str) -> list[str]:
    return [folder, *(str(each) for each in Path(folder).parents)]


def outermost(file: str, name: str) -> str | None:
    return next((each for each in reversed(upwards(file)) if os.path.basename(each) == name), None)


def environment_of(file: str) -> str | None:
    """The virtual environment that a file lies in."""
    return next((each for each in upwards(os.path.dirname(file)) if os.path.isfile(f"{each}/pyvenv.cfg")), None)


def prefix_of(file: str) -> str | None:
    """Where a program was installed with its libraries: `bin` and `lib` side by side."""
    folder = os.path.dirname(file)
    prefix = os.path.dirname(folder)
    return prefix if os.path.basename(folder) in ("bin", "sbin") and os.path.isdir(f"{prefix}/lib") else None


def python_of(program: str) -> str | None:
    """The prefix of an installed Python with all of its library, whose program this is."""
    prefix = prefix_of(program)
    if prefix is None or not os.path.basename(program).startswith("python"):
        return None
    return prefix if any(Path(prefix).glob("lib/python3*/os.py")) else None
