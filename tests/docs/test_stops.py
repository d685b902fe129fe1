"""The stops of a call, a run and a step stand in docs/architecture.md as real calls show them."""

from __future__ import annotations

import pytest

from scripts import stops
from tests import boxing

pytestmark = pytest.mark.slow

NOT_ON_THIS_WAY = {"upstream/http.py"}
"""The demo's server is reached over stdio."""


def test_calls_enter_the_files_that_the_page_names() -> None:
    boxing.need_boxes()
    entered = stops.stops_of_calls()
    missing = {
        which: [
            file
            for file in stops.on_page(which)
            if not file.startswith(stops.UNTRACED) and file not in entered[which] and file not in NOT_ON_THIS_WAY
        ]
        for which in stops.PATHS
    }
    assert missing == {which: [] for which in stops.PATHS}
    assert all(len(stops.on_page(which)) >= len(stops.PATHS) for which in stops.PATHS), "the page was read"
