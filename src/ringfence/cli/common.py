"""What several verbs share: the configuration, the state folder and printing. It re-exports `running`."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

import typer

from ringfence import config, identity
from ringfence.audit.signing import signing_key
from ringfence.cli.running import BROKEN_PIPE as BROKEN_PIPE
from ringfence.cli.running import EXIT_CODES as EXIT_CODES
from ringfence.cli.running import NO_BOX as NO_BOX
from ringfence.cli.running import OUTPUT_LOST as OUTPUT_LOST
from ringfence.cli.running import TerminalChannel as TerminalChannel
from ringfence.cli.running import ended_by_signals as ended_by_signals
from ringfence.cli.running import fail as fail
from ringfence.cli.running import named_config as named_config
from ringfence.cli.running import own_config as own_config
from ringfence.cli.running import run as run
from ringfence.cli.running import say as say
from ringfence.cli.terminal import json_text
from ringfence.config import Config
from ringfence.core.errors import ConfigError, RingfenceError
from ringfence.store import Reader, Store

ConfigOption = typer.Option(
    None, "--config", metavar="FILE", help="The ringfence.yaml to use. Default: ./ringfence.yaml, else the user's own."
)
AgentOption = typer.Option(
    None, "--agent", metavar="NAME", help="The agent, of those under agents:, that calls are made as."
)
DemoOption = typer.Option(False, "--demo", help="Use the built-in example of `ringfence serve --demo`.")


# ── Configuration ─────────────────────────────────────────────────────────────────────────────────


def find_config(path: Path | None) -> Path | None:
    """The configuration that the user named, or the one that is found; one that another user may have put there has to
    be named."""
    if path is not None:
        return named_config(path)
    try:
        found = next((p for p in config.default_paths() if p.is_file()), None)
    except ConfigError as exc:
        fail(str(exc), 2)
    if found is not None:
        require_trusted(found, found)
    return found


def require_trusted(found: Path, *files: Path, option: str = "--config") -> None:
    """Exit unless only this user can have written these files of a configuration that was found, and not named."""
    for file in files:
        if (why := config.untrusted_because(file)) is not None:
            text = f"{file} {why}, and what it says would run as you. Look at it"
            fail(f"{text}, and name {'it' if file == found else found} with {option} {found.name} if it is meant.", 2)


def load(path: Path | None, example: str = "or try without: ringfence serve --demo") -> Config:
    """Read the configuration that the user named, or the one that is found. Prints every problem and exits."""
    found = find_config(path)
    if found is None:
        text = "There is no ringfence.yaml here. Write one with `ringfence init`, name one with --config FILE,"
        fail(f"{text} {example}", 2)
    try:
        settings = config.load(found)
    except ConfigError as exc:
        fail(str(exc), 1)
    if path is None:
        require_trusted(found, *settings.policy.files)
    return settings


def state_of(path: Path | None, demo: bool) -> Path:
    """The state folder that a verb reads; without any configuration, the user's own."""
    if demo:
        return demo_state()
    if find_config(path) is None:
        return config.state_folder()
    return load(path).gateway.state


def demo_state() -> Path:
    return config.state_folder() / "demo"


def demo_config() -> Config:
    """The configuration of the built-in example."""
    folder = resources.files("ringfence.cli.demo")
    text = folder.joinpath("ringfence.yaml").read_text(encoding="utf-8")
    with resources.as_file(folder.joinpath("server.py")) as server:
        text = text.replace("@PYTHON@", sys.executable).replace("@SERVER@", str(server))
        settings = config.loads(text, file="ringfence.yaml", base=Path(str(server)).parent)
    return replace(settings, gateway=replace(settings.gateway, state=demo_state()))


def local_agent(settings: Config, named: str | None) -> str | None:
    """The declared agent that the user's calls are made as: the one named, else the one with this account. None where
    the configuration has no `agents:`: the user's programs may then call whatever policy allows. Exits where no agent
    fits."""
    known = ", ".join(settings.agents) or "it declares none"
    if named is not None and named not in settings.agents:
        fail(f"there is no agent {named} in {settings.path} ({known})", 2)
    if not settings.agents or named is not None:
        return named
    user = identity.os_user()
    found = identity.agent_of(settings.agents, user)
    if found is None:
        text = f"{settings.path} declares agents ({known}), and none of them is account {user}: name one with --agent"
        fail(f"{text}, or write os_user: {user} under it", 2)
    return found.name


# ── State ─────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def reading(folder: Path) -> Iterator[Reader]:
    """A state folder, opened read-only."""
    try:
        reader = Reader.open(folder, config.key_folder())
    except RingfenceError as exc:
        fail(str(exc), 1)
    try:
        yield reader
    finally:
        reader.close()


@contextmanager
def writing(folder: Path) -> Iterator[Store]:
    """A state folder, opened for writing; the records written are a chain of their own."""
    try:
        store = Store.open(folder, signing_key(config.key_folder()))
    except RingfenceError as exc:
        fail(str(exc), 1)
    try:
        yield store
    finally:
        store.close()


def read_time(text: str | None, option: str) -> float | None:
    """The time that an option names, in ISO 8601; UTC unless it names another zone. Exits for anything else."""
    if text is None:
        return None
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        fail(f"{option}: {text!r} is not a time in ISO 8601, as in 2026-03-01 or 2026-03-01T08:30:00Z", 2)
    return (time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp()


def dump(value: Any) -> None:
    print(json_text(value))


def own_command() -> list[str]:
    """The command that starts Ringfence, by a path that works from any folder."""
    beside = Path(sys.executable).with_name("ringfence")
    if beside.is_file():
        return [str(beside)]
    found = shutil.which("ringfence")
    return [found] if found else [sys.executable, "-m", "ringfence.cli.main"]


def typed_command() -> str:
    """What to type for `ringfence`: after `make run` it is in a virtual environment that is not on the PATH."""
    if shutil.which("ringfence"):
        return "ringfence"
    if sys.argv[0].endswith(".py"):
        return f"{shlex.quote(sys.executable)} -m ringfence.cli.main"
    return shlex.quote(sys.argv[0])
