"""Head and tail of what is too long for a reader: a model pays for every character that it is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ringfence.core.model import Json

_MIN_CHARACTERS = 80
"""A budget below this would be used up by the words that say what was left out."""


def share(lengths: Sequence[int], most: int) -> int:
    """How long each of some texts may be so that all fit into `most` together: short ones leave more to others."""
    left, waiting = most, sorted(lengths)
    for done, length in enumerate(waiting):
        if length * (len(waiting) - done) > left:
            return left // (len(waiting) - done)
        left -= length
    return max(lengths, default=0)


def excerpt(text: str, most: int) -> str:
    """The text, or its head and tail with what is missing said between them: `most` characters in all."""
    if len(text) <= most:
        return text
    said = f"\n… {len(text)} characters left out …\n"
    room = most - len(said)
    if room < 0:
        return text[:most]
    said = f"\n… {len(text) - room} characters left out …\n"
    tail = room // 2
    return text[: room - tail] + said + (text[-tail:] if tail else "")


def shortened(result: Json, most: int, *, structured: bool) -> Json:
    """A result of a tool whose texts have `most` characters together; the very same where they are no longer.

    With `structured`, so is what the structured content repeats of them; `truncated` says there that something is cut.
    """
    most = max(most, _MIN_CHARACTERS)
    blocks = result.get("content") or []
    blocks = _fewer(blocks, most)
    room = share([len(text) for text in map(_text_of, blocks) if text is not None], most)
    out = result if blocks is (result.get("content") or blocks) else {**result, "content": blocks}
    less = [_shortened_block(block, room) for block in blocks]
    if any(new is not old for new, old in zip(less, blocks, strict=True)):
        out = {**out, "content": less}
    own = result.get("structuredContent")
    if structured and isinstance(own, dict):
        said = _shortened_own(own, most)
        if said is not own or out is not result:
            out = {**out, "structuredContent": {**said, "truncated": True}}
    return out


def _fewer(blocks: list[Any], most: int) -> list[Any]:
    """No more texts than can each have something said of them; a last one says how many are missing."""
    lengths = {place: len(text) for place, block in enumerate(blocks) if (text := _text_of(block)) is not None}
    count = most // _MIN_CHARACTERS
    if len(lengths) <= count or sum(lengths.values()) <= most:
        return blocks
    gone = set([*lengths][count - 1 :])
    kept = [block for place, block in enumerate(blocks) if place not in gone]
    return [*kept, {"type": "text", "text": f"… {len(gone)} more texts left out …"}]


def _shortened_block(block: Any, room: int) -> Any:
    text = _text_of(block)
    if text is None or len(text) <= room:
        return block
    if block.get("type") == "text":
        return {**block, "text": excerpt(text, room)}
    inside = block["resource"]
    what = inside.get("mimeType") or inside.get("uri")  # half of a drawing is none
    return {"type": "text", "text": excerpt(f"[{what}, {len(text)} characters: too long to be shown]", room)}


def _text_of(block: Any) -> str | None:
    """What a model reads of a block: its text, or that of the resource in it."""
    if not isinstance(block, dict):
        return None
    holder = block if block.get("type") == "text" else block.get("resource")
    text = holder.get("text") if isinstance(holder, dict) else None
    return text if isinstance(text, str) else None


def _shortened_own(structured: Json, most: int) -> Json:
    lengths: list[int] = []

    def measured(text: str) -> str:
        lengths.append(len(text))
        return text

    _mapped(structured, measured)
    room = share(lengths, most)
    return structured if max(lengths, default=0) <= room else _mapped(structured, lambda text: excerpt(text, room))


def _mapped(structured: Json, change: Callable[[str], str]) -> Json:
    """The structured content of a program's result with its long texts changed: those that the program wrote."""
    out = dict(structured)
    for name in ("stdout", "stderr"):
        if isinstance(out.get(name), str):
            out[name] = change(out[name])
    late = out.get("late")
    if isinstance(late, dict):
        out["late"] = {name: change(said) if isinstance(said, str) else said for name, said in late.items()}
    claimed = out.get("claimed")
    if not isinstance(claimed, dict):
        return out
    shown = [
        {**each, "data": {mime: change(text) for mime, text in each["data"].items()}}
        for each in claimed.get("results") or ()
    ]
    error = claimed.get("error")
    if isinstance(error, dict):
        error = {name: change(text) if isinstance(text, str) else text for name, text in error.items()}
    return {**out, "claimed": {**claimed, "results": shown, "error": error}}
