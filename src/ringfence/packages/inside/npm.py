"""Runs in an install box: fetches npm packages as the archives of their registry, or unpacks such archives.

Scripts of packages run only if that was requested, and then only without a network. Imports nothing of ours.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from typing import Any

_INPUT = "/workspace/input"
_OUTPUT = "/workspace/output"
_CACHE = "/workspace/tmp/cache"
_QUIET = ["--no-audit", "--no-fund", "--no-update-notifier", "--no-bin-links", "--loglevel=error", f"--cache={_CACHE}"]


def fetch(order: dict[str, Any]) -> None:
    os.makedirs(f"{_OUTPUT}/files")
    os.makedirs("/workspace/tmp/project")
    os.chdir("/workspace/tmp/project")
    with open("package.json", "w", encoding="utf-8") as stream:
        json.dump({"name": "packages", "version": "0.0.0", "private": True}, stream)
    _npm(order, "install", "--ignore-scripts", "--save-exact", "--", *order["wanted"])
    for name in ("package.json", "package-lock.json"):
        shutil.copyfile(name, f"{_OUTPUT}/{name}")
    with open("package-lock.json", encoding="utf-8") as stream:
        locked = json.load(stream)["packages"]
    for entry in locked.values():
        for integrity in str(entry.get("integrity", "")).split():
            kind, _, digest = integrity.partition("-")
            number = base64.b64decode(digest).hex()
            with suppress(FileNotFoundError):  # a package for another platform
                kept = f"{_CACHE}/_cacache/content-v2/{kind}/{number[:2]}/{number[2:4]}/{number[4:]}"
                shutil.copyfile(kept, f"{_OUTPUT}/files/{kind}-{number}.tgz")


def unpack(order: dict[str, Any]) -> None:
    os.makedirs(f"{_OUTPUT}/tree")
    os.chdir(f"{_OUTPUT}/tree")
    for name in ("package.json", "package-lock.json"):
        shutil.copyfile(f"{_INPUT}/{name}", name)
    _npm(order, "ci", "--offline", *([] if order["scripts"] else ["--ignore-scripts"]))


def _npm(order: dict[str, Any], *words: str) -> None:
    done = subprocess.run([*order["npm"], words[0], *_QUIET, *words[1:]], check=False)
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    with open(f"{_INPUT}/order.json", encoding="utf-8") as given:
        {"fetch": fetch, "unpack": unpack}[sys.argv[1]](json.load(given))
