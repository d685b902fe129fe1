"""Which registries are asked for images: those that the operator's container engines are configured with.

Docker's `daemon.json` and `config.json`, and the `registries.conf` and `auth.json` of containers (podman, skopeo). No
registry is built in: an image that names none is looked for where these files say, or nowhere.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ringfence.core.errors import Unavailable
from ringfence.core.record import dataclass
from ringfence.packages.images.references import Reference

_MAX_BYTES = 4_000_000
_MAX_SOURCES = 8


@dataclass(frozen=True, slots=True)
class EngineFiles:
    """Where the engines of this host keep their configuration; the first file with content counts."""

    daemon: tuple[Path, ...] = ()
    """Docker's `daemon.json`."""
    registries: tuple[Path, ...] = ()
    """`registries.conf` of containers, and folders of further such files, which all count."""
    auths: tuple[Path, ...] = ()
    """`config.json` of docker's client, `auth.json` of the others."""
    certificates: tuple[Path, ...] = ()
    """Folders with a folder for each host: the authorities to trust there."""


@dataclass(frozen=True, slots=True)
class ImageSource:
    """One registry that may have an image."""

    reference: Reference
    """As it is pinned: without the mirror that stands in for its registry."""
    host: str
    name: str
    plain: bool = False
    """Over HTTP without TLS."""

    @property
    def origin(self) -> str:
        return f"{'http' if self.plain else 'https'}://{self.host}"


@dataclass(frozen=True, slots=True)
class _Entry:
    """One `[[registry]]` of registries.conf."""

    prefix: str
    location: str
    insecure: bool
    blocked: bool
    mirrors: tuple[tuple[str, bool], ...]


@dataclass(frozen=True, slots=True)
class Engines:
    """The configuration of all engines."""

    mirrors: tuple[str, ...] = ()
    """Docker's mirrors, for images that name no registry."""
    insecure: tuple[str, ...] = ()
    """Hosts and ranges that docker talks to without TLS."""
    search: tuple[str, ...] = ()
    entries: tuple[_Entry, ...] = ()
    auths: Mapping[str, str] = field(default_factory=dict, repr=False)
    """By host: user and password, encoded as for `Basic`."""
    certificates: tuple[Path, ...] = ()

    @classmethod
    def read(cls, files: EngineFiles) -> Engines:
        """Raises Unavailable for a malformed file."""
        daemon = next(_jsons(files.daemon), {})
        said = list(_tomls(files.registries))
        search: list[str] = next(filter(None, map(_search, said)), [])
        return cls(
            mirrors=tuple(_texts(daemon.get("registry-mirrors"))),
            insecure=tuple(_texts(daemon.get("insecure-registries"))),
            search=tuple(search),
            entries=tuple(entry for each in said for entry in _entries(each)),
            auths=dict(pair for each in reversed(list(_jsons(files.auths))) for pair in _auths(each)),
            certificates=files.certificates,
        )

    def sources(self, wanted: Reference) -> tuple[ImageSource, ...]:
        """The registries to ask, in order. Raises Unavailable."""
        if wanted.host:
            return self._of_host(wanted)
        found: list[ImageSource] = []
        for mirror in self.mirrors:
            parts = urlsplit(mirror if "://" in mirror else f"https://{mirror}")
            if parts.scheme in ("http", "https") and parts.netloc and "@" not in parts.netloc:
                # The registry that these mirror keeps names of one part under `library/`.
                name = wanted.name if "/" in wanted.name else f"library/{wanted.name}"
                name = f"{parts.path.strip('/')}/{name}".lstrip("/")
                host = parts.netloc.lower()
                found.append(ImageSource(wanted.at(host, name), host, name, self._plain(host, False)))
        for registry in () if found else self.search:
            found += self._of_host(wanted.at(registry.strip("/").lower()))
        if not found:
            text = (
                f"{wanted} names no registry, and none is set for such images on this host: write HOST/{wanted}, or"
                " set registry-mirrors in docker's daemon.json or unqualified-search-registries in registries.conf"
            )
            raise Unavailable("no_registry", text)
        return tuple(found[:_MAX_SOURCES])

    def _of_host(self, wanted: Reference) -> tuple[ImageSource, ...]:
        whole = f"{wanted.host}/{wanted.name}"
        fitting = [each for each in self.entries if _covers(each.prefix, whole)]
        entry = max(fitting, key=lambda each: len(each.prefix), default=None)
        if entry is None:
            return (ImageSource(wanted, wanted.host, wanted.name, self._plain(wanted.host, False)),)
        if entry.blocked:
            raise Unavailable("registry_blocked", f"{entry.prefix} is blocked by registries.conf of this host")
        rest = whole[len(entry.prefix) :] if not entry.prefix.startswith("*.") else f"/{wanted.name}"
        places = [*entry.mirrors, (entry.location or (whole[: -len(rest)] if rest else whole), entry.insecure)]
        found = []
        for place, insecure in places:
            host, _, name = f"{place.strip('/')}{rest}".partition("/")
            if host and name:
                found.append(ImageSource(wanted, host, name, self._plain(host, insecure)))
        return tuple(found[:_MAX_SOURCES])

    def _plain(self, host: str, asked: bool) -> bool:
        """Whether to talk without TLS: on loopback, and where the operator allows it."""
        bare = _bare(host)
        if _loopback(bare):
            return not any((folder / host).is_dir() for folder in self.certificates)
        return asked or host in self.insecure or bare in self.insecure or any(_in(bare, each) for each in self.insecure)

    def basic(self, host: str) -> tuple[str, tuple[str, ...]] | None:
        """The value of `Authorization` for a registry, and its secret parts."""
        known = self.auths.get(host)
        if known is None:
            return None
        user, _, password = base64.b64decode(known).decode("utf-8", "replace").partition(":")
        return f"Basic {known}", (known, password, user)

    def trusted(self, host: str) -> bytes:
        """The authorities to trust for this host, in PEM; empty: those of the system."""
        found = b""
        for folder in self.certificates:
            for path in sorted((folder / host).glob("*.crt")) if "/" not in host else ():
                found += _bytes(path) + b"\n"
        return found


