"""How fast output is searched for secrets: as it streams, and whole, with few secrets and with many."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

import ringfence
from ringfence.cli.bench.measure import Row, row
from ringfence.redaction import Stream, Values
from ringfence.secret import Secret

_PIECE = 64 * 1024
_BYTES = 16 << 20
_FEW, _MANY = 10, 100


def run(rounds: int = 3) -> list[Row]:
    """The text is this program's own source, which is what programs print most like."""
    text = _text()
    few, many = _values(_FEW), _values(_MANY)
    told = few.leaking(text)
    cases = (
        ("redaction, shapes alone, streamed", Values(), text),
        (f"redaction, {_FEW} secrets, streamed", few.values, text),
        (f"redaction, {_MANY} secrets, streamed", many.values, text),
        (f"redaction, {_FEW} secrets, one in every 64 KiB, streamed", few.values, told),
    )
    rows = []
    for name, values, data in cases:
        _streamed(values, data[: 4 * _PIECE])
        began = time.process_time()
        times = [seconds for _ in range(rounds) for seconds in _streamed(values, data)]
        made = row(name, times)
        # Of processor time: what else the machine does is not to be measured.
        made.mb_per_second = round(rounds * len(data) / (time.process_time() - began) / 1e6, 1)
        rows.append(made)
    return rows


class _Known:
    def __init__(self, texts: list[str]) -> None:
        self._texts = texts
        self.values = Values([Secret(f"s{index}", text) for index, text in enumerate(texts)])

    def leaking(self, data: bytes) -> bytes:
        """The data, a value in each piece of it."""
        pieces = [data[at : at + _PIECE - 64] for at in range(0, len(data), _PIECE - 64)]
        return b"".join(piece + self._texts[n % len(self._texts)].encode() for n, piece in enumerate(pieces))


def _values(count: int) -> _Known:
    return _Known([secrets.token_urlsafe(32) for _ in range(count)])


def _text() -> bytes:
    sources = sorted(Path(ringfence.__file__).parent.rglob("*.py"))
    once = b"".join(path.read_bytes() for path in sources)
    return (once * (_BYTES // len(once) + 1))[:_BYTES]


def _streamed(values: Values, data: bytes) -> list[float]:
    stream, times = Stream(values), []
    for at in range(0, len(data), _PIECE):
        piece = data[at : at + _PIECE]
        began = time.perf_counter()
        stream.feed(piece)
        times.append(time.perf_counter() - began)
    stream.finish()
    return times
