"""A box whose root is the tree of a container image, with nothing of the host's system in it. Used inside the zygote.

The image lies beneath a few folders and files of ours, both read-only, as layers of one file system: whatever has one
of our names in the image (a file, a link that leads elsewhere) is not there, and no link of the image is followed.
"""

from __future__ import annotations

import os

from ringfence.sandbox.process import kernel, template

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.sandbox.process.template import Mounted

_OURS, _IMAGE = f"{template.BASE}/ours", f"{template.BASE}/image"
_FOLDERS = ("etc", "dev", "proc", "workspace", "run", "var")
_FLAGS = kernel.MS_NOSUID | kernel.MS_NODEV
_READ_ONLY = kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NODEV
# What a layer says of itself in attributes of its files is not gone by.
_OPTIONS = f"lowerdir={_OURS}:{_IMAGE},redirect_dir=nofollow,metacopy=off,index=off,xino=off"


def build(image: Mounted, mounted: list[Mounted], without: frozenset[str]) -> None:
    """Make the template and make everything else disappear."""
    place = template.begin()
    os.mkdir(_OURS, 0o755)
    kernel.mount("ours", _OURS, "tmpfs", _FLAGS, "mode=0755,size=1m,nr_inodes=4k")
    for name in _FOLDERS:
        os.mkdir(f"{_OURS}/{name}", 0o755)
    template.link(_OURS, [mount.at for mount in mounted])
    template.write(_OURS, template.WRITTEN)
    for name in template.DEVICES:
        os.close(os.open(f"{_OURS}/dev/{name}", os.O_CREAT | os.O_CLOEXEC, 0o644))
    template.make_rooms(_OURS, mounted, [])
    image.attach(_IMAGE)
    try:
        kernel.mount("image", place, "overlay", _FLAGS, _OPTIONS)
    except OSError as exc:
        template.give_up(
            f"an image cannot be the root of a box here: the kernel makes no overlay of it ({exc.strerror})"
        )
    kernel.set_mount(place, _READ_ONLY)
    kernel.bind(f"{_OURS}/dev", f"{place}/dev", _READ_ONLY | kernel.ATTR_NOEXEC)  # and nothing that the image has there
    for layer in (_OURS, _IMAGE):
        kernel.call("umount2", layer.encode(), kernel.MNT_DETACH)
    template.finish(place, mounted, without)
