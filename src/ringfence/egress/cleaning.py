"""What passes between a box and a host that knows a secret: placeholders stay in, values stay out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from ringfence.egress.http1 import Framing, Response
from ringfence.egress.refusal import Failed
from ringfence.egress.scope import Cleaner

CHUNKED = Framing("chunked")


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
    headers = tuple((name, _cleaned(value, clean())) for name, value in answer.headers)
    return replace(answer, headers=headers, phrase=_cleaned(answer.phrase, clean()))


def _cleaned(text: str, cleaner: Cleaner) -> str:
    if len(text) < 8:
        return text
    return (cleaner.feed(text.encode("latin-1")) + cleaner.finish()).decode("latin-1")


async def cleaned(pieces: AsyncIterator[bytes], cleaner: Cleaner) -> AsyncIterator[bytes]:
    async for piece in pieces:
        if data := cleaner.feed(piece):
            yield data
    if data := cleaner.finish():
        yield data
