"""What a root file system out of this host has: decided here as a list of entries, and written by `tree`.

The interpreter of boxes with its standard library, packages, the libraries that any of it needs, a shell, usual
programs, and the few files and folders that programs expect. Wherever the interpreter lies on this host (below a home
that only its owner may enter, say), in the root it lies below /usr or /usr/local.
"""

from __future__ import annotations

import os
import stat
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import Literal

from ringfence.core import system
from ringfence.core.errors import Unavailable
from ringfence.core.record import dataclass
from ringfence.packages.images.host.elf import Libraries, needs

WORLD_WRITABLE = {"tmp": 0o1777, "var/tmp": 0o1777, "workspace": 0o777, "home/user": 0o777}
"""Folders that programs write to, whoever they run as; in a box, other folders lie there."""
_FOLDERS = ("dev", "proc", "sys", "run", "root", "opt", "etc", "usr/bin", "usr/lib", "usr/sbin", *WORLD_WRITABLE)
_MERGED = ("bin", "sbin", "lib", "lib64")
_NOT_COPIED = frozenset(
    ("__pycache__", "test", "tests", "idlelib", "turtledemo", "tkinter", "ensurepip", "lib2to3", "site-packages")
)
"""Of the standard library, at its top: tests, and what needs a screen or the network."""
_LEFT_OUT = (".pyc", ".pyo", ".a", ".pth", "direct_url.json")
_SCREEN = ("_tkinter.", "_test", "_xxtestfuzz", "xxlimited", "_ctypes_test")
_PROGRAMS = (
    *("sh", "bash", "env", "cat", "ls", "cp", "mv", "rm", "mkdir", "rmdir", "ln", "chmod", "touch", "head", "tail"),
    *(
        "sort",
        "uniq",
        "wc",
        "cut",
        "tr",
        "tee",
        "grep",
        "sed",
        "awk",
        "find",
        "xargs",
        "diff",
        "echo",
        "printf",
        "test",
    ),
    *("true", "false", "sleep", "date", "pwd", "basename", "dirname", "readlink", "realpath", "stat", "du", "df"),
    *("seq", "id", "uname", "ps", "kill", "timeout", "sha256sum", "md5sum", "od", "tar", "gzip", "gunzip"),
)
_LOADED_LATER = ("libgcc_s.so.1", "libnss_files.so.2", "libnss_dns.so.2", "libresolv.so.2")
"""What the system's libraries load by themselves; no header names it."""
_SYSTEM_FILES = ("/etc/os-release", "/etc/mime.types", "/etc/services", "/etc/protocols")
_ZONES = "/usr/share/zoneinfo"
_CERTIFICATES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
_USER = 1000
WRITTEN = {
    "etc/passwd": f"root:x:0:0:root:/root:/bin/sh\nbox:x:{_USER}:{_USER}:box:/home/user:/bin/sh\n",
    "etc/group": f"root:x:0:\nbox:x:{_USER}:\n",
    "etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "etc/resolv.conf": "",
}
SEARCH = "/usr/local/bin:/usr/bin:/bin"


@dataclass(frozen=True, slots=True)
class RootEntry:
    """One file, folder or link, to be."""

    kind: Literal["folder", "file", "link"]
    source: str = ""
    """The file of this host whose bytes it gets."""
    data: bytes = b""
    """Its bytes, where it has no source."""
    target: str = ""
    executable: bool = False


@dataclass(frozen=True, slots=True)
class RootContents:
    entries: Mapping[str, RootEntry]
    """By path below the root."""
    python: str
    """The interpreter, by its path in the root."""
    compiled: tuple[str, ...]
    """Folders of Python modules, below the root: these are compiled, or every start would do so."""
    missing: tuple[str, ...] = field(default=())
    """Libraries that something names and this host does not have."""


def contents(packages: Mapping[str, str], libraries: Libraries | None = None) -> RootContents:
    """`packages`: files of Python packages, by their paths below `site-packages`. Raises Unavailable."""
    places = _Interpreter.here()
    entries = {path: RootEntry("file", data=text.encode()) for path, text in WRITTEN.items()}
    entries |= {name: RootEntry("link", target=f"usr/{name}") for name in _MERGED}
    for source, inside in _standard_library(places):
        entries[inside] = _copied(source)
    for name, source in packages.items():
        if not name.endswith(_LEFT_OUT) and "__pycache__" not in name:
            entries[f"{places.site}/{name}"] = _copied(source)
    program = str(system.interpreter())
    entries[places.program] = RootEntry("file", program, executable=True)
    for name in ("python3", "python"):
        link = f"{os.path.dirname(places.program)}/{name}"
        if link != places.program:
            entries[link] = RootEntry("link", target=os.path.basename(places.program))
    entries |= dict(_programs())
    if "usr/bin/sh" not in entries:
        raise Unavailable("no_image", "a root needs a shell, and this host has no /bin/sh that can be read")
    entries |= dict(_data())
    missing = _with_libraries(entries, program, libraries or Libraries())
    _with_folders(entries)
    folders = dict.fromkeys((*places.standard, places.site))
    return RootContents(dict(sorted(entries.items())), f"/{places.program}", tuple(folders), tuple(sorted(missing)))


def site_folders() -> tuple[str, ...]:
    """Where the packages of this environment are."""
    found = (os.path.realpath(path) for path in sys.path if path.endswith(("site-packages", "dist-packages")))
    return tuple(dict.fromkeys(path for path in found if os.path.isdir(path)))


