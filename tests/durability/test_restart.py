from __future__ import annotations

import time
import pytest

from tests.durability.stage import Stage, client

pytestmark = pytest.mark.anyio


async def test_it(stage: Stage) -> None:
    config = stage.configure()
    t = time.monotonic()
    with stage.serving(config) as gateway:
        print("start", time.monotonic() - t)
        for mode in ("legacy", "2026-07-28"):
            async with client(gateway, mode) as caller:
                for n in range(3):
                    t = time.monotonic()
                    print(await caller.call("append", stage.line(f"a{n}")), time.monotonic() - t)
        t = time.monotonic()
    print("stop", time.monotonic() - t)
    stage.assert_verifies()
    stage.assert_each_call_closed_once()
    stage.assert_each_effect_was_started()
    assert 0
