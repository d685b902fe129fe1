"""What several verbs need: finding the configuration, opening the state, printing, exiting."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import anyio
import typer

from ringfence import config
from ringfence.audit.keys import load_or_create
from ringfence.cli.terminal import json_text, safe
from ringfence.config import Config
from ringfence.errors import ConfigError, RingfenceError, Unavailable
from ringfence.store import Reader, Store

T = TypeVar("T")

ConfigOption = typer.Option(
    None, "--config", help="The ringfence.yaml to use. Left out: ./ringfence.yaml, else the user's own."
)
DemoOption = typer.Option(False, "--demo", help="The built-in example of `ringfence serve --demo`.")


def fail(text: str, code: int = 1) -> NoReturn:
    """Say what is wrong on stderr and exit."""
    print(safe(text, lines=True), file=sys.stderr)
    raise typer.Exit(code)


def find_config(path: Path | None) -> Path | None:
    """The configuration named, or the one found; one that somebody else may have put there has to be named."""
    if path is not None:
        return path
    found = next((p for p in config.default_paths() if p.is_file()), None)
    if found is not None and (whose := config.not_obeyed(found)) is not None:
        fail(
            f"{found} {whose}, and what it says would run as you. Look at it, and name it with --config {found.name} if"
            " it is meant.",
            2,
        )
    return found


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
    """The state folder that a verb looks into; without any configuration, the user's own."""
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
    print(json_text(value))


def loaded(module: str) -> Any:
    """A module that needs the whole gateway; a verb that runs none in this process need not wait for it to load."""
    return import_module(module)


def run(work: Callable[..., Awaitable[T]], *arguments: Any, fast: bool = False) -> T:
    """Run asynchronous work to its end; of several errors at once the first of ours is raised.

    `fast` takes the event loop that is worth its import where many calls are served; Windows has none.
    """
    fast = fast and sys.platform != "win32"
    try:
        return anyio.run(work, *arguments, backend_options={"use_uvloop": True} if fast else None)
    except BaseExceptionGroup as group:
        errors = _flat(group)
        raise next((e for e in errors if isinstance(e, RingfenceError | OSError)), errors[0]) from group


def _flat(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    out: list[BaseException] = []
    for item in group.exceptions:
        out.extend(_flat(item) if isinstance(item, BaseExceptionGroup) else [item])
    return out


__all__ = [
    "ConfigOption",
    "DemoOption",
    "Unavailable",
    "demo_state",
    "dump",
    "fail",
    "find_config",
    "load",
    "loaded",
    "reading",
    "run",
    "state_of",
    "writing",
]


def own_command() -> list[str]:
    """By a path that holds wherever the client looks from."""
    beside = Path(sys.executable).with_name("ringfence")
    if beside.is_file():
        return [str(beside)]
    found = shutil.which("ringfence")
    return [found] if found else [sys.executable, "-m", "ringfence.cli.main"]
