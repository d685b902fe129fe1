"""A root file system as a tar archive, or as an OCI layout that container engines read. The same tree gives the same
bytes: times are 0, everything belongs to root, and entries are in order.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, cast

from ringfence.packages.images import manifests
from ringfence.packages.images.manifests import ImageConfig

_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_EFFORT = 1
_CHUNK = 1 << 20


def write_tar(
    tree: Path,
    to: IO[bytes],
    modes: Mapping[str, int],
    step: Callable[[int], None],
    links: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """`modes`: of paths that have other permissions than in the tree; `step` counts bytes; `links`: folders in whose
    place there is a link, and where it leads. Raises OSError."""
    with tarfile.open(fileobj=to, mode="w", format=tarfile.PAX_FORMAT, bufsize=_CHUNK) as archive:
        for path in _below(tree):
            inside = str(path.relative_to(tree))
            if any(inside.startswith(f"{each}/") for each in links):
                continue
            info = archive.gettarinfo(str(path), inside)
            if info.islnk():  # which of two names comes first is no matter of what is in them
                info.type, info.linkname, info.size = tarfile.REGTYPE, "", path.lstat().st_size
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            info.mtime = 0
            if inside in links and info.isdir():
                info.type, info.linkname = tarfile.SYMTYPE, links[inside]
            info.mode = modes.get(inside, 0o777 if info.issym() else 0o755 if info.mode & 0o100 else 0o644)
            if info.isreg():
                with path.open("rb") as content:
                    archive.addfile(info, content)
            else:
                archive.addfile(info)
            step(info.size)


def write_oci(tree: Path, to: Path, config: ImageConfig, modes: Mapping[str, int], step: Callable[[int], None]) -> str:
    """An OCI layout in a new folder. Returns the digest of its manifest. Raises OSError."""
    blobs = to / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    layer = blobs / "layer"
    with layer.open("wb") as file:
        packed = _Digested(file)
        with gzip.GzipFile("", "wb", _EFFORT, packed, mtime=0) as archive:
            plain = _Digested(archive)
            write_tar(tree, cast("IO[bytes]", plain), modes, step)
    layer.rename(blobs / packed.digest)
    about = {
        "architecture": manifests.machine(),
        "os": "linux",
        "config": {
            "Cmd": list(config.cmd),
            "Env": [f"{name}={value}" for name, value in (config.env or {}).items()],
            "WorkingDir": config.cwd,
            "User": config.user,
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{plain.digest}"]},
    }
    layers = [{"mediaType": _LAYER, "digest": f"sha256:{packed.digest}", "size": packed.size}]
    manifest = {
        "schemaVersion": 2,
        "mediaType": manifests.MANIFEST_TYPES[0],
        "config": {"mediaType": _CONFIG, **_put(blobs, about)},
        "layers": layers,
    }
    made = _put(blobs, manifest)
    listed = {
        "mediaType": manifests.MANIFEST_TYPES[0],
        **made,
        "platform": {"architecture": manifests.machine(), "os": "linux"},
        "annotations": {"org.opencontainers.image.ref.name": "latest"},
    }
    index = {"schemaVersion": 2, "mediaType": manifests.INDEX_TYPES[0], "manifests": [listed]}
    (to / "index.json").write_bytes(_json(index))
    (to / "oci-layout").write_bytes(_json({"imageLayoutVersion": "1.0.0"}))
    return str(made["digest"])


def size(tree: Path) -> int:
    return sum(path.lstat().st_size for path in _below(tree) if path.is_file() and not path.is_symlink())


def _below(folder: Path) -> Iterator[Path]:
    """All entries, each folder before what is in it, in the order of their names."""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda each: os.fsencode(each.name)):
            yield Path(entry.path)
            if entry.is_dir(follow_symlinks=False):
                yield from _below(Path(entry.path))


def _json(document: Any) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _put(blobs: Path, document: Any) -> dict[str, Any]:
    data = _json(document)
    digest = hashlib.sha256(data).hexdigest()
    (blobs / digest).write_bytes(data)
    return {"digest": f"sha256:{digest}", "size": len(data)}


class _Digested:
    """A file that is only written to, and the digest of what was."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._sum = hashlib.sha256()
        self.size = 0

    @property
    def digest(self) -> str:
        return self._sum.hexdigest()

    def write(self, data: bytes) -> int:
        self._sum.update(data)
        self.size += len(data)
        self._file.write(data)
        return len(data)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self._file.flush()
