"""Install boxes: they fetch, build and unpack packages before any other box sees them. None has mounts or secrets.

Those that reach the operator's registries run no code of a package. Those that run such code, or unpack packages, reach
nothing. What any of them leaves behind is hostile input.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from ringfence.core import canonical
from ringfence.core.box import MIB, BoxReport, BoxSpec, Input, Limits, Program, Serve
from ringfence.core.errors import Unavailable
from ringfence.core.ports import Backend
from ringfence.core.quoting import quoted
from ringfence.core.record import dataclass
from ringfence.packages.cache import Kind
from ringfence.packages.registries import Registry

_NPM = re.compile(r"(?![.-])(@[a-z0-9~_.-]+/)?[a-z0-9~_.-]+(@[A-Za-z0-9^~<>=*.+_-]+)?", re.IGNORECASE | re.ASCII)
_PYPI = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9._,-]+\])?"
    r"((===|==|~=|!=|<=|>=|<|>)[A-Za-z0-9.*+!_-]+(,(===|==|~=|!=|<=|>=|<|>)[A-Za-z0-9.*+!_-]+)*)?"
)
_HASHES = re.compile(r"( --hash=sha256:[0-9a-f]{64})+$")
_CHUNK = 1024 * 1024
_LIMITS = Limits(
    wall_seconds=600.0,
    cpu_cores=4.0,
    memory_bytes=4096 * MIB,
    disk_bytes=3072 * MIB,
    inodes=400_000,
    processes=256,
    capture_bytes=20_000,
)
_MAX_FILES = 150_000
_LAST_LINES = 6
_HOME = {"HOME": "/workspace/tmp"}
_PROXIED = {
    **{"no_proxy": "", "NO_PROXY": "", "npm_config_noproxy": ""},
    **{"PIP_RETRIES": "2", "npm_config_fetch_retry_mintimeout": "200", "npm_config_fetch_retry_maxtimeout": "2000"},
}
"""A registry on the host's loopback is not on the box's own, so it needs the proxy; a refusal is final."""
_DONE = {"fetch": "fetched", "list": "looked up", "get": "fetched", "build": "built", "unpack": "laid out"}
_TRUST = ("PIP_CERT", "npm_config_cafile", "NODE_EXTRA_CA_CERTS")

Reach = Callable[[Registry], Awaitable[Serve | None]]
"""Makes a route to the hosts of a registry and no others; None if it has no hosts."""


@dataclass(frozen=True, slots=True)
class BoxJob:
    """What one install box does."""

    script: str
    """The full name of a module of `inside`, which is sent into the box and imports nothing of ours."""
    verb: str
    order: Mapping[str, Any]
    into: Path
    """The folder for its output."""
    registry: Registry | None = None
    """The registry that it reaches; None: no network."""
    inputs: tuple[Input, ...] = ()
    packages: tuple[Path, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    network: Serve | None = None
    """Another route than to a registry."""


class InstallBoxes:
    def __init__(self, backend: Backend, reach: Reach, interpreter: Path) -> None:
        self._backend = backend
        self._reach = reach
        self.interpreter = interpreter

    async def run(self, what: str, job: BoxJob, trees: tuple[Path, ...] = ()) -> BoxReport:
        """`what` names the packages in errors. Raises Unavailable."""
        given = (
            Input("install.py", Path(__file__).with_name("inside") / f"{job.script.rpartition('.')[2]}.py", links=True),
            Input("order.json", canonical.dumps(dict(job.order))),
        )
        basis = await self._reaching(job.registry) if job.registry is not None else BoxSpec(Program("command"))
        spec = BoxSpec(
            program=Program("command", argv=(str(self.interpreter), "-I", "/workspace/input/install.py", job.verb)),
            limits=_LIMITS,
            env={**_HOME, **basis.env, **job.env},
            inputs=(*given, *basis.inputs, *job.inputs),
            output=job.into,
            output_files=_MAX_FILES,
            trees=(*basis.trees, *trees),
            packages=job.packages,
            network=job.network or basis.network,
        )
        report = await self._backend.run(spec)
        if report.ended != "exited" or report.exit_status:
            raise Unavailable("install_failed", _failure(what, job.verb, report))
        lost = {path: why for path, why in report.skipped.items() if "more than" in why or "bytes" in why}
        if lost:
            path, why = next(iter(lost.items()))
            raise Unavailable("install_failed", f"{what} cannot be kept: {path}: {why}")
        return report

    async def _reaching(self, registry: Registry) -> BoxSpec:
        """The part of a box's specification that a registry needs."""
        env = {**registry.env, **_PROXIED}
        inputs: tuple[Input, ...] = ()
        # With a credential, TLS ends at our proxy, which adds it: the proxy trusts the registry, and the box the proxy.
        if registry.certificates and not registry.credentials:
            inputs = (Input("trusted.pem", registry.certificates, links=True),)
            env |= dict.fromkeys(_TRUST, "/workspace/input/trusted.pem")
        network = await self._reach(registry)
        return BoxSpec(Program("command"), env=env, inputs=inputs, trees=registry.trees, network=network)


def _failure(what: str, verb: str, report: BoxReport) -> str:
    said = [line for line in report.stderr.text.splitlines() if line.strip()][-_LAST_LINES:]
    why = f"the box ended: {report.ended}" if report.ended != "exited" else "; ".join(said)
    denied = [f"{each['host']}:{each['port']}" for each in (report.network or {}).get("denied", [])]
    refused = (
        f" (it was refused a connection to {', '.join(denied)}, which is not one of your registries)" if denied else ""
    )
    return f"{what} could not be {_DONE[verb]}{refused}: {why or f'exit status {report.exit_status}'}"


# ── What a box may be asked for ───────────────────────────────────────────────────────────────────


def check_names(kind: Kind, packages: Iterable[str]) -> None:
    """Raises ValueError for anything but a package of a registry: addresses, folders, options."""
    for package in packages:
        named = _HASHES.sub("", package) if kind == "pypi" else package
        if len(named) > 250 or not (_NPM if kind == "npm" else _PYPI).fullmatch(named):
            raise ValueError(f"{quoted(package)} is not a package of a registry, with or without a version")


def project_name(package: str) -> str:
    """The project of a Python requirement that was checked."""
    return re.split(r"[^A-Za-z0-9._-]", package, maxsplit=1)[0]


def missing_pin(package: str, required: str) -> str | None:
    """What a Python requirement lacks of `required` (`any`, `pinned` or `hashed`): version, hash or None."""
    if required != "any" and not re.search(r"===?[A-Za-z0-9.+!_-]+$", _HASHES.sub("", package)):
        return "version"
    return "hash" if required == "hashed" and not _HASHES.search(package) else None


# ── What a box left ───────────────────────────────────────────────────────────────────────────────


def read_json(path: Path, most: int) -> dict[str, Any]:
    """A JSON object that an install box left. Raises Unavailable."""
    try:
        if path.is_symlink() or path.stat().st_size > most:
            raise ValueError
        document = json.loads(path.read_bytes())
        return document if isinstance(document, dict) else {}
    except (OSError, ValueError, RecursionError):
        raise Unavailable("install_failed", f"an install box left no {path.name} that can be read") from None


def file_digest(path: Path, kind: str) -> bytes:
    digest = hashlib.new(kind)
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.digest()


def altered(what: str) -> Unavailable:
    return Unavailable("package_altered", f"{what} is not what the registry says that it is; nothing of it was kept")
