"""What an install box brought, checked against what the registry says of it. All of it is hostile input."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ringfence.errors import Unavailable
from ringfence.packages.shelf import Kind, Package

_NPM = re.compile(r"(?![.-])(@[a-z0-9~_.-]+/)?[a-z0-9~_.-]+(@[A-Za-z0-9^~<>=*.+_-]+)?", re.IGNORECASE | re.ASCII)
_PYPI = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9._,-]+\])?"
    r"((===|==|~=|!=|<=|>=|<|>)[A-Za-z0-9.*+!_-]+(,(===|==|~=|!=|<=|>=|<|>)[A-Za-z0-9.*+!_-]+)*)?"
)
_HASHES = re.compile(r"( --hash=sha256:[0-9a-f]{64})+$")
_PLAIN = re.compile(r"[A-Za-z0-9@/._+!~-]{1,250}")
_STRONG = ("sha512", "sha384", "sha256")
_MOST_JSON = 4_000_000
_CHUNK = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Fetched:
    """Archives that are what the registry says they are."""

    packages: tuple[Package, ...]
    files: tuple[Path, ...]
    beside: Mapping[str, bytes]
    """What else the second box is given."""


def check(kind: Kind, packages: Iterable[str]) -> None:
    """Raises ValueError for what is no package of a registry: addresses, folders, options."""
    for package in packages:
        named = _HASHES.sub("", package) if kind == "pypi" else package
        if len(named) > 250 or not (_NPM if kind == "npm" else _PYPI).fullmatch(named):
            raise ValueError(f"{package[:80]!r} is not a package of a registry, with or without a version")


def name_of(package: str) -> str:
    """Of a Python package that was checked."""
    return re.split(r"[^A-Za-z0-9._-]", package, maxsplit=1)[0]


def lacking(package: str, required: str) -> str | None:
    """What a Python package does not say of itself, of what is asked for: `any`, `pinned` or `hashed`."""
    if required != "any" and not re.search(r"===?[A-Za-z0-9.+!_-]+$", _HASHES.sub("", package)):
        return "version"
    return "hash" if required == "hashed" and not _HASHES.search(package) else None


# ── PyPI ──────────────────────────────────────────────────────────────────────────────────────────


def pypi(folder: Path, most: int) -> Fetched:
    """By the report of pip's own resolution. Raises Unavailable."""
    report = read_json(folder / "report.json", most)
    packages: list[Package] = []
    for item in _list(report.get("install")):
        metadata, told = _dict(item.get("metadata")), _dict(item.get("download_info"))
        digest = _dict(_dict(told.get("archive_info")).get("hashes")).get("sha256")
        name = _plain(metadata.get("name"))
        if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
            raise Unavailable("no_integrity", f"the index gives no sha256 for {name}")
        packages.append(Package(name, _plain(metadata.get("version")), f"sha256:{digest}"))
    expected = {package.integrity: package.name for package in packages}
    files = sorted(path for path in (folder / "files").iterdir() if path.is_file())
    for path in files:
        integrity = f"sha256:{hashed(path, 'sha256').hex()}"
        if path.suffix != ".whl" or integrity not in expected:
            raise other(path.name)
        del expected[integrity]
    if expected:
        raise _missing(expected.values())
    return Fetched(tuple(packages), tuple(files), {})


def pypi_programs(tree: Path, packages: tuple[str, ...]) -> dict[str, str]:
    del packages
    folder = tree / "bin"
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return {name: f"bin/{name}" for name in names if _PLAIN.fullmatch(name)}


# ── npm ───────────────────────────────────────────────────────────────────────────────────────────


def npm(folder: Path, most: int) -> Fetched:
    """By the lock file that npm wrote. Raises Unavailable."""
    lock = read_json(folder / "package-lock.json", most)
    packages: list[Package] = []
    used: dict[str, Path] = {}
    for place, entry in _dict(lock.get("packages")).items():
        if not place or not isinstance(entry, dict) or entry.get("inBundle") is True:
            continue
        name = _plain(place.rpartition("node_modules/")[2])
        kind, digest = _strongest(name, entry)
        path = folder / "files" / f"{kind}-{digest.hex()}.tgz"
        if not path.is_file():
            if entry.get("optional") is True:
                continue  # for another kind of machine
            raise _missing([name])
        if path.name not in used and hashed(path, kind) != digest:
            raise other(name)
        used[path.name] = path
        entry["resolved"] = f"file:///workspace/input/files/{path.name}"
        integrity = f"{kind}-{base64.b64encode(digest).decode()}"
        packages.append(Package(name, _plain(entry.get("version")), integrity))
    written = {
        "package.json": (folder / "package.json").read_bytes()[:_MOST_JSON],
        "package-lock.json": json.dumps(lock).encode(),
    }
    return Fetched(tuple(packages), tuple(used[name] for name in sorted(used)), written)


def npm_programs(tree: Path, packages: tuple[str, ...]) -> dict[str, str]:
    """What the packages asked for can be run as, under the name of the package and of each program."""
    found: dict[str, str] = {}
    for package in packages:
        name = package if "@" not in package[1:] else package[: package.rindex("@")]
        home = PurePosixPath("node_modules") / name
        told = read_json(tree / home / "package.json", _MOST_JSON)
        programs = told.get("bin")
        short = name.rpartition("/")[2]
        named = {short: programs} if isinstance(programs, str) else _dict(programs)
        usable = dict(_inside(tree, home, named))
        found |= usable
        if short in usable or len(usable) == 1:
            found[name] = usable.get(short) or next(iter(usable.values()))
    return found


def _inside(tree: Path, home: PurePosixPath, named: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, path in named.items():
        if not isinstance(path, str) or not _PLAIN.fullmatch(name) or not _PLAIN.fullmatch(path):
            continue
        inside = os.path.normpath(str(home / path))
        if inside.startswith(f"{home}/") and (tree / inside).is_file() and not (tree / inside).is_symlink():
            yield name, inside


def _strongest(name: str, entry: Mapping[str, Any]) -> tuple[str, bytes]:
    given = str(entry.get("integrity", "")).split()
    for kind in _STRONG:
        for integrity in given:
            if integrity.startswith(f"{kind}-"):
                try:
                    return kind, base64.b64decode(integrity.partition("-")[2], validate=True)
                except ValueError:
                    break
    raise Unavailable("no_integrity", f"the registry gives no strong integrity for {name}: it cannot be pinned")


# ── Parts ─────────────────────────────────────────────────────────────────────────────────────────


def read_json(path: Path, most: int) -> dict[str, Any]:
    """What an install box left. Raises Unavailable."""
    try:
        if path.is_symlink() or path.stat().st_size > most:
            raise ValueError
        return _dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, RecursionError):
        raise Unavailable("install_failed", f"an install box left no {path.name} that can be read") from None


def _plain(value: Any) -> str:
    if not isinstance(value, str) or not _PLAIN.fullmatch(value):
        raise Unavailable("install_failed", "an install box left a name or version that is none")
    return value


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def hashed(path: Path, kind: str) -> bytes:
    digest = hashlib.new(kind)
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.digest()


def other(what: str) -> Unavailable:
    return Unavailable("package_altered", f"{what} is not what the registry says that it is; nothing of it was kept")


def _missing(names: Iterable[str]) -> Unavailable:
    return Unavailable("install_failed", f"an install box did not bring {', '.join(sorted(names)[:5])}")
