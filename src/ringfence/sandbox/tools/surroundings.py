"""What a box has around its program, as far as two boxes at different times can be compared."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from functools import cache
from importlib import metadata

from ringfence import __version__
from ringfence.core import canonical
from ringfence.core.model import Json


def surroundings(template: str, packages: Sequence[str], installed: Sequence[str], backend: str) -> Json:
    """`packages` are ready in boxes of the template, `installed` are added for this one."""
    about = {
        "template": template,
        "packages": {name: _version(name) for name in packages},
        "installed": list(installed),
        "python": platform.python_version(),
    }
    host = {"ringfence": __version__, "backend": backend, "kernel": platform.release(), "machine": platform.machine()}
    return {**about, "template_digest": canonical.digest(about), **host}


@cache
def _version(module: str) -> str | None:
    """Of a package of this interpreter, which is that of boxes."""
    named = metadata.packages_distributions().get(module, [module])
    try:
        return metadata.version(named[0])
    except metadata.PackageNotFoundError:
        return None
