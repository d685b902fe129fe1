"""The `wasm` backend: Python programs in WebAssembly, in a worker process of their own, in a box of `process`.

Two walls stand between a program and the kernel: the runtime, which gives it memory, a clock and a few folders, and no
system calls; and the box, which holds the runtime. Limits are those of the box, so the kernel says which was met.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ringfence.core.box import MIB, TEMPLATES, BoxReport, BoxSpec, Limits, OnOutput, Program
from ringfence.core.errors import Unavailable
from ringfence.core.model import Json, Recheck, always
from ringfence.sandbox.process.backend import ProcessBackend
from ringfence.sandbox.process.host.capabilities import check_spec
from ringfence.sandbox.wasm import runtime
from ringfence.sandbox.wasm.runtime import Runtime

_TEMPLATE = "wasm"
_MEMORY = 32 * MIB
"""What the runtime itself takes; the program's own memory comes on top."""
_THREADS = 8
_OPEN_FILES = 24
_READY = 2
"""Boxes of a kind that are kept ready. Each took a third of a second of a core."""
_PROBE_SECONDS = 60.0
_PROBE = b"import sys; print(1 + 1, sys.platform)"
_NO_GROUP = "backend wasm needs a control group for memory: run `ringfence host`, which says how to get one"
_SAID = "2 wasi\n"
_ENV = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/home/user",
    "TMPDIR": "/workspace/tmp",
    "LANG": "C.UTF-8",
    "USER": "box",
    "LOGNAME": "box",
    "TERM": "xterm-256color",
}
_NATIVE = (".so", ".pyd", ".dylib")


