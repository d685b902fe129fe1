"""The programs of this host that a box has where a contract names them: found by name, with every link on the way.

A box has a folder of programs that holds only what it may run. A program may also lie elsewhere, as a copy or under
another name, and the loader runs what it can read: so programs outside of the folders are searched for, and one that is
not allowed is replaced by an empty file. What a box gets besides, such as packages, may hold any code: nothing of it is
mapped as code. Beneath that, Landlock lets nothing else be executed.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import field
from pathlib import Path

from ringfence.core import canonical
from ringfence.core.box import Programs
from ringfence.core.record import dataclass

_ET_EXEC, _EITHER = 2, 3  # ET_EXEC; ET_DYN, which libraries are, and programs that can be anywhere in memory
_DYNAMIC = 2
_INTERPRETER = 3  # PT_DYNAMIC, PT_INTERP
_NAME_OF_LIBRARY = 14
_FLAGS = 0x6FFFFFFB  # DT_SONAME, DT_FLAGS_1
_IS_PROGRAM = 0x08000000  # DF_1_PIE
_HEADER = 64
_MAX_ENTRIES = 128
_LONGEST = 4096
_LARGEST_TABLE = 16384
_BROKEN = (OSError, LookupError, struct.error, ValueError, OverflowError)
_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_LIST = """
python pypy ipython perl ruby irb jruby node nodejs deno bun qjs php lua luajit luatex texlua tclsh wish expect
guile racket scheme chicken csi gosh sbcl clisp ecl emacs vi vim view vimdiff rvim nvim ex octave R Rscript julia
rview vimx gvim gview gvimdiff rgvim rgview evim eview phpdbg gdbtui lksh rksh rzsh sash
ghci runghc runhaskell erl escript elixir iex scala kotlin groovy clojure java jshell dotnet mono fsi csharp pwsh
powershell bash rbash dash ash zsh ksh mksh pdksh fish csh tcsh elvish nu xonsh busybox toybox awk gawk mawk nawk
original-awk bpftrace stap gdb lldb perf tcc lli cling root gs wasmtime wasmer iwasm valgrind crystal nim swift
ocaml utop coqtop prolog swipl gforth maxima gp sage matlab psql mysql sqlite3 mongosh redis-cli uv uvx npx pipx
"""
_NAMES = frozenset(_LIST.split())
_PREFIXES = ("qemu-",)
_VERSION = re.compile(r"[-_.]?v?\d[\d.]*[a-z]?$")
_MACHINE = re.compile(
    r"^[a-z][a-z0-9_]*-linux-[a-z0-9]+-|-[a-z][a-z0-9_]*-linux(-[a-z0-9]+)?$|-(x86_64|aarch64|amd64|arm64)$"
)
_VARIANT = re.compile(
    r"[-.](basic|tiny|small|huge|nox|gtk\d?|gnome|athena|motif|lucid|pgtk|x|x11|static|multiarch|minimal|dbg|debug|cgi|fpm)$"
)
_MAX_CUTS = 4
SHELL = "/bin/sh"
"""It runs every command, so it is always there."""
SEARCHED = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64")
"""Trees of the host that every box sees."""
_MAX_LINKS = 40
_FIRST_LINE = 256

_Identity = tuple[int, int]


def loader_of(path: str | Path) -> str | None:
    """The loader of a program; None where it is no program of this kind, or needs no loader."""
    try:
        descriptor = os.open(path, _OPEN)
        try:
            header = os.read(descriptor, _HEADER)
            if not _is_elf(header):
                return None
            start, length = _parts(descriptor, header)[_INTERPRETER]
            return os.fsdecode(os.pread(descriptor, min(length, _LONGEST), start).rstrip(b"\0"))
        finally:
            os.close(descriptor)
    except _BROKEN:
        return None


def is_program(path: str | Path) -> bool:
    """Whether the loader or the kernel could run it, whatever its name and mode are.

    Some libraries name a loader, too, as that of C does: they have a name as libraries, and are not marked as programs.
    """
    try:
        descriptor = os.open(path, _OPEN)
        try:
            header = os.read(descriptor, _HEADER)
            if not _is_elf(header):
                return False
            (kind,) = struct.unpack_from("<H", header, 16)
            if kind != _EITHER:
                return bool(kind == _ET_EXEC)
            parts = _parts(descriptor, header)
            dynamic = dict(_dynamic(descriptor, *parts.get(_DYNAMIC, (0, 0))))
            marked = dynamic.get(_FLAGS, 0) & _IS_PROGRAM
            return bool(marked) or (_INTERPRETER in parts and _NAME_OF_LIBRARY not in dynamic)
        finally:
            os.close(descriptor)
    except _BROKEN:
        return False


def _is_elf(header: bytes) -> bool:
    return header[:6] == b"\x7fELF\x02\x01" and len(header) == _HEADER  # 64 bits, little-endian


def _parts(descriptor: int, header: bytes) -> dict[int, tuple[int, int]]:
    """Program headers by kind: where the first of it is, and how long."""
    (offset,) = struct.unpack_from("<Q", header, 32)
    size, count = struct.unpack_from("<HH", header, 54)
    if size != 56 or count > _MAX_ENTRIES:
        return {}
    found: dict[int, tuple[int, int]] = {}
    table = os.pread(descriptor, size * count, offset)
    for number in range(len(table) // size):
        kind, _, start, _, _, length = struct.unpack_from("<IIQQQQ", table, number * size)
        found.setdefault(kind, (start, length))
    return found


def _dynamic(descriptor: int, start: int, length: int) -> Iterator[tuple[int, int]]:
    table = os.pread(descriptor, min(length, _LARGEST_TABLE), start)
    return struct.iter_unpack("<QQ", table[: len(table) // 16 * 16])


# ── Programs that run code by themselves, by name ─────────────────────────────────────────────────
# A command with one of them can do what other programs do without having them.


def runs_code(name: str) -> bool:
    """Whether the name of its file is one of them: as it is, or without a version, a variant or a kind of machine."""
    if name.startswith(_PREFIXES):
        return True
    forms = {name}
    for _ in range(_MAX_CUTS):
        if not forms.isdisjoint(_NAMES):
            return True
        forms = {
            cut for form in forms for part in (_VERSION, _VARIANT, _MACHINE) if (cut := part.sub("", form)) != form
        }
    return not forms.isdisjoint(_NAMES)


# ── Choosing ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Choice:
    """The programs of a box, for the zygote that builds its root. Compared by digest."""

    digest: str
    folders: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = field(compare=False)
    """Folders of programs with what is in each: a name, and where a link of that name leads; else it is a file."""
    hidden: tuple[str, ...] = field(compare=False)
    """Programs elsewhere that are hidden."""
    executable: tuple[str, ...] = field(compare=False)
    """Folders and files that may be executed; nothing else may."""
    advisory: bool = field(compare=False)
    """One of them runs code by itself, or code that came with the box can be run."""
    sealed: tuple[str, ...] = field(compare=False, default=())
    """Trees from which nothing is executed, nor loaded as a library."""
    spared: tuple[str, ...] = field(compare=False, default=())
    """Exceptions in those trees: allowed programs, and what belongs to the system."""


def exists(name: str, interpreter: str = "") -> bool:
    """Whether this host has a program of that name, or at that path, where boxes see it."""
    places = _Finder(_folders(interpreter)).places(name)
    return any(_is_seen(os.path.realpath(place), (*SYSTEM, sys.base_prefix)) for place in places)


def names(interpreter: str = "") -> list[str]:
    return sorted({entry for folder in _folders(interpreter) for entry in _listed(folder)})


def choose(programs: Programs, interpreter: str, trees: Sequence[str], given: Sequence[str] = ()) -> Choice:
    """Choose the programs of a box. Slow the first time: `trees`, what boxes see of the host, are searched for
    programs.

    `given` is what this box sees besides.
    """
    folders = _folders(interpreter)
    stamp = tuple(os.stat(folder).st_mtime_ns for folder in folders)
    key = (programs, interpreter, tuple(trees), tuple(given), stamp)
    if key not in _known:
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        _known[key] = _chosen(programs, folders, tuple(trees), tuple(given))
    return _known[key]


_MAX_KNOWN = 64
_known: dict[tuple[object, ...], Choice] = {}
_searched: dict[tuple[str, tuple[str, ...]], tuple[str, ...]] = {}


def _folders(interpreter: str) -> tuple[str, ...]:
    """The folders in which commands are looked for, by their real paths."""
    own = (os.path.dirname(interpreter),) if interpreter else ()
    return tuple(dict.fromkeys(os.path.realpath(each) for each in (*own, *SEARCHED) if os.path.isdir(each)))


def _is_seen(path: str, trees: Sequence[str]) -> bool:
    """Whether boxes see it: a path that they do not see cannot be given a right."""
    tops = map(os.path.realpath, trees)
    return any(path == top or path.startswith(f"{top}/") for top in tops)


def _listed(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


# ── By name ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _Finder:
    folders: tuple[str, ...]
    entries: dict[str, dict[str, str]] = field(default_factory=dict)
    """By folder: names, and where links lead."""
    files: dict[str, _Identity] = field(default_factory=dict)
    """All files that these names lead to, by real path."""

    @property
    def names(self) -> set[str]:
        return {name for entries in self.entries.values() for name in entries}

    def places(self, name: str) -> list[str]:
        """The path of the program of that name."""
        paths = [name] if name.startswith("/") else [f"{folder}/{name}" for folder in self.folders]
        return [path for path in paths if _program(os.path.realpath(path)) is not None]

    def add(self, name: str) -> None:
        for path in self.places(name):
            self._add(path)

    def _add(self, path: str) -> None:
        for _ in range(_MAX_LINKS):
            folder = os.path.realpath(os.path.dirname(path))
            base = os.path.basename(path)
            here = f"{folder}/{base}"
            leads = os.readlink(here) if os.path.islink(here) else ""
            if folder in self.folders:
                self.entries.setdefault(folder, {})[base] = leads
            if not leads:
                self._file(here)
                return
            path = os.path.join(folder, leads)

    def _file(self, path: str) -> None:
        identity = _program(path)
        if identity is None or path in self.files:
            return
        self.files[path] = identity
        for name in _interpreters_of(path):  # a script is nothing without them
            self.add(name)


def _program(path: str) -> _Identity | None:
    """The file that it is, where it can be executed."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode) or not found.st_mode & 0o111:
        return None
    return found.st_dev, found.st_ino


