"""What is promised of a fresh box holds for the box of a server whose root is an image; the image's Python tries it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ringfence.core.box import BoxReport, BoxSpec, Mount, Stream
from ringfence.core.model import PackageSpec, ServerSpec
from ringfence.core.sessions import Command, discard_output
from ringfence.doctor.placement import NOT_IN_SERVER, InServer
from ringfence.sandbox.process.backend import ProcessBackend
from ringfence.sandbox.servers.launcher import BoxLauncher, LaunchSettings
from tests.boxing import need_boxes
from tests.doctor.keeping import kept
from tests.rooting import PYTHON, system_root

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

NOT_IN_AN_IMAGE = {
    "F43": "an image's root is an overlay, and that it is one is looked at in every such box",
    "X14": "boxes of one zygote that see a mount are one user on the host, and here all see one",
}
"""Cases that say nothing of one."""


class InImage(InServer):
    """Cases are servers that come out of an image."""

    def __init__(self, backend: ProcessBackend, root: Path, shared: Path) -> None:
        super().__init__(backend)
        self._root = root
        self._shared = shared
        """Which all of them may write to: boxes that see the same are forks of one zygote."""

    async def _run(self, spec: BoxSpec, folder: Path, tell: Callable[[Stream, bytes], None]) -> BoxReport:
        source = spec.program.source.decode()
        for number, tree in enumerate(spec.trees):  # lent where an image has room for it
            source = source.replace(str(tree), f"/srv/{number}")
        mounts = (
            *spec.mounts,
            *(Mount(str(tree), f"/srv/{number}") for number, tree in enumerate(spec.trees)),
            Mount(str(self._shared), "/srv/shared", "rw"),
        )
        words = spec.program.argv if spec.program.kind == "command" else (PYTHON, "-c", source, *spec.program.argv)
        image = PackageSpec("image", ("image",), "", str(self._root))
        boxes = BoxLauncher(self._backend, LaunchSettings(spec.limits, {}, lambda path: None))
        stay, command = boxes.prepared(ServerSpec("case", words, mounts=mounts, packages=image))
        stay = replace(stay, env=spec.env, inputs=spec.inputs, tenant=spec.tenant, limits=spec.limits)
        box = await self._backend.open(replace(stay, listening=spec.listening), spec.network)
        try:
            folders = Command(("/bin/mkdir", "/workspace/tmp", "/workspace/output"))
            await (await box.command(folders, discard_output)).over()
            wanted = replace(command, limits=spec.limits, stdin=spec.program.stdin)
            return await (await box.command(wanted, tell)).over()
        finally:
            await box.end()


async def test_every_promise_is_kept_in_an_image(tmp_path: Path) -> None:
    need_boxes()
    (tmp_path / "shared").mkdir()
    backend = InImage(ProcessBackend(depth=0), system_root(tmp_path / "root"), tmp_path / "shared")
    assert await kept(backend, {*NOT_IN_SERVER, *NOT_IN_AN_IMAGE}) > 230
