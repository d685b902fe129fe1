"""What a command needs of the host to run in a box, found from the command itself and shown there read-only.

1. The program, by its path or on PATH. A link is followed; where a script begins with `#!`, its interpreter too.
2. Around a program of a virtual environment: the environment, the Python that it was made from, and the folders that
   its `.pth` files name, as far as they lie beside the environment.
3. Around a file beneath a `node_modules`: the outermost `node_modules` on its way.
4. Around any other program outside of the system's folders: the prefix (`bin` and `lib` side by side), else the file.
5. The script that an interpreter is given: as above, else the folder of its npm package (`package.json`), else the
   folder that it lies in; with `-m`, the working folder where that holds the module.

Files of a project may be anyone's, so what they name is shown only where `provenance` lets it be: links, interpreters,
the folders of `.pth` files, the home of an environment.

Nothing that could hold credentials is ever found this way: of a folder around some, the file alone is shown, and what
is itself among them is refused. PATH in the box is PATH here, without the folders that the box does not see.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import Path

from ringfence.core.box import Mount, within
from ringfence.core.record import dataclass
from ringfence.sandbox.servers.provenance import (
    DEFAULT_PATH,
    SYSTEM,
    Hidden,
    Provenance,
    environment_of,
    is_program,
    is_system,
    outermost,
    prefix_of,
    python_of,
    upwards,
)

_INTERPRETERS = ("python", "node", "nodejs", "deno", "bun", "ruby", "perl", "sh", "bash", "dash")
_VALUED = {"-m": 1, "-c": 1, "-e": 1, "--eval": 1, "-p": 1, "-W": 1, "-X": 1, "-r": 1, "--require": 1, "--import": 1}
"""Options of interpreters that take a word; the first five run something that is no file."""
_LOADED_FROM = ("PYTHONPATH", "NODE_PATH", "PERL5LIB", "RUBYLIB", "LD_LIBRARY_PATH", "LD_PRELOAD")
"""Variables that name folders or files which code is loaded from."""
_COVERED = ("/workspace", "/tmp", "/var/tmp", "/dev", "/proc")  # noqa: S108 - as they are called in a box
"""Paths of an image that a box replaces by its own."""
_ENV = ("/usr/bin/env", "/bin/env")
_MAX_BESIDE = 100
_DEEPEST = 8
"""A limit for links and scripts that lead to each other."""


@dataclass(slots=True)
class ResolvedCommand:
    """A command as it is started in the box, and what the box must see of the host for it."""

    argv: tuple[str, ...] = ()
    trees: set[str] = field(default_factory=set)
    files: dict[str, str] = field(default_factory=dict)
    """Single files, or folders under another name than their own: what they are on the host."""
    path: str = ""
    cwd: str = "/workspace"

    @property
    def mounts(self) -> tuple[Mount, ...]:
        return tuple(Mount(host, at) for at, host in sorted(self.files.items()))

    def sees(self, path: str) -> bool:
        """Whether the box has it, under this name."""
        return any(within(path, root) for root in (*SYSTEM, *self.trees, *self.files))


def resolve(
    command: Sequence[str],
    environment: Mapping[str, str],
    cwd: str,
    hidden: Hidden,
    mounts: Sequence[Mount] = (),
) -> ResolvedCommand:
    """Raises ValueError where there is no such program."""
    search = _Search(environment.get("PATH") or DEFAULT_PATH, cwd, hidden, mounts)
    mounted = next((mount for mount in mounts if within(command[0], mount.at)), None)
    if mounted is None:
        return search.run(tuple(command))
    return search.run_mounted(tuple(command), mounted)


def code_of(
    command: Sequence[str], environment: Mapping[str, str], cwd: str, mounts: Sequence[Mount] = ()
) -> tuple[str, ...]:
    """The files and folders of the host that the code of a command comes from, by their real paths; what cannot be
    found is left out. `environment` may name folders that interpreters load code from."""
    found: list[str] = []
    try:
        resolved = resolve(command, environment, cwd, Hidden(None), mounts)
        found += (*resolved.trees, *resolved.files.values())
    except (ValueError, OSError):  # it cannot be started, and starting it will report that
        pass
    named = [command[0]]
    if os.path.basename(command[0]).rstrip("0123456789.") in _INTERPRETERS:
        place = _script_place(command[1:])
        named += [] if place is None else [command[1 + place]]
    named += [folder for name in _LOADED_FROM for folder in environment.get(name, "").split(":") if folder]
    for path in (os.path.join(cwd, each) for each in named if "/" in each or os.path.exists(os.path.join(cwd, each))):
        mount = next((each for each in mounts if within(os.path.normpath(path), each.at)), None)
        on_host = path if mount is None else mount.host + os.path.normpath(path).removeprefix(mount.at)
        if not is_system(on_host):
            found.append(on_host)
    return tuple(dict.fromkeys(map(os.path.realpath, found)))


def is_installed(folder: str) -> bool:
    """Whether a folder holds installed code and nothing else: then all below it is loaded by its own rules."""
    real = os.path.realpath(folder)
    return outermost(real, "node_modules") is not None or environment_of(f"{real}/bin") is not None


def resolve_in_image(
    command: Sequence[str], cwd: str | None, root: str, mounts: Sequence[Mount] = ()
) -> ResolvedCommand:
    """Resolve a command of an image, whose tree is the box's root: nothing of the host is looked for or shown. `root`
    may hold any links; none is followed here. Raises ValueError where the program cannot be seen."""
    program = command[0]
    hidden = next((each for each in _COVERED if within(program, each)), None)
    if hidden is not None and not any(within(program, mount.at) for mount in mounts):
        raise ValueError(f"the image has its program at {program}, and {hidden} of a box is its own")
    found = ResolvedCommand(tuple(command), path=DEFAULT_PATH)
    if cwd is not None and not any(within(cwd, each) for each in _COVERED) and _may_be_in(root, cwd):
        found.cwd = cwd
    return found


def _may_be_in(root: str, path: str) -> bool:
    """Whether there is something at `path` of an image; only the box itself follows links."""
    way = root
    for part in path.strip("/").split("/"):
        way = f"{way}/{part}"
        if os.path.islink(way):
            return True
    return os.path.isdir(way)


class _Search:
    def __init__(self, path: str, cwd: str, hidden: Hidden, mounts: Sequence[Mount]) -> None:
        self._path = path
        self._cwd = cwd
        self._hidden = hidden
        self._apart = hidden.apart
        self._provenance = Provenance(path, cwd, hidden, mounts)
        self._partly: set[str] = set()
        self._found = ResolvedCommand()

    def run(self, command: tuple[str, ...]) -> ResolvedCommand:
        program = self._program(command[0])
        found = self._found
        self._provenance.named(program)
        self._around(program, 0)
        place: int | None = None
        if os.path.basename(os.path.realpath(program)).rstrip("0123456789.") in _INTERPRETERS:
            place = self._script(command[1:])
        found.argv = (program, *command[1:])
        self._drop_nested()
        if not found.sees(program):
            found.argv = (os.path.realpath(program), *command[1:])
        folders = [folder for folder in self._path.split(":") if os.path.isabs(folder) and found.sees(folder)]
        folders += [os.path.dirname(each) for each in (program, *found.files) if found.sees(os.path.dirname(each))]
        found.path = ":".join(dict.fromkeys((*folders, *DEFAULT_PATH.split(":"))))
        if any(within(self._cwd, root) for root in found.trees) or self._cwd in self._partly:
            found.cwd = self._cwd
        elif place is not None:
            # In the box another folder is the current one, and a relative path would lead elsewhere.
            script = os.path.normpath(os.path.join(self._cwd, command[1 + place]))
            found.argv = (*found.argv[: 1 + place], script, *found.argv[2 + place :])
        return found

    def run_mounted(self, command: tuple[str, ...], mount: Mount) -> ResolvedCommand:
        """Resolve a program that lies in a mount: only its interpreter has to be found."""
        self._interpreter(mount.host + command[0].removeprefix(mount.at), 0)
        found = self._found
        self._drop_nested()
        found.argv = command
        found.path = DEFAULT_PATH
        return found

    def _program(self, word: str) -> str:
        if "/" in word:
            program = os.path.normpath(os.path.join(self._cwd, word))
            if not is_program(program):
                what = f"{program} is not executable" if os.path.isfile(program) else f"there is no program {program}"
                raise ValueError(what)
            return program
        found = shutil.which(word, path=self._path)
        if found is None:
            raise ValueError(f"there is no program {word!r} on PATH")
        return _behind_shim(os.path.abspath(found), self._cwd)

    # ── What lies around a file ──

    def _around(self, file: str, depth: int, by: str | None = None) -> None:
        """Find what it takes to run this program. `by`: the script that named it."""
        if depth > _DEEPEST:
            raise ValueError(f"{file} leads round in a circle")
        real = os.path.realpath(file)
        if not self._provenance.is_mounted(file):
            for each in dict.fromkeys((file, real)):
                if not is_system(each):
                    self._show_around(each, by)
        self._interpreter(real, depth)

    def _interpreter(self, script: str, depth: int) -> None:
        """The interpreter of `#!/path/to/it`, or `#!/usr/bin/env it`."""
        words = _shebang(script)
        if not words:
            return
        word = words[0] if words[0] not in _ENV else _of_env(words[1:])
        try:
            program = self._program(word)
        except ValueError as exc:
            raise ValueError(f"{exc}, which a script begins with") from None
        if "/" in word:
            self._provenance.said(script, program)
        else:
            self._provenance.named(program)
        self._around(program, depth + 1, script)

    def _show_around(self, file: str, by: str | None = None) -> None:
        modules = outermost(file, "node_modules")
        environment = environment_of(file)
        prefix = prefix_of(file)
        if modules is not None:
            self._show(modules, file)
        elif environment is not None:
            self._show(environment, file)
            self._behind(environment, by)
        elif prefix is not None:
            self._show(prefix, file)
        else:
            self._show_file(file)

    def _behind(self, environment: str, by: str | None) -> None:
        """The Python that a virtual environment was made from, and what of its project is installed in it by reference.
        `by`: the script that led to it."""
        for line in _lines(Path(environment, "pyvenv.cfg")):
            name, _, value = line.partition("=")
            home = value.strip()
            if name.strip() == "home" and os.path.isabs(home) and not is_system(home):
                prefix = python_of(f"{os.path.realpath(home)}/python")
                if prefix is not None:
                    self._show(prefix, prefix)
        project = os.path.dirname(os.path.realpath(environment))
        if not self._provenance.refers_to_its_project(project, by):
            return
        for pointer in sorted(Path(environment).glob("lib/python3*/site-packages/*.pth")):
            for line in _lines(pointer):
                folder = line.strip()
                if os.path.isabs(folder) and os.path.isdir(folder) and within(os.path.realpath(folder), project):
                    self._show(folder, folder)

    def _script(self, words: Sequence[str]) -> int | None:
        """Which of the words names the script of an interpreter, where that is an existing file."""
        index = _script_place(words, self._module)
        if index is None:
            return None
        script = os.path.normpath(os.path.join(self._cwd, words[index]))
        if self._provenance.is_mounted(script):
            return index
        if not os.path.exists(script):
            return None
        self._provenance.named(script)
        real = os.path.realpath(script)
        if not is_system(script):
            self._show_source(script)
        if real != script and not is_system(real):
            # Beside a program of PATH lie others, which are none of its.
            (self._show_around if self._provenance.is_listed(real) else self._show_source)(real)
        return index

    def _module(self, name: str) -> None:
        top = os.path.join(self._cwd, name.partition(".")[0])
        file = top if os.path.isdir(top) else f"{top}.py"
        if os.path.exists(file):
            self._provenance.named(file)
            self._show(self._cwd, file)

    def _show_source(self, script: str) -> None:
        if outermost(script, "node_modules") is not None or environment_of(script) is not None:
            self._show_around(script)
            return
        folder = script if os.path.isdir(script) else os.path.dirname(script)
        # Beside a package's own files lies what it was installed with.
        package = _package_of(folder)
        self._show(package if package is not None and self._hidden.holds(package) is None else folder, script)

    # ── What the box is to see ──

    def _show(self, folder: str, file: str) -> None:
        """Show a folder; where it holds something private, show the file alone."""
        real = os.path.realpath(folder)
        if real == "/" or self._hidden.holds(real) is not None or any(within(real, each) for each in self._apart):
            self._show_file(file)
        elif any(within(each, real) for each in self._apart):
            self._show_rest(folder, real, file)
        elif real == folder:
            self._found.trees.add(folder)
        else:
            self._found.files[folder] = real

    def _show_rest(self, folder: str, real: str, file: str) -> None:
        """Show what lies in a folder beside one of ours, entry by entry; where they are many, the file alone. No link
        is shown: seen as what it leads to, it could lead to anything."""
        rest: dict[str, str] = {}
        inner = [real]
        while inner:
            below = inner.pop()
            for name in sorted(os.listdir(below)):
                entry = f"{below}/{name}"
                if entry in self._apart or os.path.islink(entry):
                    continue
                if any(within(each, entry) for each in self._apart):
                    inner.append(entry)
                else:
                    rest[folder + entry.removeprefix(real)] = entry
        if len(rest) <= _MAX_BESIDE:
            self._found.files |= rest
            self._partly.add(folder)
        self._show_file(file)

    def _show_file(self, file: str) -> None:
        real = os.path.realpath(file)
        if not os.path.isfile(real) or is_system(file):
            return
        why = "what no box sees" if real in self._apart else self._hidden.holds(real)
        if why is not None:
            raise ValueError(f"{file} holds {why}: if it must be seen, mount it with `unsafe: REASON`")
        self._found.files[file] = real

    def _drop_nested(self) -> None:
        """Drop what lies in something that is shown anyway."""
        found = self._found
        found.trees = {
            tree for tree in found.trees if not any(tree != other and within(tree, other) for other in found.trees)
        }
        roots = (*SYSTEM, *found.trees)
        found.files = {at: host for at, host in found.files.items() if not any(within(at, root) for root in roots)}
        found.files = {
            at: host
            for at, host in found.files.items()
            if not any(at != other and within(at, other) for other in found.files)
        }


def _script_place(words: Sequence[str], module: Callable[[str], None] | None = None) -> int | None:
    """Which of an interpreter's words names its script; None where none does. `module` is told of one after `-m`."""
    index = 0
    while index < len(words) and words[index].startswith("-") and words[index] != "-":
        option = words[index]
        if option == "-m" and index + 1 < len(words) and module is not None:
            module(words[index + 1])
        if option in ("-m", "-c", "-e", "--eval", "-p"):
            return None
        index += 1 + _VALUED.get(option, 0)
    return None if index >= len(words) or words[index] == "-" else index


