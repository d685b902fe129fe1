"""Ringfence from Python: boxes and a gateway inside your own process.

print(ringfence.run_code("print(6 * 7)").text)
"""

import importlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringfence.sdk.batch import map_code, map_code_async
    from ringfence.sdk.blocking import Sandbox
    from ringfence.sdk.execution import CommandResult, Execution, Result
    from ringfence.sdk.gateway import Gateway
    from ringfence.sdk.once import run_code, run_code_async
    from ringfence.sdk.sandbox import AsyncSandbox

__all__ = [
    "AsyncSandbox",
    "CommandResult",
    "Execution",
    "Gateway",
    "Result",
    "Sandbox",
    "map_code",
    "map_code_async",
    "run_code",
    "run_code_async",
]

# A program that uses only boxes does not load the gateway, which takes several times as long.
_HOMES = {
    "AsyncSandbox": "ringfence.sdk.sandbox",
    "Sandbox": "ringfence.sdk.blocking",
    **dict.fromkeys(("CommandResult", "Execution"), "ringfence.sdk.execution"),
    **dict.fromkeys(("map_code", "map_code_async"), "ringfence.sdk.batch"),
    **dict.fromkeys(("run_code", "run_code_async"), "ringfence.sdk.once"),
    "Gateway": "ringfence.sdk.gateway",
    "Result": "ringfence.sdk.execution",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'ringfence.sdk' has no attribute {name!r}")
        return getattr(importlib.import_module(_HOMES[name]), name)
