"""Images of the tests' own, out of Debian's files, in a registry that is a program of others."""

from __future__ import annotations

import ctypes
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests import tooling

_BASE = (
    *("libc6", "dash", "coreutils", "libacl1", "libattr1", "libgmp10", "libselinux1", "libpcre2-8-0", "libssl3"),
    *("python3-minimal", "python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib", "tzdata"),
    *("libexpat1", "zlib1g", "libffi8", "libbz2-1.0", "liblzma5", "libuuid1", "libsqlite3-0", "libgcc-s1"),
)
_UNNEEDED = (
    *("/usr/share/doc", "/usr/share/man", "/usr/share/locale", "/usr/share/lintian", "/usr/share/zoneinfo/posix"),
    *("/usr/share/zoneinfo/right", "/usr/lib/python3.11/pydoc_data", "/usr/lib/python3.11/test", "/gconv"),
)
"""Parts of paths: half of what would be packed, sent and unpacked."""


@dataclass(frozen=True, slots=True)
class Registry:
    host: str
    folder: Path
    """Where images are made."""
    password: str = ""

    def push(self, image: Image, name: str) -> str:
        """The digest of its manifest."""
        layout = self.folder / name.replace("/", "-").replace(":", "-")
        shutil.copytree(self._base(image.layers[0]), layout)
        place = f"{layout}:it"
        for layer in image.layers[1:]:
            self._add(layer, place)
        words = [word for option, values in image.config.items() for value in values for word in (option, value)]
        _run("umoci", "config", "--image", place, *(f"{a}={b}" for a, b in zip(words[::2], words[1::2], strict=True)))
        place_there = f"docker://{self.host}/{name}"
        known = [f"--creds=me:{self.password}"] if self.password else []
        dest = [f"--dest-{word.removeprefix('--')}" for word in known]
        _run("skopeo", "--insecure-policy", "copy", "-q", "--dest-tls-verify=false", *dest, f"oci:{place}", place_there)
        return str(json.loads(_run("skopeo", "inspect", "--tls-verify=false", *known, place_there))["Digest"])

    def _base(self, layer: bytes) -> Path:
        """An image of one layer: most begin with the same, which takes a second to compress."""
        layout = self.folder / f"base-{hashlib.sha256(layer).hexdigest()}"
        if not layout.exists():
            _run("umoci", "init", "--layout", layout)
            _run("umoci", "new", "--image", f"{layout}:it")
            self._add(layer, f"{layout}:it")
        return layout

    def _add(self, layer: bytes, place: str) -> None:
        (self.folder / "layer.tar").write_bytes(layer)
        _run("umoci", "raw", "add-layer", "--image", place, self.folder / "layer.tar")

    def unpacked(self, name: str) -> Path:
        """What umoci makes of an image that was pushed, to compare with."""
        layout = self.folder / name.replace("/", "-").replace(":", "-")
        into = self.folder / f"unpacked-{layout.name}"
        _run("umoci", "unpack", *([] if os.geteuid() == 0 else ["--rootless"]), "--image", f"{layout}:it", into)
        return into / "rootfs"


@dataclass(frozen=True, slots=True)
class Image:
    layers: Sequence[bytes]
    config: dict[str, list[str]] = field(default_factory=dict)
    """By options of `umoci config`."""


def need_tools() -> None:
    for tool in ("docker-registry", "skopeo", "umoci"):
        tooling.need(tool)


@contextmanager
def registry(folder: Path, *, password: str = "") -> Iterator[Registry]:
    """With a password it speaks TLS, by a certificate that lies beside it, and lets in nobody else than `me`."""
    need_tools()
    port = tooling.free_port()
    folder.mkdir(exist_ok=True)
    http: dict[str, object] = {"addr": f"127.0.0.1:{port}"}
    settings: dict[str, object] = {
        "version": 0.1,
        "log": {"level": "error"},
        "storage": {"filesystem": {"rootdirectory": str(folder / "store")}},
        "http": http,
    }
    if password:
        _certify(folder)
        http["tls"] = {"certificate": str(folder / "ca.crt"), "key": str(folder / "key.pem")}
        (folder / "htpasswd").write_text(f"me:{_bcrypt(password)}\n")
        settings["auth"] = {"htpasswd": {"realm": "tests", "path": str(folder / "htpasswd")}}
    (folder / "registry.yml").write_text(json.dumps(settings))
    program = str(tooling.need("docker-registry"))
    with tooling.start_process([program, "serve", str(folder / "registry.yml")]) as started:
        started.wait_for_port(port)
        yield Registry(f"localhost:{port}" if password else f"127.0.0.1:{port}", folder, password)


def _certify(folder: Path) -> None:
    words = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    program = tooling.need("openssl")
    _run(program, "req", *words, *names, "-keyout", folder / "key.pem", "-out", folder / "ca.crt")


def _bcrypt(password: str) -> str:
    """By the library that Debian's own passwords are made with."""
    library = ctypes.CDLL("libcrypt.so.1")
    library.crypt.restype = ctypes.c_char_p
    made: bytes = library.crypt(password.encode(), b"$2y$05$abcdefghijklmnopqrstuv")
    return made.decode()


def layer(*entries: tarfile.TarInfo | tuple[str, str]) -> bytes:
    """An archive of entries, or of files by path and text."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as packed:
        for entry in entries:
            if isinstance(entry, tarfile.TarInfo):
                packed.addfile(entry)
            else:
                info = tarfile.TarInfo(entry[0])
                info.size, info.mode = len(entry[1].encode()), 0o755
                packed.addfile(info, io.BytesIO(entry[1].encode()))
    return out.getvalue()


def entry(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.mode = kind, target, 0o755
    return made


@cache
def debian() -> bytes:
    """A layer with a shell, the usual small programs and Python, as this host's own Debian has them."""
    tooling.need("dpkg")
    listed = subprocess.run(["dpkg", "-L", *_BASE], capture_output=True, text=True, check=False).stdout
    names = {
        os.path.join(os.path.realpath(os.path.dirname(each)), os.path.basename(each)) for each in listed.split("\n")
    }
    if not os.path.exists("/usr/bin/python3.11"):
        tooling.missing("python3.11 of Debian 12", "images of the tests are made of its files")
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as packed:
        for name in ("bin", "sbin", "lib", "lib64"):
            if os.path.islink(f"/{name}"):
                packed.addfile(entry(name, tarfile.SYMTYPE, f"usr/{name}"))
        for path in sorted(names):
            if path.startswith("/usr/") and os.path.lexists(path) and not any(part in path for part in _UNNEEDED):
                packed.add(path, arcname=path[1:], recursive=False)
        packed.addfile(entry("app", tarfile.DIRTYPE))
    return out.getvalue()


def installed(folder: Path, *packages: str) -> bytes:
    """A layer with Python packages of the index that the tests have, for Debian's Python."""
    words = ["--quiet", "--disable-pip-version-check", "--no-input", "--only-binary=:all:", "--no-compile"]
    where = ["--python-version", "3.11", "--target", str(folder)]
    _run(sys.executable, "-m", "pip", "install", *words, *where, *packages)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as packed:
        packed.add(folder, arcname="app/packages")
    return out.getvalue()


def _run(*command: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
