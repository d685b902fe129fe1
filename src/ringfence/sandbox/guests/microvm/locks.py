"""Files that several supervisors use and one of them makes."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(place: Path) -> Iterator[None]:
    """One supervisor at a time, for what is to be at this place. Waits."""
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = os.open(place.with_name(f".{place.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def staging(place: Path) -> Path:
    """Where it is made, under the lock; what a supervisor left there that has died is gone."""
    beside = place.with_name(f".{place.name}.new")
    if beside.is_dir():
        shutil.rmtree(beside)
    beside.unlink(missing_ok=True)
    return beside


def made_once(place: Path, make: Callable[[Path], None]) -> Path:
    """This file, made whole or not at all if it was not there."""
    if not place.exists():
        with locked(place):
            if not place.exists():
                beside = staging(place)
                make(beside)
                beside.rename(place)
    return place
