"""Tools for the files of sessions, which are also MCP resources where they are in /workspace/output."""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from ringfence.core import canonical
from ringfence.core.box import MIB, FileFact
from ringfence.core.errors import Refused, RingfenceError, WorkProgress
from ringfence.core.model import Answer, Json, Mode, Status
from ringfence.core.quoting import quoted
from ringfence.core.sessions import Within, Writing
from ringfence.sandbox.tools.definition import COUNT, DIGEST, FILE, FLAG, ONE, TEXT, Changes, Tool, named
from ringfence.sandbox.tools.resources import OUTPUT, TEMPLATE, address, as_text, located, type_of
from ringfence.sandbox.tools.results import MAX_FILES, SPARE_BYTES, text
from ringfence.sandbox.tools.task import Task, bad, data_of, pieces_of

if TYPE_CHECKING:
    from ringfence.core.box_files import EntryInfo

_ONE: Json = {**ONE, "path": TEXT}
_WORKSPACE = "/workspace"
_TEXT_BYTES = 200_000
"""The length of a text where the caller gives none."""
_PIECE = MIB
_MAX_LISTED = 1000
_DEEPEST = 8
_MAX_PAST = 32


def _entry(entry: EntryInfo) -> Json:
    result: Json = {"name": entry.name, "path": entry.path, "kind": entry.kind, "bytes": entry.bytes}
    return {**result, "modified": entry.modified.isoformat(), "mode": entry.mode, "target": entry.target}


@Tool(
    Mode.READ,
    Changes.NOTHING,
    "List a folder of a session (default: /workspace), `depth` levels deep (default: 1).",
    {**_ONE, "depth": {"type": "integer", "minimum": 1, "maximum": 32}},
    ("session",),
    named("session", "path", "entries", "left_out"),
    wide={"depth": {"type": "integer", "minimum": 0, "maximum": 64}},
)
async def list_files(task: Task) -> Answer:
    path = task.given.get("path", _WORKSPACE)
    depth = task.given.get("depth", 1)
    if depth == 0:
        found = [await task.keeper.stat(task.owner, task.session, path)]
    else:
        found = list(await task.keeper.entries(task.owner, task.session, path, depth))
    shown = found if task.wide else found[:MAX_FILES]
    lines = [f"{each.kind} {each.path}" + (f" ({each.bytes} bytes)" if each.kind == "file" else "") for each in shown]
    if len(shown) < len(found):
        lines.append(f"[{len(found) - len(shown)} more: list a folder of it]")
    result: Json = {"path": path, "entries": [_entry(each) for each in shown], "left_out": len(found) - len(shown)}
    return task.answer(result, "\n".join(lines) or "There is nothing in it.")


@Tool(
    Mode.READ,
    Changes.NOTHING,
    "Read a file of a session. A long one comes in parts: go on from next_offset.",
    {**_ONE, "offset": COUNT, "length": {"type": "integer", "minimum": 1}},
    ("session", "path"),
    named("session", "path", "mime", "size", "offset", "bytes", "next_offset", "text"),
)
async def read_file(task: Task) -> Answer:
    if task.attached.sink is not None and task.open:
        return await _poured(task)
    path = task.given["path"]
    offset = task.given.get("offset", 0)
    size = (await task.keeper.stat(task.owner, task.session, path)).bytes
    most = (task.most_bytes - SPARE_BYTES) * 3 // 4
    length = min(task.given.get("length", most), most)
    around = task.screen.around(task.grant.contract.redact)
    before = min(offset, around)
    all_of_it = await task.keeper.read(task.owner, task.session, path, offset - before, before + length + around)
    data = all_of_it[before : before + length]
    size = max(size, offset + len(data))
    mime = type_of(path, data[: _whole(data)] if offset + len(data) < size else data)
    if mime.startswith("image/") and mime != "image/svg+xml" and not offset and len(data) == size:
        picture = {"type": "image", "data": base64.b64encode(data).decode(), "mimeType": mime}
        return task.answer(_about(task, mime, len(data), size), "", [picture])
    if as_text(data[: _whole(data)]) is None:
        return _blob(task, mime, task.screen.masked(all_of_it, before, before + len(data)), size)
    return await _words(task, mime, _Around(all_of_it, before, before + len(data)), size)


