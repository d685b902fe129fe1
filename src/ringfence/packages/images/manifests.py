"""What a registry says of an image: index, manifest and configuration. All of it is hostile input, bound by digests."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping
from typing import Any

from ringfence.core.errors import Unavailable
from ringfence.core.record import dataclass

INDEX_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFEST_TYPES = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
MAX_BYTES = 4 * 1024 * 1024
"""Size of an index, manifest or configuration: registries accept no more."""
_CONFIG_TYPES = ("application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json")
_PACKED = {
    "application/vnd.oci.image.layer.v1.tar": "plain",
    "application/vnd.oci.image.layer.v1.tar+gzip": "gzip",
    "application/vnd.oci.image.layer.v1.tar+zstd": "zstd",
    "application/vnd.docker.image.rootfs.diff.tar": "plain",
    "application/vnd.docker.image.rootfs.diff.tar.gzip": "gzip",
    "application/vnd.docker.image.rootfs.diff.tar.zstd": "zstd",
}
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,200}", re.ASCII)
_MAX_LAYERS = 200
_MAX_WORDS = 256
_LONGEST_TEXT = 32_768
_LONGEST_WANTS = 131_072
"""Of command and variables together, so that a configuration has room for several servers."""
_MAX_SIZE = 3 * 1024**3
_MACHINES = {
    **{"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64", "armv7l": "arm", "i686": "386"},
    **{"ppc64le": "ppc64le", "s390x": "s390x", "riscv64": "riscv64", "loongarch64": "loong64"},
}


@dataclass(frozen=True, slots=True)
class Piece:
    """A blob of a registry, by its digest."""

    digest: str
    size: int
    packed: str = "plain"

    @property
    def file(self) -> str:
        return self.digest.replace(":", "-")


@dataclass(frozen=True, slots=True)
class Manifest:
    config: Piece
    layers: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """How to run an image."""

    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    env: Mapping[str, str] | None = None
    cwd: str = "/"
    user: str = ""

    def plain(self) -> dict[str, Any]:
        return {
            "entrypoint": list(self.entrypoint),
            "cmd": list(self.cmd),
            "env": dict(self.env or {}),
            "cwd": self.cwd,
            "user": self.user,
        }


def machine() -> str:
    """This machine's architecture, as images name it."""
    return _MACHINES.get(platform.machine(), platform.machine())


def is_here(text: str) -> bool:
    """Whether a platform, such as `linux/arm64` or `linux/arm64/v8`, is this machine's."""
    system, _, rest = text.partition("/")
    return system == "linux" and rest.partition("/")[0] == machine()


def is_digest(text: str) -> bool:
    return _DIGEST.fullmatch(text) is not None


def chosen(data: bytes, name: str) -> str | None:
    """The digest of the manifest for this machine in an index; None: it is a manifest itself. Raises Unavailable."""
    document = _read(data, name)
    listed = document.get("manifests")
    kind = document.get("mediaType")
    if listed is None and kind not in INDEX_TYPES:
        return None
    # A document that is both could be checked as one and used as the other.
    if not isinstance(listed, list) or "layers" in document or "config" in document or kind in MANIFEST_TYPES:
        raise _bad(name, "its index and its manifest are one")
    fitting = [each for each in listed if isinstance(each, dict) and _fits(each.get("platform"))]
    if not fitting:
        there = sorted({_platform(each.get("platform")) for each in listed if isinstance(each, dict)} - {""})[:8]
        raise _bad(name, f"it is not for linux/{machine()}; it is for: {', '.join(there) or 'no platform'}")
    return _piece(fitting[0], name).digest