def _interpreters_of(script: str) -> Iterator[str]:
    try:
        with open(script, "rb") as file:
            line = file.read(_FIRST_LINE).partition(b"\n")[0]
    except OSError:
        return
    words = os.fsdecode(line[2:]).split() if line.startswith(b"#!") else []
    if words and words[0].startswith("/"):
        yield words[0]
        if os.path.basename(words[0]) == "env":
            yield from [word for word in words[1:] if not word.startswith("-") and "=" not in word][:1]


# ── Together ──────────────────────────────────────────────────────────────────────────────────────


def _chosen(programs: Programs, folders: tuple[str, ...], system: tuple[str, ...], given: tuple[str, ...]) -> Choice:
    shell = _Finder(folders)
    kept = _Finder(folders)
    shell.add(SHELL)
    unwanted = _Unwanted(programs.deny, folders, set(shell.files.values()))
    for name in programs.allow if programs.allow is not None else _every(folders):
        for place in kept.places(name):
            if not unwanted.has(place):
                kept.add(place)
    kept.add(SHELL)
    for folder, entries in kept.entries.items():  # a link may have led to what is unwanted, a script have wanted it
        kept.entries[folder] = {name: leads for name, leads in entries.items() if not unwanted.is_(f"{folder}/{name}")}
    ours = {*shell.names, *map(os.path.basename, shell.files)}
    advisory = any(runs_code(name) for name in {*kept.names, *map(os.path.basename, kept.files)} - ours)
    advisory = advisory or not _running_code(folders).isdisjoint({*kept.files.values()} - {*shell.files.values()})
    # An interpreter needs its packages, and limits nothing anyway; nor does a list of denied programs.
    sealed = (
        () if advisory or programs.allow is None else _outermost(each for each in given if not _is_seen(each, system))
    )
    open_to_all = [each for each in given if not _is_seen(each, sealed)]
    hidden, executable = _around(programs, kept, (*system, *open_to_all), unwanted)
    executable |= {os.path.realpath(loader) for path in kept.files if (loader := loader_of(path)) is not None}
    laid = tuple((folder, tuple(sorted(kept.entries.get(folder, {}).items()))) for folder in folders)
    may = tuple(sorted(path for path in executable if os.path.exists(path) and _is_seen(path, (*system, *given))))
    there = sorted([path, *identity, os.stat(path).st_mtime_ns] for path, identity in kept.files.items())
    inside = map(os.path.realpath, (*system, *kept.folders, *kept.files))
    spared = _outermost(path for path in inside if _is_seen(path, sealed))
    digest = canonical.digest(
        [[[folder, list(map(list, names))] for folder, names in laid], hidden, *map(list, (may, there, sealed, spared))]
    )
    return Choice(digest, laid, tuple(hidden), may, advisory or bool(open_to_all), sealed, spared)


