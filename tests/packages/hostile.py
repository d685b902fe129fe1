"""A registry of images that is none: it says whatever a test wants it to say. Only what no honest registry does is
tried with it; whatever one does is tried with a real one."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from ringfence.compose import packages
from ringfence.config.settings import SandboxSettings
from ringfence.core.errors import Unavailable
from ringfence.egress.tls import Authority
from ringfence.packages.cache import Tree
from ringfence.packages.images import manifests
from ringfence.packages.install import InstallRequest
from tests.packages.registry import answering

INDEX, LIST = manifests.INDEX_TYPES
MANIFEST, _ = manifests.MANIFEST_TYPES
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"


@dataclass(frozen=True, slots=True)
class Answer:
    body: bytes = b""
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    length: int | None = None
    """What it says that it is."""


@dataclass(slots=True)
class Fake:
    port: int = 0
    tls: Authority | None = None
    answers: dict[str, Answer] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)
    """Paths, and who was said to ask."""
    wants: str = ""
    """What is let in, as `Authorization`; others get the challenge."""
    challenge: str = ""

    @property
    def host(self) -> str:
        return f"localhost:{self.port}" if self.tls is not None else f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self.tls is not None else 'http'}://{self.host}"

    def blob(self, data: bytes, *, told: bytes | None = None, kind: str = LAYER, **more: Any) -> dict[str, Any]:
        """A blob, and what a manifest says of it; `told`: what it says that it is."""
        digest = digest_of(data if told is None else told)
        self.answers[f"/v2/it/blobs/{digest}"] = Answer(data)
        return {"mediaType": kind, "digest": digest, "size": len(data), **more}

    def image(self, *layers: bytes, config: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        """A manifest that is not said yet."""
        told = {"architecture": manifests.machine(), "os": "linux", "config": config or {}}
        about = self.blob(json.dumps(told).encode(), kind=CONFIG)
        blobs = [self.blob(gzip.compress(layer, 1)) for layer in layers]
        return {"schemaVersion": 2, "mediaType": MANIFEST, "config": about, "layers": blobs, **more}

    def say(self, told: Any, tag: str = "1") -> str:
        """The digest of what is said for a tag."""
        data = told if isinstance(told, bytes) else json.dumps(told).encode()
        self.answers[f"/v2/it/manifests/{tag}"] = self.answers[f"/v2/it/manifests/{digest_of(data)}"] = Answer(data)
        return digest_of(data)


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@contextmanager
def serving(tls: Authority | None = None, name: str = "localhost") -> Iterator[Fake]:
    fake = Fake(tls=tls)

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path, presented = self.path.partition("?")[0], self.headers.get("Authorization", "")
            fake.asked.append((self.path, presented))
            answer = fake.answers.get(path, Answer(status=404))
            if fake.wants and path.startswith("/v2/") and presented != fake.wants:
                answer = Answer(status=401, headers=(("WWW-Authenticate", fake.challenge),))
            self.send_response(answer.status)
            for name, value in answer.headers:
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer.body) if answer.length is None else answer.length))
            self.end_headers()
            self.wfile.write(answer.body)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with answering(Answers, tls, name) as fake.port:
        yield fake


async def fetch(folder: Path, fake: Fake, name: str = "it:1") -> Tree:
    wanted = InstallRequest("image", (f"{fake.host}/{name}",))
    return await packages.fetch(folder / "state", SandboxSettings(), wanted)


async def refused(folder: Path, fake: Fake, why: str, name: str = "it:1") -> str:
    """It is, and nothing was kept."""
    with pytest.raises(Unavailable, match=why) as told:
        await fetch(folder, fake, name)
    assert not [path for path in (folder / "state/packages").glob("*") if path.name not in ("asked", ".lock")]
    return told.value.message
