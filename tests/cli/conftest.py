"""Each file here has a home of its own, so that `--demo` and `last` speak of its own calls alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module", autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("cli-home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(path))
        patch.setenv("COLUMNS", "200")
        yield path
