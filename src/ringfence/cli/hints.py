"""What a person may do about a program that failed in its box, read from the last lines of its stderr.

Those are the program's own words: they are searched for names, and nothing is done on their account.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_MODULE = re.compile(r"ModuleNotFoundError: No module named '([A-Za-z_][A-Za-z0-9_]{0,60})[.']")
_NETWORK = re.compile(
    r"Temporary failure in name resolution|Name or service not known|Network is unreachable|ENETUNREACH|ENOTFOUND|"
    r"EAI_AGAIN|[Cc]ould not resolve host"
)
_PACKAGES = {
    "PIL": "pillow",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
"""Where a package has another name than its module."""


def hint(stderr: str, facts: Mapping[str, Any]) -> str | None:
    """One sentence, with the option that would help; None where nothing is known."""
    lines = [line for line in stderr.splitlines() if line.strip()][-3:]
    if found := next(filter(None, map(_MODULE.match, reversed(lines))), None):
        package = _PACKAGES.get(found[1], found[1])
        return f"{found[1]} is not installed in the box; install it for this program with --package {package}"
    network = facts.get("network") or {}
    denied = [f"{entry['host']}:{entry['port']}" for entry in network.get("denied", ())]
    if denied:
        allow = " ".join(f"--allow {place}" for place in dict.fromkeys(denied[:3]))
        return f"the box may not reach {', '.join(dict.fromkeys(denied[:3]))}; let it with {allow}"
    if any(map(_NETWORK.search, lines)) and not network.get("allowed"):
        return "the box has no network; let it reach a host with --allow HOST[:PORT]"
    return None
