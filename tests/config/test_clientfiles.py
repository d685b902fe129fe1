"""Files of MCP clients as hostile input: every form is read, nothing secret comes out, nothing crashes."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.config import clientfiles
from ringfence.config.clientfiles import ClientFile, ClientServer, parse
from ringfence.core.errors import ConfigError

CLAUDE = Path("/project/.mcp.json")
TOKEN = "ghp_" + "a1B2c3D4" * 5


def read(value: Any, path: Path = CLAUDE) -> ClientFile:
    return parse(value if isinstance(value, str) else json.dumps(value), path)


def one(entry: Any, path: Path = CLAUDE) -> ClientServer:
    return read({"mcpServers": {"it": entry}}, path).servers[0]


def problems(value: Any, path: Path = CLAUDE) -> str:
    with pytest.raises(ConfigError) as caught:
        read(value, path)
    return str(caught.value)


# ── Formats ───────────────────────────────────────────────────────────────────────────────────────


def test_the_file_of_claude_code() -> None:
    found = read(
        {
            "mcpServers": {
                "files": {"type": "stdio", "command": "npx", "args": ["-y", "server-filesystem", "/docs"], "env": {}},
                "desk": {"type": "http", "url": "https://desk.example/mcp", "headers": {"X-Team": "blue"}},
            }
        }
    )
    assert found.client == "claude-code"
    files, desk = found.servers
    assert files.command == ("npx", "-y", "server-filesystem", "/docs")
    assert (desk.url, desk.command, desk.headers[0].text) == ("https://desk.example/mcp", (), "blue")


@pytest.mark.parametrize(
    ("path", "client"),
    [
        ("/home/me/.config/Claude/claude_desktop_config.json", "claude-desktop"),
        ("/project/.cursor/mcp.json", "cursor"),
        ("/project/.mcp.json", "claude-code"),
    ],
)
def test_the_client_is_told_by_the_files_place(path: str, client: str) -> None:
    assert read({"mcpServers": {}}, Path(path)).client == client


def test_vs_code_has_servers_inputs_comments_and_a_last_comma() -> None:
    found = read(
        """{
        // what it asks for
        "inputs": [{"type": "promptString", "id": "key", "password": true},],
        "servers": { /* "not": this */
            "it": {"type": "stdio", "command": "node", "args": ["//no comment", "a,}"],
                   "env": {"KEY": "${input:key}"},},
        },
    }""",
        Path("/project/.vscode/mcp.json"),
    )
    assert (found.client, found.inputs) == ("vscode", ("key",))
    assert found.servers[0].command == ("node", "//no comment", "a,}")
    assert found.servers[0].env[0].variables == ("key",)


def test_settings_of_vs_code_hold_them_one_level_down() -> None:
    assert read({"mcp": {"servers": {"it": {"command": "x"}}}}).servers[0].name == "it"


def test_what_editors_put_in_by_themselves() -> None:
    entry = {"command": "node", "args": ["${workspaceFolder}/s.js", "${userHome}/d"]}
    found = read({"servers": {"it": entry}}, Path("/project/.vscode/mcp.json")).servers[0]
    assert found.command == ("node", "/project/s.js", "~/d")
    assert not found.unusable


# ── Secrets ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GITHUB_TOKEN", "short-one"),
        ("ANYTHING", TOKEN),
        ("ANYTHING", "postgres://me:hunter22@db/x"),
        ("ANYTHING", "q8Zk2mP0vX7tR4wL9sB1"),
        ("API_KEY", "hunter2"),
        ("ANYTHING", "${TOKEN:-q8Zk2mP0vX7tR4wL9sB1}"),
        ("ANYTHING", "${TOKEN}q8Zk2mP0vX7tR4wL9sB1"),
    ],
)
def test_a_secret_in_plain_text_is_named_and_not_copied(name: str, value: str) -> None:
    found = one({"command": "x", "env": {name: value}})
    assert found.env[0].kind == "hidden"
    assert value not in repr(found)


@pytest.mark.parametrize("value", ["${GH}", "${env:GH}", "Bearer ${GH}", "${input:GH}"])
def test_a_reference_is_kept_as_one(value: str) -> None:
    setting = one({"url": "https://x.example/mcp", "headers": {"Authorization": value}}).headers[0]
    assert (setting.kind, setting.text, setting.variables) == ("reference", value, ("GH",))


@pytest.mark.parametrize("value", ["info", "/home/me/notes/2024-meeting-minutes", "Europe/Berlin", "8080", "true"])
def test_a_plain_value_is_copied(value: str) -> None:
    setting = one({"command": "x", "env": {"LOG_LEVEL": value}}).env[0]
    assert (setting.kind, setting.text) == ("plain", value)


@pytest.mark.parametrize(
    "args",
    [
        *(["--token", "abcdef"], ["--api-key=abcdef"], [TOKEN], ["postgres://me:hunter22@db/x"], ["-p", TOKEN]),
        *(["docker", "run", "-e", "API_TOKEN=abcdef"], ["-c", "API_TOKEN='abcdef' exec x"], ["API_TOKEN=abcdef"]),
        *(
            ["--header", "Authorization: Basic bWU6cHc="],
            ["--header=Authorization:abcdef"],
            ["--header", "X-Team: abcdef"],
        ),
        *(['{"password": "abcdef"}'], ["{'apiKey':'abcdef'}"], ["/token:abcdef"], ["a=b;Password=abcdef"]),
    ],
)
def test_a_secret_among_the_arguments_makes_a_server_unusable(args: list[str]) -> None:
    found = one({"command": "x", "args": args})
    assert "may be a secret" in found.unusable[0]
    assert args[-1] not in repr(found)


@pytest.mark.parametrize(
    "words",
    [
        *(["env", "FOO=abcdef"], ["/usr/bin/env", "-i", "FOO=abcdef"], ["env", "-u", "X", "--", "FOO=abcdef"]),
        *(
            ["cross-env", "FOO=abcdef"],
            ["npx", "-y", "cross-env@7", "FOO=abcdef"],
            ["pnpm", "dlx", "cross-env", "FOO=abcdef"],
        ),
        *(["cmd", "/c", "cross-env", "FOO=abcdef"], ["env", "BAR=1", "env", "FOO=abcdef"]),
    ],
)
def test_a_variable_that_the_command_sets_is_one_of_env(words: list[str]) -> None:
    found = one({"command": words[0], "args": [*words[1:], "node", "s.js", "--level=3", "A=b"]})
    assert found.command == ("node", "s.js", "--level=3", "A=b")
    assert [(s.kind, s.text) for s in found.env if s.name == "FOO"] == [("plain", "abcdef")]
    assert found.unusable == ()
    assert any("sets" in note and "FOO" in note and "abcdef" not in note for note in found.notes)


def test_a_secret_that_the_command_sets_is_named_and_not_copied() -> None:
    found = one({"command": "env", "args": ["API_TOKEN=abcdef", "FOO=${BAR}", "node"]})
    assert [(s.name, s.kind) for s in found.env] == [("API_TOKEN", "hidden"), ("FOO", "reference")]
    assert "abcdef" not in repr(found)


def test_a_command_that_removes_variables_gets_none_of_them() -> None:
    entry = {"command": "env", "args": ["-u", "A", "C=3", "node"], "env": {"A": "1", "B": "2"}}
    found = one(entry)
    assert {s.name: s.text for s in found.env} == {"B": "2", "C": "3"}
    assert any(note.startswith("A of its env is left out") for note in found.notes)
    entry["args"] = ["-i", "C=3", "node"]
    assert {s.name: s.text for s in one(entry).env} == {"C": "3"}


def test_a_container_gets_what_the_command_before_it_sets() -> None:
    found = one({"command": "env", "args": ["FOO=abc", "BAR=1", "docker", "run", "-e", "FOO", "img"]})
    assert found.container is not None
    assert [(s.name, s.text) for s in found.env] == [("FOO", "abc")]


@pytest.mark.parametrize(
    "words",
    [
        *(["env", "-S", "FOO=hunter2 node"], ["env", "-C", "/x", "FOO=hunter2", "node"], ["env", "FOO=hunter2"]),
        *(
            ["sudo", "FOO=hunter2", "node"],
            ["sudo", "-n", "env", "FOO=hunter2", "node"],
            ["env", "--split-string=FOO=hunter2"],
        ),
        *(["nice", "env", "FOO=hunter2", "node"], ["cross-env-shell", "FOO=hunter2", "node"]),
        *(["sh", "-c", "FOO=hunter2 node"], ["bash", "-lc", "cd /x && export FOO=hunter2; node"]),
        *(["sh", "-c", "exec env -i FOO=hunter2 node"], ["env", "A=1", "sh", "-c", "B=2 FOO=hunter2 node"]),
    ],
)
def test_a_variable_that_cannot_be_taken_apart_is_not_shown(words: list[str]) -> None:
    found = one({"command": words[0], "args": words[1:]})
    assert "may be a secret" in found.unusable[0]
    assert "hunter2" not in repr(found)


@pytest.mark.parametrize("text", ["exec node s.js --level=3", "node s.js NAME=x", "cd /x && node s.js", "test $A = b"])
def test_words_of_a_shell_that_set_no_variable_are_taken_over(text: str) -> None:
    assert one({"command": "sh", "args": ["-c", text]}).unusable == ()


@pytest.mark.parametrize(
    "url", ["https://x.example/mcp?key=abc", "https://me:pw@x.example/", f"https://x.example/{TOKEN}"]
)
def test_a_secret_in_a_url_makes_a_server_unusable(url: str) -> None:
    found = one({"url": url})
    assert found.unusable
    assert url not in repr(found)


@pytest.mark.parametrize(
    "args",
    [
        *(["--host", "127.0.0.1:8080"], ["-v", "/data:/data:ro"], ["https://x.example/mcp"], ["C:/notes"]),
        *(['{"mode": "fast"}'], ["--header"], ["image:tag"]),
    ],
)
def test_arguments_with_colons_are_taken_over(args: list[str]) -> None:
    assert one({"command": "x", "args": args}).unusable == ()


def test_an_argument_from_the_clients_environment_cannot_be_known() -> None:
    assert "${DB}" in one({"command": "x", "args": ["${DB}"]}).unusable[0]


# ── What cannot be taken over, and what is said of it ─────────────────────────────────────────────


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"type": "sse", "url": "https://x.example/sse"}, "SSE"),
        ({"command": "x", "disabled": True}, "disabled"),
        ({"command": "/usr/bin/ringfence", "args": ["serve", "--stdio"]}, "Ringfence itself"),
    ],
)
def test_unusable(entry: Any, said: str) -> None:
    assert said in one(entry).unusable[0]


def test_keys_that_are_not_known_are_told() -> None:
    assert any("magic" in note for note in one({"command": "x", "magic": 1}).notes)
    assert any("envFile" in note for note in one({"command": "x", "envFile": ".env"}).notes)


# ── Hostile files ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("[]", "neither mcpServers nor servers"),
        ("{", "not JSON"),
        ('{"mcpServers": {}, "servers": {}}', "both"),
        ('{"mcpServers": {"a": {"command": "x"}, "a": {"command": "y"}}}', "duplicate key"),
        ('{"mcpServers": {"a": {"command": "x", "command": "y"}}}', "duplicate key"),
        ('{"mcpServers": []}', "must be a mapping"),
        ('{"mcpServers": {"a": 1}}', "must be a mapping"),
        ('{"mcpServers": {"a": {}}}', "a command or a url"),
        ('{"mcpServers": {"a": {"command": "x", "url": "https://x.example"}}}', "not both"),
        ('{"mcpServers": {"a": {"command": ["x"]}}}', "must be text"),
        ('{"mcpServers": {"a": {"command": "x", "args": "y"}}}', "must be a list"),
        ('{"mcpServers": {"a": {"command": "x", "args": [1]}}}', "must be text"),
        ('{"mcpServers": {"a": {"command": "x\\u0000"}}}', "NUL"),
        ('{"mcpServers": {"a": {"command": ""}}}', "command"),
        ('{"mcpServers": {"a": {"command": "x", "env": {"A B": "c"}}}}', "variable"),
        ('{"mcpServers": {"a": {"command": "x", "env": ["c"]}}}', "must be a mapping"),
        ('{"mcpServers": {"a": {"url": "https://x.example", "headers": {"A\\nB": "c"}}}}', "header"),
        ('{"mcpServers": {"": {"command": "x"}}}', "1 to"),
        ('{"mcpServers": {"a": {"command": "\\ud800"}}}', "surrogate"),
        ("[" * 100 + "]" * 100, "nested"),
        ('{"mcpServers": {"a": {"command": NaN}}}', "NaN"),
    ],
)
def test_a_broken_file_is_refused(value: str, said: str) -> None:
    assert said in problems(value)


def test_too_much_of_anything_is_refused() -> None:
    assert "at most" in problems({"mcpServers": {str(n): {"command": "x"} for n in range(101)}})
    assert "at most" in problems({"mcpServers": {"a": {"command": "x", "args": ["y"] * 300}}})
    assert "longer" in problems({"mcpServers": {"a": {"command": "x" * 40_000}}})


def test_a_syntax_error_has_its_place() -> None:
    assert "/project/.mcp.json:3:" in problems('{\n"mcpServers": // all\n oops}')


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a regular file"):
        clientfiles.read(tmp_path)
    (tmp_path / "big").write_bytes(b" " * 1_000_001)
    with pytest.raises(ConfigError, match="bytes"):
        clientfiles.read(tmp_path / "big")


texts = st.text(max_size=30)
values = st.recursive(
    st.none() | st.booleans() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
keys = st.sampled_from(["command", "args", "env", "url", "headers", "type", "cwd", "disabled", "envFile", "x"])


@given(st.dictionaries(texts, st.dictionaries(keys, values, max_size=6) | values, max_size=4), st.booleans())
def test_whatever_it_says_it_is_read_or_refused(servers: Any, code: bool) -> None:
    try:
        found = read({"servers" if code else "mcpServers": servers})
    except ConfigError:
        return
    for server in found.servers:
        assert all("\0" not in word for word in server.command)
        assert bool(server.command) != bool(server.url)


@given(st.text(alphabet='{}[]",:/* \n\\abs/', max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    with suppress(ConfigError):
        parse(text, CLAUDE)


@given(st.recursive(st.none() | texts, lambda i: st.lists(i, max_size=3) | st.dictionaries(texts, i, max_size=3)))
def test_strict_json_means_the_same_with_and_without_comments(value: Any) -> None:
    from ringfence.config import clientfiles

    text = json.dumps(value, indent=1)
    assert clientfiles.parse_jsonc(text, "x") == (value, [])
    if text.endswith(("}", "]")) and len(text) > 2:
        assert clientfiles.parse_jsonc(text[:-1] + ", // last\n /* end */" + text[-1], "x") == (value, [])


@given(st.sampled_from(["env", "headers"]), st.text(alphabet="abcXYZ0189_-", min_size=24, max_size=60))
def test_what_may_be_a_token_never_comes_out(place: str, value: str) -> None:
    entry = {"command": "x", "env": {"API_TOKEN": value}} if place == "env" else None
    entry = entry or {"url": "https://x.example", "headers": {"Authorization": f"Bearer {value}"}}
    assert value not in repr(one(entry))
