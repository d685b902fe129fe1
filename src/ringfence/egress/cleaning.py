"""What passes between a box and a host that knows a secret: placeholders stay in, values stay out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace

from ringfence.egress.http1 import NO_BODY, Framing, Response
from ringfence.egress.refusal import Failed
from ringfence.egress.scope import Cleaner

CHUNKED = Framing("chunked")
_SHORTEST = 8
_LENGTHS = frozenset({"content-length", "content-range"})
_PATIENCE_SECONDS = 0.1
"""So long the last of an answer waits for what follows, whatever it is."""


class Watch:
    """Looks for words in what goes by in pieces."""

    def __init__(self, words: tuple[bytes, ...]) -> None:
        self._words = words
        self._longest = max(map(len, words), default=1)
        self._seen = b""

    def sees(self, piece: bytes) -> bytes | None:
        """The first of them that is whole with this piece. The last of it has not gone on yet then."""
        if not self._words:
            return None
        data = self._seen + piece
        self._seen = data[max(0, len(data) - self._longest + 1) :]
        return next((word for word in self._words if word in data), None)


def cleaned_head(answer: Response, clean: Callable[[], Cleaner]) -> Response:
    """The head of an answer. Raises Failed for one whose body cannot be read."""
    encoding = [v for n, v in answer.headers if n.lower() == "content-encoding" and v.lower() != "identity"]
    if encoding:
        # It was told to send plain text; what is packed cannot be searched.
        raise Failed("encoded_answer", "an answer that may hold a secret came compressed")
    headers = tuple((name, _cleaned(value, clean)) for name, value in answer.headers if not _holds(name, clean))
    if answer.framing == NO_BODY:
        # Of a body that does not come: how long it would be tells how long a secret in it is.
        headers = tuple((name, value) for name, value in headers if name.lower() not in _LENGTHS)
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
    """What waits to be told from a secret goes on with what follows, at the end, or when nothing came for a while."""
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
