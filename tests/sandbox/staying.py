"""The backends whose boxes stay, for tests that run on each of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfence.compose.backends import ROWS, make_staying_backend
from ringfence.config.settings import SandboxSettings
from ringfence.core.errors import Unavailable
from ringfence.core.sessions import StaySpec
from ringfence.doctor.placement import StayingBackend

_QUICK = ("process", "oci")
NAMES = [
    pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow, id=name)
    for name, row in ROWS.items()
    if row.stays
]
"""The others take long to start, or need a daemon."""
PROCESS_ALONE = pytest.mark.parametrize("name", ["process"], scope="module")
"""For a test of what boxes of that backend alone have, such as a zygote."""


async def staying_backend(name: str, state: Path) -> StayingBackend:
    """Skips the test with the backend's own reason where it has no boxes that stay here."""
    try:
        made = make_staying_backend(SandboxSettings(backend=name), state)
        await (await made.open(StaySpec())).end()
    except Unavailable as why:
        pytest.skip(str(why))
    return made
