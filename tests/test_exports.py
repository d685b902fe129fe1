"""The public names: each is there, comes from where it is said to come from, and there are no others."""

from __future__ import annotations

import subprocess
import sys

import pytest

import ringfence


def test_every_public_name_is_there_and_has_a_home() -> None:
    assert set(ringfence._HOMES) | {"__version__"} == set(ringfence.__all__)
    for name, home in ringfence._HOMES.items():
        found = getattr(ringfence, name)
        assert found.__module__ == home
        assert found is getattr(sys.modules[home], name)
        assert found.__doc__
    assert set(ringfence.__all__) <= set(dir(ringfence))


def test_nothing_else_is_public() -> None:
    code = "import ringfence; print(sorted(n for n in dir(ringfence) if n[0] != '_'))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    own = {"annotations", "importlib", "TYPE_CHECKING"}  # what its first lines need
    assert set(eval(shown)) - own == set(ringfence.__all__) - {"__version__"}


@pytest.mark.parametrize("name", ["gateway", "App", "_nobody", "Sandbox_", "Runs"])
def test_an_unknown_name_is_an_attribute_error(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'ringfence' has no attribute '{name}'"):
        getattr(ringfence, name)


def test_star_import_gives_what_is_listed() -> None:
    space: dict[str, object] = {}
    exec("from ringfence import *", space)
    assert set(space) - {"__builtins__"} == set(ringfence.__all__)


def test_version_is_a_version() -> None:
    assert [part.isdigit() for part in ringfence.__version__.split(".")] == [True, True, True]
