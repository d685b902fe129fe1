"""What servers find when they are started in boxes. A part of the composition root, without the gateway around it:
whoever wants one server in a box loads no more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ringfence.box import Limits
from ringfence.config import paths
from ringfence.config.folders import touches_credentials
from ringfence.errors import Unavailable
from ringfence.model import ServerSpec
from ringfence.ports import Outward
from ringfence.sandbox.executor import Executor
from ringfence.sandbox.servers import Boxes, Surroundings
from ringfence.sessions import Opening


def boxes_of(executor: Executor, places: tuple[str, ...]) -> Boxes:
    """Boxes for a server that no configuration names. Raises Unavailable."""
    if not isinstance(executor.backend, Opening):
        raise Unavailable("no_backend", f"boxes of backend {executor.backend.name} do not stay")
    given = surroundings(executor.provision.limits, {}, executor.outward)
    return Boxes(executor.backend, replace(given, places=places))


def surroundings(
    limits: Limits, servers: Mapping[str, ServerSpec], outward: Callable[[], Outward] | None
) -> Surroundings:
    return Surroundings(limits, paths.process_environment(), touches_credentials, outward, servers)
