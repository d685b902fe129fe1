"""Files of a session are listed, read, written and copied."""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
from collections.abc import Mapping
from contextlib import suppress

from ringfence import canonical
from ringfence.box import MIB, FileFact
from ringfence.errors import RingfenceError
from ringfence.model import Answer, Json
from ringfence.sandbox.addresses import address, as_text, type_of
from ringfence.sandbox.beneath import PART
from ringfence.sandbox.calls.attachments import data_of, pieces_of
from ringfence.sandbox.calls.task import Carry, Task, bad, file_json
from ringfence.sandbox.results import MOST_FILES, SPARE_BYTES, text
from ringfence.sandbox.workspace import Entry
from ringfence.sessions import Writing

_WORKSPACE = "/workspace"
_TEXT_BYTES = 200_000
"""Of a text, where nobody says how much."""
_PIECE = MIB


def _entry(entry: Entry) -> Json:
    told: Json = {"name": entry.name, "path": entry.path, "kind": entry.kind, "bytes": entry.bytes}
    return {**told, "modified": entry.modified.isoformat(), "mode": entry.mode, "target": entry.target}


async def list_files(task: Task) -> Answer:
    path, depth = task.given.get("path", _WORKSPACE), task.given.get("depth", 1)
    if depth == 0:
        found = [await task.keeper.stat(task.owner, task.session, path)]
    else:
        found = list(await task.keeper.entries(task.owner, task.session, path, depth))
    shown = found if task.wide else found[:MOST_FILES]
    lines = [f"{each.kind} {each.path}" + (f" ({each.bytes} bytes)" if each.kind == "file" else "") for each in shown]
    if len(shown) < len(found):
        lines.append(f"[{len(found) - len(shown)} more: list a folder of it]")
    told: Json = {"path": path, "entries": [_entry(each) for each in shown], "left_out": len(found) - len(shown)}
    return task.done(told, "\n".join(lines) or "There is nothing in it.")


# ── Reading ───────────────────────────────────────────────────────────────────────────────────────


async def read_file(task: Task) -> Answer:
    if task.attached.sink is not None and task.open:
        return await _poured(task)
    path, offset = task.given["path"], task.given.get("offset", 0)
    size = (await task.keeper.stat(task.owner, task.session, path)).bytes
    most = (task.most_bytes - SPARE_BYTES) * 3 // 4
    data = await task.keeper.read(task.owner, task.session, path, offset, min(task.given.get("length", most), most))
    size = max(size, offset + len(data))
    mime = type_of(path, data[: _whole(data)] if offset + len(data) < size else data)
    if mime.startswith("image/") and mime != "image/svg+xml" and not offset and len(data) == size:
        picture = {"type": "image", "data": base64.b64encode(data).decode(), "mimeType": mime}
        return task.done(_about(task, mime, len(data), size), "", [picture])
    words = as_text(data[: _whole(data)])
    return _blob(task, mime, data, size) if words is None else _words(task, mime, data, size)


def _about(task: Task, mime: str, taken: int, size: int) -> Json:
    offset = task.given.get("offset", 0)
    about: Json = {"path": task.given["path"], "mime": mime, "size": size, "offset": offset, "bytes": taken}
    return {**about, "next_offset": offset + taken if offset + taken < size else None}


def _rest(about: Json) -> list[Json]:
    if about["next_offset"] is None:
        return []
    return [text(f"[{about['size'] - about['next_offset']} bytes more: read on with offset={about['next_offset']}]")]


def _words(task: Task, mime: str, data: bytes, size: int) -> Answer:
    """Less of it, until the result fits: it stands there twice."""
    room = len(data) if "length" in task.given else min(len(data), _TEXT_BYTES)
    while True:
        part = data[: _whole(data[:room]) or room]
        about = _about(task, mime, len(part), size)
        words = part.decode("utf-8", "replace")
        content = [text(words), *_rest(about)]
        structured = {**about, "text": words}
        if room <= 1 or len(canonical.dumps([content, structured])) <= task.most_bytes - SPARE_BYTES:
            return task.done(structured, "", content)
        room //= 2


def _whole(data: bytes) -> int:
    """How much of it ends with a whole character; the beginning of one more waits for the rest."""
    for back in range(1, min(3, len(data)) + 1):
        if data[-back] >= 0xC0:
            needed = 2 if data[-back] < 0xE0 else 3 if data[-back] < 0xF0 else 4
            return len(data) - back if back < needed else len(data)
        if data[-back] < 0x80:
            break
    return len(data)


def _blob(task: Task, mime: str, data: bytes, size: int) -> Answer:
    about = _about(task, mime, len(data), size)
    where = about["path"] if about["path"].startswith("/") else f"{_WORKSPACE}/{about['path']}"
    blob = {"uri": address(task.session, where), "mimeType": mime, "blob": base64.b64encode(data).decode()}
    return task.done(about, "", [{"type": "resource", "resource": blob}, *_rest(about)])


async def _poured(task: Task) -> Answer:
    """Into what the caller has for it, piece by piece, however long it is."""
    path, at, left = task.given["path"], task.given.get("offset", 0), task.given.get("length")
    size, pour = 0, _Pour(task)
    while left is None or left > 0:
        piece = await task.keeper.read(
            task.owner, task.session, path, at, _PIECE if left is None else min(left, _PIECE)
        )
        if not piece:
            break
        size, at = size + len(piece), at + len(piece)
        left = None if left is None else left - len(piece)
        await pour(piece)
    digest = await pour.end()
    return task.done({"path": path, "bytes": size, "sha256": digest}, f"{size} bytes")


