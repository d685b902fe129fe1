"""The key that zygotes are made by: boxes with the same baseline are forks of the same processes."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from ringfence.core.record import plain
from ringfence.core.system import interpreter
from ringfence.sandbox.process.seccomp import filter
from ringfence.sandbox.process.zygote.template import NODE_FILE, OWN_PROGRAMS

if TYPE_CHECKING:
    from ringfence.sandbox.process import mounting
    from ringfence.sandbox.process.named_programs import Choice

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
INSTALLED = f".local/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
"""Where pip installs for a user who cannot write beside the interpreter, below the folder of that user."""
_INSTALLED_PROGRAMS = ".local/bin"
_HOMES = ("/home/user", "/home/box", "/home/ringfence")
_TEMPORARY = ("/tmp", "/var/tmp")  # noqa: S108 - as they are called in a box
SHARED_SLOT = 1
"""Boxes that write to one folder have one id on the host: a mount can be mapped to one id only."""


@plain
class Baseline:
    """What all boxes of a zygote have in common."""

    tenant: str = "local"
    template: str = "python"
    preload: tuple[str, ...] = ()
    trees: tuple[str, ...] = ()
    """Host folders that are readable in the boxes, the interpreter's own not among them."""
    without: tuple[str, ...] = ()
    """Confinement steps that are left out: what the operator accepted to do without."""
    packages: tuple[str, ...] = ()
    """Those of the trees that modules are imported from."""
    setup: str = ""
    """The operator's Python source, run once in the zygote; sessions start with its names."""
    warmup: str = ""
    """Our Python source, run in each box once that is confined, and before it is ready for a program."""
    stays: bool = False
    """Its boxes stay; what runs cell after cell in them is loaded."""
    mounts: tuple[mounting.Placed, ...] = ()
    """What its boxes see of the host besides, where they see it, and whether they may write to it."""
    installs: bool = False
    """Programs in its boxes may install packages, and Python looks for those."""
    programs: Choice | None = None
    """Those of the host that its boxes have; None: all of them."""
    image: mounting.Placed | None = None
    """The folder that is their root, instead of the system of the host and the interpreter."""

    @property
    def uses_host_mounts(self) -> bool:
        """Whether its zygotes keep a file system of the host in use."""
        return bool(self.mounts) or self.image is not None

    @property
    def home(self) -> str:
        """Its boxes' HOME: the usual one, unless something of the host lies there that they need."""
        return self._free(_HOMES)

    @property
    def places(self) -> tuple[str, ...]:
        """Where boxes that stay have a folder for temporary files and one for their user, both on their disk. Other
        boxes have links there, to one folder that is thrown away with the rest."""
        return (self._free(_TEMPORARY), self.home) if self.stays else ()

    def _free(self, those: tuple[str, ...]) -> str:
        taken = [] if self.image is not None else [os.path.realpath(sys.base_prefix), *self.trees]
        if not self.stays:
            taken += [mount.at for mount in self.mounts]
        return next((at for at in those if not any(f"{path}/".startswith(f"{at}/") for path in taken)), those[-1])

    @property
    def writes(self) -> bool:
        """Whether its boxes can write to the host."""
        return any(mount.writable for mount in self.mounts)


# ── The configuration of a zygote: what its boxes have, and which system calls ────────────────────


def configuration(baseline: Baseline, *, own_ids: bool) -> dict[str, Any]:
    image = baseline.image
    trees = [] if image is not None else sorted({os.path.realpath(sys.base_prefix), *baseline.trees})
    path = _PATH if image is not None else f"{interpreter().parent}:{_PATH}"
    if baseline.installs:
        path += f":{baseline.home}/{_INSTALLED_PROGRAMS}"
    # Debian and others call it python3 alone, but programs and models write `python`.
    unnamed = image is None and baseline.programs is None and not has_program("python", path)
    if unnamed:
        path += f":{OWN_PROGRAMS}"
    return {
        "trees": trees,
        "preload": list(baseline.preload),
        "without": list(baseline.without),
        "packages": [*baseline.packages, *([f"{baseline.home}/{INSTALLED}"] if baseline.installs else [])],
        "stays": baseline.stays and image is None,
        "setup": baseline.setup,
        "warmup": baseline.warmup,
        "own_ids": own_ids,
        "mounts": [each.words for each in baseline.mounts],
        "image": [] if image is None else [image.words],
        "places": list(baseline.places),
        "home": baseline.home,
        "python": str(interpreter()) if unnamed else "",
        "env": {
            **{"PATH": path, "HOME": baseline.home, "TMPDIR": (*baseline.places, "/workspace/tmp")[0]},
            **{"LANG": "C.UTF-8", "USER": "box", "LOGNAME": "box", "TERM": "xterm-256color"},
            "NODE_OPTIONS": f"--require=/etc/{NODE_FILE}",
        },
    }


def has_program(name: str, path: str) -> bool:
    return any(os.access(f"{folder}/{name}", os.X_OK) for folder in path.split(":"))


def call_filter(baseline: Baseline) -> bytes:
    # What is in memory alone could be executed, whatever is mounted how.
    memfd = "memfd" not in baseline.without and (baseline.programs is None or "noexec" in baseline.without)
    which: filter.Which = {"memfd": memfd, "marks": not baseline.writes}
    which["counted"] = "memfd" not in baseline.without
    which["mappings"] = baseline.stays
    return filter.compile_filter(os.uname().machine, **which)
