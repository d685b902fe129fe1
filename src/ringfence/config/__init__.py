"""One file, `ringfence.yaml`: read, checked as a whole, and frozen."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringfence.config.compare import loosens
    from ringfence.config.folders import doubts, overlaps
    from ringfence.config.loading import is_policy_file, load, loads, with_policy_file
    from ringfence.config.paths import (
        default_paths,
        key_folder,
        own_paths,
        process_environment,
        state_folder,
        untrusted_because,
    )
    from ringfence.config.settings import Config, GatewaySettings, PolicySettings, SandboxSettings, sealed
    from ringfence.config.validators import is_loopback, listen_address

__all__ = [
    "Config",
    "GatewaySettings",
    "PolicySettings",
    "SandboxSettings",
    "default_paths",
    "doubts",
    "is_loopback",
    "is_policy_file",
    "key_folder",
    "listen_address",
    "load",
    "loads",
    "loosens",
    "overlaps",
    "own_paths",
    "process_environment",
    "sealed",
    "state_folder",
    "untrusted_because",
    "with_policy_file",
]

# A module is loaded when one of its names is first used: a program that reads no file does not wait for the parser.
_HOMES = {
    **dict.fromkeys(("Config", "GatewaySettings", "PolicySettings", "SandboxSettings", "sealed"), "settings"),
    **dict.fromkeys(
        ("default_paths", "key_folder", "untrusted_because", "own_paths", "process_environment", "state_folder"),
        "paths",
    ),
    **dict.fromkeys(("is_policy_file", "load", "loads", "with_policy_file"), "loading"),
    **dict.fromkeys(("is_loopback", "listen_address"), "validators"),
    "loosens": "compare",
    "doubts": "folders",
    "overlaps": "folders",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'ringfence.config' has no attribute {name!r}")
        return getattr(import_module(f"ringfence.config.{_HOMES[name]}"), name)
