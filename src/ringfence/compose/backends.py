"""Which backend a configuration names, and what is ready in its boxes. The lowest part of the composition root: a
caller that wants a box alone loads no more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ringfence.config.settings import SandboxSettings
from ringfence.core import deferred, system
from ringfence.core.box import BACKENDS, LEVELS, NOT_BUILT, TEMPLATES
from ringfence.core.errors import Unavailable
from ringfence.core.record import plain

if TYPE_CHECKING:
    from ringfence.compose.choosing import ChosenBackend
    from ringfence.compose.probes import Makers
    from ringfence.core.ports import Backend
    from ringfence.doctor.placement import StayingBackend
    from ringfence.sandbox.guests.backend import GuestBackend
    from ringfence.sandbox.process.backend import ProcessBackend
    from ringfence.sandbox.wasm.backend import WasmBackend


GROUP = "ringfence.backends"
"""The entry points by which installed packages bring backends."""

# ── How each is made ──────────────────────────────────────────────────────────────────────────────


def _process(settings: SandboxSettings, state: Path | None, keep_ready: int | None) -> ProcessBackend:
    # Loaded only now: what boxes are made of is not there on other systems, not even to be imported.
    with deferred.loading():
        from ringfence.sandbox.process.backend import ProcessBackend  # noqa: PLC0415
        from ringfence.sandbox.process.host.capabilities import HostCapabilities  # noqa: PLC0415

    HostCapabilities.detect().require(settings.accept_missing)
    return ProcessBackend(
        accept_missing=settings.accept_missing,
        templates=templates(settings),
        setups=settings.setups,
        depth=keep_ready,
        state=state,
    )


def _oci(settings: SandboxSettings, state: Path | None, keep_ready: int | None) -> GuestBackend:
    with deferred.loading():
        from ringfence.compose.guests import oci_backend  # noqa: PLC0415 - most boxes are no guests

    return oci_backend(templates(settings), state, settings.setups)


def _gvisor(settings: SandboxSettings, state: Path | None, keep_ready: int | None) -> GuestBackend:
    with deferred.loading():
        from ringfence.compose.guests import gvisor_backend  # noqa: PLC0415

    return gvisor_backend(templates(settings), state, settings.setups)


def _docker(settings: SandboxSettings, state: Path | None, keep_ready: int | None) -> GuestBackend:
    with deferred.loading():
        from ringfence.compose.guests import docker_backend  # noqa: PLC0415

    return docker_backend(settings, templates(settings), state, keep_ready)


def _microvm(settings: SandboxSettings, state: Path | None, keep_ready: int | None) -> GuestBackend:
    with deferred.loading():
        from ringfence.compose.guests import microvm_backend  # noqa: PLC0415 - as above

    return microvm_backend(settings, templates(settings), state)


def _wasm(settings: SandboxSettings, state: Path | None, keep_ready: int | None) -> WasmBackend:
    with deferred.loading():
        from ringfence.config import paths  # noqa: PLC0415
        from ringfence.sandbox.process.host.capabilities import HostCapabilities  # noqa: PLC0415
        from ringfence.sandbox.wasm.backend import WasmBackend  # noqa: PLC0415

    HostCapabilities.detect().require(settings.accept_missing)
    folder = state or paths.state_folder()
    return WasmBackend(
        folder,
        accept_missing=settings.accept_missing,
        templates=templates(settings),
        setups=settings.setups,
        depth=keep_ready,
    )


def _firecracker(settings: SandboxSettings, state: Path | None, keep_ready: int | None) -> GuestBackend:
    with deferred.loading():
        from ringfence.compose.guests import firecracker_backend  # noqa: PLC0415 - as above

    return firecracker_backend(settings, templates(settings), state)


@plain
class BackendRow:
    """How a backend is made, and what is known of it before it is. Its level is in `core.box.BACKENDS`."""

    make: Callable[[SandboxSettings, Path | None, int | None], Backend]
    """Starts nothing yet. Raises Unavailable."""
    stays: bool = True
    """Whether its boxes can stay."""
    elsewhere: bool = False
    """Whether it also serves systems other than Linux."""
    level: str = "process"
    """Of LEVELS, by its author's word, for one that is not ours; ours have theirs in `core.box.BACKENDS`."""
    general: bool = True
    """Whether its boxes run what other boxes run. One that runs Python alone, say, is not chosen by `auto`."""
    emulates: bool = False
    """Whether it emulates machines where no virtualization serves."""
    probe_seconds: float = 120.0
    """How long a first box may take, with all that is made ready for it, until it is given up."""


