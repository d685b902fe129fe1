"""What a program or library in ELF needs to be loaded, read from its own headers: nothing of it is run.

`ldd` would start the program. Here, files are only read, and a file that is malformed needs nothing.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from ringfence.core.record import dataclass

_DYNAMIC, _INTERPRETER, _LOAD = 2, 3, 1
_NEEDED, _STRINGS, _RPATH, _RUNPATH, _END = 1, 5, 15, 29, 0
_MAX_SEGMENTS = 1000
_MAX_ENTRIES = 10_000
_LONGEST = 4096
_MAX_FILES = 20_000
_CONF = "/etc/ld.so.conf"
_USUAL = ("/lib", "/usr/lib", "/lib64", "/usr/lib64")


@dataclass(frozen=True, slots=True)
class ElfNeeds:
    """What the headers of one file name."""

    kind: tuple[int, int]
    """Class and machine: a library of another kind does not fit."""
    loader: str = ""
    """The program that loads it; libraries name none."""
    libraries: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    """Where it looks first, `$ORIGIN` still in it."""


def needs(path: str | Path) -> ElfNeeds | None:
    """None for what is no ELF file, or malformed. Raises OSError."""
    with open(path, "rb") as file:
        head = file.read(64)
        if len(head) < 52 or head[:4] != b"\x7fELF" or head[4] not in (1, 2) or head[5] not in (1, 2):
            return None
        with suppress(struct.error, ValueError, OverflowError, UnicodeDecodeError):
            return _Reader(file.fileno(), wide=head[4] == 2, order="<" if head[5] == 1 else ">").read(head)
    return None


class _Reader:
    def __init__(self, descriptor: int, *, wide: bool, order: str) -> None:
        self._descriptor = descriptor
        self._wide = wide
        self._order = order

    def read(self, head: bytes) -> ElfNeeds:
        (machine,) = struct.unpack_from(f"{self._order}H", head, 18)
        kind = (2 if self._wide else 1, machine)
        segments = list(self._segments(head))
        loader = next((self._text(at, size) for what, at, _, size in segments if what == _INTERPRETER), "")
        entries = [each for what, at, _, size in segments if what == _DYNAMIC for each in self._entries(at, size)]
        strings = next((self._place(segments, value) for tag, value in entries if tag == _STRINGS), None)
        if strings is None:
            return ElfNeeds(kind, loader)

        def named(*tags: int) -> list[str]:
            return [self._text(strings + value, _LONGEST) for tag, value in entries if tag in tags]

        folders = named(_RUNPATH) or named(_RPATH)
        return ElfNeeds(
            kind, loader, tuple(named(_NEEDED)), tuple(each for text in folders for each in text.split(":") if each)
        )

    def _segments(self, head: bytes) -> Iterator[tuple[int, int, int, int]]:
        """Kind, place in the file, address, and size in the file of each."""
        at, size, count = (32, 54, 56) if self._wide else (28, 42, 44)
        (table,) = struct.unpack_from(f"{self._order}{'Q' if self._wide else 'I'}", head, at)
        (each,) = struct.unpack_from(f"{self._order}H", head, size)
        (most,) = struct.unpack_from(f"{self._order}H", head, count)
        for number in range(min(most, _MAX_SEGMENTS)):
            entry = os.pread(self._descriptor, each, table + number * each)
            if self._wide:
                what, _, place, address, _, length = struct.unpack_from(f"{self._order}IIQQQQ", entry)
            else:
                what, place, address, _, length = struct.unpack_from(f"{self._order}IIIII", entry)
            yield what, place, address, length

    def _entries(self, at: int, size: int) -> Iterator[tuple[int, int]]:
        form = f"{self._order}{'qQ' if self._wide else 'iI'}"
        data = os.pread(self._descriptor, min(size, _MAX_ENTRIES * struct.calcsize(form)), at)
        for tag, value in struct.iter_unpack(form, data[: len(data) - len(data) % struct.calcsize(form)]):
            if tag == _END:
                return
            yield tag, value

    @staticmethod
    def _place(segments: Iterable[tuple[int, int, int, int]], address: int) -> int:
        """Where in the file an address lies. Raises ValueError."""
        for what, at, start, size in segments:
            if what == _LOAD and start <= address < start + size:
                return at + address - start
        raise ValueError

    def _text(self, at: int, most: int) -> str:
        text, end, _ = os.pread(self._descriptor, min(most, _LONGEST), at).partition(b"\0")
        if not end:
            raise ValueError
        return text.decode()


# ── Where libraries are ───────────────────────────────────────────────────────────────────────────


class Libraries:
    """Finds the libraries that files need, as the loader of this host would."""

    def __init__(self, system: Iterable[str] | None = None) -> None:
        """`system`: the folders where every program looks; those of this host unless they are given."""
        self._system = tuple(dict.fromkeys((*_configured(_CONF), *_usual())) if system is None else system)

    def closure(self, files: Iterable[str]) -> tuple[dict[str, str], dict[str, str], set[str]]:
        """What these files need, and what that needs, and so on: libraries of the system by name, as real paths;
        loaders by the path that programs have for them; and the names of what is not there.

        What lies below a folder that a file names relative to itself moves with it, and is not among these.
        """
        found: dict[str, str] = {}
        loaders: dict[str, str] = {}
        missing: set[str] = set()
        waiting = list(files)
        seen = set[str]()
        while waiting and len(seen) < _MAX_FILES:
            path = waiting.pop()
            if path in seen:
                continue
            seen.add(path)
            wants = needs(path)
            if wants is None:
                continue
            if wants.loader:
                loaders[wants.loader] = os.path.realpath(wants.loader)
            for name in wants.libraries:
                beside = self._beside(path, wants, name)
                place = beside or self._of_the_system(path, wants, name)
                if place is None:
                    missing.add(name)
                    continue
                waiting.append(place)
                if beside is None:
                    found.setdefault(os.path.basename(name), place)
        missing -= found.keys() | {os.path.basename(each) for each in seen}
        return found, loaders, missing

    def named(self, names: Iterable[str], like: ElfNeeds) -> list[str]:
        """Libraries of the system, by name, that fit to a program; those that are there."""
        return [place for name in names if (place := self._of_the_system("", like, name)) is not None]

    @staticmethod
    def _beside(path: str, wants: ElfNeeds, name: str) -> str | None:
        for folder in wants.folders:
            if "$ORIGIN" in folder or "${ORIGIN}" in folder:
                own = os.path.dirname(path)
                place = os.path.join(folder.replace("${ORIGIN}", own).replace("$ORIGIN", own), name)
                if (found := _fitting(place, wants)) is not None:
                    return found
        return None

    def _of_the_system(self, path: str, wants: ElfNeeds, name: str) -> str | None:
        if "/" in name:
            return _fitting(name, wants)
        for folder in (*(each for each in wants.folders if "$" not in each), *self._system):
            if (found := _fitting(os.path.join(folder, name), wants)) is not None:
                return found
        return None


def _fitting(path: str, wants: ElfNeeds) -> str | None:
    with suppress(OSError):
        real = os.path.realpath(path)
        found = needs(real)
        if found is not None and found.kind == wants.kind:
            return real
    return None


def _configured(path: str) -> Iterator[str]:
    """The folders of the loader's configuration; further files are named by patterns."""
    with suppress(OSError, UnicodeDecodeError):
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            text = line.partition("#")[0].strip()
            if text.startswith("include"):
                pattern = text.removeprefix("include").strip()
                for each in sorted(Path("/").glob(os.path.join(os.path.dirname(path), pattern).lstrip("/"))):
                    if str(each) != path:
                        yield from _configured(str(each))
            elif text.startswith("/"):
                yield text


def _usual() -> Iterator[str]:
    machine = os.uname().machine
    for folder in _USUAL:
        yield f"{folder}/{machine}-linux-gnu"
    yield from _USUAL