class WasmBackend:
    """Boxes whose programs run in WebAssembly."""

    name = "wasm"

    def __init__(
        self,
        state: Path,
        *,
        accept_missing: Sequence[str] = (),
        templates: Mapping[str, tuple[str, ...]] = TEMPLATES,
        setups: Collection[str] = (),
        depth: int | None = None,
    ) -> None:
        """`state`: a folder that is its owner's, where the runtime is unpacked. `setups`: templates that have set-up.
        `depth`: boxes kept ready."""
        self._state = state
        self._accepted = tuple(accept_missing)
        self._templates = templates
        self._setups = frozenset(setups)
        self._depth = _READY if depth is None else depth
        self._opening = asyncio.Lock()
        self._boxes: ProcessBackend | None = None
        self._runtime: Runtime | None = None
        self._folder = Path()
        self._problem: Unavailable | None = None

    async def run(self, spec: BoxSpec, tell: OnOutput | None = None, recheck: Recheck = always) -> BoxReport:
        check_spec(spec, self._templates)
        self._check(spec)
        boxes = await self._ready()
        try:
            report = await boxes.run(self._of_worker(spec), tell, recheck)
        except asyncio.CancelledError as cancelled:
            for said in cancelled.args:
                if isinstance(said, BoxReport):
                    cancelled.args = (self._report(said),)
            raise
        return self._report(report)

    async def _ready(self) -> ProcessBackend:
        """Try it, once: run something. Raises Unavailable, with what is missing and how to get it."""
        async with self._opening:
            if self._problem is not None:
                raise self._problem
            if self._boxes is None:
                try:
                    self._boxes = await self._opened()
                except Unavailable as exc:
                    self._problem = exc
                    raise
        return self._boxes

    async def _opened(self) -> ProcessBackend:
        found = self._runtime = runtime.find()
        self._folder = await asyncio.to_thread(runtime.prepared, found, self._state)
        boxes = ProcessBackend(
            accept_missing=self._accepted,
            templates={"python": (), _TEMPLATE: ()},
            warmups={_TEMPLATE: runtime.warmup(found, self._folder)},
            depth=self._depth,
            state=self._state,
        )
        try:
            spec = BoxSpec(Program("python", _PROBE), Limits(wall_seconds=_PROBE_SECONDS))
            await boxes.run(replace(spec, program=Program("python", b"pass")))
            if not boxes.counts_memory:  # a box then asks about calls of the runtime before we can answer
                raise Unavailable("no_backend", _NO_GROUP)
            report = await boxes.run(self._of_worker(spec))
        except BaseException:
            await boxes.close()
            raise
        if report.stdout.text != _SAID:
            await boxes.close()
            said = report.stderr.text.strip().splitlines()[-1:] or [report.ended]
            raise Unavailable("no_backend", f"pyeryx {found.version} runs no program here: {said[0]}")
        return boxes

    async def close(self) -> None:
        if self._boxes is not None:
            await self._boxes.close()
            self._boxes = None

    # ── What its boxes are ──

    def _check(self, spec: BoxSpec) -> None:
        """Raises Unavailable for what this backend cannot give: it never gives less instead."""
        asked = {
            "commands: in WebAssembly there are no processes": spec.program.kind == "command",
            "a network: in WebAssembly there is none that could be governed": spec.network is not None,
            "named programs: in WebAssembly there are none": spec.programs is not None,
            "ports to listen on: in WebAssembly there is no network": spec.listening.allowed,
            "installs by programs: there is no network": spec.installs,
            "an image as their root: their interpreter is the one of pyeryx": spec.root is not None
            or spec.image is not None,
            "a hash seed of their own: their interpreter was started when it was built": spec.layout == "fresh",
            f"template {spec.template}: its packages are native code": bool(self._templates[spec.template]),
            f"template {spec.template}: its set-up is for boxes that stay": spec.template in self._setups,
        }
        lacking = next((what for what, wanted in asked.items() if wanted), None) or _native(spec.packages)
        if lacking is not None:
            raise Unavailable("not_supported", f"backend wasm cannot give boxes {lacking}; backend process can")

    def _of_worker(self, spec: BoxSpec) -> BoxSpec:
        """The box around it, whose program is the worker."""
        assert self._runtime is not None
        given = spec.program
        packages = [str(Path(os.path.realpath(each))) for each in spec.packages]
        seen = [(str(each), str(each), True) for each in (*spec.trees, *packages)]
        seen += [(each.at, each.at, each.mode == "ro") for each in spec.mounts]
        order: dict[str, Any] = {
            "source": given.source,
            "name": given.name,
            "argv": list(given.argv),
            "cell": given.cell,
            "env": {**_ENV, **spec.env},
            "packages": packages,
            "folders": seen,
            "input": False,
        }
        limits = replace(
            spec.limits,
            memory_bytes=spec.limits.memory_bytes + _MEMORY,
            processes=spec.limits.processes + _THREADS,
            open_files=spec.limits.open_files + _OPEN_FILES,
        )
        return replace(
            spec,
            program=Program("python", runtime.program(order), stdin=given.stdin, cell=given.cell),
            limits=limits,
            env={},
            template=_TEMPLATE,
            trees=(*spec.trees, *map(Path, packages), self._runtime.package, self._folder),
            packages=(),
        )

    def _report(self, report: BoxReport) -> BoxReport:
        return replace(report, isolation=self._isolation(report.isolation))

    def _isolation(self, box: Json) -> Json:
        """What the box says of itself, and the wall within it."""
        assert self._runtime is not None
        if not box:
            return box
        protections = {"webassembly": {"on": True, "verified": "host"}, **box.get("protections", {})}
        engine = f"pyeryx {self._runtime.version}"
        return {**box, "backend": self.name, "engine": engine, "protections": protections}


def _native(packages: Sequence[Path]) -> str | None:
    """What among these packages is code for this machine, which does not run in WebAssembly."""
    for package in packages:
        for folder, _, files in os.walk(package):
            for name in files:
                if name.endswith(_NATIVE):
                    at = os.path.relpath(os.path.join(folder, name), package)
                    return f"packages with native code ({at})"
    return None
