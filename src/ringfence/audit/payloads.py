"""Whether what is kept of a payload is what was recorded. It lies apart from the log, so that it can be erased."""

from __future__ import annotations

from collections.abc import Iterable

from ringfence import canonical
from ringfence.model import Json

SALT_BYTES = 16


def is_as_recorded(records: Iterable[Json], part: str, salt: object, body: object) -> bool | None:
    """By the records of its call, read as objects. None where none of them says that anything was kept: an earlier
    version did not, or nothing was."""
    entries = [entry for record in records if isinstance(entry := record.get(part), dict)]
    if not isinstance(salt, bytes) or not isinstance(body, bytes) or len(salt) != SALT_BYTES:
        return False if any("kept" in entry for entry in entries) else None
    digest = canonical.salted_bytes(body, salt)
    kept = [entry["kept"] for entry in entries if "kept" in entry]
    if kept:
        return all(each == digest for each in kept)
    # What was not redacted is what was digested.
    return True if digest in [entry.get("digest") for entry in entries] else None
