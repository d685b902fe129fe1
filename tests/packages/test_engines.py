"""Who is asked for an image: what docker's and containers' own files say, and nobody that they do not name."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from ringfence.core.errors import Unavailable
from ringfence.packages.images.engines import EngineFiles, Engines
from ringfence.packages.images.references import Reference


def engines(folder: Path, daemon: Any = None, conf: str = "", auths: Any = None) -> Engines:
    (folder / "daemon.json").write_text("" if daemon is None else json.dumps(daemon))
    (folder / "registries.conf").write_text(conf)
    (folder / "config.json").write_text("" if auths is None else json.dumps({"auths": auths}))
    files = EngineFiles(
        (folder / "none.json", folder / "daemon.json"),
        (folder / "registries.conf",),
        (folder / "config.json",),
        (folder / "certs.d",),
    )
    return Engines.read(files)


def asked(found: Engines, name: str) -> list[str]:
    return [f"{source.origin}/{source.name}" for source in found.sources(Reference.of(name))]


def test_an_image_that_names_its_registry_is_asked_for_there(tmp_path: Path) -> None:
    assert asked(engines(tmp_path), "corp.example:8443/a/b:1") == ["https://corp.example:8443/a/b"]


def test_an_image_that_names_none_is_asked_for_nowhere_unless_somebody_is_set(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="write HOST/a/b:1, or set registry-mirrors"):
        engines(tmp_path).sources(Reference.of("a/b:1"))


def test_mirrors_of_docker(tmp_path: Path) -> None:
    found = engines(
        tmp_path, {"registry-mirrors": ["https://one.example/", "http://127.0.0.1:5000", "http://two.example"]}
    )
    assert asked(found, "a/b") == ["https://one.example/a/b", "http://127.0.0.1:5000/a/b", "https://two.example/a/b"]
    assert asked(found, "b")[0] == "https://one.example/library/b"
    assert str(found.sources(Reference.of("b"))[0].reference) == "one.example/library/b:latest"
    assert asked(found, "corp.example/b") == ["https://corp.example/b"]


def test_registries_to_search_and_what_stands_in_for_them(tmp_path: Path) -> None:
    conf = """
unqualified-search-registries = ["hub.example", "other.example"]
[[registry]]
prefix = "hub.example"
location = "inner.example/hub"
[[registry.mirror]]
location = "mirror.example"
[[registry]]
prefix = "hub.example/secret"
blocked = true
[[registry]]
location = "lab.example:5000"
insecure = true
"""
    found = engines(tmp_path, conf=conf)
    hub = ["https://mirror.example/a/b", "https://inner.example/hub/a/b"]
    assert asked(found, "a/b") == [*hub, "https://other.example/a/b"]
    assert asked(found, "hub.example/a/b") == hub
    assert {str(source.reference) for source in found.sources(Reference.of("hub.example/a/b:1"))} == {
        "hub.example/a/b:1"
    }
    assert asked(found, "lab.example:5000/x") == ["http://lab.example:5000/x"]
    with pytest.raises(Unavailable, match=r"hub\.example/secret is blocked"):
        asked(found, "hub.example/secret/x")
    assert asked(found, "hub.example/secrets/x")[0] == "https://mirror.example/secrets/x"


@pytest.mark.parametrize(
    ("host", "plain"),
    [
        *(("localhost:5000", True), ("127.0.0.1", True), ("[::1]:5000", True), ("127.9.9.9:1", True)),
        *(("lab.example:5000", True), ("lab.example", False), ("10.1.2.3:5000", True), ("11.1.2.3", False)),
        *(("localhost.example", False), ("128.0.0.1", False)),
    ],
)
def test_without_tls_on_loopback_and_where_the_operator_says_so(tmp_path: Path, host: str, plain: bool) -> None:
    found = engines(tmp_path, {"insecure-registries": ["lab.example:5000", "10.0.0.0/8"]})
    assert found.sources(Reference.of(f"{host}/x"))[0].plain is plain


def test_credentials_are_for_their_host_and_are_not_shown(tmp_path: Path) -> None:
    auth = base64.b64encode(b"me:correct-horse").decode()
    found = engines(tmp_path, auths={"https://corp.example/v2/": {"auth": auth}, "b.example": {}, "c": {"auth": "?"}})
    assert found.basic("corp.example") == (f"Basic {auth}", (auth, "correct-horse", "me"))
    assert found.basic("b.example") is None and found.basic("c") is None
    assert auth not in repr(found)


def test_whom_to_trust_at_a_host(tmp_path: Path) -> None:
    (tmp_path / "certs.d" / "corp.example").mkdir(parents=True)
    (tmp_path / "certs.d" / "corp.example" / "ca.crt").write_bytes(b"PEM")
    found = engines(tmp_path)
    assert (found.trusted("corp.example"), found.trusted("other.example")) == (b"PEM\n", b"")


def test_no_part_of_a_name_becomes_one_of_a_host(tmp_path: Path) -> None:
    """Whoever writes the name is not who writes the configuration."""
    conf = '[[registry]]\nprefix = "hub.example/"\nlocation = "inner.example/"\nmirror = 1\n'
    assert asked(engines(tmp_path, conf=conf), "hub.example/a.b.example/x") == ["https://inner.example/a.b.example/x"]


@pytest.mark.parametrize(("file", "text"), [("daemon.json", "{"), ("registries.conf", "= 1")])
def test_a_file_that_makes_no_sense_is_named(tmp_path: Path, file: str, text: str) -> None:
    engines(tmp_path)
    (tmp_path / file).write_text(text)
    files = EngineFiles((tmp_path / "daemon.json",), (tmp_path / "registries.conf",))
    with pytest.raises(Unavailable, match=file):
        Engines.read(files)
