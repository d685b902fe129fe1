"""What is promised of a fresh box holds for the box of an MCP server, which has folders of the host besides."""

from __future__ import annotations

import pytest

from ringfence.promises import CATALOGUE
from ringfence.promises.inserver import NOT_THERE, InServer
from ringfence.sandbox.process.backend import ProcessBackend
from tests.boxing import need_boxes
from tests.promises.keeping import kept

pytestmark = pytest.mark.anyio


async def test_every_promise_is_kept_by_the_box_of_a_server() -> None:
    need_boxes()
    backend = InServer(ProcessBackend(depth=0))
    assert await kept(backend, NOT_THERE) > 240


def test_what_is_left_out_exists() -> None:
    assert NOT_THERE.keys() <= {case.id for case in CATALOGUE}
