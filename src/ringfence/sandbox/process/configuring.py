"""What a zygote is told when it starts: what its boxes are to have, and which system calls."""

from __future__ import annotations

import os
import sys
from typing import Any

from ringfence.sandbox.process import seccomp
from ringfence.sandbox.process.baseline import Baseline
from ringfence.system import interpreter

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
INSTALLED = f"/workspace/.local/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
INSTALLED_PROGRAMS = "/workspace/.local/bin"
"""Where pip puts what a user installs who cannot write beside the interpreter."""


def configuration(baseline: Baseline, *, own_ids: bool) -> dict[str, Any]:
    image = baseline.image
    trees = [] if image is not None else sorted({os.path.realpath(sys.base_prefix), *baseline.trees})
    path = _PATH if image is not None else f"{interpreter().parent}:{_PATH}"
    if baseline.installs:
        path += f":{INSTALLED_PROGRAMS}"
    return {
        "trees": trees,
        "preload": list(baseline.preload),
        "without": list(baseline.without),
        "packages": [*baseline.packages, *([INSTALLED] if baseline.installs else [])],
        "stays": baseline.stays and image is None,
        "setup": baseline.setup,
        "own_ids": own_ids,
        "mounts": [each.words for each in baseline.mounts],
        "image": [] if image is None else [image.words],
        "env": {
            **{"PATH": path, "HOME": "/workspace", "TMPDIR": "/workspace/tmp"},
            **{"LANG": "C.UTF-8", "USER": "box", "LOGNAME": "box"},
        },
    }


def call_filter(baseline: Baseline) -> bytes:
    # What is in memory alone could be executed, whatever is mounted how.
    memfd = "memfd" not in baseline.without and (baseline.programs is None or "noexec" in baseline.without)
    which: seccomp.Which = {"memfd": memfd, "marks": not baseline.writes, "listens": baseline.listens}
    which["terminals"], which["counted"] = baseline.stays, "memfd" not in baseline.without
    return seccomp.compile_filter(os.uname().machine, **which)
