"""The position of a hook in the log, on disk, and the lock of the one process that delivers to it."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from ringfence.core import system
from ringfence.core.errors import StoreError

FOLDER = "hooks"
_MAX_BYTES = 4096


class HookPosition:
    """Files of one hook in the state folder."""

    def __init__(self, state: Path, name: str) -> None:
        self._folder = state / FOLDER
        self._name = name
        self._path = self._folder / f"{name}.json"
        self._lock: int | None = None

    def take(self) -> bool:
        """Take the lock; False where another process holds it. Raises StoreError."""
        if self._lock is not None:
            return True
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            os.close(system.open_own_folder(self._folder))
            flags = os.O_RDWR | os.O_CREAT | system.PRIVATE
            descriptor = os.open(self._folder / f"{self._name}.lock", flags, 0o600)
            if system.lock(descriptor):
                self._lock = descriptor
                return True
            os.close(descriptor)
        except OSError as exc:
            raise self._problem(exc) from exc
        return False

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def read(self) -> int | None:
        """The number of the last record that the hook took; None for a new hook. Raises StoreError."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | system.PRIVATE | system.UNHURRIED)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise self._problem(exc) from exc
        with open(descriptor, "rb") as file:
            data = file.read(_MAX_BYTES)
        with contextlib.suppress(ValueError, TypeError, KeyError):
            after = json.loads(data)["after"]
            if isinstance(after, int) and after >= 0:
                return after
        raise StoreError(f"{self._path} does not say how far hook {self._name} has come; remove it to begin from now")

    def write(self, after: int) -> None:
        """Waits for the disk: the position must never be ahead of what the hook took, nor torn. Raises StoreError."""
        beside = self._path.with_suffix(".new")
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | system.PLAIN
            with open(os.open(beside, flags, 0o600), "wb") as file:
                file.write(json.dumps({"after": after}).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            beside.replace(self._path)
        except OSError as exc:
            raise self._problem(exc) from exc

    def _problem(self, exc: OSError) -> StoreError:
        return StoreError(f"how far hook {self._name} has come cannot be kept in {self._folder}: {exc.strerror or exc}")