class _Around(NamedTuple):
    """A page of a file, with what stands before and behind it."""

    data: bytes
    start: int
    stop: int


def _about(task: Task, mime: str, taken: int, size: int) -> Json:
    offset = task.given.get("offset", 0)
    about: Json = {"path": task.given["path"], "mime": mime, "size": size, "offset": offset, "bytes": taken}
    return {**about, "next_offset": offset + taken if offset + taken < size else None}


def _rest(about: Json) -> list[Json]:
    if about["next_offset"] is None:
        return []
    return [text(f"[{about['size'] - about['next_offset']} bytes more: read on with offset={about['next_offset']}]")]


async def _words(task: Task, mime: str, page: _Around, size: int) -> Answer:
    """Shorten it until the result fits: it stands there twice."""
    all_of_it = page.stop - page.start
    room = all_of_it if "length" in task.given else min(all_of_it, task.most_chars or _TEXT_BYTES)
    searched = await task.screen.searched(page.data, task.grant.contract.redact)
    while True:
        stop = page.start + (_whole(page.data[page.start : page.start + room]) or room)
        clean, stop = searched.page(page.start, stop)
        about = _about(task, mime, stop - page.start, size)
        words = clean.data.decode("utf-8", "replace")
        content = [text(words), *_rest(about)]
        structured = {**about, "text": words}
        if room <= 1 or len(canonical.dumps([content, structured])) <= task.most_bytes - SPARE_BYTES:
            task.screen.counted(clean)
            return task.answer(structured, "", content)
        room //= 2


def _whole(data: bytes) -> int:
    """How many bytes end with a whole character; the beginning of one more waits for the rest."""
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
    return task.answer(about, "", [{"type": "resource", "resource": blob}, *_rest(about)])


async def _poured(task: Task) -> Answer:
    """Hand the file to the caller piece by piece, however long it is."""
    path = task.given["path"]
    begin = task.given.get("offset", 0)
    length = task.given.get("length")
    end = None if length is None else begin + length
    around = task.screen.around_file
    at = max(0, begin - around)
    pour = _Pour(task, at, begin, end)
    while end is None or at < end + around:
        piece = await task.keeper.read(
            task.owner, task.session, path, at, _PIECE if end is None else min(end + around - at, _PIECE)
        )
        if not piece:
            break
        at += len(piece)
        await pour(piece)
    digest = await pour.end()
    return task.answer({"path": path, "bytes": pour.size, "sha256": digest}, f"{pour.size} bytes")


class _Pour:
    """Bytes on their way to a caller, without the secrets in them, and the digest of what arrives. What is searched may
    begin before the part that the caller wants, and end behind it."""

    def __init__(self, task: Task, at: int = 0, begin: int = 0, end: int | None = None) -> None:
        """The first byte is the file's byte `at`; the caller gets those from `begin` to `end`."""
        self._task = task
        self._search = task.screen.file()
        self._digest = hashlib.sha256()
        self._at = at
        self._begin = begin
        self._end = end
        self.size = 0
        """How many bytes the caller got."""

    async def __call__(self, piece: bytes) -> None:
        await self._sink(piece if self._search is None else self._search.feed(piece))

    async def end(self) -> str:
        if self._search is not None:
            await self._sink(self._search.finish())
            self._task.screen.filed(self._search)
        return self._digest.hexdigest()

    async def _sink(self, piece: bytes) -> None:
        assert self._task.attached.sink is not None
        wanted = piece[max(0, self._begin - self._at) : None if self._end is None else max(0, self._end - self._at)]
        self._at += len(piece)
        if wanted:
            self.size += len(wanted)
            self._digest.update(wanted)
            await self._task.attached.sink(wanted)


