"""What a box may do more or less: who listens in it, and which programs it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfence import config


def shell(**keys: str) -> config.Config:
    given = ", ".join(f"{key}: {value}" for key, value in keys.items())
    text = f"capabilities: {{run_shell: {{transport: sandboxed_exec, {given}}}}}"
    return config.loads(text, file="ringfence.yaml", base=Path("/srv"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("denied", "allowed"),
        ("denied", "{web: 80}"),
        ("{web: 80}", "allowed"),
        ("{web: 80}", "{web: 81}"),
        ("{web: 80}", "{web: 80, more: 81}"),
    ],
)
def test_who_may_listen(old: str, new: str) -> None:
    assert len(config.loosens(shell(listen=old), shell(listen=new))) == 1
    assert config.loosens(shell(listen=new), shell(listen="denied")) == []
    assert config.loosens(shell(listen="allowed"), shell(listen=old)) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("{allow: [ls]}", "{allow: [ls, cat]}"),
        ("{allow: [ls]}", "{allow: [ls], ask: [cat]}"),
        ("{allow: [ls], ask: [cat]}", "{allow: [ls, cat]}"),
        ("{allow: [ls]}", "{}"),
        ("{deny: [cat]}", "{ask: [cat]}"),
        ("{deny: [cat]}", "{}"),
        ("{ask: [cat]}", "{}"),
        ("{deny: [cat, ls]}", "{deny: [cat]}"),
    ],
)
def test_programs_may_become_fewer(old: str, new: str) -> None:
    assert len(config.loosens(shell(commands=old), shell(commands=new))) == 1
    assert config.loosens(shell(commands=new), shell(commands=old)) == []
    assert len(config.loosens(shell(commands=old), shell(listen="denied"))) == 1
    assert config.loosens(shell(listen="denied"), shell(commands=old)) == []