def _running_code(folders: tuple[str, ...]) -> set[_Identity]:
    """The files that programs which run code end at: another name of such a file runs code as well."""
    paths = (f"{folder}/{name}" for folder in folders for name in _listed(folder) if runs_code(name))
    return {identity for path in paths if (identity := _program(os.path.realpath(path))) is not None}


def _outermost(paths: Iterable[str]) -> tuple[str, ...]:
    found: list[str] = []
    for path in sorted(set(map(os.path.realpath, paths))):
        if not _is_seen(path, found):
            found.append(path)
    return tuple(found)


def _every(folders: tuple[str, ...]) -> list[str]:
    return [f"{folder}/{name}" for folder in folders for name in _listed(folder)]


def _around(
    programs: Programs, kept: _Finder, trees: tuple[str, ...], unwanted: _Unwanted
) -> tuple[list[str], set[str]]:
    """What is hidden outside of the folders, and everything that may be executed."""
    elsewhere = _elsewhere(trees, kept.folders)
    if programs.allow is None:
        return [path for path in elsewhere if unwanted.is_(path)], set(map(os.path.realpath, (*trees, *kept.folders)))
    there = set(kept.files.values())
    same = {path for path in elsewhere if _program(path) in there}
    outside = {path for path in kept.files if os.path.dirname(path) not in kept.folders}
    return [path for path in elsewhere if path not in same], {*kept.folders, *same, *outside}


