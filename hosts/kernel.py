"""A kernel of the distribution as QEMU can start it: the kernel, a first file system, and a disk with its modules."""

from __future__ import annotations

import lzma
import re
import stat
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hosts.mirror import Packages
from hosts.places import CACHE, Trouble, digest, find, fresh, make_ext4, run, say, size_of

# What a guest's disks, its root and the line to us need. A kernel may have any of them built in.
_WANTED = ("virtio_pci", "virtio_mmio", "virtio_blk", "virtio_console", "virtio_rng", "crc32c_generic", "ext4")
_KEPT_PARTS = re.compile(r"linux-(image|binary|modules)-\d")


@dataclass(frozen=True)
class Kernel:
    release: str
    image: Path
    initrd: Path
    modules: Path


def name_of(module: str) -> str:
    """The kernel takes `-` and `_` in names of modules for the same."""
    return Path(module).name.split(".")[0].replace("-", "_")


def load_order(dep: str, wanted: Iterable[str]) -> list[str]:
    """The files of these modules and of all that they need, each after what it needs itself; `dep` is modules.dep."""
    needs: dict[str, list[str]] = {}
    files: dict[str, str] = {}
    for line in dep.splitlines():
        file, _, rest = line.partition(":")
        files[name_of(file)] = file
        needs[name_of(file)] = [name_of(other) for other in rest.split()]
    order: list[str] = []

    def visit(module: str) -> None:
        for other in needs[module]:
            if files[other] not in order:
                visit(other)
        if files[module] not in order:
            order.append(files[module])

    for module in wanted:
        if module in files:
            visit(module)
    return order


def cpio(files: Mapping[str, tuple[int, bytes]]) -> bytes:
    """An archive that the kernel unpacks into its first file system: path to mode and content. Folders are implied."""
    whole: dict[str, tuple[int, bytes]] = {}
    for path, entry in files.items():
        for parent in reversed(Path(path).parents[:-1]):
            whole.setdefault(str(parent), (stat.S_IFDIR | 0o755, b""))
        whole[path] = entry
    whole["TRAILER!!!"] = (0, b"")
    out = bytearray()
    for number, (path, (mode, content)) in enumerate(whole.items(), 1):
        name = path.encode() + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name), 0)
        out += b"070701" + b"".join(b"%08x" % field for field in fields) + name
        out += b"\0" * (-len(out) % 4) + content
        out += b"\0" * (-len(out) % 4)
    return bytes(out)


def _plain(module: Path) -> bytes:
    content = module.read_bytes()
    if module.suffix == ".xz":
        return lzma.decompress(content)
    if module.suffix == ".zst":
        program = find("zstd") or "zstd"
        return subprocess.run([program, "-dc"], input=content, capture_output=True, check=True).stdout
    return content


def _unpack(packages: Packages, machine: str, tree: Path) -> tuple[Path, Path]:
    """The kernel and its modules, from whichever packages they are spread over."""
    todo, seen = [f"linux-image-{machine}"], set[str]()
    while todo:
        package = todo.pop()
        seen.add(package)
        if _KEPT_PARTS.match(package):
            packages.fetch(package, tree)
        todo += [other for other in packages.depends(package) if _KEPT_PARTS.match(other) and other not in seen]
    # Newer packages have both in one place.
    images = [*tree.glob("boot/vmlinuz-*"), *tree.glob("usr/lib/modules/*/vmlinuz")]
    modules = [*tree.glob("lib/modules/*"), *tree.glob("usr/lib/modules/*")]
    if not images or not modules:
        raise Trouble(f"the kernel's packages have no kernel or no modules: see {tree}")
    return images[0], modules[0]


def _busybox(machine: str) -> bytes:
    tree = fresh(CACHE / "kernels" / f"busybox-{machine}")
    Packages("bookworm", machine).fetch("busybox-static", tree)
    for place in ("usr/bin/busybox", "bin/busybox"):
        if (tree / place).is_file():
            return (tree / place).read_bytes()
    raise Trouble("the package busybox-static has no busybox")


def kernel(suite: str, machine: str) -> Kernel:
    """The newest kernel of a suite, fetched and prepared at its first use. Its initrd has yet to be given an `init`."""
    place = CACHE / "kernels" / f"{suite}-{machine}-{digest(_WANTED)}"
    made = place / "release"
    if not made.exists():
        tree = fresh(place) / "tree"
        image, base = _unpack(Packages(suite, machine), machine, tree)
        release, top = base.name, base.parent
        say(f"preparing kernel {release}")
        run(["depmod", "-b", top.parent.parent, release])
        loaded = load_order((base / "modules.dep").read_text(), _WANTED)
        files = {f"modules/{number:02}-{name_of(one)}.ko": _plain(base / one) for number, one in enumerate(loaded)}
        entries = {path: (stat.S_IFREG | 0o644, content) for path, content in files.items()}
        entries["bin/busybox"] = (stat.S_IFREG | 0o755, _busybox(machine))
        (place / "initrd").write_bytes(cpio(entries))
        image.rename(place / "vmlinuz")
        make_ext4(place / "modules.ext4", top, size_of(top) * 5 // 4 + 64)
        run(["rm", "-rf", tree])
        made.write_text(release)
    return Kernel(made.read_text(), place / "vmlinuz", place / "initrd", place / "modules.ext4")