class _Pour:
    """Bytes on their way to a caller, without the secrets in them, and the digest of what came there."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._search = task.screen.file()
        self._digest = hashlib.sha256()

    async def __call__(self, piece: bytes) -> None:
        await self._sink(piece if self._search is None else self._search.feed(piece))

    async def end(self) -> str:
        if self._search is not None:
            await self._sink(self._search.finish())
            self._task.screen.filed(self._search)
        return self._digest.hexdigest()

    async def _sink(self, piece: bytes) -> None:
        assert self._task.attached.sink is not None
        if piece:
            self._digest.update(piece)
            await self._task.attached.sink(piece)


async def read_folder(task: Task) -> Answer:
    if task.attached.sink is None or not task.open:
        raise bad("a folder is read by a caller that takes it as it comes, and where the contract removes nothing")
    path, size, pour = task.given["path"], 0, _Pour(task)
    async for piece in task.keeper.pack(task.owner, task.session, path):
        size += len(piece)
        await pour(piece)
    return task.done({"path": path, "bytes": size, "sha256": await pour.end()}, f"{size} bytes")


# ── Writing ───────────────────────────────────────────────────────────────────────────────────────


async def write_file(task: Task) -> Answer:
    given, path = task.given, task.given["path"]
    how = Writing(append=bool(given.get("append")), mode=given.get("mode"))
    if "data" in given and not isinstance(task.attached.data, bytes) and not how["append"]:
        fact = await _streamed(task, path, how)
    else:
        fact = await task.keeper.write(task.owner, task.session, path, await _content(task), **how)
    return _written(task, fact)


def _written(task: Task, fact: FileFact) -> Answer:
    words = f"{fact.bytes} bytes are in {fact.path}."
    return task.done(file_json(fact), words, given=(fact,))


async def _content(task: Task) -> bytes:
    given = task.given
    if "text" in given:
        return str(given["text"]).encode()
    if "data" in given:
        return await data_of(task)
    try:
        return binascii.a2b_base64("".join(given["base64"].split()), strict_mode=True)
    except ValueError:  # not ASCII, or not base64
        raise bad("base64: this is none") from None


async def _streamed(task: Task, path: str, how: Writing) -> FileFact:
    """A file of any size: beside its place until it is whole."""
    folder, _, _ = path.rpartition("/")
    part = f"{folder}/{PART}{secrets.token_hex(8)}.part" if folder else f"{PART}{secrets.token_hex(8)}.part"
    keeper, owner, session = task.keeper, task.owner, task.session
    await keeper.write(owner, session, part, b"", mode=how.get("mode"))
    try:
        async for piece in pieces_of(task):
            await keeper.write(owner, session, part, piece, append=True)
        await keeper.rename(owner, session, part, path)
    except BaseException:
        with suppress(RingfenceError):  # it is gone, and its session with it
            await keeper.remove(owner, session, part)
        raise
    named = task.given["data"]
    absolute = path if path.startswith("/") else f"{_WORKSPACE}/{path}"
    return FileFact(absolute, named["bytes"], named["sha256"])


async def write_folder(task: Task) -> Answer:
    facts = list(await task.keeper.unpack(task.owner, task.session, task.given["path"], pieces_of(task)))
    told: Json = {"path": task.given["path"], "files": [file_json(fact) for fact in facts[:MOST_FILES]]}
    return task.done({**told, "count": len(facts)}, f"{len(facts)} files", given=facts[:MOST_FILES])


async def remove_file(task: Task) -> Answer:
    await task.keeper.remove(task.owner, task.session, task.given["path"])
    return task.done({"path": task.given["path"]}, "It is removed.")


async def make_folder(task: Task) -> Answer:
    made = await task.keeper.make_dir(task.owner, task.session, task.given["path"])
    return task.done({"path": task.given["path"], "made": made}, "It is there.")


async def rename_file(task: Task) -> Answer:
    await task.keeper.rename(task.owner, task.session, task.given["path"], task.given["to"])
    return task.done({"path": task.given["to"]}, "It is renamed.")


async def copy_file(task: Task) -> Answer:
    """From box to box, inside of whoever keeps them."""
    target = task.given.get("to_session", task.session)
    fact = await task.keeper.copy(task.owner, task.session, task.given["path"], target, task.given["to_path"])
    words = f"{fact.bytes} bytes are in {fact.path} of session {target}."
    return task.done(file_json(fact), words, given=(fact,))


async def watch_files(task: Task) -> Answer:
    """Until the caller has seen enough. They are told `None` when it has begun."""
    tell = task.attached.changed
    if tell is None:
        raise bad("a folder is watched by a caller that is told of each change")
    recursive = bool(task.given.get("recursive"))
    async for change in task.keeper.watch(task.owner, task.session, task.given["path"], recursive):
        tell(None if change.kind == "begun" else change)
    return task.done({"path": task.given["path"]}, "It is over.")


CALLS: Mapping[str, Carry] = {
    call.__name__: call
    for call in (
        *(list_files, read_file, read_folder, write_file, write_folder, remove_file, make_folder),
        *(rename_file, copy_file, watch_files),
    )
}
