"""A file becomes a Config, or the list of everything that is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfence import config
from ringfence.core.errors import ConfigError
from ringfence.core.model import Action, Mode, Transport

# The examples of the design, as they stand.
CAPABILITIES = """\
capabilities:
  search_docs:   {transport: mcp, mode: read,  network: internal_only, secrets: none, timeout_seconds: 8,  approval: none}
  create_ticket: {transport: mcp, mode: write, network: internal_only, secrets: service_account_helpdesk, timeout_seconds: 15,
                  approval: manager_for_high_priority}
  run_shell:     {transport: sandboxed_exec, mode: high_risk, network: denied, filesystem: workspace_only, secrets: none,
                  timeout_seconds: 10, approval: always}
"""  # noqa: E501
POLICY = """\
rules:
  - {id: sandbox-exec, name: Sandbox all code execution, action: sandbox, priority: 20,
     tool_patterns: ["execute_.*", "run_.*", "code_.*"], owasp_asi_id: ASI-02}
"""
NAMES = """\
servers: {helpdesk: {url: "https://helpdesk.corp.example/mcp"}}
networks:  {internal_only: {allow: ["*.corp.example:443"], methods: null, paths: null, max_bytes_out: null}}
secrets:   {service_account_helpdesk: {from: env, name: HELPDESK_TOKEN, hosts: [helpdesk.corp.example], header: Authorization}}
approvals: {manager_for_high_priority: {when: 'has(args.priority) && args.priority == "high"', roles: [manager], expires_seconds: 3600, self: false, people: 1}}
"""  # noqa: E501
# Every key of the design's whole file whose feature there is, with the values that it shows.
WHOLE = """\
version: 1
environment: development
gateway: {listen: "127.0.0.1:8700", state: ./state, approval_wait_seconds: 30, code_mode: off}
people:  {alice: {roles: [manager], os_user: alice}}
servers:
  files:    {command: [node, server.js], mounts: [], network: denied, secrets: none, placement: own,
             resources: ["file:///workspace/*"], prompts: [], sampling: deny, elicitation: ask, pins: accepted}
  helpdesk: {url: "http://127.0.0.1:9101/mcp"}
capabilities:
  create_ticket:
    transport: mcp
    server: helpdesk
    tool: create_ticket
    mode: write
    description: null
    network: denied
    filesystem: workspace_only
    secrets: none
    environments: [development, production]
    isolation: process
    timeout_seconds: 30
    retry: {attempts: 0, on: [unavailable]}
    idempotent: false
    rate: {per_minute: null, burst: null, concurrent: null, per_day: null}
    approval: none
    log: {arguments: digest, result: digest}
    redact: []
    result: {max_bytes: 1000000, fields: null, trust: partial}
    effects: {reversible: false, compensate: null, preview: null}
    labels: []
    record: facts
