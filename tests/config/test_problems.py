"""Every problem is told at once, in plain words, at its exact place."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringfence import config
from ringfence.core.errors import ConfigError

META = 'servers: {s: {url: "http://h/mcp"}}\ncapabilities: {c: {meta: [%s]}}'


def problems(text: str, base: Path = Path("/nowhere")) -> list[str]:
    """What is wrong with a text, each as `line:col: problem`."""
    with pytest.raises(ConfigError) as caught:
        config.loads(text, file="f", base=base)
    assert caught.value.problems == sorted(caught.value.problems)
    return [str(problem).removeprefix("f:") for problem in caught.value.problems]


BROKEN = """\
version: 2
enviroment: production
gateway: {listen: 127.0.0.1, approval_wait_seconds: -1}
people:
  alice: {roles: manager}
servers:
  both: {command: [a], url: "http://h/mcp"}
  neither: {}
  text: {command: node server.js}
  remote: {url: "ftp://h/x", elicitation: maybe}
  remote: {url: "http://h/y"}
capabilities:
  search: {server: remotee, network: internl_only, secrets: [tokn], approval: mangers, timeout_seconds: 0}
  create: {server: remote, mode: writ, redact: ["("], idempotent: {key: args.a + nope}}
  8: {server: remote}
networks: {internal_only: {allow: ["*", "h:99999"]}}
secrets: {token: {from: enviroment}, file: {from: file, name: x}}
approvals:
  managers: {when: 'args.a == 1 && prio == "high"', people: 2, roles: [manager]}
policy:
  preset: stanard
  rules:
    - {id: one, acton: deny}
    - {id: two, action: deny, tool_patterns: ["(?=x)"], when: 1 + 1}
    - {id: two, action: deny, approval: managers, servers: [remot]}
  files: [missing.yaml]
