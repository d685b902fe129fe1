"""What sends traces, where the configuration wants them: OpenTelemetry, which is an extra."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from ringfence.config import paths
from ringfence.config.settings import TelemetrySettings
from ringfence.core.errors import Unavailable

if TYPE_CHECKING:
    from ringfence.telemetry.traces import Tracing

_NEEDED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
_MISSING = (
    "telemetry.otlp needs OpenTelemetry, which is not installed: pip install opentelemetry-sdk"
    " opentelemetry-exporter-otlp-proto-http, or take otlp out of the configuration"
)


def tracing_of(settings: TelemetrySettings) -> Tracing | None:
    """Raises Unavailable where it is wanted and not installed."""
    if settings.otlp is None:
        return None
    if not all(map(_is_there, _NEEDED)):
        raise Unavailable("no_telemetry", _MISSING)
    from ringfence.telemetry.traces import TraceTarget, Tracing  # noqa: PLC0415 - an extra, and few want it

    return Tracing(TraceTarget(settings.otlp, settings.service, settings.sample, paths.otlp_headers()))


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
