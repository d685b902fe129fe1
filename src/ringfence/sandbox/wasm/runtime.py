"""The runtime: the package `pyeryx`, imported as `eryx`, with CPython compiled to WebAssembly in it.

It is never loaded here, since a program can kill the process that it runs in. It unpacks itself into a folder when it
is first used; that is done once, in a process of its own, and boxes see the folder as it is, read-only.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES, PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ringfence.core.errors import Unavailable
from ringfence.core.record import plain
from ringfence.core.system import interpreter
from ringfence.sandbox.process import guest_code
from ringfence.sandbox.wasm import worker

OLDEST = (3, 12)
REMEDY = "pip install 'pyeryx>=0.11,<0.12'"
"""As the extra `wasm` has it."""
_PREPARE_SECONDS = 300.0
_PREPARE = "import sys; sys.path.append(sys.argv[1]); import eryx; eryx.Session().execute('pass')"

_LOAD = """\
import sys
for name, source in {sources!r}:
    module = sys.modules[name] = type(sys)(name)
    if source is not None:
        exec(compile(source, "<" + name.rpartition(".")[2] + ">", "exec", dont_inherit=True), module.__dict__)
exec(compile({inside!r}, "<inside>", "exec", dont_inherit=True), globals())
"""


@plain
class Runtime:
    """The runtime as it lies on this host."""

    package: Path
    """The folder of its package."""
    version: str
    library: Path
    """Its native part."""

    @property
    def key(self) -> str:
        """Changes with it."""
        info = self.library.stat()
        told = f"{self.version} {self.library} {info.st_size} {info.st_mtime_ns}"
        return f"{self.version}-{hashlib.sha256(told.encode()).hexdigest()[:16]}"


def find() -> Runtime:
    """Raises Unavailable, with what is missing and how to get it."""
    if sys.version_info < OLDEST:
        have = ".".join(map(str, sys.version_info[:2]))
        raise Unavailable("no_backend", f"backend wasm needs Python 3.12 or later, and this is {have}")
    try:
        found = version("pyeryx")
    except PackageNotFoundError:
        raise Unavailable("no_backend", f"backend wasm needs the package pyeryx: {REMEDY}") from None
    spec = PathFinder.find_spec("eryx", sys.path)
    place = Path(spec.origin).parent if spec is not None and spec.origin else None
    names = ("_eryx.abi3.so", *(f"_eryx{suffix}" for suffix in EXTENSION_SUFFIXES))
    for name in names if place is not None else ():
        assert place is not None
        if (place / name).is_file():
            return Runtime(Path(os.path.realpath(place)), found, Path(os.path.realpath(place / name)))
    raise Unavailable("no_backend", f"what is installed as eryx is not the package pyeryx: {REMEDY} --force-reinstall")


def prepared(runtime: Runtime, state: Path) -> Path:
    """A folder with all that it unpacks, made if it was not made before. Blocks. Raises Unavailable."""
    place = state / "wasm" / runtime.key
    if place.is_dir():
        return place
    place.parent.mkdir(0o700, parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".new-", dir=place.parent))
    try:
        _unpack(runtime, staging)
        for folder, _, files in os.walk(staging):
            os.chmod(folder, 0o755)  # noqa: S103 - its parent is its owner's alone, and boxes are another user
            for name in files:
                os.chmod(os.path.join(folder, name), 0o644)
        try:
            staging.rename(place)
        except OSError:
            if not place.is_dir():  # another process was faster
                raise
    except OSError as exc:
        raise Unavailable("no_backend", f"the runtime of backend wasm cannot be unpacked into {place}: {exc}") from exc
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return place


def _unpack(runtime: Runtime, folder: Path) -> None:
    words = (str(interpreter()), "-I", "-c", _PREPARE, str(runtime.package.parent))
    env = {"TMPDIR": str(folder), "PATH": os.defpath}
    try:
        done = subprocess.run(
            words, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PREPARE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise OSError("it took too long") from None
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or [f"status {done.returncode}"]
        raise OSError(f"it does not run here: {said[0]}")


# ── What is sent into a box ───────────────────────────────────────────────────────────────────────


def warmup(runtime: Runtime, folder: Path) -> str:
    """Source that makes a worker ready in a box."""
    given = (str(runtime.package.parent), str(folder), _inside())
    return (
        f"import sys\nmodule = sys.modules[{worker.NAME!r}] = type(sys)({worker.NAME!r})\n"
        f"exec(compile({_source('worker.py')!r}, '<worker>', 'exec', dont_inherit=True), module.__dict__)\n"
        f"module.worker = module.Worker(*{given!r})\n"
    )


def program(order: dict[str, object]) -> bytes:
    """Source that has the worker of its box run the program of an order."""
    return f"import sys\nsys.modules.pop({worker.NAME!r}).worker.run({order!r})\n".encode()


@cache
def _inside() -> str:
    """What runs in the interpreter in WebAssembly, whose version is not ours: so it is compiled there."""
    return _LOAD.format(sources=guest_code.sources(), inside=_source("inside.py"))


def _source(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
