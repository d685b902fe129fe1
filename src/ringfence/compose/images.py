"""`ringfence image build`: which packages are in it, and where it is kept and copied to."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from ringfence.compose.backends import make_backend, templates
from ringfence.compose.packages import PackageService, package_cache
from ringfence.config.settings import SandboxSettings
from ringfence.core.aio import in_thread
from ringfence.core.box import TEMPLATES_NEED
from ringfence.core.errors import Unavailable
from ringfence.core.record import dataclass
from ringfence.packages.images import build, packing
from ringfence.packages.images.build import BuildRequest, BuiltImage
from ringfence.packages.images.host.environment import EnvironmentPackages

Form = Literal["folder", "tar", "oci"]
FORMS: tuple[Form, ...] = ("folder", "tar", "oci")
_PLACES = {"folder": "root", "tar": "root.tar", "oci": "oci"}


@dataclass(frozen=True, slots=True)
class ImageWanted:
    template: str = "python"
    packages: tuple[str, ...] = ()
    """By name out of this environment; with a version, or where it has none of that name, as `run --package`."""
    environment: bool = False
    """All packages of this environment."""


async def request(state: Path, settings: SandboxSettings, wanted: ImageWanted) -> BuildRequest:
    """What is to be in it; packages that this environment has not are installed first. Raises Unavailable, Refused."""
    known = templates(settings)
    if wanted.template not in known:
        raise Unavailable(
            "unknown_template", f"there is no template {wanted.template}; there are {', '.join(sorted(known))}"
        )
    here = await in_thread(EnvironmentPackages)
    of_template = here.of_modules(known[wanted.template])
    if (needed := TEMPLATES_NEED.get(wanted.template)) is not None and not here.has(needed):
        raise Unavailable(
            "template_lacks",
            f"the template {wanted.template} needs {needed}, which is not installed in this environment",
        )
    own = [name for name in wanted.packages if here.has(name)]
    others = tuple(name for name in wanted.packages if not here.has(name))
    found = tuple(dict.fromkeys((*of_template, *own, *(here.all() if wanted.environment else ()))))
    if not others:
        return BuildRequest(found)
    backend = make_backend(settings)
    try:
        installed = await PackageService(state, backend, settings).install(others)
    finally:
        await backend.close()
    names = tuple(f"{each['name']} {each['version']}" for each in installed.packages)
    return BuildRequest(found, (installed.folder,), names)


def make(state: Path, wanted: BuildRequest, total: Callable[[int], None], step: Callable[[int], None]) -> BuiltImage:
    """Raises Unavailable, StoreError."""
    return build.build(package_cache(state), wanted, total, step)


def check_out(out: Path, forms: tuple[Form, ...]) -> None:
    """Raises Unavailable where something is there already: it is not replaced."""
    for form in forms:
        place = out / _PLACES[form]
        if os.path.lexists(place):
            raise Unavailable("no_image", f"{place} is there already; remove it, or name another folder with --out")


def write(image: BuiltImage, out: Path, form: Form, step: Callable[[int], None]) -> tuple[Path, str | None]:
    """One form of an image, whole or not at all; `step` counts its bytes. Returns where it is, and the digest of an OCI
    manifest. Raises OSError."""
    out.mkdir(parents=True, exist_ok=True)
    place = out / _PLACES[form]
    part = out / f".{_PLACES[form]}-{secrets.token_hex(4)}"
    digest = None
    try:
        if form == "folder":
            shutil.copytree(image.tree.folder, part, symlinks=True, copy_function=_counted(step))
            for path, mode in build.MODES.items():
                (part / path).chmod(mode)
        elif form == "tar":
            with part.open("wb") as file:
                packing.write_tar(image.tree.folder, file, build.MODES, step)
        else:
            digest = packing.write_oci(image.tree.folder, part, image.config, build.MODES, step)
        os.rename(part, place)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        part.unlink(missing_ok=True)
        raise
    return place, digest


def size(image: BuiltImage) -> int:
    return packing.size(image.tree.folder)


def _counted(step: Callable[[int], None]) -> Callable[[str, str], object]:
    def copy(source: str, to: str) -> object:
        copied = shutil.copy(source, to)
        step(os.path.getsize(to))
        return copied

    return copy
