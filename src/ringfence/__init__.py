"""Ringfence: the layer between an AI agent and everything it can do."""

from __future__ import annotations

import importlib

# Not from typing, which is larger than all that some users of a single module of ours need.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.core.box import Limits
    from ringfence.core.errors import (
        Denied,
        NotFound,
        OutcomeUnknown,
        QuotaExceeded,
        Refused,
        RingfenceError,
        SandboxNotFound,
        SandboxStopped,
        SetUpFailed,
        TimedOut,
        Unavailable,
    )
    from ringfence.core.sessions import VolumeMount
    from ringfence.sdk.batch import map_code, map_code_async
    from ringfence.sdk.blocking import Sandbox
    from ringfence.sdk.execution import CommandResult, Execution, Result
    from ringfence.sdk.gateway import Gateway
    from ringfence.sdk.once import run_code, run_code_async
    from ringfence.sdk.sandbox import AsyncSandbox

__all__ = [
    "AsyncSandbox",
    "CommandResult",
    "Denied",
    "Execution",
    "Gateway",
    "Limits",
    "NotFound",
    "OutcomeUnknown",
    "QuotaExceeded",
    "Refused",
    "Result",
    "RingfenceError",
    "Sandbox",
    "SandboxNotFound",
    "SandboxStopped",
    "SetUpFailed",
    "TimedOut",
    "Unavailable",
    "VolumeMount",
    "__version__",
    "map_code",
    "map_code_async",
    "run_code",
    "run_code_async",
]
__version__ = "0.1.0"

# Public name -> the module that has it. A module is loaded when its name is first used: a program that needs one of
# them, an auditor's `ringfence.audit.chain` say, does not pay for the whole gateway.
_HOMES = {
    "AsyncSandbox": "ringfence.sdk.sandbox",
    "CommandResult": "ringfence.sdk.execution",
    "Denied": "ringfence.core.errors",
    "Execution": "ringfence.sdk.execution",
    "Gateway": "ringfence.sdk.gateway",
    "Limits": "ringfence.core.box",
    "NotFound": "ringfence.core.errors",
    "OutcomeUnknown": "ringfence.core.errors",
    "QuotaExceeded": "ringfence.core.errors",
    "Refused": "ringfence.core.errors",
    "Result": "ringfence.sdk.execution",
    "RingfenceError": "ringfence.core.errors",
    "Sandbox": "ringfence.sdk.blocking",
    "SandboxNotFound": "ringfence.core.errors",
    "SandboxStopped": "ringfence.core.errors",
    "SetUpFailed": "ringfence.core.errors",
    "TimedOut": "ringfence.core.errors",
    "Unavailable": "ringfence.core.errors",
    "VolumeMount": "ringfence.core.sessions",
    "map_code": "ringfence.sdk.batch",
    "map_code_async": "ringfence.sdk.batch",
    "run_code": "ringfence.sdk.once",
    "run_code_async": "ringfence.sdk.once",
}


if not TYPE_CHECKING:  # to a type checker, a name that is not listed above does not exist

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'ringfence' has no attribute {name!r}")
        found = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