# ── Files ─────────────────────────────────────────────────────────────────────────────────────────


def _shebang(file: str) -> list[str]:
    try:
        with open(file, "rb") as opened:
            line = opened.readline(512)
    except OSError:
        return []
    return line[2:].decode("utf-8", "replace").split() if line.startswith(b"#!") else []


def _of_env(words: Sequence[str]) -> str:
    """The program that `env` is told to run. What else it can be told is not guessed at."""
    rest = words[1:] if words[:1] == ["-S"] else words
    name = next((word for word in rest if "=" not in word), "")
    if not name or name.startswith("-") or "/" in name:
        given = " ".join(words)
        raise ValueError(f"a script begins with `env {given}`: only `env NAME` and `env -S NAME` are understood")
    return name


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text("utf-8", "replace").splitlines()[:1000]
    except OSError:
        return []


def _package_of(folder: str) -> str | None:
    """The folder of the npm package that this one belongs to, within its repository."""
    for each in upwards(folder):
        if os.path.isfile(f"{each}/package.json"):
            return each
        if os.path.lexists(f"{each}/.git"):
            break
    return None


def _behind_shim(program: str, cwd: str) -> str:
    """A version manager's shim only looks for the program; where that is can be read without running it."""
    root, _, name = program.rpartition("/shims/")
    if not root or "/" in name:
        return program
    places = [Path(each, ".python-version") for each in upwards(cwd)]
    for place in (*places, Path(root, "version")):
        for version in _lines(place)[:1]:
            found = f"{root}/versions/{version.strip()}/bin/{name}"
            if "/" not in version and version.strip() not in (".", "..") and os.path.isfile(found):
                return found
    raise ValueError(f"{program} is a version manager's shim; name the program itself")
