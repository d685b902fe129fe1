"""Commands that fetch before they run: which package it is, and what cannot be pinned."""

from __future__ import annotations

import pytest

from ringfence.cli.init.runners import NotTaken, taken_apart


@pytest.mark.parametrize(
    ("command", "kind", "packages", "program", "arguments"),
    [
        ("npx -y pkg /docs", "npm", ("pkg",), None, ("/docs",)),
        ("npx --yes @me/pkg@1.2.3 -- --flag", "npm", ("@me/pkg@1.2.3",), None, ("--flag",)),
        ("npx -p @me/pkg tool x", "npm", ("@me/pkg",), "tool", ("x",)),
        ("npx --package=@me/pkg tool", "npm", ("@me/pkg",), "tool", ()),
        ("cmd /c npx -y pkg", "npm", ("pkg",), None, ()),
        ("/usr/bin/npx pkg", "npm", ("pkg",), None, ()),
        ("bunx pkg", "npm", ("pkg",), None, ()),
        ("npm exec -y pkg", "npm", ("pkg",), None, ()),
        ("pnpm dlx pkg", "npm", ("pkg",), None, ()),
        ("uvx mcp-server-time --tz=x", "pypi", ("mcp-server-time",), "mcp-server-time", ("--tz=x",)),
        ("uvx pkg@1.2", "pypi", ("pkg==1.2",), "pkg", ()),
        ("uvx pkg@latest", "pypi", ("pkg",), "pkg", ()),
        ("uvx --from pkg[x]==2 tool a", "pypi", ("pkg[x]==2",), "tool", ("a",)),
        ("uvx --with other --python 3.12 pkg", "pypi", ("pkg", "other"), "pkg", ()),
        ("uv tool run pkg", "pypi", ("pkg",), "pkg", ()),
        ("pipx run --spec pkg tool", "pypi", ("pkg",), "tool", ()),
    ],
)
def test_taken_apart(command: str, kind: str, packages: tuple, program: str | None, arguments: tuple) -> None:
    found = taken_apart(tuple(command.split()))
    assert found is not None
    assert (found.kind, found.packages, found.program, found.arguments) == (kind, packages, program, arguments)


@pytest.mark.parametrize("command", ["node server.js", "python -m server", "/opt/server", "uv run server.py"])
def test_what_is_there_already_is_left_as_it_is(command: str) -> None:
    assert taken_apart(tuple(command.split())) is None


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("npx", "no package"),
        ("npx -y github:me/repo", "no package of a registry"),
        ("npx ./here", "no package of a registry"),
        ("npx -c script", "option"),
        ("uvx --from git+https://x.example/y tool", "no package of an index"),
        ("uvx --index-url http://x tool", "option"),
        ("uvx", "no package"),
    ],
)
def test_what_cannot_be_pinned_is_not_taken(command: str, why: str) -> None:
    with pytest.raises(NotTaken, match=why):
        taken_apart(tuple(command.split()))