ROWS: Mapping[str, BackendRow] = {
    "process": BackendRow(_process),
    "oci": BackendRow(_oci),
    "gvisor": BackendRow(_gvisor, stays=False),
    "docker": BackendRow(_docker),
    "microvm": BackendRow(_microvm, emulates=True, probe_seconds=900.0),
    "firecracker": BackendRow(_firecracker, probe_seconds=60.0),
    "wasm": BackendRow(_wasm, stays=False, general=False),
}
"""One row for each backend that is built: the others are in `core.box.NOT_BUILT`."""


def make_backend(settings: SandboxSettings, state: Path | None = None, *, keep_ready: int | None = None) -> Backend:
    """The backend that the configuration names, never another. Nothing is started yet.

    `state`: where it remembers what it found out about this host. `keep_ready`: boxes of a kind; as many as suit this
    machine where nothing is said.

    Raises Unavailable, naming what is missing.
    """
    if settings.backend == "auto":
        return chosen_backend(settings, state, keep_ready=keep_ready)
    row = row_of(settings.backend)
    if not row.elsewhere and (missing := system.no_boxes()) is not None:
        raise Unavailable("no_backend", missing)
    return row.make(settings, state, keep_ready)


def make_staying_backend(settings: SandboxSettings, state: Path | None = None) -> StayingBackend:
    """The same, for boxes that stay. Raises Unavailable where those of this backend do not."""
    if not boxes_stay(settings):
        raise Unavailable("no_backend", makers().no_stay(settings.backend))
    return cast("StayingBackend", make_backend(settings, state))


def chosen_backend(
    settings: SandboxSettings, state: Path | None, own: Backend | None = None, *, keep_ready: int | None = None
) -> ChosenBackend:
    """Boxes by whatever backend a spec names, or is strong enough for it; by `own` where that will do."""
    from ringfence.compose.choosing import ChosenBackend  # noqa: PLC0415 - most boxes are the configuration's

    return (
        own if isinstance(own, ChosenBackend) else ChosenBackend(settings, state, makers(), own, keep_ready=keep_ready)
    )


def makers() -> Makers:
    """All of the above, for what chooses among them."""
    from ringfence.compose.probes import Makers  # noqa: PLC0415 - as above

    return Makers(ROWS, row_of, level_of, make_backend)


def boxes_stay(settings: SandboxSettings) -> bool:
    """Whether boxes of the backend that the configuration names can stay."""
    return settings.backend == "auto" or row_of(settings.backend).stays


def row_of(name: str) -> BackendRow:
    """Raises Unavailable for a name that is none, or of what is not built."""
    if name in ROWS:
        return ROWS[name]
    if name not in BACKENDS and (row := _foreign(name)) is not None:
        return row
    what = "is not built yet" if name in NOT_BUILT else f"does not exist; there are {', '.join((*BACKENDS, 'auto'))}"
    raise Unavailable("no_backend", f"sandbox backend {name} {what}")


def _foreign(name: str) -> BackendRow | None:
    """The row of a backend that an installed package brings."""
    from importlib.metadata import entry_points  # noqa: PLC0415 - few name one

    for each in entry_points(group=GROUP, name=name):
        row = each.load()
        if isinstance(row, BackendRow) and row.level in LEVELS:
            return row
        raise Unavailable("no_backend", f"sandbox backend {name}: {each.value} is no BackendRow with one of our levels")
    return None


def level_of(name: str) -> str:
    """The level of a backend; of `auto`, what all have. Raises Unavailable for a name that is none."""
    if name == "auto":
        return "process"
    return BACKENDS[name] if name in BACKENDS else row_of(name).level


def templates(settings: SandboxSettings) -> Mapping[str, tuple[str, ...]]:
    return {**TEMPLATES, **settings.templates}
