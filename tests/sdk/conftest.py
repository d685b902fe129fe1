"""What tests of the SDK with real boxes share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence.sdk import engine
from ringfence.sdk.blocking import Sandbox
from tests import boxing


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The state of a home of this module's own; its engine and its sandboxes are gone with it."""
    boxing.need_boxes()
    home = tmp_path_factory.mktemp("sdk-home")
    engine.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        patch.delenv("RINGFENCE_CONFIG", raising=False)
        yield home / ".local/state/ringfence"
        for info in Sandbox.list():
            if info.state != "stopped":
                Sandbox.connect(info.id).kill()
        engine.close()


@pytest.fixture(scope="module")
def sandbox(state: Path) -> Iterator[Sandbox]:
    """One for the tests of a module that do not mind what others left in it."""
    with Sandbox.create() as made:
        yield made
