"""How the server of an image is started: what its image, and the command that ran it, say of that."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ringfence.cli.init.runners import Runner
from ringfence.config.clientfiles import looks_secret
from ringfence.errors import Unavailable
from ringfence.packages.rootfs import program
from ringfence.packages.shelf import Tree

_USUAL_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(slots=True)
class Imaged:
    keys: dict[str, Any]
    remarks: list[str] = field(default_factory=list)


def started(tree: Tree, runner: Runner, given: Mapping[str, Any]) -> Imaged:
    """Keys of a server. `given`: those that its entry has already. Raises Unavailable where nothing would run."""
    about = tree.about
    env = {"PATH": _USUAL_PATH, **about["env"], **given.get("env", {})}
    cwd = posixpath.normpath(posixpath.join(about["cwd"], given.get("cwd") or ""))
    words = _words(about, runner)
    if not words:
        raise Unavailable("no_program", f"{runner.packages[0]} does not say what it runs; name it behind the image")
    path = program(tree.folder, words[0], env["PATH"], cwd)
    made = Imaged({"command": [path or words[0], *words[1:]], "env": env, "cwd": cwd})
    if path is None:
        made.remarks.append(f"The image has no program {words[0]!r} that can be found.")
    if about["user"] not in ("", "root", "0"):
        made.remarks.append(f"The image wants to run as {about['user']!r}; a box has an id of its own.")
    for name, value in about["env"].items():
        if name not in given.get("env", {}) and looks_secret(name, value):
            made.remarks.append(f"{name} is as the image has it, and looks like a secret: it stands here in the clear.")
    for what, count in about["left_out"].items():
        made.remarks.append(f"Of the image were left out: {what} ({count}).")
    return made


def _words(about: Mapping[str, Any], runner: Runner) -> list[str]:
    """Whoever names another entry point means none of the image's own arguments."""
    if runner.program is not None:
        return [*filter(None, [runner.program]), *runner.arguments]
    return [*about["entrypoint"], *(runner.arguments or about["cmd"])]
