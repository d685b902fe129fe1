"""Files of a session by tools: what comes back is what it is, fits, and says where to go on."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringfence.core import canonical
from ringfence.core.box import Attached
from ringfence.core.errors import Refused
from ringfence.core.model import Answer, Contract, Grant, Status
from ringfence.core.secret import Secret
from ringfence.governance.contract import build
from ringfence.sandbox.tools.screening import OutputScreen
from ringfence.secrets.redaction import TenantRedactor
from tests.faking import make_call
from tests.sandbox.fake_sessions import until
from tests.sandbox.tools.calling import ALLOWED, LISTS, MINE, OTHERS, Caller, calling, named, words

pytestmark = pytest.mark.anyio

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)


def small(tool: str, most: int, **more: Any) -> Contract:
    given = {"transport": "sandboxed_exec", "tool": tool, "mode": "read", "result": {"max_bytes": most}, **more}
    return build(tool, given)[0]


async def test_text_comes_as_text_and_a_picture_as_a_picture(tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        session = await call.opened()
        await call("write_file", session=session, path="a/b.csv", text="grüß,1\n")
        await call("write_file", session=session, path="p.png", base64=base64.b64encode(PNG).decode())
        await call("write_file", session=session, path="blob", base64="AAEC")
        text = await call("read_file", session=session, path="/workspace/a/b.csv")
        assert words(text) == "grüß,1\n"
        told = await call.told("read_file", session=session, path="a/b.csv")
        assert (told["text"], told["mime"], told["size"], told["next_offset"]) == ("grüß,1\n", "text/csv", 9, None)
        picture = await call("read_file", session=session, path="p.png")
        assert picture.result is not None
        (block,) = picture.result["content"]
        assert block == {"type": "image", "data": base64.b64encode(PNG).decode(), "mimeType": "image/png"}
        other = await call("read_file", session=session, path="blob")
        assert other.result is not None
        (embedded,) = other.result["content"]
        assert embedded["resource"]["blob"] == "AAEC"
        assert embedded["resource"]["uri"] == f"ringfence://session/{session}/blob"


async def test_what_a_file_is_called_makes_it_no_picture(tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        session = await call.opened()
        await call("write_file", session=session, path="a.png", text="<script>")
        assert (await call.told("read_file", session=session, path="a.png"))["mime"] == "text/plain"


@pytest.mark.parametrize("letter", ["x", "\n", "é", "\U0001f600", "\x1b"], ids=ascii)
async def test_a_long_text_comes_in_parts_that_fit_and_join(letter: str, tmp_path: Path) -> None:
    whole = letter * 5000
    async with calling(tmp_path, small("read_file", 9000)) as call:
        session = await call.opened()
        await call("write_file", session=session, path="a", text=whole)
        got, at, parts = "", 0, 0
        while at is not None:
            answer = await call("read_file", session=session, path="a", offset=at)
            assert answer.result is not None
            assert len(canonical.dumps(answer.result)) <= 9000
            told = answer.result["structuredContent"]
            got, at, parts = got + told["text"], told["next_offset"], parts + 1
            assert (f"read on with offset={at}" in words(answer)) is (at is not None)
            assert parts < 100
    assert got == whole


async def test_a_part_may_be_asked_for_and_of_what_is_no_text_comes_a_part_too(tmp_path: Path) -> None:
    async with calling(tmp_path, small("read_file", 4000)) as call:
        session = await call.opened()
        await call("write_file", session=session, path="t", text="0123456789")
        told = await call.told("read_file", session=session, path="t", offset=2, length=3)
        assert (told["text"], told["offset"], told["bytes"], told["next_offset"]) == ("234", 2, 3, 5)
        call.file("big.png").write_bytes(PNG + bytes(20_000))
        answer = await call("read_file", session=session, path="big.png")
        assert answer.result is not None and answer.result["content"][0]["type"] == "resource"
        assert len(canonical.dumps(answer.result)) <= 4000
        assert answer.result["structuredContent"]["next_offset"] > 0


async def test_what_is_written_goes_on_record_by_digest(tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        session = await call.opened()
        answer = await call("write_file", session=session, path="a", text="xy")
        assert answer.within is not None
        (fact,) = answer.within.given
        assert (fact.path, fact.bytes) == ("/workspace/a", 2)
        await call("write_file", session=session, path="a", text="z", append=True)
        assert call.file("a").read_text() == "xyz"


@pytest.mark.parametrize("wrong", ["a", "a===", "ä", "a b"])
async def test_what_is_no_base64_is_refused(wrong: str, tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        session = await call.opened()
        with pytest.raises(Refused) as refused:
            await call("write_file", session=session, path="a", base64=wrong)
        assert refused.value.reason_code == "bad_arguments"
        assert not call.file("a").exists()


@pytest.mark.parametrize("path", ["../a", "/etc/passwd", "a/../../b", "/workspace/../x", "link/passwd"])
async def test_no_path_leads_out(path: str, tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        session = await call.opened()
        call.file("link").symlink_to("/etc")
        tried: tuple[tuple[str, Any], ...] = (
            ("read_file", {}),
            ("write_file", {"text": "x"}),
            ("remove_file", {}),
            ("make_folder", {}),
            ("list_files", {}),
        )
        for tool, more in tried:
            with pytest.raises(Refused) as refused:
                await call(tool, session=session, path=path, **more)
            assert refused.value.status is Status.VALIDATION_FAILURE


async def test_folders_are_listed_made_and_removed(tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        session = await call.opened()
        assert (await call.told("make_folder", session=session, path="a/b"))["made"] is True
        assert (await call.told("make_folder", session=session, path="a/b"))["made"] is False
        await call("write_file", session=session, path="a/b/c", text="x")
        told = await call.told("list_files", session=session, path="a", depth=2)
        assert [(each["path"], each["kind"]) for each in told["entries"]] == [
            ("/workspace/a/b", "dir"),
            ("/workspace/a/b/c", "file"),
        ]
        itself = await call.told("list_files", Attached(), session=session, path="a/b/c", depth=0)
        assert [each["bytes"] for each in itself["entries"]] == [1]
        await call("rename_file", Attached(), session=session, path="a/b/c", to="a/d")
        await call("remove_file", session=session, path="a/b")
        assert "file /workspace/a/d (1 bytes)" in words(await call("list_files", session=session, path="a"))


async def test_a_long_list_is_cut_for_an_agent(tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        session = await call.opened()
        call.file("tmp").mkdir()
        for number in range(1005):
            call.file(f"tmp/{number}").touch()
        told = await call.told("list_files", session=session, path="tmp")
        assert (len(told["entries"]), told["left_out"]) == (1000, 5)
        assert len((await call.told("list_files", Attached(), session=session, path="tmp"))["entries"]) == 1005


async def test_a_file_is_copied_from_box_to_box_without_passing_through_the_caller(tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        first, second = await call.opened(), await call.opened()
        await call("write_file", session=first, path="output/r.csv", text="1,2\n")
        answer = await call("copy_file", session=first, path="output/r.csv", to_session=second, to_path="in.csv")
        assert "1,2" not in str(answer.result)
        assert (await call.told("read_file", session=second, path="in.csv"))["text"] == "1,2\n"
        await call("copy_file", session=first, path="output/r.csv", to_path="again.csv")
        assert (await call.told("read_file", session=first, path="again.csv"))["text"] == "1,2\n"


# ── somebody in this process ──


async def pieces(*data: bytes) -> AsyncIterator[bytes]:
    for piece in data:
        yield piece


async def test_bytes_beside_the_call_are_written_if_they_are_what_was_named(tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        session = await call.opened()
        told = await call.told(
            "write_file", Attached(data=b"ab"), session=session, path="a", data=named(b"ab"), mode=0o700
        )
        assert (told["sha256"], call.file("a").stat().st_mode & 0o777) == (named(b"ab")["sha256"], 0o700)
        await call("write_file", Attached(data=pieces(b"cd", b"ef")), session=session, path="x/b", data=named(b"cdef"))
        assert call.file("x/b").read_bytes() == b"cdef"


@pytest.mark.parametrize("given", [(b"other",), (b"ab", b"c"), (b"a",), ()], ids=repr)
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_other_bytes_than_were_named_leave_nothing(
    given: tuple[bytes, ...], streamed: bool, tmp_path: Path
) -> None:
    async with calling(tmp_path) as call:
        session = await call.opened()
        await call("write_file", session=session, path="a", text="before")
        data: Any = pieces(*given) if streamed else b"".join(given)
        with pytest.raises(Refused) as refused:
            await call("write_file", Attached(data=data), session=session, path="a", data=named(b"ab"))
        assert (refused.value.status, refused.value.reason_code) == (Status.FAILED, "input_changed")
        assert call.file("a").read_text() == "before"
        assert sorted(path.name for path in call.file("").iterdir()) == ["a"]


async def test_large_files_and_folders_go_piece_by_piece(tmp_path: Path) -> None:
    got: list[bytes] = []

    async def sink(piece: bytes) -> None:
        got.append(piece)

    async with calling(tmp_path) as call:
        session = await call.opened()
        call.file("a").write_bytes(bytes(2_500_000))
        told = await call.told("read_file", Attached(sink=sink), session=session, path="a")
        assert (b"".join(got), len(got), told["bytes"]) == (bytes(2_500_000), 3, 2_500_000)
        got.clear()
        await call("read_file", Attached(sink=sink), session=session, path="a", offset=10, length=5)
        assert got == [bytes(5)]
        got.clear()
        await call("write_file", session=session, path="f/x", text="1")
        packed = await call.told("read_folder", Attached(sink=sink), session=session, path="f")
        archive = b"".join(got)
        assert packed["bytes"] == len(archive)
        told = await call.told(
            "write_folder", Attached(data=pieces(archive)), session=session, path="g", data=named(archive)
        )
        assert (told["count"], [each["path"] for each in told["files"]]) == (1, ["/workspace/g/x"])
        with pytest.raises(Refused):
            await call("write_folder", Attached(data=pieces(archive)), session=session, path="h", data=named(b"other"))
        assert not call.file("h/x").exists()


async def test_what_a_contract_redacts_is_poured_to_nobody(tmp_path: Path) -> None:
    got: list[bytes] = []

    async def sink(piece: bytes) -> None:
        got.append(piece)

    redacting = small("read_file", 100_000, redact=["s3cret"])
    async with calling(tmp_path, redacting, small("read_folder", 100_000, redact=["s3cret"])) as call:
        session = await call.opened()
        await call("write_file", session=session, path="a", text="s3cret")
        told = await call.told("read_file", Attached(sink=sink), session=session, path="a")
        assert told["text"] == "[redacted]"
        with pytest.raises(Refused):
            await call("read_folder", Attached(sink=sink), session=session, path="/workspace")
    assert got == []


async def test_a_folder_is_watched_until_its_caller_has_seen_enough(tmp_path: Path) -> None:
    heard: list[Any] = []
    async with calling(tmp_path) as call:
        session = await call.opened()
        watching = asyncio.ensure_future(
            call("watch_files", Attached(changed=heard.append), session=session, path="/workspace")
        )
        await until(lambda: heard == [None])
        call.file("a").write_text("x")
        await until(lambda: len(heard) > 1)
        assert (heard[1].kind, heard[1].path) == ("created", "/workspace/a")
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watching
        with pytest.raises(Refused):
            await call("watch_files", Attached(), session=session, path="/workspace")


# ── As resources: of their owner, while the session lives and for a time after it ────────────────


async def read(call: Caller, uri: str, principal: Any = MINE, most: int = 1_000_000) -> Answer:
    contract = replace(LISTS, result=replace(LISTS.result, max_bytes=most))
    asked = make_call(uri, {"uri": uri}, kind="resource", method="resources/read", principal=principal)
    call.executor.check(asked, contract)
    return await call.executor.run(Grant(asked, contract, ALLOWED, None, "d", None, time.monotonic() + 600))


async def listed(call: Caller, principal: Any = MINE) -> list[str]:
    return [each["uri"] for each in (await call.listing("resources/list", principal))["resources"]]


async def test_results_are_listed_and_read_by_their_owner(tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        session = await call.opened()
        await call("write_file", session=session, path="output/a b/ü.csv", text="1,2\n")
        await call("write_file", session=session, path="output/p.png", base64=base64.b64encode(PNG).decode())
        await call("write_file", session=session, path="elsewhere.txt", text="x")
        place = f"ringfence://session/{session}/output"
        assert await listed(call) == [f"{place}/a%20b/%C3%BC.csv", f"{place}/p.png"]
        text = await read(call, f"{place}/a%20b/%C3%BC.csv")
        assert text.result is not None and text.within is not None and text.within.session == session
        (only,) = text.result["contents"]
        assert (only["mimeType"], only["text"]) == ("text/csv", "1,2\n")
        picture = await read(call, f"{place}/p.png")
        assert picture.result is not None
        assert picture.result["contents"][0]["blob"] == base64.b64encode(PNG).decode()
        assert (await call.listing("resources/templates/list"))["resourceTemplates"] != []


async def test_what_a_session_left_is_there_after_its_end(tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        session = await call.opened()
        await call("write_file", session=session, path="output/r", text="x")
        (uri,) = await listed(call)
        await call("close_session", session=session)
        assert await listed(call) == [uri]
        answer = await read(call, uri)
        assert answer.result is not None and answer.result["contents"][0]["text"] == "x"


async def test_a_paused_session_stays_paused(tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        session = await call.opened()
        await call("write_file", session=session, path="output/r", text="x")
        await call("pause_session", session=session)
        (uri,) = await listed(call)
        await read(call, uri)
        assert await call.place.state(session) == "paused"


async def test_nobody_else_sees_or_reads_them(tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        session = await call.opened()
        await call("write_file", session=session, path="output/r", text="x")
        (uri,) = await listed(call)
        assert await listed(call, OTHERS) == []
        with pytest.raises(Refused) as refused:
            await read(call, uri, OTHERS)
        with pytest.raises(Refused) as unknown:
            await read(call, uri.replace(session, "box_0"), OTHERS)
        assert {refused.value.reason_code, unknown.value.reason_code} == {"unknown_resource"}


@pytest.mark.parametrize(
    "rest",
    ["/../a.txt", "/output/../a.txt", "/output/%2e%2e/a.txt", "/a.txt", "/tmp/x", "", "/output/", "/output/none"],
)
async def test_only_what_is_a_result_is_a_resource(rest: str, tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        session = await call.opened()
        await call("write_file", session=session, path="a.txt", text="x")
        with pytest.raises(Refused) as refused:
            await read(call, f"ringfence://session/{session}{rest}")
        assert refused.value.reason_code == "unknown_resource"


async def test_what_is_too_long_says_how_to_read_it(tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        session = await call.opened()
        await call("write_file", session=session, path="output/r", text="x" * 5000)
        (uri,) = await listed(call)
        with pytest.raises(Refused) as refused:
            await read(call, uri, most=4000)
        assert refused.value.reason_code == "result_too_large" and "read_file" in refused.value.message


async def test_something_else_in_the_place_of_the_folder_is_no_trouble(tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        await call.opened()
        call.file("output").symlink_to("/etc")
        assert await listed(call) == []


# ── A secret across the border of a page ──────────────────────────────────────────────────────────

SECRET = "correct-horse-battery-staple"
_KNOWN = (Secret("horse", SECRET),)
WHOLE = f"before {SECRET} behind"


def screen() -> OutputScreen:
    return OutputScreen(TenantRedactor(lambda: _KNOWN), TenantRedactor(lambda: _KNOWN, shaped=False))


@pytest.mark.parametrize("length", [1, 5, 12, 20])
async def test_pages_of_a_file_show_no_piece_of_a_secret_wherever_they_end(length: int, tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        call.executor.screens = screen
        session = await call.opened()
        await call("write_file", session=session, path="a", text=WHOLE)
        for offset in range(len(WHOLE)):
            told = await call.told("read_file", session=session, path="a", offset=offset, length=length)
            stop = offset + told["bytes"]
            kept = [c for at, c in enumerate(WHOLE) if offset <= at < stop and not 7 <= at < 7 + len(SECRET)]
            assert told["text"].replace("[redacted]", "") == "".join(kept)
            assert told["next_offset"] is None or told["next_offset"] == stop
            assert not 7 < stop < 7 + len(SECRET), "no page ends inside of it"


async def test_pages_of_a_file_join_to_all_of_it_without_the_secret(tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        call.executor.screens = screen
        session = await call.opened()
        await call("write_file", session=session, path="a", text=WHOLE * 3)
        got, at = "", 0
        while at is not None:
            told = await call.told("read_file", session=session, path="a", offset=at, length=10)
            got, at = got + told["text"], told["next_offset"]
        assert got == WHOLE.replace(SECRET, "[redacted]") * 3


async def test_pages_of_a_file_show_no_piece_of_what_an_operators_pattern_finds(tmp_path: Path) -> None:
    async with calling(tmp_path, small("read_file", 9000, redact=["case-[0-9]{8}"])) as call:
        session = await call.opened()
        await call("write_file", session=session, path="a", text="a case-12345678 b")
        told = await call.told("read_file", session=session, path="a", length=9)
        assert (told["text"], told["next_offset"]) == ("a [redacted]", 15)


async def test_parts_of_what_is_no_text_show_no_piece_of_a_secret_and_keep_their_length(tmp_path: Path) -> None:
    async with calling(tmp_path) as call:
        call.executor.screens = screen
        session = await call.opened()
        whole = b"\0\xff" + SECRET.encode() + b"\xff\0"
        await call("write_file", session=session, path="a", base64=base64.b64encode(whole).decode())
        answer = await call("read_file", session=session, path="a", length=12)
        assert answer.result is not None
        assert base64.b64decode(answer.result["content"][0]["resource"]["blob"]) == b"\0\xff" + b"*" * 10


@pytest.mark.parametrize(("offset", "length"), [(0, 12), (12, 12), (20, None), (0, None), (30, 100)])
async def test_a_part_that_somebody_in_this_process_reads_shows_no_piece_of_a_secret(
    offset: int, length: int | None, tmp_path: Path
) -> None:
    got: list[bytes] = []

    async def sink(piece: bytes) -> None:
        got.append(piece)

    async with calling(tmp_path) as call:
        call.executor.screens = screen
        session = await call.opened()
        await call("write_file", session=session, path="a", text=WHOLE)
        wanted = {"offset": offset} | ({} if length is None else {"length": length})
        told = await call.told("read_file", Attached(sink=sink), session=session, path="a", **wanted)
        masked = WHOLE.replace(SECRET, "*" * len(SECRET)).encode()
        expected = masked[offset : None if length is None else offset + length]
        assert (b"".join(got), told["bytes"], told["sha256"]) == (expected, len(expected), named(expected)["sha256"])
