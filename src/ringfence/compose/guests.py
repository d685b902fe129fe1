"""Backends whose boxes are guests of an engine, and the roots that guests have."""

from __future__ import annotations

import hashlib
import logging
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

from ringfence.config import paths
from ringfence.config.settings import SandboxSettings
from ringfence.core import system
from ringfence.core.aio import in_thread
from ringfence.core.box import TEMPLATES, ImageRoot, SetUp
from ringfence.core.errors import Unavailable
from ringfence.packages.cache import PackageCache
from ringfence.packages.images import build, guests, packing
from ringfence.packages.images.host.environment import EnvironmentPackages
from ringfence.sandbox.guests.backend import GuestBackend, agent_code
from ringfence.sandbox.guests.docker import DockerEngine, DockerSettings
from ringfence.sandbox.guests.engine import GuestEngine, GuestRoot
from ringfence.sandbox.guests.gvisor import GvisorEngine
from ringfence.sandbox.guests.microvm import disks
from ringfence.sandbox.guests.microvm import kernel as kernels
from ringfence.sandbox.guests.microvm.engine import MicrovmEngine
from ringfence.sandbox.guests.microvm.firecracker import Firecracker
from ringfence.sandbox.guests.microvm.kernel import GuestKernel
from ringfence.sandbox.guests.microvm.qemu import KVM, TCG, Qemu
from ringfence.sandbox.guests.oci import OciEngine

_PIECE = 1024 * 1024
_NO_SETUPS: Mapping[str, SetUp] = MappingProxyType({})
_LINKS = dict.fromkeys(("tmp", "var/tmp", "home/user"), "/workspace/tmp")
log = logging.getLogger(__name__)


def engine_backend(
    engine: GuestEngine,
    templates: Mapping[str, tuple[str, ...]] = TEMPLATES,
    state: Path | None = None,
    setups: Mapping[str, SetUp] = _NO_SETUPS,
) -> GuestBackend:
    """Boxes of any engine, with roots that are made of this host and kept in the state folder."""
    cache = PackageCache((state or paths.state_folder()) / "packages")
    return GuestBackend(engine, partial(_root, cache, templates), templates, setups)


def oci_backend(
    templates: Mapping[str, tuple[str, ...]], state: Path | None, setups: Mapping[str, SetUp] = _NO_SETUPS
) -> GuestBackend:
    """Containers of runc or crun."""
    return engine_backend(OciEngine(), templates, state, setups)


def gvisor_backend(
    templates: Mapping[str, tuple[str, ...]], state: Path | None, setups: Mapping[str, SetUp] = _NO_SETUPS
) -> GuestBackend:
    """Containers of runsc, with a kernel of their own."""
    return engine_backend(GvisorEngine(), templates, state, setups)


def docker_backend(
    settings: SandboxSettings, templates: Mapping[str, tuple[str, ...]], state: Path | None, keep_ready: int | None
) -> GuestBackend:
    """Containers of an engine with Docker's API."""
    addresses = (settings.docker_host,) if settings.docker_host is not None else paths.docker_hosts()
    ready = settings.docker_ready if keep_ready is None else min(keep_ready, settings.docker_ready)
    said = DockerSettings(addresses, settings.docker_runtime, ready)
    return engine_backend(DockerEngine(said, _packed), templates, state, settings.setups)


async def _packed(root: GuestRoot) -> AsyncIterator[bytes]:
    """As a tar archive, with the folders for temporary files within the workspace: one disk has one limit."""
    with tempfile.TemporaryFile() as file:
        await in_thread(lambda: packing.write_tar(root.folder, file, build.MODES, lambda done: None, _LINKS))
        file.seek(0)
        while piece := await in_thread(lambda: file.read(_PIECE)):
            yield piece


