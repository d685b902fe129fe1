"""A kernel of the distribution for guests, with the first file system that it unpacks."""

from __future__ import annotations

import lzma
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ringfence.core import system
from ringfence.core.errors import Unavailable
from ringfence.core.record import plain

_WANTED = ("virtio_pci", "virtio_mmio", "virtio_blk", "virtio_console", "ext4", "overlay", "vmw_vsock_virtio_transport")
"""What a machine has to find in it. A kernel may have any of it built in."""
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_FIRST = Path(__file__).parent / "inside" / "first.py"
_IMPORTED = "__future__, ctypes, os, stat, struct, time, encodings.utf_8, encodings.ascii"
_SECONDS = 120.0


@plain
class GuestKernel:
    release: str
    image: Path
    modules: Path
    """The folder of its modules."""


def find(named: Path | None, kept: Path) -> GuestKernel:
    """The kernel that was named, as a file or as the folder of an unpacked package; else one that was fetched into
    `kept`, or that this host has installed. Raises Unavailable."""
    if named is not None:
        found = _in(named.parents[1], named) if named.is_file() and len(named.parents) > 1 else _newest(named)
        if found is None:
            text = f"{named} has no kernel with modules that can be read: name a vmlinuz, or an unpacked kernel package"
            raise Unavailable("no_backend", f"backend microvm: {text}")
        return found
    for place in (kept, Path("/")):
        if (found := _newest(place)) is not None:
            return found
    text = "backend microvm needs a kernel for its machines: `ringfence image kernel` fetches one of the distribution"
    raise Unavailable("no_backend", text)


def operators(image: Path | None) -> GuestKernel:
    """The operator's own, with all that a machine needs built in. Raises Unavailable."""
    lacking = "virtio, ext4, overlay and vsock built in"
    if image is None:
        text = f"backend firecracker needs sandbox.firecracker_kernel_path: an uncompressed kernel with {lacking}"
        raise Unavailable("no_backend", text)
    try:
        with image.open("rb") as file:
            head = file.read(64)
    except OSError as problem:
        text = f"sandbox.firecracker_kernel_path: {image}: {problem.strerror}"
        raise Unavailable("no_backend", text) from None
    if not (head.startswith(b"\x7fELF") or head[56:60] == b"ARM\x64"):
        text = f"sandbox.firecracker_kernel_path: {image} is no kernel that Firecracker boots (vmlinux; Image on arm64)"
        raise Unavailable("no_backend", text)
    return GuestKernel(image.name, image.resolve(), Path("/nonexistent"))


def _newest(place: Path) -> GuestKernel | None:
    patterns = ("boot/vmlinuz-*", "lib/modules/*/vmlinuz", "usr/lib/modules/*/vmlinuz")
    place = place.absolute()
    images = [image for pattern in patterns for image in place.glob(pattern)]
    kernels = [each for image in images if (each := _in(place, image)) is not None]
    # Those that are made for machines of others start faster, and have all that is needed.
    return max(kernels, key=lambda each: ("cloud" in each.release, _numbers(each.release)), default=None)


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", release)))


def _in(place: Path, image: Path) -> GuestKernel | None:
    release = image.name.removeprefix("vmlinuz-") if image.name != "vmlinuz" else image.parent.name
    for top in (place / "lib/modules", place / "usr/lib/modules", Path("/lib/modules")):
        if (top / release / "kernel").is_dir() and os.access(image, os.R_OK):
            return GuestKernel(release, image.resolve(), top / release)
    return None


def fetch(into: Path) -> GuestKernel:
    """The distribution's kernel for machines of others, from wherever its own programs fetch packages. Raises
    Unavailable."""
    machine = _MACHINES.get(os.uname().machine)
    if machine is None or shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        text = "a kernel can be fetched with apt on x86_64 and arm64 alone: name one as sandbox.microvm_kernel"
        raise Unavailable("no_backend", text)
    into = into.absolute()
    staging = into.with_name(f".{into.name}.{os.getpid()}")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        for package in _packages(f"linux-image-cloud-{machine}"):
            _run("apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", package, cwd=staging)
        for archive in staging.glob("*.deb"):
            _run("dpkg-deb", "-x", str(archive), str(staging))
            archive.unlink()
        if _newest(staging) is None:
            raise Unavailable("no_backend", "the package of the kernel has none that can be used")
        shutil.rmtree(into, ignore_errors=True)
        staging.rename(into)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    found = _newest(into)
    assert found is not None
    return found


