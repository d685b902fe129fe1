"""The sources on this machine: the environment, files, commands and the keyring.

No error and no log of these holds a value, nor what a command printed.
"""

from __future__ import annotations

import importlib
import os
import stat
import subprocess
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import field
from functools import partial
from typing import Any

from ringfence.core import system
from ringfence.core.aio import in_thread
from ringfence.core.errors import Unavailable
from ringfence.core.model import SecretSpec
from ringfence.core.record import dataclass
from ringfence.core.secret import MAX_CHARACTERS

COMMAND_SECONDS = 30.0
_MAX_BYTES = 4 * MAX_CHARACTERS


@dataclass(frozen=True, slots=True)
class SourceValue:
    """A value as it was read."""

    value: str = field(repr=False)
    watched: bool = False
    """Whether the source is so cheap to ask that it is asked every time."""
    mark: object = field(default=None, repr=False)
    """By which a source tells that nothing has changed."""
    lifetime_seconds: float | None = None
    """How long the source lends it."""


SecretSource = Callable[[SecretSpec, SourceValue | None], Awaitable[SourceValue]]
"""Reads a value; given what was found before, it may return that when its source has not changed."""


def local_sources(environment: Callable[[str], str | None]) -> Mapping[str, SecretSource]:
    """Every source on this machine, by its name in the configuration. `environment` gets a variable."""

    async def from_environment(spec: SecretSpec, before: SourceValue | None) -> SourceValue:
        variable = str(spec.options["name"])
        value = environment(variable)
        if not value:
            raise missing(spec, f"the variable {variable} is not set")
        return SourceValue(value, watched=True)

    command_environment = {name: value for name in ("PATH", "HOME", "USER", "LANG") if (value := environment(name))}

    async def from_command(spec: SecretSpec, before: SourceValue | None) -> SourceValue:
        return before or await _command(spec, command_environment)

    return {"env": from_environment, "file": _file, "command": from_command, "keyring": _keyring}


def missing(spec: SecretSpec, why: str) -> Unavailable:
    """The error of every source."""
    return Unavailable("no_secret", f"secret {spec.name!r}: {why}")


async def _file(spec: SecretSpec, before: SourceValue | None) -> SourceValue:
    return await in_thread(partial(_read_file, spec, before))


def _read_file(spec: SecretSpec, before: SourceValue | None) -> SourceValue:
    path = str(spec.options["path"])
    try:
        # A pipe under that name must not hold us up.
        descriptor = os.open(path, os.O_RDONLY | system.UNHURRIED)
    except OSError as error:
        raise missing(spec, f"{path} cannot be read: {error.strerror}") from None
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise missing(spec, f"{path} is no file")
        if system.open_to_others(about, stat.S_IWOTH):
            raise missing(spec, f"every user of this machine can write {path}: chmod o-w")
        mark = (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns)
        if before is not None and before.mark == mark:
            return before
        return SourceValue(_text(spec, os.read(descriptor, _MAX_BYTES + 1)), watched=True, mark=mark)
    finally:
        os.close(descriptor)


async def _command(spec: SecretSpec, environment: Mapping[str, str]) -> SourceValue:
    command = list(spec.options["command"])
    import anyio  # noqa: PLC0415 - most have no such secret, and need not load it

    try:
        with anyio.fail_after(COMMAND_SECONDS):
            done = await anyio.run_process(
                command, check=False, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
            )
    except OSError as error:
        raise missing(spec, f"{command[0]} cannot be run: {error.strerror}") from None
    except TimeoutError:
        raise missing(spec, f"{command[0]} took longer than {COMMAND_SECONDS:.0f} seconds") from None
    if done.returncode != 0:
        raise missing(spec, f"{command[0]} ended with {done.returncode}")
    return SourceValue(_text(spec, done.stdout))


async def _keyring(spec: SecretSpec, before: SourceValue | None) -> SourceValue:
    if before is not None:
        return before
    try:
        keyring: Any = importlib.import_module("keyring")
    except ImportError:
        raise missing(spec, "secrets of a keyring need its package beside Ringfence: pip install keyring") from None
    service = str(spec.options["service"])
    name = str(spec.options["name"])
    try:
        value = await in_thread(partial(keyring.get_password, service, name))
    except Exception as error:  # backends raise what they like, and its text may be anything
        raise missing(spec, f"the keyring failed: {type(error).__name__}") from None
    if value is None:
        raise missing(spec, f"the keyring has no {name} of {service}")
    return SourceValue(value)


def _text(spec: SecretSpec, data: bytes) -> str:
    """What was read, without the newline that editors and commands put at the end."""
    if len(data) > _MAX_BYTES:
        raise missing(spec, "it is too long")
    try:
        return data.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise missing(spec, "it is not UTF-8") from None
