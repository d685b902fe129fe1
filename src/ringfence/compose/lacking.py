"""What boxes of a configuration lack on this host, before any call is refused for it: the same sentences."""

from __future__ import annotations

from contextlib import aclosing

from ringfence.compose.backends import level_of, make_backend, makers
from ringfence.compose.choosing import Chooser, at_least
from ringfence.compose.probes import Probes
from ringfence.config.settings import Config
from ringfence.core.errors import Unavailable
from ringfence.core.model import Transport


async def of_backend(settings: Config) -> str | None:
    """What the backend lacks that the configuration names. Others than `process`, which says what it lacks without, are
    tried, if that was not done lately."""
    named = settings.sandbox.backend
    if named == "auto":
        return (await of_levels(settings, {"process"})).get("process")
    if named != "process":
        return (await _probes(settings).of(named)).missing
    try:
        make_backend(settings.sandbox, keep_ready=0)
    except Unavailable as exc:
        return exc.message
    return None


async def of_capabilities(settings: Config) -> dict[str, str]:
    """Why calls will be refused, by the capabilities that ask for more isolation than there is."""
    try:
        own = level_of(settings.sandbox.backend)
    except Unavailable:
        return {}  # what is to be said of a backend that does not exist, `of_backend` says
    asked = {
        name: contract.isolation
        for name, contract in settings.contracts.items()
        if contract.transport is Transport.SANDBOXED_EXEC and not at_least(own, contract.isolation)
    }
    refused = await of_levels(settings, set(asked.values()))
    return {name: refused[level] for name, level in asked.items() if level in refused}


async def of_levels(settings: Config, levels: set[str]) -> dict[str, str]:
    """Why there are no boxes of a level, by level."""
    chooser = Chooser(settings.sandbox, _probes(settings), makers())
    out: dict[str, str] = {}
    for level in sorted(levels):
        try:
            async with aclosing(chooser.choices(level)) as choices:
                await anext(choices)
        except Unavailable as exc:
            out[level] = exc.message
    return out


def _probes(settings: Config) -> Probes:
    return Probes(settings.sandbox, settings.gateway.state, makers())
