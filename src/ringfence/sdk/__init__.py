"""Ringfence from Python: boxes and a gateway inside your own process.

print(ringfence.run_code("print(6 * 7)").text)
"""

import importlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.sdk.execution import CommandResult, Execution
    from ringfence.sdk.gateway import Gateway
    from ringfence.sdk.sandbox import AsyncSandbox, Sandbox, run_code

__all__ = ["AsyncSandbox", "CommandResult", "Execution", "Gateway", "Sandbox", "run_code"]

# Whoever wants a box does not load the gateway, which takes several times as long.
_HOMES = {
    **dict.fromkeys(("AsyncSandbox", "Sandbox", "run_code"), "ringfence.sdk.sandbox"),
    **dict.fromkeys(("CommandResult", "Execution"), "ringfence.sdk.execution"),
    "Gateway": "ringfence.sdk.gateway",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'ringfence.sdk' has no attribute {name!r}")
        return getattr(importlib.import_module(_HOMES[name]), name)
