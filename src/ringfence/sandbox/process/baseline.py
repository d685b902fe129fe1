"""What zygotes are made by: boxes with the same baseline are forks of the same processes."""

from __future__ import annotations

from ringfence.plain import plain
from ringfence.sandbox.process import mounting
from ringfence.sandbox.process.choosing import Choice


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
    """Python source of the operator's, run once in the zygote; what it makes, sessions begin with."""
    stays: bool = False
    """Its boxes stay; what runs cell after cell in them is loaded."""
    mounts: tuple[mounting.Placed, ...] = ()
    """What its boxes see of the host besides, where they see it, and whether they may write to it."""
    listens: bool = False
    """Programs in its boxes may wait for connections."""
    installs: bool = False
    """Programs in its boxes may install packages, and Python looks for those."""
    programs: Choice | None = None
    """Those of the host that its boxes have; None: all of them."""
    image: mounting.Placed | None = None
    """The folder that is their root, instead of the system of the host and the interpreter."""

    @property
    def borrows(self) -> bool:
        """Whether a file system of the host's is in use as long as a zygote of it lives."""
        return bool(self.mounts) or self.image is not None

    @property
    def writes(self) -> bool:
        """Whether what its boxes do can stay on the host."""
        return any(mount.writable for mount in self.mounts)
