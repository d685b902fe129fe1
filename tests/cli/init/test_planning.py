"""What becomes of the servers of a file before anything is started."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ringfence import config
from ringfence.cli.init import takeover
from ringfence.cli.init.planning import NotTaken, Planner, ServerPlan, taken_apart
from ringfence.compose.servers import volumes_folder
from ringfence.config import writing
from ringfence.config.clientfiles import parse
from ringfence.sandbox.servers.volumes import claim


def planned(servers: Any, folder: Path = Path("/project"), plain: Sequence[str] = ()) -> Planner:
    return Planner(parse(json.dumps({"mcpServers": servers}), folder / ".mcp.json"), plain)


def one(entry: Any, folder: Path = Path("/project"), name: str = "it") -> ServerPlan:
    return planned({name: entry}, folder).plans()[0]


def loads(planner: Planner) -> config.Config:
    plans = planner.plans()
    servers = [writing.WrittenEntry(plan.name, plan.keys, plan.remarks) for plan in plans]
    text = writing.configuration([], {"servers": servers, "secrets": [asked.entry() for asked in planner.secrets]})
    return config.loads(text, file="ringfence.yaml", base=Path("/project"))


def test_folders_among_the_arguments_are_mounted_read_only_at_their_own_place(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    plan = one({"command": "node", "args": ["s.js", "./docs", "--also=./docs", "/nowhere", "./gone"]}, tmp_path)
    docs = str(tmp_path / "docs")
    assert plan.keys["mounts"] == [{"host": docs, "at": docs, "mode": "ro"}]
    assert plan.keys["command"] == ["node", "s.js", docs, f"--also={docs}", "/nowhere", str(tmp_path / "gone")]


@pytest.mark.parametrize("path", ["/", "~", "~/.ssh", "/home", "/proc"])
def test_a_folder_with_credentials_is_not_mounted(path: str) -> None:
    (Path.home() / ".ssh").mkdir(exist_ok=True)
    plan = one({"command": "node", "args": [path]})
    assert "mounts" not in plan.keys
    assert any("unsafe: REASON" in remark for remark in plan.remarks)


def test_what_a_box_will_see_outside_of_the_project_is_shown(tmp_path: Path) -> None:
    project, modules = tmp_path / "project", tmp_path / "node_modules"
    for server in (project / "bin" / "server", modules / "a" / "index.js"):
        server.parent.mkdir(parents=True)
        server.write_text("#!/bin/sh\n")
        server.chmod(0o755)
    (project / "modules").symlink_to(modules)
    seen = "\n".join(takeover._shown(one({"command": str(modules / "a" / "index.js")}, project)))
    assert f"  sees     {modules} (read-only, because its command needs it)" in seen
    for command in ("./bin/server", "./modules/a/index.js"):
        assert "because its command" not in "\n".join(takeover._shown(one({"command": command}, project)))


def test_a_link_of_a_project_that_leads_out_of_it_is_not_mounted(tmp_path: Path) -> None:
    private, project = tmp_path / "private", tmp_path / "project"
    (project / "inside").mkdir(parents=True)
    private.mkdir()
    (project / "docs").symlink_to(private)
    (project / "near").symlink_to("inside")
    for given in (
        {"args": ["./docs"]},
        {"args": [str(project / "docs")]},
        {"cwd": "./docs"},
    ):
        plan = one({"command": "server", **given}, project)
        assert not plan.keys.get("mounts"), given
        assert any(f"leads from there to {private}" in remark for remark in plan.remarks)
    bound = one({"command": "docker", "args": ["run", "-v", "./docs:/data", "image"]}, project)
    assert not bound.keys.get("mounts")
    near = one({"command": "server", "args": ["./near"]}, project)
    assert near.keys["mounts"] == [{"host": str(project / "inside"), "at": str(project / "near"), "mode": "ro"}]


def test_names_become_names_of_ours() -> None:
    plans = planned({name: {"command": "x"} for name in ("my server", "my/server", "ringfence", "ключ")}).plans()
    assert [plan.name for plan in plans] == ["my_server", "my_server_2", "ringfence_2", "server"]


def test_a_secret_in_plain_text_becomes_a_reference() -> None:
    servers = {"hub": {"command": "x", "env": {"HUB_TOKEN": "abcdefabcdef", "LEVEL": "info"}}}
    planner = planned(servers, plain=["LEVEL"])
    settings = loads(planner)
    assert settings.servers["hub"].secrets == ("hub_token",)
    assert settings.servers["hub"].env == {"LEVEL": "info"}
    assert planner.secrets[0].given is None
    found = settings.secrets["hub_token"]
    assert (found.source, found.options["name"], found.env) == ("env", "HUB_TOKEN", "HUB_TOKEN")


@pytest.mark.parametrize("value", ["info", "correct horse battery staple", "/srv/data", "1", "true", ""])
def test_a_value_with_an_innocent_name_becomes_a_reference_unless_a_person_says_that_it_is_no_secret(
    value: str,
) -> None:
    servers = {"hub": {"command": "x", "env": {"LEVEL": value, "OTHER": value}}}
    planner = planned(servers, plain=["OTHER"])
    settings = loads(planner)
    assert settings.servers["hub"].env == {"OTHER": value}
    assert settings.servers["hub"].secrets == ("level",)
    assert settings.secrets["level"].options["name"] == "LEVEL"
    (plan,) = planned(servers).plans()
    assert "env" not in plan.keys
    assert any("--plain LEVEL" in remark for remark in plan.remarks)


def test_a_value_that_is_too_short_for_a_secret_is_named_with_what_to_do() -> None:
    planner = planned({"a": {"command": "node", "env": {"LEVEL": "debug", "LONG": "x" * 12, "PORT": "80"}}})
    (remark,) = [remark for remark in planner.plans()[0].remarks if remark.startswith("Too short")]
    assert "--plain LEVEL --plain PORT" in remark and "LONG" not in remark and "debug" not in remark


def test_two_servers_with_values_of_one_name_have_two_secrets() -> None:
    entry = {"command": "x", "env": {"API_KEY": "abcdefabcdef"}}
    planner = planned({"a": entry, "b": entry})
    settings = loads(planner)
    assert settings.servers["a"].secrets != settings.servers["b"].secrets
    assert {asked.variable for asked in planner.secrets} == {"API_KEY", "B_API_KEY"}


def test_two_servers_with_one_reference_share_a_secret() -> None:
    entry = {"command": "x", "env": {"KEY": "${SHARED}"}}
    planner = planned({"a": entry, "b": entry})
    settings = loads(planner)
    assert settings.servers["a"].secrets == settings.servers["b"].secrets == ("shared",)
    assert planner.secrets[0].servers == ["a", "b"]


def test_a_header_of_a_remote_server_is_put_in_by_us() -> None:
    entry = {"url": "https://desk.example/mcp", "headers": {"Authorization": "Bearer ${DESK}", "X-Team": "blue"}}
    planner = planned({"desk": entry})
    settings = loads(planner)
    found = settings.secrets["desk"]
    assert (found.hosts, found.header, found.options["name"]) == (("desk.example",), "Authorization", "DESK")
    assert any("X-Team" in remark for remark in planner.plans()[0].remarks)


def test_a_variable_that_the_command_sets_becomes_a_reference() -> None:
    planner = planned({"it": {"command": "env", "args": ["FOO=hunter2-hunter2", "node", "s.js"]}})
    settings = loads(planner)
    assert settings.servers["it"].secrets == ("foo",)
    plan = planner.plans()[0]
    assert plan.keys["command"] == ["node", "s.js"]
    shown = "\n".join(takeover._shown(plan))
    assert "FOO: (not copied; taken from your variable " in shown and "hunter2" not in shown


def test_the_value_of_a_header_is_not_shown() -> None:
    headers = {"X-Other": "hunter2", "Authorization": "Bearer ${DESK}"}
    shown = "\n".join(takeover._shown(one({"url": "https://desk.example/mcp", "headers": headers})))
    assert "X-Other: (its value is not copied)" in shown and "hunter2" not in shown
    assert "Authorization: Bearer ${DESK}" in shown


def test_what_cannot_be_taken_over_says_why() -> None:
    assert "no image" in str(one({"command": "docker", "args": ["run", "-i"]}).problem)
    assert "disabled" in str(one({"command": "x", "disabled": True}).problem)


# ── Images ──


def image(folder: Path, *words: str, **more: Any) -> ServerPlan:
    return one({"command": "docker", "args": ["run", "-i", "--rm", *words], **more}, folder)


def test_an_image_is_fetched_and_sees_what_is_bound_into_it_read_only(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    bound = ["-v", "./docs:/data", "-v", f"{tmp_path}/docs:/more:ro", "-v", "./none:/none", "-v", "./docs:/etc/x"]
    plan = image(tmp_path, *bound, "-w", "/srv", "h.example/me/x:1", "./docs", str(tmp_path / "docs"))
    docs = str(tmp_path / "docs")
    assert plan.problem is None and plan.runner is not None
    assert (plan.runner.kind, plan.runner.packages) == ("image", ("h.example/me/x:1",))
    assert plan.runner.arguments == ("./docs", docs)
    assert plan.keys["mounts"] == [
        {"host": docs, "at": "/data", "mode": "ro"},
        {"host": docs, "at": "/more", "mode": "ro"},
    ]
    assert plan.keys["cwd"] == "/srv"
    told = " ".join(plan.remarks)
    assert "/data is mounted read-only" in told and "/more" not in told
    assert "./none is not mounted" in told and "cannot be at /etc/x" in told


def test_a_socket_of_the_host_is_bound_into_nothing(tmp_path: Path) -> None:
    """Read-only or not, whoever sees it can talk to what is behind it."""
    (tmp_path / "at" / "some").mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as listening, contextlib.chdir(tmp_path / "at/some"):
        listening.bind("agent")
    plan = image(tmp_path, "-v", "./at:/x", "h.example/x")
    assert "mounts" not in plan.keys and "a socket of a program of this host (some/agent)" in plan.remarks[0]
    named = one({"command": "x", "args": [str(tmp_path / "at")]}, tmp_path)
    assert "mounts" not in named.keys and "a socket of" in named.remarks[0]


@pytest.mark.parametrize("path", ["/", "~/.ssh", "/var/run/docker.sock", "/run", "/tmp", "/var"])
def test_what_holds_credentials_is_not_bound_into_an_image(tmp_path: Path, path: str) -> None:
    (Path.home() / ".ssh").mkdir(exist_ok=True)
    plan = image(tmp_path, "-v", f"{path}:/x", "h.example/x")
    assert "mounts" not in plan.keys
    assert any("is not mounted" in remark for remark in plan.remarks)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--privileged", "h.example/x"], "--privileged"),
        (["../x"], "not the name of an image"),
        (["--platform", "linux/pdp11", "h.example/x"], "linux/pdp11"),
        (["--platform", "windows/amd64", "h.example/x"], "windows"),
    ],
)
def test_an_image_that_is_not_taken(tmp_path: Path, words: list[str], why: str) -> None:
    assert why in str(image(tmp_path, *words).problem)


def test_secrets_of_an_image_become_names(tmp_path: Path) -> None:
    words = ["-e", "HUB_TOKEN", "-e", "LEVEL=info", "-e", "API_KEY=abcdefabcdef"]
    entry = {"command": "docker", "args": ["run", *words, "h.example/x"], "env": {"HUB_TOKEN": "abcdefabcdef"}}
    planner = planned({"hub": entry}, tmp_path, plain=["LEVEL"])
    (plan,) = planner.plans()
    assert plan.keys["env"] == {"LEVEL": "info"}
    assert plan.keys["secrets"] == ["hub_token", "api_key"]
    assert [asked.variable for asked in planner.secrets] == ["HUB_TOKEN", "API_KEY"]


# ── Commands that fetch a package ─────────────────────────────────────────────────────────────────


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


# ── Servers that keep data ──


@pytest.mark.parametrize(
    "entry",
    [
        {"command": "npx", "args": ["-y", "@modelcontextprotocol/server-memory"]},
        {"command": "npx", "args": ["-y", "@modelcontextprotocol/server-memory@1.2"], "env": {"MEMORY_FILE_PATH": "x"}},
        {"command": "node", "args": ["/srv/node_modules/@modelcontextprotocol/server-memory/dist/index.js"]},
        {"command": "mcp-server-memory"},
        {"command": "docker", "args": ["run", "-i", "mcp/memory"]},
    ],
)
def test_a_server_that_keeps_a_file_has_a_volume_for_it(entry: Any) -> None:
    plan = one(entry, name="notes")
    assert plan.keys["volumes"] == [{"name": "notes", "at": "/data"}]
    assert plan.keys["env"] == {"MEMORY_FILE_PATH": "/data/memory.jsonl"}
    assert "secrets" not in plan.keys
    assert any("in the volume notes" in remark for remark in plan.remarks)


@pytest.mark.parametrize(
    ("arguments", "file"),
    [([], "sqlite.db"), (["--db-path", "/nowhere/shop.db"], "shop.db"), (["--db-path=~/nowhere.db"], "nowhere.db")],
)
def test_a_database_that_is_not_there_yet_lies_in_a_volume(arguments: list[str], file: str) -> None:
    plan = one({"command": "uvx", "args": ["mcp-server-sqlite", *arguments]})
    assert plan.runner is not None and plan.runner.arguments == ("--db-path", f"/data/{file}")
    assert plan.keys["volumes"] == [{"name": "it", "at": "/data"}]


def test_a_database_of_the_host_is_not_replaced_by_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "shop.db").touch()
    plan = one({"command": "uvx", "args": ["mcp-server-sqlite", "--db-path", "./shop.db"]}, tmp_path)
    assert plan.runner is not None and plan.runner.arguments == ("--db-path", str(tmp_path / "shop.db"))
    assert "volumes" not in plan.keys
    assert any("mode: rw" in remark for remark in plan.remarks)


def test_a_volume_that_exists_is_not_given_to_a_server_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    theirs, output = tmp_path / "theirs.yaml", tmp_path / "ringfence.yaml"
    claim(volumes_folder(config.state_folder()), "memory", theirs)
    entry = {"command": "docker", "args": ["run", "-v", "memory:/data", "-v", "mine:/more", "notes"]}
    plan = one(entry)
    takeover._keep_apart(takeover.TakenOver(parse('{"mcpServers": {}}', output), [plan], []), output)
    taken, mine = (volume["name"] for volume in plan.keys["volumes"])
    assert taken.startswith("memory_") and mine == "mine"
    assert f"A volume memory exists already ({theirs})" in "\n".join(takeover._shown(plan))


def test_a_named_volume_of_a_container_becomes_one_of_the_server() -> None:
    words = ["run", "-i", "-v", "shop:/mcp", "mcp/sqlite", "--db-path", "/mcp/shop.db"]
    plan = one({"command": "docker", "args": words})
    assert plan.keys["volumes"] == [{"name": "shop", "at": "/mcp"}]
    assert plan.runner is not None and plan.runner.arguments == ("--db-path", "/mcp/shop.db")


def test_a_file_that_knows_the_name_of_a_users_variable_does_not_get_its_value() -> None:
    servers = {
        "aws": {
            "url": "https://x.example/mcp",
            "headers": {"GITHUB_TOKEN": "dummy-dummy-dummy", "Secret_Key": "x" * 20},
        },
        "it": {
            "command": "node",
            "args": ["s.js"],
            "env": {"API_KEY": "the-very-same-1", "GITHUB_TOKEN": "another-one-2"},
        },
    }
    ours = {"GITHUB_TOKEN": "real", "API_KEY": "the-very-same-1"}
    planner = Planner(parse(json.dumps({"mcpServers": servers}), Path("/project/.mcp.json")), (), ours)
    plans = planner.plans()
    names = [asked.variable for asked in planner.secrets]
    assert names == ["FOR_AWS_GITHUB_TOKEN", "FOR_AWS_SECRET_KEY", "API_KEY", "IT_GITHUB_TOKEN"]
    told = "\n".join(remark for plan in plans for remark in plan.remarks)
    assert "Your GITHUB_TOKEN differs from the value in the file, so this server does not get it" in told
    assert "set FOR_AWS_GITHUB_TOKEN" in told and "Your API_KEY" not in told
    assert "real" not in repr((plans, planner.secrets)) and "very-same" not in repr((plans, planner.secrets))
    assert loads(planner)


def test_a_variable_that_was_set_as_it_was_asked_for_is_taken() -> None:
    servers = {"it": {"command": "node", "args": ["s.js"], "env": {"GITHUB_TOKEN": "placeholder-1"}}}
    ours = {"GITHUB_TOKEN": "real", "IT_GITHUB_TOKEN": "else", "FOR_IT_GITHUB_TOKEN": "set by the user"}
    planner = Planner(parse(json.dumps({"mcpServers": servers}), Path("/project/.mcp.json")), (), ours)
    planner.plans()
    assert [asked.variable for asked in planner.secrets] == ["FOR_IT_GITHUB_TOKEN"]