def _bare(host: str) -> str:
    return host.partition("]")[0].strip("[") if host.startswith("[") else host.partition(":")[0]


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _in(host: str, network: str) -> bool:
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False


def _covers(prefix: str, whole: str) -> bool:
    if prefix.startswith("*."):
        return _bare(whole.partition("/")[0]).endswith(prefix[1:])
    return whole == prefix or whole.startswith(f"{prefix.rstrip('/')}/")


# ── Files ─────────────────────────────────────────────────────────────────────────────────────────


def _bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            return stream.read(_MAX_BYTES)
    except OSError:
        return b""


def _jsons(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    for path in paths:
        data = _bytes(path)
        if data.strip():
            try:
                document = json.loads(data)
            except (ValueError, RecursionError):
                raise Unavailable("no_registry", f"{path} cannot be read as JSON") from None
            if isinstance(document, dict):
                yield document


def _tomls(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    for place in paths:
        for path in sorted(place.glob("*.conf")) if place.is_dir() else (place,):
            try:
                yield tomllib.loads(_bytes(path).decode("utf-8"))
            except ValueError:
                raise Unavailable("no_registry", f"{path} cannot be read as TOML") from None


def _search(document: Mapping[str, Any]) -> list[str]:
    return _texts(document.get("unqualified-search-registries"))


def _texts(value: Any) -> list[str]:
    return [each for each in value if isinstance(each, str) and each] if isinstance(value, list) else []


def _entries(document: Mapping[str, Any]) -> Iterator[_Entry]:
    listed = document.get("registry")
    for each in listed if isinstance(listed, list) else []:
        if not isinstance(each, dict):
            continue
        location = each.get("location") if isinstance(each.get("location"), str) else ""
        prefix = each.get("prefix") if isinstance(each.get("prefix"), str) and each.get("prefix") else location
        given = each.get("mirror") if isinstance(each.get("mirror"), list) else []
        mirrors = [m for m in given or [] if isinstance(m, dict) and isinstance(m.get("location"), str)]
        if prefix:
            yield _Entry(
                # With a trailing slash, the rest of a name would become a part of the host.
                prefix=str(prefix).rstrip("/"),
                location=str(location),
                insecure=each.get("insecure") is True,
                blocked=each.get("blocked") is True,
                mirrors=tuple((m["location"], m.get("insecure") is True) for m in mirrors),
            )


def _auths(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    listed = document.get("auths")
    for place, given in (listed if isinstance(listed, dict) else {}).items():
        auth = given.get("auth") if isinstance(given, dict) else None
        if not isinstance(auth, str) or not auth:
            continue  # kept by a credential helper, which is not asked
        try:
            base64.b64decode(auth, validate=True)
        except (binascii.Error, ValueError):
            continue
        host = urlsplit(place).netloc if "://" in place else place.partition("/")[0]
        if host:
            yield host.lower(), auth
