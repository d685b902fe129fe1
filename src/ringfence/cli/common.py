"""What several verbs need: finding the configuration, opening the state, printing, exiting."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import typer

from ringfence import config
from ringfence.audit.keys import load_or_create
from ringfence.config import Config
from ringfence.errors import ConfigError, RingfenceError, Unavailable
from ringfence.store import Reader, Store

ConfigOption = typer.Option(
    None, "--config", help="The ringfence.yaml to use. Left out: ./ringfence.yaml, else the user's own."
)


def fail(text: str, code: int = 1) -> NoReturn:
    """Say what is wrong on stderr and exit."""
    print(text, file=sys.stderr)
    raise typer.Exit(code)


def find_config(path: Path | None) -> Path | None:
    if path is not None:
        return path
    return next((p for p in config.default_paths() if p.is_file()), None)


def load(path: Path | None) -> Config:
    """The configuration named, or the one found; every problem is printed."""
    found = find_config(path)
    if found is None:
        fail("There is no ringfence.yaml here. Write one, name one with --config, or try: ringfence serve --demo", 2)
    try:
        return config.load(found)
    except ConfigError as exc:
        fail(str(exc), 1)


def state_of(path: Path | None, demo: bool) -> Path:
    """The state folder that a verb looks into; the state of a broken configuration can be read all the same."""
    if demo:
        return demo_state()
    if find_config(path) is None:
        return config.state_folder()
    return load(path).gateway.state


def demo_state() -> Path:
    return config.state_folder() / "demo"


@contextmanager
def reading(folder: Path) -> Iterator[Reader]:
    """A state folder, for looking only."""
    try:
        reader = Reader.open(folder)
    except RingfenceError as exc:
        fail(str(exc), 1)
    try:
        yield reader
    finally:
        reader.close()


@contextmanager
def writing(folder: Path) -> Iterator[Store]:
    """A state folder, for adding to it; what is added is a chain of its own."""
    try:
        store = Store.open(folder, load_or_create(config.key_folder()))
    except RingfenceError as exc:
        fail(str(exc), 1)
    try:
        yield store
    finally:
        store.close()


def dump(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


__all__ = [
    "ConfigOption",
    "Unavailable",
    "demo_state",
    "dump",
    "fail",
    "find_config",
    "load",
    "reading",
    "state_of",
    "writing",
]