def manifest(data: bytes, name: str) -> Manifest:
    """Raises Unavailable."""
    document = _read(data, name)
    if document.get("schemaVersion") != 2:
        raise _bad(name, "its manifest is of the old schema 1, which says nothing of what is in it")
    if (
        document.get("mediaType", MANIFEST_TYPES[0]) not in MANIFEST_TYPES
        or "manifests" in document
        or "fsLayers" in document
    ):
        raise _bad(name, "its manifest is of a kind that is not known here")
    config = document.get("config")
    layers = document.get("layers")
    if not isinstance(config, dict) or config.get("mediaType") not in _CONFIG_TYPES:
        raise _bad(name, "it is no image of a container: its configuration is of another kind")
    if not isinstance(layers, list) or not layers or len(layers) > _MAX_LAYERS:
        raise _bad(name, f"it has no layers, or more than {_MAX_LAYERS}")
    found = tuple(_layer(each, name) for each in layers)
    if sum(each.size for each in found) > _MAX_SIZE:
        raise _bad(name, f"it has more than {_MAX_SIZE} bytes")
    about = _piece(config, name)
    if about.size > MAX_BYTES:
        raise _bad(name, "its configuration is too long")
    return Manifest(about, found)


def config(data: bytes, name: str) -> ImageConfig:
    """Raises Unavailable."""
    document = _read(data, name)
    if document.get("os") != "linux" or document.get("architecture") != machine():
        kind = f"{_short(document.get('os'))}/{_short(document.get('architecture'))}"
        raise _bad(name, f"it is for {kind}, and this is linux/{machine()}")
    given = document.get("config")
    given = given if isinstance(given, dict) else {}
    cwd = given.get("WorkingDir") or "/"
    user = given.get("User") or ""
    if not _is_text(cwd) or not _is_text(user):
        raise _bad(name, "its configuration has a folder or a user that is none")
    entrypoint, cmd, env = (_words(given.get(key), name) for key in ("Entrypoint", "Cmd", "Env"))
    if sum(map(len, (*entrypoint, *cmd, *env))) > _LONGEST_WANTS:
        raise _bad(name, "what it wants to be run with is too long to be written down")
    return ImageConfig(entrypoint, cmd, _env(env), cwd if cwd.startswith("/") else f"/{cwd}", user)


# ── Parts ─────────────────────────────────────────────────────────────────────────────────────────


def _read(data: bytes, name: str) -> dict[str, Any]:
    try:
        document = json.loads(data, object_pairs_hook=_once)
    except (ValueError, RecursionError):
        raise _bad(name, "what its registry says of it is no JSON") from None
    if not isinstance(document, dict):
        raise _bad(name, "what its registry says of it is no mapping")
    return document


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands there twice")
    return found


def _piece(entry: Mapping[str, Any], name: str) -> Piece:
    digest = entry.get("digest")
    size = entry.get("size")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise _bad(name, "its registry gives no sha256 for a part of it")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= _MAX_SIZE:
        raise _bad(name, "its registry gives no size for a part of it, or one that cannot be")
    return Piece(digest, size)


def _layer(entry: Any, name: str) -> Piece:
    kind = entry.get("mediaType") if isinstance(entry, dict) else None
    if not isinstance(kind, str) or kind not in _PACKED or entry.get("urls"):
        raise _bad(name, f"it has a layer of a kind that is not taken: {_short(kind)}")
    piece = _piece(entry, name)
    return Piece(piece.digest, piece.size, _PACKED[kind])


def _fits(platform: Any) -> bool:
    if not isinstance(platform, dict):
        return False
    variant = platform.get("variant", "")
    known = ("", "v8") if machine() == "arm64" else ("", "v7", "v6") if machine() == "arm" else ("", "v1")
    return platform.get("os") == "linux" and platform.get("architecture") == machine() and variant in known


def _platform(platform: Any) -> str:
    platform = platform if isinstance(platform, dict) else {}
    return f"{_short(platform.get('os'))}/{_short(platform.get('architecture'))}" if platform.get("os") else ""


def _words(value: Any, name: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > _MAX_WORDS or not all(map(_is_text, value)):
        raise _bad(name, "its command is none")
    return tuple(value)


def _env(words: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in words:
        variable, sign, given = text.partition("=")
        if sign and _VARIABLE.fullmatch(variable):
            found[variable] = given
    return found


def _is_text(value: Any) -> bool:
    if not isinstance(value, str) or len(value) > _LONGEST_TEXT or "\0" in value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _short(value: Any) -> str:
    return re.sub(r"[^A-Za-z0-9/+._-]", "?", str(value))[:100]


def _bad(name: str, why: str) -> Unavailable:
    return Unavailable("bad_image", f"the image {name} is not taken: {why}")
