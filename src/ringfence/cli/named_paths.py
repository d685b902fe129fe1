"""Paths of the host that a person names on the command line."""

from __future__ import annotations

from pathlib import Path

from ringfence.cli import running
from ringfence.config import named_paths


def resolve(option: str, path: Path) -> Path:
    """The path without links. Exits where one of its links may have been made by another."""
    try:
        return named_paths.resolve(path)
    except named_paths.UntrustedLink as exc:
        running.fail(f"{option} {path}: {exc}", 2)
