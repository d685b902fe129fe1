"""The pipeline that is bound to one box, without a box."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfence.cli.box.mcp_server import LEFT_OUT, TOOLS, BoxPipeline
from ringfence.sandbox.tools.toolkit import declarable_tools
from tests.faking import Said, governed, make_call


@pytest.mark.anyio
async def test_a_call_that_is_taken_back_before_it_begins_is_on_record(tmp_path: Path) -> None:
    async with governed(tmp_path, Said()) as way:
        call = make_call("list_processes")
        await BoxPipeline(way.pipeline, "box_1").withdrawn(call)
        (record,) = way.store.reader().records(call_id=call.id)
        assert (record.kind, record.body["reason_code"]) == ("finished", "cancelled")


def test_of_every_tool_it_is_decided_whether_the_client_of_one_box_has_it() -> None:
    assert sorted((*TOOLS, *LEFT_OUT)) == sorted(declarable_tools())