def _packages(package: str) -> Iterator[str]:
    """What a package that is only a name stands for."""
    shown = _run("apt-cache", "depends", "--no-recommends", "--no-suggests", package)
    found = re.findall(r"^ +Depends: (linux-(?:image|binary|modules)-\d\S*)$", shown, re.MULTILINE)
    if not found:
        raise Unavailable("no_backend", f"apt knows no {package}: name a kernel as sandbox.microvm_kernel")
    for each in found:
        yield each
        more = _run("apt-cache", "depends", "--no-recommends", "--no-suggests", each)
        yield from re.findall(r"^ +Depends: (linux-(?:binary|modules)-\d\S*)$", more, re.MULTILINE)


def _run(*words: str, cwd: Path | None = None) -> str:
    try:
        done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    except OSError as problem:
        raise Unavailable("no_backend", f"{words[0]}: {problem.strerror}") from None
    except subprocess.CalledProcessError as problem:
        said = problem.stderr.strip().rpartition("\n")[2] or f"status {problem.returncode}"
        raise Unavailable("no_backend", f"{' '.join(words[:2])}: {said}") from None
    return done.stdout


# ── Its first file system ─────────────────────────────────────────────────────────────────────────


def initial(kernel: GuestKernel) -> bytes:
    """The first file system: modules, this host's interpreter with what little it needs, and `inside.first`."""
    python = str(system.interpreter())
    files: dict[str, tuple[int, bytes]] = {
        f"modules/{number:02}-{name}": (stat.S_IFREG | 0o644, content)
        for number, (name, content) in enumerate(_modules(kernel))
    }
    for path in _closure(python):
        files[path.lstrip("/")] = (stat.S_IFREG | 0o755, Path(path).read_bytes())
    start = f"#!{python} -IS\n".encode()
    files["init"] = (stat.S_IFREG | 0o755, start + _FIRST.read_bytes())
    for name in ("dev", "proc", "sys"):
        files[name] = (stat.S_IFDIR | 0o755, b"")
    files["dev/console"] = (stat.S_IFCHR | 0o600, b"")
    return archive(files)


def _modules(kernel: GuestKernel) -> Iterator[tuple[str, bytes]]:
    """What is wanted and all that this needs, each after what it needs itself."""
    files = {_name(path): path for path in kernel.modules.rglob("*.ko*")}
    done: set[str] = set()

    def visit(module: str) -> Iterator[tuple[str, bytes]]:
        if module in done or module not in files:
            return  # it is built in
        done.add(module)
        content = _unpacked(files[module])
        needs = re.search(rb"(?:^|\0)depends=([^\0]*)\0", content)
        for other in needs[1].decode().split(",") if needs else ():
            yield from visit(other.replace("-", "_"))
        yield f"{module}.ko", content

    for module in _WANTED:
        yield from visit(module)


def _name(path: Path) -> str:
    """The kernel takes `-` and `_` in names of modules for the same."""
    return path.name.partition(".")[0].replace("-", "_")


def _unpacked(path: Path) -> bytes:
    content = path.read_bytes()
    if path.suffix == ".xz":
        return lzma.decompress(content)
    if path.suffix == ".zst":
        if (program := shutil.which("zstd")) is None:
            raise Unavailable("no_backend", "the kernel's modules are packed by zstd: apt install zstd")
        return subprocess.run([program, "-dc"], input=content, capture_output=True, check=True).stdout
    return content


def _closure(python: str) -> Sequence[str]:
    """The files that the interpreter needs for what `inside.first` imports."""
    code = (
        f"import {_IMPORTED}, sys; print(*(getattr(each, '__file__', '') for each in sys.modules.values()), sep='\\n')"
    )
    modules = [path for path in _run(python, "-I", "-S", "-c", code).splitlines() if os.path.isfile(path)]
    landmark = os.path.join(os.path.dirname(os.__file__), "os.py")
    linked = [python, *(path for path in modules if path.endswith(".so"))]
    found = dict.fromkeys((python, landmark, *modules))
    for path in linked:
        for library in re.findall(r"(?:^|\s)(/\S+)(?= \(0x)", _run("ldd", path)):
            found[library] = None
    return list(found)


def archive(files: Mapping[str, tuple[int, bytes]]) -> bytes:
    """As the kernel unpacks it: path to mode and content. Folders are implied."""
    whole: dict[str, tuple[int, bytes]] = {}
    for path, entry in files.items():
        for parent in reversed(Path(path).parents[:-1]):
            whole.setdefault(str(parent), (stat.S_IFDIR | 0o755, b""))
        whole[path] = entry
    out = bytearray()
    for number, (path, (mode, content)) in enumerate([*whole.items(), ("TRAILER!!!", (0, b""))], 1):
        device = (5, 1) if stat.S_ISCHR(mode) else (0, 0)
        name = os.fsencode(path) + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, *device, len(name), 0)
        out += b"070701" + b"".join(b"%08x" % value for value in fields) + name
        out += b"\0" * (-len(out) % 4) + content
        out += b"\0" * (-len(out) % 4)
    return bytes(out)
