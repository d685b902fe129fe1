"""What an install box leaves is hostile input: only what the hash of the registry fits is taken."""

from __future__ import annotations

import base64
import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ringfence.core.errors import Unavailable
from ringfence.packages.install import Fetched, checked_npm, checked_pypi, npm_programs
from ringfence.packages.install_boxes import check_names, missing_pin

MAX_BYTES = 1_000_000
DATA = b"an archive"
SHA512 = hashlib.sha512(DATA)
INTEGRITY = "sha512-" + base64.b64encode(SHA512.digest()).decode()
WHEEL = hashlib.sha256(DATA).hexdigest()


def npm(folder: Path, entries: Any, files: dict[str, bytes] | None = None) -> Fetched:
    (folder / "files").mkdir(exist_ok=True)
    (folder / "package.json").write_text("{}")
    (folder / "package-lock.json").write_text(json.dumps({"packages": entries}))
    for name, data in (files if files is not None else {f"sha512-{SHA512.hexdigest()}.tgz": DATA}).items():
        (folder / "files" / name).write_bytes(data)
    return checked_npm(folder, MAX_BYTES)


def pypi(folder: Path, install: Any, files: dict[str, bytes] | None = None) -> Fetched:
    (folder / "files").mkdir(exist_ok=True)
    (folder / "report.json").write_text(json.dumps({"install": install}))
    for name, data in (files if files is not None else {"a-1-py3-none-any.whl": DATA}).items():
        (folder / "files" / name).write_bytes(data)
    return checked_pypi(folder, MAX_BYTES)


def entry(**more: Any) -> dict[str, Any]:
    return {"version": "1.0.0", "integrity": INTEGRITY, **more}


def item(digest: Any = WHEEL, name: Any = "a") -> dict[str, Any]:
    return {
        "metadata": {"name": name, "version": "1"},
        "download_info": {"url": "x", "archive_info": {"hashes": {"sha256": digest}}},
    }


def test_archives_that_fit_are_taken(tmp_path: Path) -> None:
    fetched = npm(tmp_path, {"": {}, "node_modules/@me/a": entry(), "node_modules/b/node_modules/@me/a": entry()})
    assert [(p.name, p.version, p.integrity) for p in fetched.packages] == [("@me/a", "1.0.0", INTEGRITY)] * 2
    assert len(fetched.files) == 1
    lock = json.loads(fetched.beside["package-lock.json"])
    assert lock["packages"]["node_modules/@me/a"]["resolved"].startswith("file:///workspace/input/files/sha512-")


def test_wheels_that_fit_are_taken(tmp_path: Path) -> None:
    fetched = pypi(tmp_path, [item()])
    assert [(p.name, p.integrity) for p in fetched.packages] == [("a", f"sha256:{WHEEL}")]


@pytest.mark.parametrize(
    ("entries", "files", "code"),
    [
        ({"node_modules/a": entry()}, {}, "install_failed"),
        ({"node_modules/a": entry()}, {f"sha512-{SHA512.hexdigest()}.tgz": b"another"}, "package_altered"),
        ({"node_modules/a": entry(integrity="sha1-AAAA")}, None, "no_integrity"),
        ({"node_modules/a": {"version": "1", "resolved": "git+ssh://x"}}, None, "no_integrity"),
        ({"node_modules/a": entry(integrity="sha512-../../x")}, None, "no_integrity"),
        ({"node_modules/a\n": entry()}, None, "install_failed"),
        ({"node_modules/a": entry(version="1\u001b[2J")}, None, "install_failed"),
    ],
)
def test_what_does_not_fit_is_not_taken(tmp_path: Path, entries: Any, files: Any, code: str) -> None:
    with pytest.raises(Unavailable) as caught:
        npm(tmp_path, entries, files)
    assert caught.value.reason_code == code


def test_what_is_for_another_machine_may_be_missing(tmp_path: Path) -> None:
    assert npm(tmp_path, {"node_modules/a": entry(optional=True)}, {}).packages == ()


@pytest.mark.parametrize(
    ("install", "files", "code"),
    [
        ([item()], {"a.whl": b"another"}, "package_altered"),
        ([item()], {"a.tar.gz": DATA}, "package_altered"),
        ([item()], {"a.whl": DATA, "b.whl": b"more"}, "package_altered"),
        ([item()], {}, "install_failed"),
        ([item(None)], None, "no_integrity"),
        ([item("md5")], None, "no_integrity"),
        ([item(name="\u202e")], None, "install_failed"),
    ],
)
def test_wheels_that_do_not_fit_are_not_taken(tmp_path: Path, install: Any, files: Any, code: str) -> None:
    with pytest.raises(Unavailable) as caught:
        pypi(tmp_path, install, files)
    assert caught.value.reason_code == code


@pytest.mark.parametrize("path", ["../../../etc/passwd", "/etc/passwd", "link.js", "gone.js", "a\nb", 1, None])
def test_a_program_lies_in_its_own_package(tmp_path: Path, path: Any) -> None:
    home = tmp_path / "node_modules" / "a"
    home.mkdir(parents=True)
    (home / "link.js").symlink_to("/etc/passwd")
    (home / "cli.js").write_text("1")
    (home / "package.json").write_text(json.dumps({"bin": {"bad": path, "a": "./cli.js"}}))
    assert npm_programs(tmp_path, ("a@1",)) == {"a": "node_modules/a/cli.js"}


@pytest.mark.parametrize(
    ("package", "required", "lacks"),
    [
        ("six", "any", None),
        ("six", "pinned", "version"),
        ("six>=1", "pinned", "version"),
        ("six==1.16.0", "pinned", None),
        ("six==1.*", "pinned", "version"),
        ("six==1.16.0", "hashed", "hash"),
        (f"six==1.16.0 --hash=sha256:{'0' * 64}", "hashed", None),
    ],
)
def test_what_a_package_must_say(package: str, required: str, lacks: str | None) -> None:
    assert missing_pin(package, required) == lacks


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)
parts = st.sampled_from(["integrity", "version", "optional", "inBundle", "resolved", "metadata", "download_info"])


@given(st.dictionaries(st.text(max_size=20), st.dictionaries(parts, values, max_size=5) | values, max_size=3) | values)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_it_leaves_nothing_but_an_error_of_ours_comes_of_it(tmp_path: Path, said: Any) -> None:
    with suppress(Unavailable):
        npm(tmp_path, said)
    with suppress(Unavailable):
        pypi(tmp_path, said)


@given(st.text(max_size=60), st.sampled_from(["npm", "pypi"]))
def test_names_are_names(text: str, kind: Any) -> None:
    with suppress(ValueError):
        check_names(kind, [text])
        assert not text.startswith("-") and "://" not in text and "\n" not in text
