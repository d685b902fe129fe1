"""What a browser sends: the fields of a form or of an address, within bounds that also hold for strangers."""

from __future__ import annotations

import asyncio
from urllib.parse import parse_qsl

from starlette.requests import Request

_MAX_BYTES = 65_536
_MAX_FIELDS = 30
_SECONDS = 30.0


class FormRefused(Exception):
    """A form or an address that is not read further."""

    def __init__(self, status: int, reason: str, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.reason = reason


async def read(request: Request, seconds: float = _SECONDS) -> dict[str, str]:
    """The fields of a form. Raises FormRefused."""
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size > _MAX_BYTES:
                    raise FormRefused(413, "too_large", "the form is too large")
                parts.append(part)
    except TimeoutError:
        raise FormRefused(408, "too_slow", f"the form did not arrive within {seconds:g} s") from None
    return fields(b"".join(parts).decode("utf-8", "replace"))


def fields(text: str) -> dict[str, str]:
    """The fields of a form or of an address. Raises FormRefused."""
    try:
        return dict(parse_qsl(text, keep_blank_values=True, max_num_fields=_MAX_FIELDS))
    except ValueError:
        raise FormRefused(400, "invalid_request", f"there are more than {_MAX_FIELDS} fields") from None