sandbox: {timeout_seconds: 5, max_memory_mb: 1}
"""
EXPECTED = """\
1:10: this Ringfence reads version 1, not 2
2:1: unknown key 'enviroment' (did you mean 'environment'?)
3:19: '127.0.0.1' names no port: write host:port
3:53: must be at least 0, this is -1
5:18: must be a list, this is 'manager'
7:24: server 'both' has both command and url: keep one of them
8:3: server 'neither' has neither command nor url nor openapi
9:19: write a list: [program, argument, …]
10:17: 'ftp://h/x' is not an http:// or https:// URL
10:43: must be 'deny' or 'ask', this is 'maybe'
11:3: duplicate key 'remote' (first at line 10)
13:20: no server named 'remotee' (did you mean 'remote'?)
13:38: no network named 'internl_only' (did you mean 'internal_only'?)
13:62: no secret named 'tokn' (did you mean 'token'?)
13:79: no approval named 'mangers' (did you mean 'managers'?)
13:105: must be greater than 0, this is 0
14:34: must be 'read', 'write' or 'high_risk', this is 'writ' (did you mean 'write'?)
14:49: bad pattern: missing ): (
14:82: bad expression: undeclared reference to 'nope'
15:3: a key must be text, this is a number (quote it)
16:41: '99999' is not a port
17:25: must be 'env', 'file', 'command', 'keyring' or 'vault', this is 'enviroment'
17:44: missing key 'path': a secret from file needs it
17:57: 'name' means nothing for a secret from file
19:36: bad expression: undeclared reference to 'prio'
19:61: needs 2 people with role manager, and people: has 1
21:11: must be one of none, permissive, standard, strict, owasp-asi; this is 'stanard' (did you mean 'standard'?)
23:7: missing key 'action'
23:17: unknown key 'acton' (did you mean 'action'?)
24:47: bad pattern: invalid perl operator: (?= (RE2 has no lookaround)
24:63: bad expression: a condition must be true or false, this is int
25:12: duplicate rule id 'two' (first at f:24:12)
25:41: only a rule with action ask may name one, this one is deny
25:61: no server named 'remot' (did you mean 'remote'?)
26:11: missing.yaml cannot be read: No such file or directory
27:11: unknown key 'timeout_seconds' (did you mean 'default_timeout_seconds'?)
27:46: must be at least 64, this is 1
"""


def test_every_problem_is_reported_at_once_with_its_place() -> None:
    assert "\n".join(problems(BROKEN)) + "\n" == EXPECTED


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- a\n", "1:1: a configuration is a mapping, this is a list"),
        ("hello", "1:1: a configuration is a mapping, this is text"),
        ("servers: []", "1:10: must be a mapping of names, this is a list"),
        ("servers: {a: 1}", "1:14: must be a mapping, this is a number"),
        ("gateway: 1", "1:10: must be a mapping, this is a number"),
        ("policy: {rules: {}}", "1:17: must be a list, this is a mapping"),
        ("policy: {rules: [1]}", "1:18: must be a mapping, this is a number"),
        ("rules: []", "1:1: unknown key 'rules' (did you mean 'policy.rules'?)"),
        ("mcpServers: {}", "1:1: unknown key 'mcpServers' (did you mean 'servers'?)"),
        ("servers: {a: {command: [x], args: [y]}}", "1:29: unknown key 'args' (did you mean 'command'?)"),
        ("version: true", "1:10: must be a whole number, this is true"),
        ("version: 1.0", "1:10: must be a whole number, this is 1.0"),
        ("environment: 1", "1:14: must be text, this is 1 (quote it)"),
        ("environment: a b", "1:14: 'a b' is not a name: letters, digits, '_', '-', '.' and '@', at most 128"),
        ("gateway: {listen: 'h:70000'}", "1:19: 70000 is not a port"),
        ("gateway: {listen: 'a b:1'}", "1:19: 'a b' is not a host"),
        ("gateway: {listen: '::1:80'}", "1:19: '::1:80' is not host:port"),
        ("gateway: {approval_wait_seconds: .inf}", "1:34: must be a finite number, this is inf"),
        ("gateway: {retention: 2w}", "1:22: '2w' is not a duration: write days, as in 90 or 90d, or hours"),
        ("people: {a: {os_user: x}, b: {os_user: x}}", "1:40: 'x' is 'a' already"),
        ("people: {a: {roles: ['*']}}", "1:22: '*' is not a name"),
        ("servers: {ringfence: {command: [x]}}", "1:11: the name 'ringfence' is taken: choose another"),
        ("servers: {RingFence: {command: [x]}}", "1:11: the name 'RingFence' is taken: choose another"),
        ("servers: {ring-fence: {command: [x]}}", "1:11: the name 'ring-fence' is taken: choose another"),
        ("servers: {r1ngfence: {command: [x]}}", "1:11: the name 'r1ngfence' is taken: choose another"),
        ("servers: {a@b: {command: [x]}}", "1:11: 'a@b' is not a name of a tool or server: no '@'"),
        ("servers: {a: {command: []}}", "1:24: must not be empty"),
        ("servers: {a: {command: [x, '']}}", "1:28: must not be empty"),
        ("servers: {a: {url: 'http://u:p@h/'}}", "1:20: a URL must not carry a user or password"),
        ("servers: {a: {url: 'http://h:99999/'}}", "1:20: Port out of range 0-65535"),
        ("servers: {a: {url: 'http:///x'}}", "1:20: '' is not a host"),
        ("servers: {a: {url: 'http://h', env: {A: b}}}", "1:32: env is for a server that is started by a command"),
        ("servers: {a: {url: 'http://h', base_url: 'http://h'}}", "1:32: belongs to openapi"),
        ("servers: {a: {command: [x], env: {A: 1}}}", "1:38: must be text, this is a number (quote it)"),
        ("servers: {a: {command: [x], env: {A-B: b}}}", "1:35: 'A-B' is not a variable's name"),
        ("servers: {a: {command: [x], resources: ['a[']}}", "1:41: bad pattern 'a[': a '[' without its ']'"),
        ("servers: {a: {command: [x], resources: ['']}}", "1:41: an empty pattern matches nothing"),
        ("servers: {a: {command: [x], start_timeout_seconds: 0}}", "1:52: must be greater than 0, this is 0"),
        ("capabilities: {a: {filesystem: all}}", "1:32: must be workspace_only or {mounts: […]}; this is 'all'"),
        ("capabilities: {a: {environments: []}}", "1:34: must not be empty"),
        ("capabilities: {a: {idempotent: 1}}", "1:32: must be true or false, this is 1"),
        ("capabilities: {a: {idempotent: {}}}", "1:32: missing key 'key'"),
        ("capabilities: {a: {idempotent: {key: ''}}}", "1:38: must not be empty"),
        ("capabilities: {a: {rate: {per_minut: 1}}}", "1:27: unknown key 'per_minut' (did you mean 'per_minute'?)"),
        ("capabilities: {a: {rate: {burst: 1}}}", "1:34: a burst needs per_minute"),
        ("capabilities: {a: {retry: {attempts: 1}}}", "1:38: a write is retried only where it is idempotent"),
        ("capabilities: {a: {retry: {on: []}}}", "1:32: must not be empty"),
        ("capabilities: {a: {retry: {on: [failed]}}}", "1:33: must be 'unavailable', this is 'failed'"),
        (
            "capabilities: {run_shell: {transport: sandboxed_exec, server: b}}",
            "1:55: transport sandboxed_exec has no server",
        ),
        (
            "capabilities: {run_shel: {transport: sandboxed_exec}}",
            "1:16: a box has no tool 'run_shel', only execute_python, run_shell and those of sessions;"
            " name one with tool: (did you mean 'run_shell'?)",
        ),
        ("capabilities: {a: {transport: sandboxed_exec, tool: eval}}", "1:53: a box has no tool 'eval', only"),
        ("capabilities: {a: {memory_layout: fresh}}", "1:20: memory_layout is for transport sandboxed_exec"),
        ("capabilities: {a: {template: data}}", "1:20: template is for transport sandboxed_exec"),
        ("capabilities: {a: {listen: allowed}}", "1:20: listen is for transport sandboxed_exec"),
        ("capabilities: {a: {commands: {}}}", "1:20: commands is for transport sandboxed_exec"),
        (
            "capabilities: {run_shell: {transport: sandboxed_exec, listen: alowed}}",
            "1:63: must be 'denied' or 'allowed', this is 'alowed' (did you mean 'allowed'?)",
        ),
        (
            "capabilities: {run_shell: {transport: sandboxed_exec, listen: {web: 70000}}}",
            "1:69: must be at most 65535, this is 70000",
        ),
        (
            "capabilities: {read_file: {transport: sandboxed_exec, listen: allowed}}",
            "1:55: listen is for execute_python, run_shell, open_session, not for read_file",
        ),
        (
            "capabilities: {execute_python: {transport: sandboxed_exec, commands: {allow: [ls]}}}",
            "1:60: commands is for run_shell, not for execute_python",
        ),
        (
            "capabilities: {run_shell: {transport: sandboxed_exec, commands: {allowed: [ls]}}}",
            "1:66: unknown key 'allowed' (did you mean 'allow'?)",
        ),
        (
            "capabilities: {run_shell: {transport: sandboxed_exec, commands: {allow: [ls -l]}}}",
            "1:74: 'ls -l' is not the name of a program, nor an absolute path",
        ),
        (
            "capabilities: {run_shell: {transport: sandboxed_exec, commands: {allow: [/bin/../ls]}}}",
            "1:74: '/bin/../ls' must be an absolute path without '..' and double slashes",
        ),
        (
            "capabilities: {run_shell: {transport: sandboxed_exec, commands: {allow: [ls], deny: [ls]}}}",
            "1:86: 'ls' is under allow already: one of them",
        ),
        (
            "capabilities: {run_shell: {transport: sandboxed_exec, commands: {deny: [sh]}}}",
            "1:73: every command is run by /bin/sh, so it is always there",
        ),
        ("servers: {a: {command: [x], listen: 80}}", "1:37: must be 'denied' or 'allowed', this is 80"),
        (
            "capabilities: {run_shell: {transport: sandboxed_exec, template: dta}}",
            "1:65: no template named 'dta' (did you mean 'data'?)",
        ),
        (
            "sandbox: {session_idle_seconds: 60, max_session_idle_seconds: 30}",
            "1:33: more than max_session_idle_seconds, which is 30",
        ),
        (
            "sandbox: {session_lifetime_seconds: 7200, max_session_lifetime_seconds: 3600.0}",
            "1:37: more than max_session_lifetime_seconds, which is 3600",
        ),
        ("sandbox: {max_sessions: -1}", "1:25: must be at least 0, this is -1"),
        ("sandbox: {templates: {data: {}}}", "1:23: the name 'data' is taken: choose another"),
        ("sandbox: {templates: {ml: {packages: ['a b']}}}", "1:39: 'a b' is not the name of a Python module"),
        ("sandbox: {accept_missing: [landlok]}", "1:28: 'landlok' cannot be given up; only landlock can (did you"),
        ("sandbox: {max_processes: 0}", "1:26: must be at least 1, this is 0"),
        ("capabilities: {a: {effects: {preview: b}}}", "1:39: no capability named 'b'"),
        ("networks: {denied: {}}", "1:12: the name 'denied' is taken: choose another"),
        ("networks: {a: {allow: ['*.0.0.1']}}", "1:24: '*.0.0.1': '*.' stands before a domain"),
        ("networks: {a: {allow: ['*.10.0.0.1']}}", "1:24: '*.10.0.0.1': '*.' stands before a domain"),
        ("networks: {a: {allow: ['h:0']}}", "1:24: '0' is not a port"),
        ("networks: {a: {allow: ['a..b']}}", "1:24: 'a..b' is not a host"),
        ("networks: {a: {allow: ['u@h']}}", "1:24: 'u@h' is not a host"),
        ("networks: {a: {methods: [get]}}", "1:26: 'get' is not an HTTP method"),
        ("networks: {a: {methods: []}}", "1:25: must not be empty"),
        ("networks: {a: {paths: [v1]}}", "1:24: 'v1' is not a path prefix"),
        ("networks: {a: {paths: ['/a/../b']}}", "1:24: '/a/../b' is not a path prefix"),
        ("networks: {a: {addresses: [corp]}}", "1:28: 'corp' is not an address"),
        ("networks: {a: {per_minute: 0}}", "1:28: must be at least 1"),
        (
            "secrets: {a: {from: env, name: A, hosts: ['*'], header: X}}",
            "1:43: '*' would send the secret to every host",
        ),
        ("sandbox: {install_inside: true}", "1:11: install_inside without allow_packages would let in nothing"),
        ("sandbox: {allow_packages: ['six>=1']}", "1:28: 'six>=1' is not a name or pattern of packages"),
        (
            "sandbox: {install_inside: true, require_packages: pinned, allow_packages: [six, 'idna==3.4']}",
            "1:76: 'six' names no version, and require_packages asks for it",
        ),
        (
            "sandbox: {install_inside: true, require_packages: hashed, allow_packages: ['y==2']}",
            "1:76: 'y==2' names no version and hash",
        ),
        (
            "sandbox: {network_enabled: true}",
            "1:11: network_enabled without allowed_egress_domains would mean everywhere",
        ),
        (
            "sandbox: {network_enabled: true, allowed_egress_domains: [a.example]}\nnetworks: {sandbox: {}}",
            "2:12: the name 'sandbox' is what network_enabled makes",
        ),
        (
            "networks: {n: {}}\ncapabilities: {read_file: {transport: sandboxed_exec, network: n}}",
            "2:55: network is for what makes a box",
        ),
        (META % "traceparent", "2:27: traceparent is always passed on"),
        (META % "progressToken", "2:27: 'progressToken' is for one hop"),
        (META % "io.modelcontextprotocol/logLevel", "2:27: 'io.modelcontextprotocol/logLevel' is for one hop"),
        (META % "ringfence/session", "2:27: 'ringfence/session' is for one hop"),
        (META % '"a b"', "2:27: 'a b' is not a key of _meta"),
        (
            "capabilities: {run_shell: {transport: sandboxed_exec, meta: [x]}}",
            "1:61: what runs in a box has no server that _meta could reach",
        ),
        ("approvals: {always: {}}", "1:13: the name 'always' is taken: choose another"),
        ("approvals: {a: {people: 2}}", "1:25: needs 2 people, and without people: there is one"),
        ("people: {p: {}}\napprovals: {a: {roles: [r]}}", "2:24: needs 1 people with role r, and people: has 0"),
        ("approvals: {a: {expires_seconds: 0}}", "1:34: must be greater than 0, this is 0"),
        ("policy: {rules: [{id: std-read, action: deny}]}", "1:23: the rule id 'std-read' belongs to preset"),
        ("policy: {rules: [{id: a, action: forbid}]}", "1:34: must be 'allow', 'audit', 'warn', 'sandbox', 'ask' or"),
        ("policy: {rules: [{id: a, action: ask, approval: b}]}", "1:49: no approval named 'b'"),
        ("policy: {rules: [{id: a, action: deny, argument_patterns: {x: '['}}]}", "1:63: bad pattern"),
        ("policy: {rules: [{id: a, action: deny, arg_patterns: {}}]}", "1:40: unknown key 'arg_patterns'"),
        ("policy: {files: [.]}", "1:18: . is not a regular file"),
    ],
)
def test_each_problem_has_its_sentence(text: str, expected: str, tmp_path: Path) -> None:
    found = problems(text, tmp_path)
    assert any(problem.startswith(expected) for problem in found), found


def test_a_condition_over_several_lines_is_reported_where_it_starts() -> None:
    text = "approvals:\n  a:\n    when: |\n      args.x == 1\n      && nope\n"
    assert problems(text) == ["3:11: bad expression: undeclared reference to 'nope'"]


def test_a_problem_is_one_short_line_without_control_characters() -> None:
    deep = "approvals: {a: {when: '%s'}}" % ("args." * 1900 + "x")
    long = "policy: {rules: [{id: a, action: deny, tool_patterns: ['%s']}]}" % ("(" * 5000)
    odd = 'policy: {rules: [{id: a, action: deny, tool_patterns: ["(\\e[2J\\n"]}]}'
    for text in (deep, long, odd):
        (problem,) = problems(text)
        assert problem.isprintable()
        assert len(problem) < 400


def test_problems_of_a_policy_file_are_in_that_file(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("rules:\n  - {id: a, action: dny}\n  - {id: b, action: deny}\nrule: []\n")
    (tmp_path / "q.yaml").write_bytes(b"rules:\n  - {id: \xff}\n")
    (tmp_path / "r.yaml").write_text("- {id: a}")
    (tmp_path / "c.yaml").write_text("policy:\n  rules: [{id: b, action: deny}]\n  files: [p.yaml, q.yaml, r.yaml]\n")
    with pytest.raises(ConfigError) as caught:
        config.load(tmp_path / "c.yaml")
    assert [str(p).removeprefix(f"{tmp_path}/") for p in caught.value.problems] == [
        "p.yaml:2:21: must be 'allow', 'audit', 'warn', 'sandbox', 'ask' or 'deny', this is 'dny'"
        " (did you mean 'deny'?)",
        f"p.yaml:3:10: duplicate rule id 'b' (first at {tmp_path}/c.yaml:2:16)",
        "p.yaml:4:1: unknown key 'rule' (did you mean 'rules'?)",
        "q.yaml:2:10: invalid UTF-8 (byte 0xff)",
        "r.yaml:1:1: a policy file is a mapping with rules: at its top",
    ]


def test_a_file_that_is_not_there_is_a_problem(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path, Path("a\0b")):
        with pytest.raises(ConfigError) as caught:
            config.load(path)
        assert len(caught.value.problems) == 1


def test_values_of_a_server_environment_are_never_shown() -> None:
    for text in ("A: 31337", "A: [31337]"):
        assert "31337" not in str(problems(f"servers: {{a: {{command: [x], env: {{{text}}}}}}}"))


def test_a_secret_in_an_environment_is_warned_of_without_showing_it() -> None:
    env = "{API_TOKEN: hunter2hunter2, LEVEL: ghp_0123456789abcdefghij, TOKEN_FILE: /run/token, MODE: fast}"
    settings = config.loads(f"servers: {{a: {{command: [x], env: {env}}}}}", file="f", base=Path("/nowhere"))
    assert [warning.text.split()[0] for warning in settings.warnings] == ["API_TOKEN", "LEVEL"]
    assert "hunter2" not in str(settings.warnings)
    assert "ghp_" not in str(settings.warnings)
