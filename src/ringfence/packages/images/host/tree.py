"""Writes the entries of a root as a tree, and compiles its Python modules.

Nothing of the tree is made by the clock, the order of a folder or the user: files are 0755 or 0644, and modules are
compiled in one order, by interpreters that were started for it, and are valid whatever the times of their sources.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from ringfence.core import system
from ringfence.core.errors import Unavailable
from ringfence.packages.images.host.contents import RootContents

_COMPILERS = 2
"""How many at a time; always as many, so that each compiles the same modules in the same order."""
_COMPILE_SECONDS = 600
_COMPILE = """
import json, os, py_compile, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (500, 500))
resource.setrlimit(resource.RLIMIT_AS, (1 << 32, 1 << 32))
mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
tag = sys.implementation.cache_tag
for path, named in json.load(sys.stdin):
    folder, name = os.path.split(path)
    made = f"{folder}/__pycache__/{name[:-3]}.{tag}.pyc"
    try:
        py_compile.compile(path, made, named, doraise=True, invalidation_mode=mode)
    except (py_compile.PyCompileError, ValueError, RecursionError, MemoryError):
        pass  # a template, or a test of what cannot be compiled
    print(flush=True)
"""


def written(contents: RootContents, into: Path, step: Callable[[int], None]) -> None:
    """Make the tree in a new folder; `step` counts what is done of `steps`. Raises Unavailable."""
    into.mkdir(mode=0o755)
    for path, entry in contents.entries.items():  # sorted: a folder comes before what is in it
        place = into / path
        try:
            if entry.kind == "folder":
                place.mkdir()
            elif entry.kind == "link":
                place.symlink_to(entry.target)
            elif entry.source:
                shutil.copyfile(entry.source, place)
            else:
                place.write_bytes(entry.data)
            if entry.kind != "link":
                place.chmod(0o755 if entry.executable or entry.kind == "folder" else 0o644)
        except OSError as problem:
            what = entry.source or f"/{path}"
            raise Unavailable("no_image", f"{what} cannot be put into the image: {problem.strerror}") from None
        step(1)
    _compile(into, _modules(contents), step)


def steps(contents: RootContents) -> int:
    return len(contents.entries) + len(_modules(contents))


def _modules(contents: RootContents) -> list[str]:
    below = tuple(f"{folder}/" for folder in contents.compiled)
    return [path for path in contents.entries if path.endswith(".py") and path.startswith(below)]


def _compile(root: Path, modules: list[str], step: Callable[[int], None]) -> None:
    words = [str(system.interpreter()), "-S", "-s", "-P", "-B", "-W", "ignore", "-c", _COMPILE]
    running = []
    for number in range(_COMPILERS):
        share = [(str(root / path), f"/{path}") for path in modules[number::_COMPILERS]]
        started = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"},
        )
        assert started.stdin is not None
        started.stdin.write(json.dumps(share).encode())
        started.stdin.close()
        running.append(started)
    try:
        for started in running:
            assert started.stdout is not None
            for _ in started.stdout:
                step(1)
            started.wait(_COMPILE_SECONDS)
    finally:
        for started in running:
            started.kill()
            started.wait()
            assert started.stdout is not None
            started.stdout.close()
    for folder in root.rglob("__pycache__"):
        folder.chmod(0o755)
        for made in folder.iterdir():
            made.chmod(0o644)


def stamped(contents: RootContents) -> list[list[object]]:
    """What tells, without reading them, that the same entries would come to the same tree."""
    return [
        [path, entry.kind, entry.executable, entry.target, entry.data.decode(), entry.source, _stamp(entry.source)]
        for path, entry in contents.entries.items()
    ]


def _stamp(source: str) -> list[int]:
    if not source:
        return []
    try:
        seen = os.stat(source)
    except OSError as problem:
        raise Unavailable("no_image", f"{source} cannot be read: {problem.strerror}") from None
    return [seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns]
