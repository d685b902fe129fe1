"""Which backends there are, and what is said of one that cannot be made."""

from __future__ import annotations

from typing import get_args

import pytest

from ringfence.compose.backends import ROWS, make_backend
from ringfence.config.schema import SandboxSection
from ringfence.config.settings import SandboxSettings
from ringfence.core.box import BACKENDS, LEVELS, NOT_BUILT
from ringfence.core.errors import Unavailable


def test_every_backend_is_in_one_list_and_has_a_row_once_it_is_built() -> None:
    assert set(BACKENDS.values()) <= set(LEVELS)
    assert ROWS.keys() == BACKENDS.keys() - NOT_BUILT
    assert {*BACKENDS, "auto"} == set(get_args(SandboxSection.model_fields["backend"].annotation))


@pytest.mark.parametrize("name", [*sorted(NOT_BUILT), "chroot"])
def test_a_backend_that_is_not_there_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(Unavailable, match=f"sandbox backend {name} (is not built yet|does not exist)"):
        make_backend(SandboxSettings(backend=name))
