"""A client on the other end of a pipe that sends, and does not read what it is answered."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
from typing import Any

import anyio
import pytest
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCResponse

from ringfence.core.model import Principal
from ringfence.front import stdio
from ringfence.front.stdio import StdioFront
from tests import tooling

pytestmark = pytest.mark.anyio


def unread(descriptor: int) -> int:
    return int(struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, b"\0" * 4))[0])


async def test_of_a_client_that_does_not_read_its_answers_nothing_more_is_read() -> None:
    front: Any = None
    made = StdioFront(front, lambda: Principal("a"))
    inbound, taken = anyio.create_memory_object_stream[SessionMessage | Exception](10)
    outbound, answers = anyio.create_memory_object_stream[SessionMessage](0)
    theirs, ours = os.pipe()
    sink, their_sink = os.pipe()
    answer = SessionMessage(JSONRPCResponse(jsonrpc="2.0", id=1, result={}))
    async with anyio.create_task_group() as group:
        for _ in range(stdio.MAX_UNREAD):
            group.start_soon(outbound.send, answer)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(made._read, theirs, inbound, outbound)
        os.write(ours, b'{"jsonrpc": "2.0", "id": 2, "method": "ping"}\n')
        await tooling.until(lambda: unread(ours) == 0)
        await anyio.sleep(0.2)
        assert taken.statistics().current_buffer_used == 0, "it is not taken while the client reads nothing"
        group.start_soon(made._write, their_sink, answers)
        with anyio.fail_after(tooling.PATIENCE):
            message = await taken.receive()
        assert isinstance(message, SessionMessage) and message.message.id == 2  # type: ignore[union-attr]
        os.close(ours)
        group.cancel_scope.cancel()
    os.close(sink)
    taken.close()
