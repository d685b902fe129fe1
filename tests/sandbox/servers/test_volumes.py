"""Whose a volume is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringfence.compose.servers import launch_settings
from ringfence.core.box import Limits
from ringfence.core.errors import StoreError, Unavailable
from ringfence.core.model import Principal, ServerSpec, ServerVolume
from ringfence.sandbox.servers.launcher import BoxLauncher
from ringfence.sandbox.servers.volumes import claim, is_free, owner_of

WHO = Principal("local")
OURS, THEIRS = Path("/ours/ringfence.yaml"), Path("/theirs/ringfence.yaml")


def test_a_volume_belongs_to_the_configuration_that_had_it_first(tmp_path: Path) -> None:
    claim(tmp_path, "memory", OURS)
    claim(tmp_path, "memory", OURS)
    with pytest.raises(StoreError, match="belongs to the configuration /ours/"):
        claim(tmp_path, "memory", THEIRS)
    assert owner_of(tmp_path, "memory") == str(OURS)
    assert [each.name for each in (tmp_path / "owners").iterdir()] == ["memory"]


def test_a_name_is_free_where_nobody_else_keeps_anything_under_it(tmp_path: Path) -> None:
    assert is_free(tmp_path, "memory", OURS)
    claim(tmp_path, "memory", OURS)
    assert is_free(tmp_path, "memory", OURS) and not is_free(tmp_path, "memory", THEIRS)
    (tmp_path / "agent" / "older").mkdir(parents=True)
    assert not is_free(tmp_path, "older", OURS)
    claim(tmp_path, "older", OURS)
    assert is_free(tmp_path, "older", OURS)


def test_a_server_does_not_get_what_another_configurations_server_keeps(tmp_path: Path) -> None:
    backend: Any = None
    spec = ServerSpec("notes", ("true",), volumes=(ServerVolume("memory", "/data"),))
    given = replace(launch_settings(Limits(), {}, None), volumes=tmp_path / "servers")
    ours = BoxLauncher(backend, replace(given, configuration=OURS))
    assert [mount.at for mount in ours._with_volumes(spec, WHO).mounts] == ["/data"]
    with pytest.raises(Unavailable, match="belongs to the configuration /ours/"):
        BoxLauncher(backend, replace(given, configuration=THEIRS))._with_volumes(spec, WHO)
