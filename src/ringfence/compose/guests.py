"""Backends whose boxes are guests of an engine, and the roots that guests have."""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

from ringfence.config import paths
from ringfence.config.settings import SandboxSettings
from ringfence.core.aio import in_thread
from ringfence.core.box import TEMPLATES, ImageRoot, SetUp
from ringfence.packages.cache import PackageCache
from ringfence.packages.images import build, guests, packing
from ringfence.packages.images.host.environment import EnvironmentPackages
from ringfence.sandbox.guests.backend import GuestBackend, agent_code
from ringfence.sandbox.guests.docker import DockerEngine, DockerSettings
from ringfence.sandbox.guests.engine import GuestEngine, GuestRoot
from ringfence.sandbox.guests.microvm import kernel as kernels
from ringfence.sandbox.guests.microvm.engine import MicrovmEngine
from ringfence.sandbox.guests.microvm.kernel import GuestKernel
from ringfence.sandbox.guests.microvm.qemu import KVM, TCG, Qemu
from ringfence.sandbox.guests.oci import OciEngine

_PIECE = 1024 * 1024
_LINKS = dict.fromkeys(("tmp", "var/tmp", "home/user"), "/workspace/tmp")
log = logging.getLogger(__name__)


def engine_backend(
    engine: GuestEngine, templates: Mapping[str, tuple[str, ...]] = TEMPLATES, state: Path | None = None
) -> GuestBackend:
    """Boxes of any engine, with roots that are made of this host and kept in the state folder."""
    cache = PackageCache((state or paths.state_folder()) / "packages")
    return GuestBackend(engine, partial(_root, cache, templates), templates)


def oci_backend(
    templates: Mapping[str, tuple[str, ...]], state: Path | None, setups: Mapping[str, SetUp] = MappingProxyType({})
) -> GuestBackend:
    """Containers of runc or crun."""
    cache = PackageCache((state or paths.state_folder()) / "packages")
    return GuestBackend(OciEngine(), partial(_root, cache, templates), templates, setups)


def docker_backend(
    settings: SandboxSettings, templates: Mapping[str, tuple[str, ...]], state: Path | None, keep_ready: int | None
) -> GuestBackend:
    """Containers of an engine with Docker's API."""
    cache = PackageCache((state or paths.state_folder()) / "packages")
    addresses = (settings.docker_host,) if settings.docker_host is not None else paths.docker_hosts()
    ready = settings.docker_ready if keep_ready is None else min(keep_ready, settings.docker_ready)
    said = DockerSettings(addresses, settings.docker_runtime, ready)
    return GuestBackend(DockerEngine(said, _packed), partial(_root, cache, templates), templates)


async def _packed(root: GuestRoot) -> AsyncIterator[bytes]:
    """As a tar archive, with the folders for temporary files within the workspace: one disk has one limit."""
    with tempfile.TemporaryFile() as file:
        await in_thread(lambda: packing.write_tar(root.folder, file, build.MODES, lambda done: None, _LINKS))
        file.seek(0)
        while piece := await in_thread(lambda: file.read(_PIECE)):
            yield piece


def microvm_backend(templates: Mapping[str, tuple[str, ...]], state: Path | None, kernel: str | None) -> GuestBackend:
    """Virtual machines of QEMU: with KVM where one boots with it, else emulated."""
    folder = state or paths.state_folder()
    named = None if kernel is None else Path(kernel)
    find = partial(kernels.find, named, _kernel_folder(folder))
    engine = MicrovmEngine("microvm", (Qemu(KVM), Qemu(TCG)), folder / "microvm", find, agent_code)
    return GuestBackend(engine, partial(_root, PackageCache(folder / "packages"), templates), templates)


def fetch_kernel(state: Path) -> GuestKernel:
    """The distribution's kernel for such machines, into the state. Raises Unavailable, OSError."""
    return kernels.fetch(_kernel_folder(state))


def _kernel_folder(state: Path) -> Path:
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
