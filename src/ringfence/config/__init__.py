"""One file, `ringfence.yaml`: read, checked as a whole, and frozen."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringfence.config.compare import loosens
    from ringfence.config.loading import load, loads
    from ringfence.config.overlap import overlaps
    from ringfence.config.paths import (
        default_paths,
        key_folder,
        not_obeyed,
        own_paths,
        process_environment,
        state_folder,
    )
    from ringfence.config.settings import Config, GatewaySettings, PolicySettings, SandboxSettings, sealed
    from ringfence.config.unbuilt import is_loopback
    from ringfence.config.words import listen_address

__all__ = [
    "Config",
    "GatewaySettings",
    "PolicySettings",
    "SandboxSettings",
    "default_paths",
    "is_loopback",
    "key_folder",
    "listen_address",
    "load",
    "loads",
    "loosens",
    "not_obeyed",
    "overlaps",
    "own_paths",
    "process_environment",
    "sealed",
    "state_folder",
]

# Nothing is loaded before it is asked for: where no file is read, nobody waits for what reads one.
_HOMES = {
    **dict.fromkeys(("Config", "GatewaySettings", "PolicySettings", "SandboxSettings", "sealed"), "settings"),
    **dict.fromkeys(
        ("default_paths", "key_folder", "not_obeyed", "own_paths", "process_environment", "state_folder"), "paths"
    ),
    **dict.fromkeys(("load", "loads"), "loading"),
    "is_loopback": "unbuilt",
    "listen_address": "words",
    "loosens": "compare",
    "overlaps": "overlap",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'ringfence.config' has no attribute {name!r}")
        return getattr(import_module(f"ringfence.config.{_HOMES[name]}"), name)
