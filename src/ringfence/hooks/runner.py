"""All hooks of a gateway, each in a task of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

import anyio
import anyio.abc
import anyio.to_thread

from ringfence.core.errors import StoreError
from ringfence.core.model import HookSpec
from ringfence.core.record import dataclass
from ringfence.hooks.delivery import Hook, HookDelivery
from ringfence.hooks.questions import Post, Put, QuestionDelivery
from ringfence.store import Store


@dataclass(slots=True)
class _Running:
    spec: HookSpec
    delivery: HookDelivery | QuestionDelivery
    scope: anyio.CancelScope
    ended: anyio.Event


class HookRunner:
    """Runs the hooks of the configuration in force."""

    def __init__(self, store: Store, make: Callable[[HookSpec], Hook], put: Put) -> None:
        """`put` makes the message of a question that waits for people."""
        self._store = store
        self._make = make
        self._put = put
        self._running: dict[str, _Running] = {}
        self._group: anyio.abc.TaskGroup | None = None

    async def run(
        self,
        specs: Mapping[str, HookSpec],
        *,
        task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        """Run until cancelled. From `task_status.started()` on, no record of a call that ends is missed."""
        async with anyio.create_task_group() as group:
            self._group = group
            try:
                await self.use(specs)
                task_status.started()
                await anyio.sleep_forever()
            finally:
                self._group = None

    async def use(self, specs: Mapping[str, HookSpec]) -> None:
        """Replace the hooks that run by these. A hook whose specification is unchanged keeps running."""
        if self._group is None:
            return
        for name, running in list(self._running.items()):
            if specs.get(name) != running.spec:
                running.scope.cancel()
                await running.ended.wait()
        for name, spec in specs.items():
            if name not in self._running:
                delivery = self._delivery(spec)
                with suppress(StoreError):  # `run` tries again, and reports it
                    await anyio.to_thread.run_sync(delivery.begin)
                running = self._running[name] = _Running(spec, delivery, anyio.CancelScope(), anyio.Event())
                self._group.start_soon(self._deliver, running)

    def _delivery(self, spec: HookSpec) -> HookDelivery | QuestionDelivery:
        hook = self._make(spec)
        if spec.tells == "questions" and isinstance(hook, Post):
            return QuestionDelivery(spec, hook, self._store, self._put)
        return HookDelivery(spec.name, hook, self._store)

    async def _deliver(self, running: _Running) -> None:
        try:
            with running.scope:
                await running.delivery.run()
        finally:
            del self._running[running.spec.name]
            running.ended.set()

    # ── What operators see ──

    def taken(self) -> dict[tuple[str, ...], float]:
        return {(name,): float(each.delivery.counts.taken) for name, each in self._running.items()}

    def failures(self) -> dict[tuple[str, ...], float]:
        return {(name,): float(each.delivery.counts.failures) for name, each in self._running.items()}

    def behind(self) -> dict[tuple[str, ...], float]:
        return {(name,): float(each.delivery.behind()) for name, each in self._running.items()}
