"""How a session's interpreter encodes its claims, so that a supervisor can read them without trusting them.

A claim is one line of JSON text:

    {"t": "result", "id": 7, "main": true, "data": {"text/plain": "2"}}
    {"t": "result", "id": 7, "main": false, "data": {"text/plain": "…"}, "parts": [["image/png", 81234]]}
    {"t": "error", "id": 7, "data": {"name": "ValueError", "value": "no", "traceback": "Traceback …"}}
    {"t": "done", "id": 7, "ok": true, "left_out": 0}

A message has one claim or several, joined by line breaks, and at most 60,000 bytes. A text that is too long for that is
named in the `parts` of its claim, with its length in bytes of UTF-8, and follows in messages that begin with `+`: those
of the first part, then those of the next. `cut` has the forms that were too long altogether, with their length: plain
text is shortened with a note, other forms are left out.
"""

from __future__ import annotations

from _json import encode_basestring

from ringfence.sandbox.process.guest import display

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import TracebackType

__builtins__ = display.BUILTINS  # type: ignore[assignment]

_MESSAGE = 60_000
_SHORT = 4_000
"""Characters; a text up to this goes into the first message, as long as there is room."""
_ROOM = 50_000
_PER_CLAIM = 512
_PER_FORM = 256
"""Their cost beyond their texts: the supervisor has to keep them."""
_MARKER = 128
"""Bytes for the note that a text was cut."""
MAX_LENGTHS = {"name": 200, "value": 65_536, "traceback": 262_144}
"""Characters of an error."""


def messages(head: str, texts: dict[str, str], cut: dict[str, int] | None = None) -> Iterator[bytes]:
    """`head` is the beginning of the JSON object."""
    short = []
    parts = []
    room = _ROOM
    for name, text in texts.items():
        quoted = encode_basestring(text) if len(text) <= _SHORT else ""
        size = len(quoted.encode("utf-8", "backslashreplace")) + len(name)
        if quoted and size <= room:
            short.append(f"{encode_basestring(name)}:{quoted}")
            room -= size
        else:
            parts.append((name, text.encode("utf-8", "backslashreplace")))
    fields = [head, f'"data":{{{",".join(short)}}}']
    if parts:
        fields.append(f'"parts":[{",".join(f"[{encode_basestring(name)},{len(raw)}]" for name, raw in parts)}]')
    if cut:
        fields.append(f'"cut":{{{",".join(f"{encode_basestring(name)}:{size}" for name, size in cut.items())}}}')
    yield f"{','.join(fields)}}}".encode("utf-8", "backslashreplace")
    for _, raw in parts:
        for start in range(0, len(raw), _MESSAGE - 1):
            yield b"+" + raw[start : start + _MESSAGE - 1]


def fitting(forms: dict[str, str], most: int) -> tuple[dict[str, str], dict[str, int]]:
    """The forms that fit into so many bytes, and the lengths of the others."""
    fit = {}
    cut = {}
    left = most - _PER_CLAIM
    for mime, text in forms.items():
        left -= _PER_FORM
        raw = text.encode("utf-8", "backslashreplace")
        if len(raw) <= left:
            fit[mime] = text
            left -= len(raw)
            continue
        cut[mime] = len(raw)
        if mime == "text/plain" and left > _MARKER:
            kept = raw[: left - _MARKER].decode("utf-8", "ignore")
            fit[mime] = f"{kept}\n… [cut: {len(kept):,} of {len(text):,} characters are shown]"
            left = 0
    return fit, cut


def cost(encoded: Iterable[bytes], forms: int) -> int:
    return sum(map(len, encoded)) + _PER_CLAIM + _PER_FORM * forms


def described(exc: BaseException, cell: str, ours: frozenset[str]) -> dict[str, str]:
    """An error as the interpreter would show it, without the frames that are ours."""
    # First, because callers further on would take an interrupt for a failure of the text.
    value = str("0" if isinstance(exc, SystemExit) and exc.code is None else exc)
    exc.__traceback__ = within(exc.__traceback__, cell, ours)
    formatted = display.standard("traceback").TracebackException(type(exc), exc, exc.__traceback__, compact=True)
    waiting = [formatted]
    while waiting:
        one = waiting.pop()
        one.stack[:] = [frame for frame in one.stack if frame.filename not in ours]
        waiting += [other for other in (one.__cause__, one.__context__, *(one.exceptions or ())) if other is not None]
    return shortened({"name": _name(exc), "value": value, "traceback": "".join(formatted.format())})


def shortened(error: dict[str, str]) -> dict[str, str]:
    found = {}
    for name, text in error.items():
        half = MAX_LENGTHS[name] // 2
        many = len(text)
        found[name] = (
            text if many <= 2 * half else f"{text[:half]}\n… [cut: {many:,} characters] …\n{text[many - half :]}"
        )
    return found


def within(trace: TracebackType | None, cell: str, ours: frozenset[str]) -> TracebackType | None:
    """A traceback from the cell on; if it never got there, the part that is not ours."""
    first = trace
    while first is not None and first.tb_frame.f_code.co_filename != cell:
        first = first.tb_next
    if first is not None:
        return first
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


def barely_described(exc: BaseException) -> dict[str, str]:
    """The description of an error that cannot be asked about itself, or has no usable traceback."""
    name = _name(exc)
    return {"name": name, "value": "", "traceback": f"{name}: <the error could not be described>\n"}


def _name(exc: BaseException) -> str:
    # Without asking the type itself, which may be anything.
    return str(type.__getattribute__(type(exc), "__name__"))[: MAX_LENGTHS["name"]]
