"""A hook that is a command: it runs in a fresh box, with the records on its stdin, one a line."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from ringfence.core import canonical
from ringfence.core.aio import to_the_end
from ringfence.core.box import BoxReport, BoxSpec, Limits, Program
from ringfence.core.model import HookSpec, Json
from ringfence.core.ports import Backend, Route
from ringfence.hooks.delivery import HookFailed

_LAST_WORDS = 500


class BoxedHook:
    """A command that exits with 0 has taken its records."""

    def __init__(
        self,
        spec: HookSpec,
        backend: Callable[[], tuple[Backend, Limits]],
        route: Callable[[], Awaitable[Route]],
        sent: Callable[[Json], Awaitable[None]],
    ) -> None:
        """`backend` and `route` return those of the configuration in force, and raise Unavailable where there are none.
        `sent` records the `network` fact of a box."""
        self._spec = spec
        self._sent = sent
        self._backend = backend
        self._route = route

    async def take(self, records: Sequence[Json]) -> None:
        lines = b"".join(canonical.dumps(record) + b"\n" for record in records)
        backend, limits = self._backend()
        route = await self._route()
        wanted = BoxSpec(
            Program("command", argv=self._spec.command, stdin=lines),
            replace(limits, wall_seconds=self._spec.timeout_seconds),
            env=route.env,
            mounts=self._spec.mounts,
            network=route.serve,
        )
        try:
            report = await to_the_end(backend.run(wanted))
        except ValueError as exc:
            raise HookFailed("no such box can be made", output=str(exc)) from None
        if report.network is not None and any(report.network.values()):
            await self._sent(dict(report.network))
        if report.ended != "exited" or report.exit_status != 0:
            raise HookFailed(
                _how(report), output=(report.stderr.head + report.stderr.tail).decode("utf-8", "replace")[-_LAST_WORDS:]
            )

    async def close(self) -> None:
        return None


def _how(report: BoxReport) -> str:
    if report.ended == "exited":
        return f"it ended with status {report.exit_status}"
    return f"its box ended it: {report.ended}"