# ── Parts ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Interpreter:
    """Where the interpreter's parts are to be, below the root, and where its modules are now."""

    program: str
    standard: Mapping[str, str]
    """Folders of the standard library, by their places below the root."""
    site: str

    @classmethod
    def here(cls) -> _Interpreter:
        prefix = os.path.realpath(sys.base_prefix)
        to = prefix if prefix in ("/usr", "/usr/local") else "/usr/local"
        scheme = "posix_prefix"
        if prefix == "/usr" and "deb_system" in sysconfig.get_scheme_names():  # Debian's finds packages there alone
            scheme = "deb_system"
        at = {"base": prefix, "platbase": prefix, "installed_base": prefix, "installed_platbase": prefix}
        paths = sysconfig.get_paths(scheme, at)

        def moved(path: str) -> str:
            return f"{to}/{os.path.relpath(path, prefix)}".lstrip("/")

        standard = {moved(paths[each]): paths[each] for each in ("stdlib", "platstdlib")}
        name = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return cls(f"{to.lstrip('/')}/bin/{name}", standard, moved(paths["purelib"]))


def _standard_library(places: _Interpreter) -> Iterator[tuple[str, str]]:
    for inside, folder in places.standard.items():
        for source in _files(folder, _NOT_COPIED):
            name = os.path.relpath(source, folder)
            top = name.partition("/")[0]
            if not top.startswith("config-") and not os.path.basename(name).startswith(_SCREEN):
                yield source, f"{inside}/{name}"


def _files(folder: str, without: frozenset[str] = frozenset()) -> Iterator[str]:
    """All files below, but those in folders of these names at its top."""
    for here, folders, names in os.walk(folder, onerror=_unreadable):
        folders[:] = sorted(
            each for each in folders if each != "__pycache__" and not (here == folder and each in without)
        )
        for name in sorted(names):
            if not name.endswith(_LEFT_OUT) and os.path.isfile(f"{here}/{name}"):
                yield f"{here}/{name}"


def _unreadable(problem: OSError) -> None:
    raise Unavailable("no_image", f"{problem.filename} cannot be read: {problem.strerror}")


def _copied(source: str) -> RootEntry:
    try:
        return RootEntry("file", source, executable=bool(os.stat(source).st_mode & 0o111))
    except OSError as problem:
        raise Unavailable("no_image", f"{source} cannot be read: {problem.strerror}") from None


def _programs() -> Iterator[tuple[str, RootEntry]]:
    for name in _PROGRAMS:
        for folder in ("/usr/bin", "/bin"):
            place = os.path.realpath(f"{folder}/{name}")
            if os.access(place, os.R_OK | os.X_OK) and stat.S_ISREG(os.stat(place).st_mode):
                # Under its usual name: the host may have it by way of links (`awk`).
                yield f"usr/bin/{name}", RootEntry("file", place, executable=True)
                break


def _data() -> Iterator[tuple[str, RootEntry]]:
    """What is no code: time zones, authorities, a few tables."""
    for name in _SYSTEM_FILES:
        if os.access(name, os.R_OK):
            yield name.lstrip("/"), RootEntry("file", os.path.realpath(name))
    for source in _files(_ZONES, frozenset(("posix", "right"))) if os.path.isdir(_ZONES) else ():
        yield source.lstrip("/"), RootEntry("file", source)
    authorities = next((each for each in _CERTIFICATES if os.access(each, os.R_OK)), None)
    if authorities is not None:
        there = "etc/ssl/certs/ca-certificates.crt"
        yield there, RootEntry("file", os.path.realpath(authorities))
        # Where the library of this interpreter looks, which follows from how it was built.
        from ssl import get_default_verify_paths  # noqa: PLC0415 - a large module, and only this needs it

        looks = get_default_verify_paths().openssl_cafile.lstrip("/")
        if looks and looks != there and not looks.startswith(("home/", "root/", "tmp/")):
            yield looks, RootEntry("link", target=f"/{there}")


def _with_libraries(entries: dict[str, RootEntry], program: str, libraries: Libraries) -> set[str]:
    """Add what programs and libraries need. Returns what is not there. Raises Unavailable."""
    files = [each.source for each in entries.values() if each.source and (each.executable or ".so" in each.source)]
    files.append(program)
    own = needs(program)
    files += libraries.named(_LOADED_LATER, own) if own is not None else []
    found, loaders, missing = libraries.closure(files)
    found |= {os.path.basename(each): each for each in files if os.path.basename(each) in _LOADED_LATER}
    home = next((os.path.dirname(place) for name, place in found.items() if name.startswith("libc.")), "/usr/lib")
    folder = home.lstrip("/") if home.startswith("/usr/") else f"usr{home}"
    for name, place in found.items():
        # All in one folder, where every program looks; which of them it is differs between systems.
        entries.setdefault(f"{folder}/{name}", RootEntry("file", place, executable=True))
    for name, place in loaders.items():
        inside = name.lstrip("/")
        inside = inside if inside.startswith("usr/") else f"usr/{inside}"
        entries.setdefault(inside, RootEntry("file", place, executable=True))
    return missing


def _with_folders(entries: dict[str, RootEntry]) -> None:
    wanted: Iterable[str] = (*_FOLDERS, *(f"usr/{name}" for name in _MERGED))
    for path in (*(f"{each}/." for each in wanted), *tuple(entries)):
        above = os.path.dirname(path)
        while above:
            found = entries.setdefault(above, RootEntry("folder"))
            if found.kind != "folder":
                raise Unavailable("no_image", f"/{above} would have to be a {found.kind} and a folder at once")
            above = os.path.dirname(above)


def listed_in(folder: Path) -> dict[str, str]:
    """All files of packages that were installed into a folder, by their paths below it."""
    return {os.path.relpath(each, folder): each for each in _files(str(folder))}
