"""Registries of the tests' own, on loopback: what npm and pip ask for, and nothing that a test did not put there."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ringfence.egress import names
from ringfence.egress.tls import Authority


@dataclass(slots=True)
class Registry:
    """Pages by their path; `asked` is every path that was."""

    port: int = 0
    pages: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    secured: Authority | None = None
    """Who says who it is, where it speaks TLS."""
    wants: str = ""
    """What it lets nobody in without, as `Authorization`."""
    presented: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}" if self.secured is None else f"https://localhost:{self.port}"

    def wheel(self, name: str, version: str, files: dict[str, str], *, told: bytes | None = None, **more: str) -> str:
        """A package of one wheel; `told`: the bytes that the index gives the hash of. The wheel's sha256."""
        return self._file(
            name, f"{name.replace('-', '_')}-{version}-py3-none-any.whl", wheel(name, version, files, **more), told
        )

    def sources(self, name: str, version: str, files: dict[str, str]) -> str:
        """A package of which there are only sources. Their sha256."""
        root = f"{name}-{version}"
        held = {"PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", **files}
        return self._file(name, f"{root}.tar.gz", archive(held, root))

    def _file(self, name: str, file: str, data: bytes, told: bytes | None = None) -> str:
        digest = hashlib.sha256(told if told is not None else data).hexdigest()
        self.pages[f"/files/{file}"] = data
        before = self.pages.get(f"/simple/{name}/", b"<!DOCTYPE html><html><body></body></html>").decode()
        link = f'<a href="../../files/{file}#sha256={digest}">{file}</a><br>'
        kept = "".join(line for line in before.splitlines(keepends=True) if f">{file}<" not in line)
        self.pages[f"/simple/{name}/"] = kept.replace("</body>", f"\n{link}\n</body>").encode()
        return digest

    def npm(self, name: str, version: str, files: dict[str, str], *, at: str | None = None, **package: object) -> str:
        """A package of one version; `at`: from where its archive is said to come. Its integrity."""
        told = {"name": name, "version": version, **package}
        data = archive({"package.json": json.dumps(told), **files})
        integrity = "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode()
        path = f"/{name}/-/{version}.tgz"
        self.pages[path] = data
        dist = {"tarball": f"{at or self.url}{path}", "integrity": integrity}
        known = {"name": name, "dist-tags": {"latest": version}, "versions": {version: {**told, "dist": dist}}}
        self.pages[f"/{name.replace('/', '%2f')}"] = self.pages[f"/{name}"] = json.dumps(known).encode()
        return integrity


def wheel(name: str, version: str, files: dict[str, str], *, script: str = "", needs: str = "") -> bytes:
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    held = dict(files)
    held[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    if needs:
        held[f"{info}/METADATA"] += f"Requires-Dist: {needs}\n"
    held[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    if script:
        held[f"{info}/entry_points.txt"] = f"[console_scripts]\n{script}\n"
    held[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in held) + f"{info}/RECORD,,\n"
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as packed:
        for path, text in held.items():
            packed.writestr(zipfile.ZipInfo(path, (2024, 1, 1, 0, 0, 0)), text)
    return out.getvalue()


def archive(files: dict[str, str], root: str = "package") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as packed:
        for path, text in files.items():
            entry = tarfile.TarInfo(f"{root}/{path}")
            entry.size, entry.mode = len(text.encode()), 0o644
            packed.addfile(entry, io.BytesIO(text.encode()))
    return out.getvalue()


def known_alone(registry: Registry, patch: pytest.MonkeyPatch) -> None:
    """The operator's own npm and pip know this one and no other."""
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CERT", "PIP_NO_INDEX"):
        patch.delenv(name, raising=False)
    patch.setenv("PIP_CONFIG_FILE", "/dev/null")
    patch.setenv("PIP_INDEX_URL", f"{registry.url}/simple")
    patch.setenv("npm_config_registry", f"{registry.url}/")


@contextmanager
def served(secured: Authority | None = None, wants: str = "") -> Iterator[Registry]:
    registry = Registry(secured=secured, wants=wants)

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            registry.asked.append(self.path)
            page = registry.pages.get(self.path.partition("?")[0])
            registry.presented.append(self.headers.get("Authorization", ""))
            if wants and registry.presented[-1] != wants:
                page = None
            self.send_response(401 if wants and page is None else 404 if page is None else 200)
            html = self.path.startswith("/simple/")
            self.send_header("Content-Type", "text/html" if html else "application/json")
            self.send_header("Content-Length", str(len(page or b"")))
            self.end_headers()
            self.wfile.write(page or b"")

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with answering(Pages, secured) as registry.port:
        yield registry


@contextmanager
def answering(
    handler: type[BaseHTTPRequestHandler], secured: Authority | None, name: str = "localhost"
) -> Iterator[int]:
    """A server on loopback, by TLS where somebody says who it is. Its port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    if secured is not None:
        server.socket = secured.context(names.host(name)).wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
