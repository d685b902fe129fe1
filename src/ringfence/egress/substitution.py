"""Secrets in a box's requests: values go in on the way out, and never come back in.

The broker, which lies above this package, says what changes in a request. Here a request is scanned for placeholders
that stand where they must not, and an answer is cleaned of values before the box gets it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import field, replace
from typing import Protocol

from ringfence.core.brokering import OutboundRequest
from ringfence.core.record import dataclass
from ringfence.egress.http1 import NO_BODY, Framing, HttpResponse
from ringfence.egress.ledger import Failed


class Cleaner(Protocol):
    """Removes from an answer, as it comes, what must not enter the box."""

    def feed(self, chunk: bytes) -> bytes: ...

    def release(self) -> bytes:
        """What waits for the next chunk, though that may still come."""
        ...

    def finish(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Substitution:
    """What changes in the request: headers that are taken off, then headers that are put on."""

    strip: frozenset[str] = frozenset()
    """In lower case."""
    put: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Never sent without TLS. The caller's own headers of these names are taken off."""
    forbid: tuple[bytes, ...] = ()
    """What may not be in the body; a body that holds one is cut off before its end."""
    clean: Callable[[], Cleaner] | None = None
    """Makes what the answer passes through: one for each header, one for the body."""
    caught: Callable[[bytes], Awaitable[None]] | None = None
    """Called with the forbidden values that a body held. Whatever it raises, the request is refused."""


class Substitute(Protocol):
    """Puts secrets into requests. Raises Refused where this one may not have it, Unavailable where it is not there."""

    async def __call__(self, asked: OutboundRequest, /) -> Substitution: ...


# ── Scanning requests and cleaning answers ───────────────────────────────────────────────────────

CHUNKED = Framing("chunked")
_SHORTEST = 8
_LENGTHS = frozenset({"content-length", "content-range"})
_IN_PART = (206, 226)
"""Partial Content, IM Used: statuses of an answer that is only a part of what is there, or a difference to it."""
_PATIENCE_SECONDS = 0.1
"""So long the last of an answer waits for what follows, whatever it is."""


class WordScan:
    """Looks for words in a stream of pieces."""

    def __init__(self, words: tuple[bytes, ...]) -> None:
        self._words = words
        self._longest = max(map(len, words), default=1)
        self._seen = b""

    def sees(self, piece: bytes) -> bytes | None:
        """The first word that is whole with this piece. Its last bytes have not been sent yet then."""
        if not self._words:
            return None
        data = self._seen + piece
        self._seen = data[max(0, len(data) - self._longest + 1) :]
        return next((word for word in self._words if word in data), None)


def cleaned_head(answer: HttpResponse, clean: Callable[[], Cleaner]) -> HttpResponse:
    """The head of an answer. Raises Failed for one whose body cannot be read."""
    encoding = [v for n, v in answer.headers if n.lower() == "content-encoding" and v.lower() != "identity"]
    if encoding:
        # The request asked for plain text; what is compressed cannot be searched.
        raise Failed("encoded_answer", "an answer that may hold a secret came compressed")
    if answer.status in _IN_PART:
        # Nor was a part asked for, at least by no name that is known: part of a secret is not recognised.
        raise Failed("partial_answer", "an answer that may hold a secret came in part")
    headers = tuple((name, _cleaned(value, clean)) for name, value in answer.headers if not _holds(name, clean))
    # How long a body is, or would be that does not come, tells how long a secret in it is. The length of one that comes
    # is written anew.
    untold = _LENGTHS if answer.framing == NO_BODY else {"content-range"}
    headers = tuple((name, value) for name, value in headers if name.lower() not in untold)
    return replace(answer, headers=headers, phrase=_cleaned(answer.phrase, clean))


def _cleaned(text: str, clean: Callable[[], Cleaner]) -> str:
    if len(text) < _SHORTEST:
        return text
    cleaner = clean()
    return (cleaner.feed(text.encode("latin-1")) + cleaner.finish()).decode("latin-1")


def _holds(name: str, clean: Callable[[], Cleaner]) -> bool:
    """Whether a header's name holds a secret: what would be left of it is no name."""
    return _cleaned(name, clean) != name


async def cleaned(pieces: AsyncIterator[bytes], cleaner: Cleaner) -> AsyncGenerator[bytes]:
    """Bytes that may begin a secret go on with what follows, at the end, or when nothing came for a while."""
    following: asyncio.Task[bytes | None] | None = None
    try:
        while True:
            following = asyncio.ensure_future(_next(pieces))
            done, _ = await asyncio.wait({following}, timeout=_PATIENCE_SECONDS)
            if not done and (data := cleaner.release()):
                yield data
            piece = await following
            if piece is None:
                break
            if data := cleaner.feed(piece):
                yield data
    finally:
        if following is not None and not following.done():
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
    if data := cleaner.finish():
        yield data


async def _next(pieces: AsyncIterator[bytes]) -> bytes | None:
    return await anext(pieces, None)
