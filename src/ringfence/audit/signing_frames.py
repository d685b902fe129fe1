"""What the signer's pipes carry: a request is parts with their lengths, the last of them empty; an answer is one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import IO

from ringfence.audit.chain import MAX_RECORD_BYTES

_MAX_FRAME = 4 * MAX_RECORD_BYTES


def write_request(file: IO[bytes], parts: Iterable[bytes]) -> None:
    """Raises OSError."""
    for part in parts:
        file.write(len(part).to_bytes(4))
        file.write(part)
    file.write(bytes(4))
    file.flush()


def blobs(file: IO[bytes]) -> Iterator[bytes]:
    """The parts of the next request. Raises EOFError where it ends before its end, or has none."""
    while size := int.from_bytes(_exactly(file, 4)):
        yield _exactly(file, size)


def write_answer(file: IO[bytes], answer: bytes, *, refused: bool = False) -> None:
    file.write((len(answer) + 1).to_bytes(4) + (b"-" if refused else b"+") + answer)
    file.flush()


def read_answer(file: IO[bytes]) -> tuple[bytes, bool]:
    """The answer, and whether it is a refusal. Raises EOFError."""
    answer = _exactly(file, int.from_bytes(_exactly(file, 4)))
    return answer[1:], answer[:1] != b"+"


def _exactly(file: IO[bytes], size: int) -> bytes:
    if size > _MAX_FRAME:
        raise EOFError("a part is longer than any can be")
    data = file.read(size)
    if len(data) < size:
        raise EOFError("the other side has ended")
    return data