@Tool(
    Mode.WRITE,
    Changes.FILES,
    "Write a file in a session, with the folders above it: `text`, or `base64` for binary data. It replaces what"
    " was there; `append` adds to it.",
    {**_ONE, "text": TEXT, "base64": TEXT, "append": FLAG},
    ("session", "path"),
    FILE,
    wide={"data": DIGEST, "mode": {"type": "integer", "minimum": 0, "maximum": 0o777}},
    one_of=("text", "base64", "data"),
)
async def write_file(task: Task) -> Answer:
    given = task.given
    path = task.given["path"]
    how = Writing(append=bool(given.get("append")), mode=given.get("mode"))
    if "data" in given and not isinstance(task.attached.data, bytes) and not how["append"]:
        fact = await _streamed(task, path, how)
    else:
        fact = await task.keeper.write(task.owner, task.session, path, await _content(task), **how)
    return _written(task, fact)


def _written(task: Task, fact: FileFact) -> Answer:
    words = f"{fact.bytes} bytes are in {fact.path}."
    return task.answer(fact.as_json(), words, given=(fact,))


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
    """Write a file of any size, beside its place until it is complete."""
    from ringfence.sandbox.files.paths import PART  # noqa: PLC0415 - the tools are declared long before a file is written

    folder, _, _ = path.rpartition("/")
    part = f"{folder}/{PART}{secrets.token_hex(8)}.part" if folder else f"{PART}{secrets.token_hex(8)}.part"
    keeper = task.keeper
    owner = task.owner
    session = task.session
    await keeper.write(owner, session, part, b"", mode=how.get("mode"))
    try:
        with WorkProgress(begun=True):
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


@Tool(
    Mode.WRITE,
    Changes.FILES,
    "Remove a file of a session, or a folder with all that is in it.",
    _ONE,
    ("session", "path"),
    named("session", "path"),
    destructive=True,
)
async def remove_file(task: Task) -> Answer:
    await task.keeper.remove(task.owner, task.session, task.given["path"])
    return task.answer({"path": task.given["path"]}, "It is removed.")


@Tool(
    Mode.WRITE,
    Changes.FILES,
    "Make a folder in a session, with those above it.",
    _ONE,
    ("session", "path"),
    named("session", "path", "made"),
)
async def make_folder(task: Task) -> Answer:
    made = await task.keeper.make_dir(task.owner, task.session, task.given["path"])
    return task.answer({"path": task.given["path"], "made": made}, "It exists.")


@Tool(
    Mode.WRITE,
    Changes.FILES,
    "Copy a file, also to another session of yours, without its content passing through you.",
    {**_ONE, "to_session": TEXT, "to_path": TEXT},
    ("session", "path", "to_path"),
    FILE,
)
async def copy_file(task: Task) -> Answer:
    """Copy from box to box, inside the keeper."""
    target = task.given.get("to_session", task.session)
    fact = await task.keeper.copy(task.owner, task.session, task.given["path"], target, task.given["to_path"])
    words = f"{fact.bytes} bytes are in {fact.path} of session {target}."
    return task.answer(fact.as_json(), words, given=(fact,))


@Tool(
    Mode.WRITE,
    Changes.FILES,
    "Give a file another path.",
    {**_ONE, "to": TEXT},
    ("session", "path", "to"),
    only_wide=True,
)
async def rename_file(task: Task) -> Answer:
    await task.keeper.rename(task.owner, task.session, task.given["path"], task.given["to"])
    return task.answer({"path": task.given["to"]}, "It is renamed.")


@Tool(
    Mode.READ,
    Changes.NOTHING,
    "A folder as a tar stream.",
    _ONE,
    ("session", "path"),
    only_wide=True,
)
async def read_folder(task: Task) -> Answer:
    if task.attached.sink is None or not task.open:
        raise bad("a folder is read by a caller that takes it as it comes, and where the contract removes nothing")
    path = task.given["path"]
    size = 0
    pour = _Pour(task)
    async for piece in task.keeper.pack(task.owner, task.session, path):
        size += len(piece)
        await pour(piece)
    return task.answer({"path": path, "bytes": size, "sha256": await pour.end()}, f"{size} bytes")


