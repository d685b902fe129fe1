"""Ringfence: the layer between an AI agent and everything it can do."""

from __future__ import annotations

import importlib

# Not from typing, which is larger than all that some users of a single module of ours need.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.box import Limits
    from ringfence.sdk.execution import CommandResult, Execution
    from ringfence.sdk.gateway import Gateway
    from ringfence.sdk.sandbox import AsyncSandbox, Sandbox, run_code

__all__ = [
    "AsyncSandbox",
    "CommandResult",
    "Execution",
    "Gateway",
    "Limits",
    "Sandbox",
    "__version__",
    "run_code",
]
__version__ = "0.1.0"

# Public name -> the module that has it. Nothing is loaded before it is asked for: whoever needs one module of ours,
# an auditor's `ringfence.audit.chain` say, does not pay for the whole gateway.
_HOMES = {
    "AsyncSandbox": "ringfence.sdk.sandbox",
    "CommandResult": "ringfence.sdk.execution",
    "Execution": "ringfence.sdk.execution",
    "Gateway": "ringfence.sdk.gateway",
    "Limits": "ringfence.box",
    "Sandbox": "ringfence.sdk.sandbox",
    "run_code": "ringfence.sdk.sandbox",
}


if not TYPE_CHECKING:  # to a type checker, a name that is not listed above does not exist

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'ringfence' has no attribute {name!r}")
        return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
