"""The address of our package index inside a box, and the environment that directs pip and uv to it."""

from __future__ import annotations

from collections.abc import Mapping

INDEX_HOST = "packages.ringfence.internal"
"""No one else can have that name: its top-level domain is reserved for private use. It is never resolved."""
_URL = f"http://{INDEX_HOST}/simple/"
INDEX_ENV: Mapping[str, str] = {
    "PIP_INDEX_URL": _URL,
    "PIP_TRUSTED_HOST": INDEX_HOST,
    "PIP_DEFAULT_TIMEOUT": "600",
    "PIP_RETRIES": "0",
    "PIP_NO_CACHE_DIR": "1",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_BREAK_SYSTEM_PACKAGES": "1",
    "UV_DEFAULT_INDEX": _URL,
    "UV_INSECURE_HOST": INDEX_HOST,
    "UV_HTTP_TIMEOUT": "600",
}
"""Plain HTTP is safe: the connection stays on the box's own loopback."""
