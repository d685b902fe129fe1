"""Paths of the host that a person names on the command line."""

from __future__ import annotations

from pathlib import Path

from ringfence.cli import running
from ringfence.config import named_paths


def real(option: str, given: Path) -> Path:
    """Where a path leads; it ends this command where that is by a link that another may have made."""
    try:
        return named_paths.real(given)
    except named_paths.UntrustedLink as exc:
        running.fail(f"{option} {given}: {exc}", 2)
