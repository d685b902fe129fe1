"""The walk-through of an auditor, run as it stands: a call that a person approves, an export, and its verification."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests import boxing, tooling
from tests.docs.test_platform import _BLOCK, follow

pytestmark = pytest.mark.slow

PAGE = tooling.ROOT / "docs" / "tutorial-auditor.md"


def test_the_walk_through_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boxing.need_boxes()
    home, programs, work = (tmp_path / name for name in ("home", "bin", "work"))
    for folder in (home, programs, work):
        folder.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in ("RINGFENCE_KEYS", "RINGFENCE_CONFIG", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    (programs / "ringfence").write_text(f'#!/bin/sh\nexec {sys.executable} -m ringfence.cli.main "$@"\n')
    (programs / "ringfence").chmod(0o755)
    follow(_BLOCK.findall(PAGE.read_text()), work)
