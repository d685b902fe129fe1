"""Runs in an install box: fetches Python packages as wheels with their hashes, or unpacks such wheels.

No code of a package runs: wheels have no hooks, and nothing else is accepted. Imports nothing of ours.
"""

from __future__ import annotations

import compileall
import hashlib
import json
import py_compile
import subprocess
import sys
from typing import Any
from urllib.parse import unquote, urlsplit

_INPUT = "/workspace/input"
_OUTPUT = "/workspace/output"
_WANTED = "/workspace/tmp/wanted.txt"
_LOCKED = "/workspace/tmp/locked.txt"
_PIP = [sys.executable, "-I", "-m", "pip", "--no-input", "--disable-pip-version-check", "--no-cache-dir", "-q"]
_WHEELS = "--only-binary=:all:"


def fetch(order: dict[str, list[str]]) -> None:
    path = f"{_OUTPUT}/report.json"
    # In a file, since only there a requirement can carry a hash; then pip requires one for each.
    with open(_WANTED, "w", encoding="utf-8") as stream:
        print(*order["wanted"], sep="\n", file=stream)
    _pip("install", "--dry-run", "--ignore-installed", _WHEELS, "--report", path, "-r", _WANTED)
    with open(path, encoding="utf-8") as stream:
        report = json.load(stream)
    with open(_LOCKED, "w", encoding="utf-8") as stream:
        for each in report["install"]:
            named = f"{each['metadata']['name']}=={each['metadata']['version']}"
            print(named, f"--hash=sha256:{_hash(named, each['download_info'])}", file=stream)
    with open(path, "w", encoding="utf-8") as stream:
        json.dump(report, stream)
    _pip("download", "--no-deps", _WHEELS, "--require-hashes", "-d", f"{_OUTPUT}/files", "-r", _LOCKED)


def _hash(named: str, download: dict[str, Any]) -> str:
    """The sha256 of its archive, put where pip puts it since 23.1."""
    archive = download.setdefault("archive_info", {})
    hashes = archive.setdefault("hashes", {})
    kind, _, value = str(archive.get("hash", "")).partition("=")
    if "sha256" not in hashes and kind == "sha256":
        hashes["sha256"] = value
    if "sha256" not in hashes and download["url"].startswith("file://"):
        with open(unquote(urlsplit(download["url"]).path), "rb") as stream:
            hashes["sha256"] = hashlib.file_digest(stream, "sha256").hexdigest()
    if "sha256" not in hashes:
        raise SystemExit(f"the index gives no sha256 for {named}")
    return str(hashes["sha256"])


def unpack(order: dict[str, list[str]]) -> None:
    tree = f"{_OUTPUT}/tree"
    wheels = [f"{_INPUT}/files/{name}" for name in order["files"]]
    where = ["--target", tree, "--no-warn-script-location"]
    _pip("install", "--no-index", "--no-deps", "--no-compile", *where, "--", *wheels)
    # No box can write beside the sources later, so they are compiled now, for the path where boxes see them.
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(tree, quiet=2, stripdir=tree, prependdir=order["at"][0], invalidation_mode=mode)


def _pip(*words: str) -> None:
    done = subprocess.run([*_PIP, *words], check=False)
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    with open(f"{_INPUT}/order.json", encoding="utf-8") as given:
        {"fetch": fetch, "unpack": unpack}[sys.argv[1]](json.load(given))