@Tool(
    Mode.WRITE,
    Changes.FILES,
    "Put the files of a tar stream into a folder.",
    {**_ONE, "data": DIGEST},
    ("session", "path", "data"),
    only_wide=True,
)
async def write_folder(task: Task) -> Answer:
    facts = list(await task.keeper.unpack(task.owner, task.session, task.given["path"], pieces_of(task)))
    result: Json = {"path": task.given["path"], "files": [fact.as_json() for fact in facts[:MAX_FILES]]}
    return task.answer({**result, "count": len(facts)}, f"{len(facts)} files", given=facts[:MAX_FILES])


@Tool(
    Mode.READ,
    Changes.NOTHING,
    "Tells what changes in a folder.",
    {**_ONE, "recursive": FLAG},
    ("session", "path"),
    only_wide=True,
)
async def watch_files(task: Task) -> Answer:
    """Watch until the caller has seen enough. The first notice is `None`: watching has begun."""
    tell = task.attached.changed
    if tell is None:
        raise bad("only a caller that takes notices of changes can watch a folder")
    recursive = bool(task.given.get("recursive"))
    async for change in task.keeper.watch(task.owner, task.session, task.given["path"], recursive):
        tell(None if change.kind == "begun" else change)
    return task.answer({"path": task.given["path"]}, "It is over.")


# ── What sessions leave in /workspace/output, as MCP resources ────────────────────────────────────


async def list_resources(task: Task) -> Answer:
    """All files that this agent may read, or how their addresses are made."""
    if task.call.method == "resources/templates/list":
        about: Json = {"uriTemplate": TEMPLATE, "name": "Output of a session"}
        about["description"] = "A file that a session left in /workspace/output."
        return Answer({"resourceTemplates": [about]}, isolation=task.isolation)
    out: list[Json] = []
    past = list(await task.keeper.past(task.owner))[-_MAX_PAST:]
    for info in [*await task.keeper.list(task.owner), *reversed(past)]:
        if info.state == "starting" or (info.opened_by is None and not task.is_handed_over(info.id)):
            continue
        try:
            # A link there would lead to what is no result.
            is_folder = (await task.keeper.stat(task.owner, info.id, OUTPUT)).kind == "dir"
            found = await task.keeper.entries(task.owner, info.id, OUTPUT, _DEEPEST) if is_folder else []
        except RingfenceError:
            continue  # it ended just now, nothing was kept, or the program in it put something else there
        for entry in found:
            if entry.kind == "file" and len(out) < _MAX_LISTED:
                file: Json = {"uri": address(info.id, entry.path), "name": entry.path.removeprefix(f"{OUTPUT}/")}
                out.append({**file, "size": entry.bytes, "description": f"left by session {info.id}"})
    return Answer({"resources": out}, isolation=task.isolation)


def unknown_resource(uri: str) -> Refused:
    return Refused(Status.VALIDATION_FAILURE, "unknown_resource", f"no resource {quoted(uri, 1000)} is offered")


async def read_resource(task: Task) -> Answer:
    """Read one whole file: MCP has no parts of a resource."""
    uri = str(task.given["uri"])
    found = located(uri)
    if found is None:
        raise unknown_resource(uri)
    session, path = found
    most = (task.most_bytes - SPARE_BYTES) * 3 // 4
    try:
        data = await task.keeper.read(task.owner, session, path, 0, most + 1)
    except Refused as exc:
        if exc.status is not Status.VALIDATION_FAILURE:
            raise
        # No such session, another owner's, or no such file: the caller must not see which.
        raise unknown_resource(uri) from None
    if len(data) > most:
        text = f"{path} is longer than the {most} bytes that fit; read parts of it with read_file"
        raise Refused(Status.FAILED, "result_too_large", text)
    mime = type_of(path, data)
    result: Json = {"uri": uri, "mimeType": mime}
    words = None if mime.startswith("image/") and mime != "image/svg+xml" else as_text(data)
    if words is not None and len(words) * 6 < task.most_bytes:
        result["text"] = words
    else:
        result["blob"] = base64.b64encode(data).decode()
    return Answer({"contents": [result]}, isolation=task.isolation, within=Within(session))
