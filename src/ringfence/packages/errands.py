"""Install boxes: what is done with packages before a box of anybody's sees them. None has mounts or secrets.

Those that reach the operator's registries run no code of a package; those that do, or that lay packages out, reach
nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringfence import canonical
from ringfence.box import MIB, BoxReport, BoxSpec, Input, Limits, Program, Serve
from ringfence.errors import Unavailable
from ringfence.packages.registries import Registry
from ringfence.ports import Backend

_LIMITS = Limits(
    wall_seconds=600.0,
    cpu_cores=4.0,
    memory_bytes=4096 * MIB,
    disk_bytes=3072 * MIB,
    inodes=400_000,
    processes=256,
    capture_bytes=20_000,
)
_MOST_FILES = 150_000
_LAST_LINES = 6
_HOME = {"HOME": "/workspace/tmp"}
_PROXIED = {
    **{"no_proxy": "", "NO_PROXY": "", "npm_config_noproxy": ""},
    **{"PIP_RETRIES": "2", "npm_config_fetch_retry_mintimeout": "200", "npm_config_fetch_retry_maxtimeout": "2000"},
}
"""A registry on this host's loopback is not on the box's own; and what is refused is refused again."""
_TRUST = ("PIP_CERT", "npm_config_cafile", "NODE_EXTRA_CA_CERTS")

Reach = Callable[[Registry], Awaitable[Serve | None]]
"""A way out to the hosts of a registry and no others; None where it has none."""


@dataclass(frozen=True, slots=True)
class Errand:
    """What one box is to do."""

    script: str
    """A module beside this one, by its whole name: runs in it, and imports nothing of ours."""
    verb: str
    order: Mapping[str, Any]
    into: Path
    """Where what it leaves goes."""
    registry: Registry | None = None
    """Whom it may ask; None: nobody."""
    inputs: tuple[Input, ...] = ()
    packages: tuple[Path, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    network: Serve | None = None
    """Another way out than to a registry."""


class InstallBoxes:
    def __init__(self, backend: Backend, reach: Reach, interpreter: Path) -> None:
        self._backend = backend
        self._reach = reach
        self.interpreter = interpreter

    async def run(self, what: str, errand: Errand, trees: tuple[Path, ...] = ()) -> BoxReport:
        """`what` is it about, for whoever is told that it failed. Raises Unavailable."""
        given = (
            Input("install.py", Path(__file__).with_name(f"{errand.script.rpartition('.')[2]}.py")),
            Input("order.json", canonical.dumps(dict(errand.order))),
        )
        asking = await self._asking(errand.registry) if errand.registry is not None else BoxSpec(Program("command"))
        spec = BoxSpec(
            program=Program("command", argv=(str(self.interpreter), "-I", "/workspace/input/install.py", errand.verb)),
            limits=_LIMITS,
            env={**_HOME, **asking.env, **errand.env},
            inputs=(*given, *asking.inputs, *errand.inputs),
            output=errand.into,
            output_files=_MOST_FILES,
            trees=(*asking.trees, *trees),
            packages=errand.packages,
            network=errand.network or asking.network,
        )
        report = await self._backend.run(spec)
        if report.ended != "exited" or report.exit_status:
            raise Unavailable("install_failed", _told(what, errand.verb, report))
        lost = {path: why for path, why in report.skipped.items() if "more than" in why or "bytes" in why}
        if lost:
            path, why = next(iter(lost.items()))
            raise Unavailable("install_failed", f"{what} cannot be kept: {path}: {why}")
        return report

    async def _asking(self, registry: Registry) -> BoxSpec:
        """As much of a box as a registry asks for."""
        env = {**registry.env, **_PROXIED}
        inputs: tuple[Input, ...] = ()
        # Where a credential is put in on the way, it is the way that trusts the registry, and the box the way.
        if registry.certificates and not registry.credentials:
            inputs = (Input("trusted.pem", registry.certificates),)
            env |= dict.fromkeys(_TRUST, "/workspace/input/trusted.pem")
        network = await self._reach(registry)
        return BoxSpec(Program("command"), env=env, inputs=inputs, trees=registry.trees, network=network)


_DOINGS = {"fetch": "fetched", "list": "looked up", "get": "fetched", "build": "built", "unpack": "laid out"}


def _told(what: str, verb: str, report: BoxReport) -> str:
    said = [line for line in report.stderr.text.splitlines() if line.strip()][-_LAST_LINES:]
    why = f"the box ended: {report.ended}" if report.ended != "exited" else "; ".join(said)
    denied = [f"{each['host']}:{each['port']}" for each in (report.network or {}).get("denied", [])]
    refused = f" (it was not let to {', '.join(denied)}, which is none of your registries)" if denied else ""
    return f"{what} could not be {_DOINGS[verb]}{refused}: {why or f'exit status {report.exit_status}'}"
