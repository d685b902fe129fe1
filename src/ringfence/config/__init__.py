"""One file, `ringfence.yaml`: read, checked as a whole, and frozen."""

from ringfence.config.compare import loosens
from ringfence.config.load import load, loads
from ringfence.config.overlap import overlaps
from ringfence.config.paths import default_paths, key_folder, process_environment, state_folder
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
    "overlaps",
    "process_environment",
    "sealed",
    "state_folder",
]