def microvm_backend(
    settings: SandboxSettings, templates: Mapping[str, tuple[str, ...]], state: Path | None
) -> GuestBackend:
    """Virtual machines of QEMU: with KVM where one boots with it, else emulated."""
    folder = state or paths.state_folder()
    named = None if settings.microvm_kernel is None else Path(settings.microvm_kernel)
    find = partial(kernels.find, named, kernel_folder(folder))
    engine = MicrovmEngine("microvm", (Qemu(KVM), Qemu(TCG)), folder / "microvm", find, agent_code)
    return engine_backend(engine, templates, state, settings.setups)


def firecracker_backend(
    settings: SandboxSettings, templates: Mapping[str, tuple[str, ...]], state: Path | None
) -> GuestBackend:
    """Virtual machines of Firecracker, with the operator's kernel, and the operator's disk or this host's root."""
    folder = state or paths.state_folder()
    kernel, disk = settings.firecracker_kernel_path, settings.firecracker_rootfs_path
    own = partial(_root, PackageCache(folder / "packages"), templates)
    machines = (Firecracker(folder / "firecracker" / "machines"),)
    find = partial(kernels.operators, None if kernel is None else Path(kernel))
    engine = MicrovmEngine("firecracker", machines, folder / "firecracker", find, agent_code, emulates=False)
    return GuestBackend(engine, own if disk is None else partial(_disk_root, Path(disk)), templates, settings.setups)


async def _disk_root(disk: Path, template: str, image: ImageRoot | None) -> GuestRoot:
    """The operator's disk as the root. Raises Unavailable."""
    if image is not None or template != "python":
        text = "backend firecracker has the root of sandbox.firecracker_rootfs_path, and no other"
        raise Unavailable("not_supported", f"{text}: leave that out for templates and images")
    return await in_thread(lambda: _of_disk(disk))


def _of_disk(disk: Path) -> GuestRoot:
    if not disk.is_file():
        raise Unavailable("no_backend", f"sandbox.firecracker_rootfs_path: there is no file {disk}")
    python, version = disks.python_of(disk, (str(system.interpreter()), "/usr/bin/python3", "/usr/local/bin/python3"))
    if version != sys.version_info[:2]:
        said, ours = (".".join(map(str, each)) for each in (version, sys.version_info[:2]))
        text = f"{disk} has Python {said}, and the agent of this host is for {ours}"
        raise Unavailable("no_backend", f"{text}: make the disk out of `ringfence image build`, or leave it out")
    about = disk.stat()
    digest = hashlib.sha256(f"{disk} {about.st_size} {about.st_mtime_ns}".encode()).hexdigest()
    return GuestRoot(disk.resolve(), f"disk:{digest}", (python,), python, version)


def fetch_kernel(state: Path) -> GuestKernel:
    """The distribution's kernel for such machines, into the state. Raises Unavailable, OSError."""
    return kernels.fetch(kernel_folder(state))


def kernel_folder(state: Path) -> Path:
    """Where that is."""
    return state / "microvm" / "kernel"


async def _root(
    cache: PackageCache, templates: Mapping[str, tuple[str, ...]], template: str, image: ImageRoot | None
) -> GuestRoot:
    """The root of a template's guests, made of this host if it was not made before; or that of an image. Raises
    Unavailable."""
    return await in_thread(lambda: _found(cache, templates[template], image))


def _found(cache: PackageCache, modules: tuple[str, ...], image: ImageRoot | None) -> GuestRoot:
    tree = _built(cache, modules).tree
    if image is None:
        python = tree.about["python"]
        return GuestRoot(tree.folder, tree.digest, (python,), python, sys.version_info[:2])
    folder = guests.joined(cache, image.folder, tree)
    words = guests.starts(tree.folder, tree.about["python"])
    return GuestRoot(folder, image.digest, words, image.python, image.version)


def _built(cache: PackageCache, modules: tuple[str, ...]) -> build.BuiltImage:
    packages = EnvironmentPackages().of_modules(modules)
    return build.build(cache, build.BuildRequest(packages), _tell, lambda done: None)


def _tell(steps: int) -> None:
    log.info("a root file system of this host is made for guests, once: %d steps", steps)
