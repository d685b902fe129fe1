"""Runs in an install box: lists what an index has of a package, fetches one file, builds a wheel from sources.

pip's own code reads the index, as the operator configured it. While there is a network no code of a package runs; a
build has no network. Imports nothing of ours.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import BytesHeaderParser
from typing import Any
from urllib.parse import unquote, urlsplit

_INPUT = "/workspace/input"
_OUTPUT = "/workspace/output"
_MAX_TEXT = 1_000_000
_LEGACY = ["setuptools>=40.8.0", "wheel"]
"""Build requirements of sources that name none."""


class _Index:
    def __init__(self, sources: bool) -> None:
        # pip's internals, since it has no public interface that lists an index.
        command = importlib.import_module("pip._internal.commands").create_command("download")
        words = ["--no-cache-dir", "--disable-pip-version-check", *([] if sources else ["--only-binary=:all:"])]
        options, _ = command.parse_args([*words, "nothing"])
        self._session = command._build_session(options, retries=2, timeout=30)
        self._finder = command._build_package_finder(options=options, session=self._session)

    def offers(self, name: str) -> list[dict[str, Any]]:
        found = []
        for candidate in self._finder.find_all_candidates(name):
            digest = _digest(candidate.link)
            if digest is not None:
                about = {"version": str(candidate.version), "file": candidate.link.filename, "sha256": digest}
                about |= {"python": candidate.link.requires_python, "yanked": bool(candidate.link.is_yanked)}
                about["url"] = candidate.link.url_without_fragment
                found.append(about)
        return found

    def download(self, url: str, digest: str, into: str) -> None:
        answer = self._session.get(url, headers={"Accept-Encoding": "identity"}, stream=True)
        answer.raise_for_status()
        with open(into, "wb") as stream:
            for piece in answer.iter_content(1 << 20):
                stream.write(piece)
        with open(into, "rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != digest:
                sys.exit(f"{os.path.basename(into)} is not what the registry says that it is")


def _digest(link: Any) -> str | None:
    hashes = dict(getattr(link, "_hashes", None) or {link.hash_name: link.hash})
    if "sha256" in hashes:
        return str(hashes["sha256"])
    if link.scheme != "file":
        return None
    with open(unquote(urlsplit(link.url).path), "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def list_(order: dict[str, Any]) -> None:
    index = _Index(order["sources"])
    _leave("offers", {name: index.offers(name) for name in order["names"]})


def get(order: dict[str, Any]) -> None:
    os.makedirs(f"{_OUTPUT}/files")
    path = f"{_OUTPUT}/files/{order['file']}"
    _Index(order["sources"]).download(order["url"], order["sha256"], path)
    _leave("about", _needs(path) if path.endswith(".whl") else {"build": _build_needs(path)})


def build(order: dict[str, Any]) -> None:
    words = ["--no-index", "--no-deps", "--no-build-isolation", "--use-pep517", "--no-cache-dir", "-q"]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", *words]
    given = f"{_INPUT}/files/{order['file']}"
    done = subprocess.run([*command, "-w", f"{_OUTPUT}/files", given], check=False)
    if done.returncode:
        sys.exit(done.returncode)
    for name in os.listdir(f"{_OUTPUT}/files"):
        _leave("about", _needs(f"{_OUTPUT}/files/{name}"))


def _needs(wheel: str) -> dict[str, list[str]]:
    """Names of all that it may need, and of what it needs here, which is asked for next."""
    parser = _requirements()
    with zipfile.ZipFile(wheel) as packed:
        names = [name for name in packed.namelist() if name.endswith(".dist-info/METADATA") and name.count("/") == 1]
        with packed.open(names[0]) as stream:
            metadata = BytesHeaderParser().parsebytes(stream.read(_MAX_TEXT))
    always = []
    here = []
    for text in metadata.get_all("Requires-Dist") or ():
        try:
            needed = parser.Requirement(text)
        except parser.InvalidRequirement:
            continue
        name = re.sub(r"[-_.]+", "-", needed.name).lower()
        always.append(name)
        if needed.marker is None or needed.marker.evaluate({"extra": ""}):
            here.append(name)
    return {"needs": sorted(set(always)), "soon": sorted(set(here))}


def _build_needs(sources: str) -> list[str]:
    """The build requirements that apply here."""
    text = _pyproject(sources)
    said = tomllib.loads(text).get("build-system", {}).get("requires") if text is not None else None
    needed = map(_requirements().Requirement, _LEGACY if said is None else said)
    here = (each for each in needed if each.marker is None or each.marker.evaluate({"extra": ""}))
    return [f"{each.name}[{','.join(sorted(each.extras))}]{each.specifier}".replace("[]", "") for each in here]


def _requirements() -> Any:
    return importlib.import_module("pip._vendor.packaging.requirements")


def _pyproject(sources: str) -> str | None:
    if sources.endswith(".zip"):
        with zipfile.ZipFile(sources) as packed:
            for name in packed.namelist():
                if name.count("/") == 1 and name.endswith("/pyproject.toml"):
                    with packed.open(name) as stream:
                        return stream.read(_MAX_TEXT).decode()
        return None
    with tarfile.open(sources) as archive:
        for member in archive:
            name = member.name.removeprefix("./")
            if member.isfile() and name.count("/") == 1 and name.endswith("/pyproject.toml"):
                found = archive.extractfile(member)
                return found.read(_MAX_TEXT).decode() if found is not None else None
    return None


def _leave(name: str, value: Any) -> None:
    with open(f"{_OUTPUT}/{name}.json", "w", encoding="utf-8") as stream:
        json.dump(value, stream)


if __name__ == "__main__":
    with open(f"{_INPUT}/order.json", encoding="utf-8") as given_order:
        {"list": list_, "get": get, "build": build}[sys.argv[1]](json.load(given_order))
