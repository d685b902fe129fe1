"""What tests of images share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import boxing
from tests.packages.hostile import Fake, serving


@pytest.fixture
def own_engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The engines of whoever runs this know nothing but what is in this folder."""
    boxing.need_boxes()
    for name in ("REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "registries.conf").write_text("")
    monkeypatch.setenv("CONTAINERS_REGISTRIES_CONF", str(tmp_path / "registries.conf"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    return tmp_path


@pytest.fixture
def fake(own_engines: Path) -> Iterator[Fake]:
    with serving() as found:
        yield found