class _Unwanted:
    """Denied programs by content: under any name, and as a copy."""

    def __init__(self, names: Sequence[str], folders: tuple[str, ...], shell: set[_Identity]) -> None:
        """Other names of the shell's file can be hidden, the file itself cannot."""
        finder = _Finder(folders)
        every = {each for name in names for each in (name, *_versions(name, folders))}
        self._places = {place for name in every for place in finder.places(name)}
        self._identities: set[_Identity] = set()
        self._sizes: dict[int, set[str]] = {}
        for path in map(os.path.realpath, self._places):
            found = os.stat(path)
            if (found.st_dev, found.st_ino) not in shell:
                self._identities.add((found.st_dev, found.st_ino))
                with suppress(PermissionError):  # one that only may be executed has no copies that others could make
                    self._sizes.setdefault(found.st_size, set()).add(_content(path))

    def has(self, place: str) -> bool:
        """Whether it is denied, by its name or by its content."""
        return place in self._places or self.is_(place)

    def is_(self, path: str) -> bool:
        try:
            found = os.stat(path)
            if (found.st_dev, found.st_ino) in self._identities:
                return True
            same_size = self._sizes.get(found.st_size)
            return same_size is not None and _content(path) in same_size
        except OSError:
            return False


def _versions(name: str, folders: tuple[str, ...]) -> Iterator[str]:
    """Versions of a denied program: of `perl` also `perl5.36`, of `python` `python3` and `python3.11`."""
    if not name.startswith("/"):
        pattern = re.compile(rf"{re.escape(name)}[-._]?v?\d[\w.+-]*")
        yield from (entry for folder in folders for entry in _listed(folder) if pattern.fullmatch(entry))


def _content(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ── Elsewhere ─────────────────────────────────────────────────────────────────────────────────────


def _elsewhere(trees: tuple[str, ...], folders: tuple[str, ...]) -> tuple[str, ...]:
    """Programs outside of the folders that the loader could run, by their real paths."""
    found: list[str] = []
    for tree in _outermost(trees):
        if (tree, folders) not in _searched:
            if len(_searched) >= _MAX_KNOWN:
                _searched.clear()
            _searched[tree, folders] = tuple(_programs_below(tree, folders))
        found += _searched[tree, folders]
    return tuple(sorted(found))


def _programs_below(tree: str, folders: tuple[str, ...]) -> Iterator[str]:
    waiting = [tree]
    while waiting:
        folder = waiting.pop()
        if folder in folders:
            continue
        try:
            entries = list(os.scandir(folder))
        except OSError:
            continue  # neither we nor boxes may read it
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                waiting.append(entry.path)
            elif entry.is_file(follow_symlinks=False) and is_program(entry.path):
                yield entry.path