networks:  {internal_only: {allow: ["*.corp.example:443"], methods: null, paths: null, max_bytes_out: null}}
secrets:   {service_account_helpdesk: {from: env, name: HELPDESK_TOKEN, hosts: [helpdesk.corp.example], header: Authorization}}
approvals: {manager_for_high_priority: {when: 'has(args.priority) && args.priority == "high"', roles: [manager], expires_seconds: 3600, self: false, people: 1}}
policy:    {preset: standard, default: deny, rules: [], files: [policies/sandbox_code.yaml]}
sandbox:   {backend: process, default_timeout_seconds: 30, max_cpu_cores: 1.0, max_memory_mb: 256, max_disk_mb: 512, network_enabled: false}
"""  # noqa: E501


def loads(text: str, base: Path = Path("/etc/ringfence")) -> config.Config:
    return config.loads(text, file="f", base=base)


# ── What is right ─────────────────────────────────────────────────────────────────────────────────


def test_an_empty_file_permits_nothing(home: Path) -> None:
    settings = loads("")
    assert (settings.environment, settings.gateway.host, settings.gateway.port) == ("development", "127.0.0.1", 8700)
    assert settings.gateway.state == home / ".local/state/ringfence"
    assert settings.gateway.approval_wait_seconds == 30
    assert settings.gateway.code_mode == "off"
    assert (settings.policy.preset, settings.policy.default, settings.policy.rules) == ("standard", "deny", ())
    assert not settings.contracts
    assert not settings.servers
    assert settings.sandbox == config.SandboxSettings("process", 30, 1.0, 256, 512, 128, 64, 1_000_000, (), {}, False)


@pytest.mark.parametrize(
    ("text", "seconds"), [("null", None), ("90", 90 * 86_400.0), ("30d", 30 * 86_400.0), ("36h", 36 * 3600.0)]
)
def test_records_are_kept_for_days_or_hours(text: str, seconds: float | None) -> None:
    assert loads(f"gateway: {{retention: {text}}}").gateway.retention_seconds == seconds


@pytest.mark.parametrize("text", ["servers:\ncapabilities:\npolicy:\n", "policy: {rules: }", "--- \n# nothing\n"])
def test_an_empty_section_is_none(text: str) -> None:
    assert loads(text).digest == loads("").digest


def test_the_capabilities_of_the_design_load(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(POLICY)
    settings = loads(CAPABILITIES + NAMES + "policy: {files: [policy.yaml]}", tmp_path)
    search, create, shell = settings.contracts.values()
    assert (search.mode, search.network, search.timeout_seconds) == (Mode.READ, "internal_only", 8)
    assert create.approval == "manager_for_high_priority"
    assert create.secrets == ("service_account_helpdesk",)
    assert (search.server, create.server, shell.server) == ("helpdesk", "helpdesk", None)
    assert (shell.transport, shell.approval) == (Transport.SANDBOXED_EXEC, "always")
    (rule,) = settings.policy.rules
    assert (rule.id, rule.action, rule.priority) == ("sandbox-exec", Action.SANDBOX, 20)
    assert rule.tool_patterns == ("execute_.*", "run_.*", "code_.*")
    assert settings.warnings == ()


def test_the_rules_of_the_design_load_in_the_file_too() -> None:
    rules = POLICY.replace("rules:\n  - ", "policy:\n  rules:\n   - ")
    assert [rule.id for rule in loads(rules).policy.rules] == ["sandbox-exec"]


def test_the_whole_file_of_the_design_loads(tmp_path: Path) -> None:
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies/sandbox_code.yaml").write_text(POLICY)
    path = tmp_path / "ringfence.yaml"
    path.write_text(WHOLE)
    settings = config.load(path)
    assert settings.path == path
    assert settings.files == (path, tmp_path / "policies/sandbox_code.yaml")
    assert settings.gateway.state == tmp_path / "state"
    assert settings.servers["files"].command == ("node", "server.js")
    assert settings.servers["files"].cwd == str(tmp_path)
    assert settings.servers["files"].resources == ("file:///workspace/*",)
    assert settings.servers["helpdesk"].cwd is None
    assert settings.people["alice"].roles == {"manager"}
    assert settings.networks["internal_only"].allow == ("*.corp.example:443",)
    assert settings.secrets["service_account_helpdesk"].options == {"name": "HELPDESK_TOKEN"}
    assert settings.approvals["manager_for_high_priority"].roles == ("manager",)
    assert settings.warnings == ()


def test_what_is_written_equals_what_is_left_out(tmp_path: Path) -> None:
    short = "servers: {helpdesk: {url: 'http://127.0.0.1:9101/mcp'}}\ncapabilities:\n  create_ticket: %s"
    written = WHOLE.partition("create_ticket:\n")[2].partition("networks:")[0]
    spelled_out = loads(short % ("\n" + written.replace("isolation: process", "isolation: none")))
    left_out = loads(short % "{environments: [development, production]}")
    assert spelled_out.contracts["create_ticket"] == left_out.contracts["create_ticket"]


@pytest.mark.parametrize(("word", "kept"), [("off", True), ("false", True), ('"off"', True)])
def test_words_of_code_mode(word: str, kept: bool) -> None:
    assert (loads(f"gateway: {{code_mode: {word}}}").gateway.code_mode == "off") is kept


def test_a_capability_finds_the_only_server_and_else_waits_for_the_catalog() -> None:
    one = loads("servers: {a: {command: [x]}}\ncapabilities: {t: {}}")
    two = loads("servers: {a: {command: [x]}, b: {command: [y]}}\ncapabilities: {t: {}}")
    assert one.contracts["t"].server == "a"
    assert two.contracts["t"].server is None


def test_paths_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    (tmp_path / "conf").mkdir()
    text = (
        "gateway: {state: ../state}\nservers: {s: {command: [x], cwd: work}}\n"
        "capabilities: {run_shell: {transport: sandboxed_exec, filesystem: {mounts: [{host: data, at: /w}]}}}\n"
        "secrets: {f: {from: file, path: ~/token}}\npolicy: {files: [p.yaml]}"
    )
    (tmp_path / "conf/ringfence.yaml").write_text(text)
    (tmp_path / "conf/p.yaml").write_text("rules: []")
    monkeypatch.chdir(tmp_path)
    settings = config.load(Path("conf/ringfence.yaml"))
    assert settings.path == tmp_path / "conf/ringfence.yaml"
    assert settings.gateway.state == tmp_path / "state"
    assert settings.servers["s"].cwd == str(tmp_path / "conf/work")
    assert settings.contracts["run_shell"].mounts[0].host == str(tmp_path / "conf/data")
    assert settings.secrets["f"].options == {"path": str(home / "token")}
    assert settings.policy.files == (tmp_path / "conf/p.yaml",)


def test_the_digest_is_of_what_the_file_says() -> None:
    one = loads("environment: a\ngateway: {listen: '127.0.0.1:1'}")
    same = loads("# a comment\ngateway:\n  listen: 127.0.0.1:1\nenvironment: 'a'\n")
    other = loads("environment: a\ngateway: {listen: '127.0.0.1:2'}")
    assert one.digest == same.digest != other.digest


def test_rules_keep_their_order_over_files(tmp_path: Path) -> None:
    (tmp_path / "1.yaml").write_text("rules: [{id: b, action: deny}]")
    (tmp_path / "2.yaml").write_text("rules: [{id: c, action: deny}]")
    settings = loads("policy: {files: [2.yaml, 1.yaml], rules: [{id: a, action: deny}]}", tmp_path)
    assert [rule.id for rule in settings.policy.rules] == ["a", "c", "b"]


# ── Defects that others have ──────────────────────────────────────────────────────────────────────


def test_defect_1_policy_files_of_the_documented_config_load(tmp_path: Path) -> None:
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies/sandbox_code.yaml").write_text(POLICY)
    (tmp_path / "ringfence.yaml").write_text(WHOLE)
    files = config.load(tmp_path / "ringfence.yaml").policy.files
    assert all(isinstance(path, Path) and path.exists() for path in files)


def test_defect_18_the_file_beats_the_environment_and_nothing_unknown_is_ignored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "env"))
    for name in ("RINGFENCE_ENVIRONMENT", "RINGFENCE_GATEWAY__LISTEN", "RINGFENCE_LISTEN", "RINGFENCE_STATE"):
        monkeypatch.setenv(name, "production")
    assert loads("").gateway.state == tmp_path / "env/ringfence"
    settings = loads("gateway: {state: here}", tmp_path)
    assert settings.gateway.state == tmp_path / "here"
    assert (settings.environment, settings.gateway.port) == ("development", 8700)
    for text, key in (
        ("policy: {rules: [{id: a, action: deny, arg_patterns: {q: x}}]}", "argument_patterns"),
        ("sandbox: {timeout_seconds: 5}", "default_timeout_seconds"),
    ):
        with pytest.raises(ConfigError) as caught:
            loads(text)
        assert f"(did you mean {key!r}?)" in str(caught.value)


def test_defect_19_a_removed_rule_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "ringfence.yaml"
    path.write_text("policy: {rules: [{id: a, action: deny}, {id: b, action: deny}]}")
    assert [rule.id for rule in config.load(path).policy.rules] == ["a", "b"]
    path.write_text("policy: {rules: [{id: b, action: deny}]}")
    assert [rule.id for rule in config.load(path).policy.rules] == ["b"]
