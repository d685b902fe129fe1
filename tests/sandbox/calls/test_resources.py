"""What sessions leave in /workspace/output are resources: of their owner, while they live and for a time after."""

from __future__ import annotations

import base64
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringfence.contract import build
from ringfence.errors import Refused
from ringfence.model import Answer, Grant
from tests.faking import make_call
from tests.sandbox.calling import ALLOWED, MINE, OTHERS, Caller, calling
from tests.sandbox.calls.test_files import PNG

pytestmark = pytest.mark.anyio

LISTS = build("ringfence:lists", {"transport": "sandboxed_exec", "tool": "resources/read", "mode": "read"})[0]


async def read(call: Caller, uri: str, principal: Any = MINE, most: int = 1_000_000) -> Answer:
    contract = replace(LISTS, result=replace(LISTS.result, max_bytes=most))
    asked = make_call(uri, {"uri": uri}, kind="resource", method="resources/read", principal=principal)
    call.executor.check(asked, contract)
    return await call.executor.run(Grant(asked, contract, ALLOWED, None, "d", None, time.monotonic() + 600))


async def listed(call: Caller, principal: Any = MINE) -> list[str]:
    return [each["uri"] for each in await call.executor.resources(principal, templates=False)]


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
        assert await call.executor.resources(MINE, templates=True) != []


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
        call.file("output").rmdir()
        call.file("output").symlink_to("/etc")
        assert await listed(call) == []
