"""Runs in an install box: Python packages, fetched as wheels with their hashes, or laid out from wheels that are there.

No code of a package runs: wheels have no hooks, and nothing else is taken. Imports nothing of ours.
"""

from __future__ import annotations

import compileall
import json
import py_compile
import subprocess
import sys

_INPUT, _OUTPUT = "/workspace/input", "/workspace/output"
_WANTED = "/workspace/tmp/wanted.txt"
_LOCKED = "/workspace/tmp/locked.txt"
_PIP = [sys.executable, "-I", "-m", "pip", "--no-input", "--disable-pip-version-check", "--no-cache-dir", "-q"]
_WHEELS = "--only-binary=:all:"


def fetch(order: dict[str, list[str]]) -> None:
    report = f"{_OUTPUT}/report.json"
    # In a file, since only there a package can be given with its hash; then pip wants one for each.
    with open(_WANTED, "w", encoding="utf-8") as stream:
        print(*order["wanted"], sep="\n", file=stream)
    _pip("install", "--dry-run", "--ignore-installed", _WHEELS, "--report", report, "-r", _WANTED)
    with open(report, encoding="utf-8") as stream:
        found = json.load(stream)["install"]
    with open(_LOCKED, "w", encoding="utf-8") as stream:
        for each in found:
            named = f"{each['metadata']['name']}=={each['metadata']['version']}"
            print(named, f"--hash=sha256:{each['download_info']['archive_info']['hashes']['sha256']}", file=stream)
    _pip("download", "--no-deps", _WHEELS, "--require-hashes", "-d", f"{_OUTPUT}/files", "-r", _LOCKED)


def unpack(order: dict[str, list[str]]) -> None:
    tree = f"{_OUTPUT}/tree"
    wheels = [f"{_INPUT}/files/{name}" for name in order["files"]]
    where = ["--target", tree, "--no-warn-script-location"]
    _pip("install", "--no-index", "--no-deps", "--no-compile", *where, "--", *wheels)
    # Nobody can write beside the sources later, so they are compiled now, for the place where they will be seen.
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(tree, quiet=2, stripdir=tree, prependdir=order["at"][0], invalidation_mode=mode)


def _pip(*words: str) -> None:
    done = subprocess.run([*_PIP, *words], check=False)
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    with open(f"{_INPUT}/order.json", encoding="utf-8") as given:
        {"fetch": fetch, "unpack": unpack}[sys.argv[1]](json.load(given))
