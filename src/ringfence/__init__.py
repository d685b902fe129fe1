"""Ringfence: the layer between an AI agent and everything it can do."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringfence.sdk import Gateway

__all__ = ["Gateway", "__version__"]
__version__ = "0.1.0"

# Public name -> the module that has it. Nothing is loaded before it is asked for: whoever needs one module of ours,
# an auditor's `ringfence.audit.chain` say, does not pay for the whole gateway.
_HOMES = {"Gateway": "ringfence.sdk"}


if not TYPE_CHECKING:  # to a type checker, a name that is not listed above does not exist

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'ringfence' has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
