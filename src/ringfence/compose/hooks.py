"""The hooks of a configuration, put together."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from ringfence.config import paths
from ringfence.config.settings import Config
from ringfence.core.box import Limits
from ringfence.core.errors import Unavailable
from ringfence.core.model import DEFAULT_TENANT, HookSpec, Json
from ringfence.core.ports import Access, Backend, Route, Router
from ringfence.core.secret import Secret
from ringfence.secrets.vault import SecretUse

if TYPE_CHECKING:
    from ringfence.compose.secrets import ConfiguredSecrets
    from ringfence.hooks.delivery import Hook
    from ringfence.sandbox.tools.executor import Executor


class HookMaker:
    """Makes hooks over what a gateway has at the time at which each is used."""

    def __init__(
        self,
        settings: Callable[[], Config],
        secrets: Callable[[], ConfiguredSecrets],
        executor: Callable[[], Executor | None],
        sent: Callable[[str, Json], Awaitable[None]],
    ) -> None:
        """`sent` puts on record what the box of a hook, by its name, sent to the network."""
        self._sent = sent
        self._settings = settings
        self._secrets = secrets
        self._executor = executor

    def make(self, spec: HookSpec) -> Hook:
        # Few gateways have hooks, and load nothing of them.
        if spec.url is not None:
            from ringfence.hooks.webhook import WebhookHook  # noqa: PLC0415

            return WebhookHook(spec, lambda: self._secret(spec))
        if spec.command:
            from ringfence.hooks.boxed import BoxedHook  # noqa: PLC0415

            return BoxedHook(spec, self._boxes, lambda: self._route(spec), partial(self._sent, spec.name))
        from ringfence.hooks.python import PythonHook  # noqa: PLC0415

        return PythonHook(spec, paths.process_environment(), str(self._settings().path.parent))

    async def _secret(self, spec: HookSpec) -> Secret:
        assert spec.secret is not None
        use = SecretUse(DEFAULT_TENANT, self._settings().environment)
        return await self._secrets().vault.secret(spec.secret, use)

    def _boxes(self) -> tuple[Backend, Limits]:
        executor = self._executor()
        if executor is None:
            raise Unavailable("no_backend", "no box can be made here")
        return executor.backend, executor.provision.limits

    async def _route(self, spec: HookSpec) -> Route:
        if spec.network == "denied":
            return Route()
        executor = self._executor()
        router: Callable[[], Router] | None = None if executor is None else executor.router
        if router is None:
            raise Unavailable("no_network_control", "boxes have no network here")
        return await router().route(Access(network=spec.network))
