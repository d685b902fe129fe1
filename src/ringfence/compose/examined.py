"""What `ringfence doctor` found on this host, kept in a state folder for the console. Facts rest on nothing of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ringfence import __version__
from ringfence.core import system
from ringfence.core.errors import StoreError
from ringfence.core.model import Json

FOLDER = "doctor"
_MAX_BYTES = 4_000_000
_PLACES = ("box", "session", "server")


def keep(state: Path, report: Json, place: str) -> bool:
    """Keep a report, in the place of the one before it. Where there is no state yet, none is begun for it."""
    from ringfence.sandbox.files.blobstore import private_folder, write_whole  # noqa: PLC0415 - for Linux alone

    if not state.is_dir():
        return False
    with suppress(OSError, StoreError):
        private_folder(state / FOLDER)
        whole = {**report, "place": place, "version": __version__}
        write_whole(state / FOLDER / f"{report['backend']}-{place}.json", json.dumps(whole).encode())
        return True
    return False


def kept(states: Iterable[Path], backend: str) -> list[Json]:
    """The reports on this backend; of each place the first that is found."""
    out = []
    for place in _PLACES:
        found = (_read(state / FOLDER / f"{backend}-{place}.json") for state in states)
        out += [report for report in found if report is not None][:1]
    return out


def _read(path: Path) -> Json | None:
    """Raises nothing: one that cannot be read is not there."""
    try:
        descriptor = os.open(path, os.O_RDONLY | system.PRIVATE | system.UNHURRIED)
        with open(descriptor, "rb") as file:
            if system.stranger(os.fstat(descriptor)):
                return None
            found = json.loads(file.read(_MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    whole = isinstance(found, dict) and isinstance(found.get("cases"), list) and isinstance(found.get("host"), dict)
    return found if whole else None
