"""Where a box finds the index that is ours, and what its clients have to know of that."""

from __future__ import annotations

from collections.abc import Mapping

HOST = "packages.ringfence.internal"
"""Nobody else can have that name: it ends in one that is reserved for private use, and is never resolved."""
_URL = f"http://{HOST}/simple/"
ENV: Mapping[str, str] = {
    "PIP_INDEX_URL": _URL,
    "PIP_TRUSTED_HOST": HOST,
    "PIP_DEFAULT_TIMEOUT": "600",
    "PIP_RETRIES": "0",
    "PIP_NO_CACHE_DIR": "1",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_BREAK_SYSTEM_PACKAGES": "1",
    "UV_DEFAULT_INDEX": _URL,
    "UV_INSECURE_HOST": HOST,
    "UV_HTTP_TIMEOUT": "600",
}
"""The way there is the box's own loopback, where nobody listens in."""
