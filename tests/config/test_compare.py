"""A reload that permits anything more is told; one that only tightens is not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from ringfence import config

BASE = Path("/etc/ringfence")


def flow(keys: Mapping[str, object]) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in keys.items() if value not in ("", None)) + "}"


def rate(**changes: object) -> str:
    return flow({"per_minute": 10, "burst": 5, "concurrent": 3, "per_day": 100, **changes})


def result(**changes: object) -> str:
    return flow({"max_bytes": 1000, "fields": "[x, y]", "trust": "partial", **changes})


CAPABILITY = {
    "mode": "write",
    "network": "n",
    "secrets": "[k, l]",
    "environments": "[development, staging]",
    "timeout_seconds": "10",
    "retry": "{attempts: 2}",
    "idempotent": "true",
    "rate": rate(),
    "approval": "managers",
    "log": "{arguments: names}",
    "redact": "['a', 'b']",
    "result": result(),
    "labels": "[external_sink]",
    "meta": "[v.example/x]",
}
SERVER = {
    "url": "'https://api.corp.example/mcp'",
    "resources": "['a*', 'b*']",
    "prompts": "['p']",
    "sampling": "ask",
    "elicitation": "ask",
    "pins": "accepted",
    "start_timeout_seconds": "20",
}
APPROVAL = {
    "when": "'has(args.x)'",
    "roles": "[manager, chief]",
    "expires_seconds": "600",
    "self": "false",
    "people": "1",
}
SECTIONS = {
    "gateway": "{listen: '127.0.0.1:8700', state: /var/lib/r, approval_wait_seconds: 30}",
    "people": "{alice: {roles: [manager, chief], os_user: alice}, bob: {roles: [manager], os_user: bob}}",
    "networks": "{n: {allow: ['*.corp.example:443', h]}, m: {allow: []}}",
    "secrets": "{k: {from: env, name: K, hosts: [a, b]}, l: {from: env, name: L}, j: {from: env, name: J}}",
    "policy": "{preset: standard}",
    "sandbox": "{max_memory_mb: 256}",
}


def build(**changes: dict[str, str] | str) -> config.Config:
    def section(name: str, keys: dict[str, str]) -> str:
        change = changes.get(name, {})
        assert isinstance(change, dict)
        return flow({**keys, **change})

    sections = {**SECTIONS, **{name: text for name, text in changes.items() if isinstance(text, str)}}
    text = "\n".join(f"{name}: {value}" for name, value in sections.items())
    text += f"\nservers: {{s: {section('server', SERVER)}{changes.get('more_servers', '')}}}"
    text += f"\ncapabilities: {{c: {section('capability', CAPABILITY)}{changes.get('more_capabilities', '')}}}"
    text += f"\napprovals: {{managers: {section('approval', APPROVAL)}, chiefs: {{roles: [chief]}}}}"
    text = "\n".join(line for line in text.splitlines() if not line.startswith("more_"))
    return config.loads(text, file="f", base=BASE)


def told(old: config.Config, new: config.Config) -> list[str]:
    return config.loosens(old, new)


def test_the_same_loosens_nothing() -> None:
    assert told(build(), build()) == []


@pytest.mark.parametrize(
    ("key", "looser", "tighter"),
    [
        ("mode", "read", "high_risk"),
        ("network", "m", "denied"),
        ("secrets", "[k, l, j]", "[k]"),
        ("environments", "", "[staging]"),
        ("environments", "[development, staging, production]", "[development]"),
        ("timeout_seconds", "11", "9"),
        ("retry", "{attempts: 3}", "{attempts: 1}"),
        ("rate", rate(per_minute=11), rate(per_minute=9)),
        ("rate", rate(burst=None), rate(burst=4)),
        ("rate", rate(concurrent=None), rate(concurrent=1)),
        ("rate", rate(per_day=101), rate(per_day=1)),
        ("rate", "", "{per_minute: 1, concurrent: 3, per_day: 10}"),
        ("approval", "none", ""),
        ("redact", "['a']", "['a', 'b', 'c']"),
        ("meta", "[v.example/x, v.example/y]", "[]"),
        ("result", result(max_bytes=1001), result(max_bytes=10)),
        ("result", result(fields=None), result(fields="[x]")),
        ("result", result(fields="[x, y, z]"), result(fields="[]")),
        ("result", result(trust="trusted"), result(trust="untrusted")),
    ],
)
def test_a_contract(key: str, looser: str, tighter: str) -> None:
    old = build()
    keep = {"retry": "{attempts: 0}"} if tighter == "high_risk" else {}
    (sentence,) = told(old, build(capability={key: looser}))
    assert sentence.startswith("capability 'c'")
    assert key in sentence
    if tighter:
        assert told(old, build(capability={key: tighter, **keep})) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("log", "{arguments: redacted}"),
        ("log", "{arguments: digest}"),
        ("labels", "[]"),
        ("labels", "[external_sink, private]"),
        ("idempotent", "{key: args.x}"),
        ("record", "full"),
        ("tool", "other"),
        ("effects", "{reversible: true}"),
        ("filesystem", "workspace_only"),
    ],
)
def test_what_has_no_order_may_not_change(key: str, value: str) -> None:
    expected = 0 if key == "filesystem" else 1
    assert len(told(build(), build(capability={key: value}))) == expected


def test_a_description_is_of_no_consequence() -> None:
    old = build(policy="{rules: [{id: a, action: deny, when: 'contract.mode == \"x\"'}]}")
    new = build(
        policy="{rules: [{id: a, action: deny, when: 'contract.mode == \"x\"'}]}", capability={"description": "text"}
    )
    assert told(old, new) == []


def test_a_tighter_contract_counts_where_a_condition_looks_at_contracts() -> None:
    rules = "{rules: [{id: a, action: deny, when: 'contract.network != \"denied\"'}]}"
    assert len(told(build(policy=rules), build(policy=rules, capability={"network": "denied"}))) == 1


def test_approvals_of_a_contract_are_compared_by_what_they_ask() -> None:
    old = build()
    assert told(build(capability={"approval": "none"}), build(capability={"approval": "managers"})) == []
    assert len(told(build(capability={"approval": "always"}), build(capability={"approval": "managers"}))) == 1
    # `always` lets anybody answer, and keeps the question open longer.
    assert len(told(old, build(capability={"approval": "always"}))) == 1
    assert len(told(old, build(capability={"approval": "chiefs"}))) == 1
    stricter = build(capability={"approval": "chiefs"}, approval={"expires_seconds": "3600"})
    assert told(build(approval={"expires_seconds": "3600"}), stricter) == []


def test_capabilities_come_and_go() -> None:
    more = build(more_capabilities=", d: {server: s}")
    assert told(build(), more) == ["capability 'd' is new"]
    assert told(more, build()) == []


@pytest.mark.parametrize(
    ("key", "looser", "tighter"),
    [
        ("url", "'https://b.corp.example/mcp'", ""),
        ("resources", "['a*', 'b*', 'c*']", "['a*']"),
        ("prompts", "['p', 'q']", "[]"),
        ("sampling", "allow", "deny"),
        ("elicitation", "", "deny"),
        ("pins", "first_use", ""),
        ("start_timeout_seconds", "21", "5"),
        ("placement", "remote", ""),
    ],
)
def test_a_server(key: str, looser: str, tighter: str) -> None:
    old = build()
    if looser:
        (sentence,) = told(old, build(server={key: looser}))
        assert sentence.startswith(f"server 's': {key}")
    if tighter:
        assert told(old, build(server={key: tighter})) == []
        assert len(told(build(server={key: tighter}), old)) == 1


def test_a_server_command_or_environment_may_not_change_and_values_are_not_shown() -> None:
    local = {**dict.fromkeys(SERVER, ""), "command": "[x]", "env": "{A: hunter2}"}
    old = build(server=local)
    assert len(told(old, build(server={**local, "command": "[y]"}))) == 1
    assert len(told(old, build(server={**local, "cwd": "/"}))) == 1
    (sentence,) = told(old, build(server={**local, "env": "{A: hunter3}"}))
    assert "hunter" not in sentence


def test_a_contract_of_our_own_tool_that_goes_leaves_the_usual_one() -> None:
    own = "execute_python: {transport: sandboxed_exec, mode: write, approval: always}"
    text = "version: 1\ncapabilities: {CAPABILITIES}\npolicy: {preset: standard}\n"
    old, new = (config.loads(text.replace("CAPABILITIES", each), file="f", base=BASE) for each in (own, ""))
    (sentence,) = told(old, new)
    assert "'execute_python' is gone" in sentence
    assert told(old, old) == []


def test_servers_come_and_go() -> None:
    more = build(more_servers=", t: {url: 'https://h/mcp'}", capability={"server": "s"})
    assert told(build(), more) == ["server 't' is new"]
    assert told(more, build()) == []
    third = ", t: {url: 'https://h/mcp'}, u: {url: 'https://i/mcp'}"
    (sentence,) = told(build(more_servers=third), build(more_servers=", t: {url: 'https://h/mcp'}"))
    assert sentence == "a server is gone, and c may now find its tool on another"


@pytest.mark.parametrize(
    ("given_up", "held", "heir"),
    [
        ("resources: ['doc:*']", "resources: ['doc:x']", True),
        ("resources: ['doc:x']", "resources: ['DOC:*']", True),
        ("resources: ['doc:x']", "resources: ['doc:x']", True),
        ("resources: ['doc:x']", "resources: ['doc:xy']", False),
        ("resources: ['doc:x']", "resources: ['doc:xy*']", False),
        ("prompts: ['g*']", "prompts: [greet]", True),
        ("resources: ['doc:*']", "prompts: ['doc:x']", False),
        ("resources: ['doc:*']", "resources: ['mail:*']", False),
    ],
)
def test_a_server_that_gives_up_what_another_may_offer_in_its_place(given_up: str, held: str, heir: bool) -> None:
    def servers(gives: str) -> config.Config:
        more = f", t: {{url: 'https://h/mcp', {gives}}}, u: {{url: 'https://i/mcp', {held}}}"
        return build(more_servers=more, capability={"server": "s"})

    gone = build(more_servers=f", u: {{url: 'https://i/mcp', {held}}}", capability={"server": "s"})
    what = given_up.partition(":")[0]
    sentence = [f"server 't' gives up {what}, and u may now offer them in its place"] if heir else []
    assert told(servers(given_up), gone) == sentence
    assert told(servers(given_up), servers(f"{what}: []")) == sentence
    assert told(gone, gone) == []


@pytest.mark.parametrize(
    ("section", "text", "count"),
    [
        ("environment", "staging", 1),
        ("gateway", "{listen: '127.0.0.1:8701', state: /var/lib/r, approval_wait_seconds: 30}", 1),
        ("gateway", "{listen: '127.0.0.1:8700', state: /var/lib/s, approval_wait_seconds: 30}", 1),
        ("gateway", "{listen: '127.0.0.1:8700', state: /var/lib/r, approval_wait_seconds: 31}", 1),
        ("gateway", "{listen: '127.0.0.1:8700', state: /var/lib/r, approval_wait_seconds: 1}", 0),
        ("gateway", "{listen: '127.0.0.1:8700', state: /var/lib/r, approval_wait_seconds: 30, retention: 90d}", 1),
        ("sandbox", "{max_memory_mb: 257}", 1),
        ("sandbox", "{max_memory_mb: 64, default_timeout_seconds: 5}", 0),
        ("people", "{}", 1),
        (
            "people",
            "{alice: {roles: [manager, chief], os_user: alice}, bob: {roles: [manager, chief], os_user: bob}}",
            1,
        ),
        ("people", "{alice: {roles: [manager, chief], os_user: carol}, bob: {roles: [manager], os_user: bob}}", 1),
        ("people", "{alice: {roles: [manager, chief]}, bob: {roles: [manager]}}", 0),
        ("people", "{alice: {roles: [chief], os_user: alice}}", 0),
        (
            "people",
            "{alice: {roles: [manager, chief], os_user: alice}, bob: {roles: [manager], os_user: bob}, eve: {}}",
            1,
        ),
        ("networks", "{n: {allow: ['*.corp.example:443']}, m: {allow: []}, o: {allow: [x]}}", 0),
        ("networks", "{n: {allow: ['*.corp.example:443', h, i]}, m: {allow: []}}", 1),
        ("networks", "{n: {allow: ['*.corp.example', h]}, m: {allow: []}}", 1),
        ("secrets", "{k: {from: env, name: K, hosts: [a]}, l: {from: env, name: L}, j: {from: env, name: J}}", 0),
        ("secrets", "{k: {from: env, name: K, hosts: [c]}, l: {from: env, name: L}, j: {from: env, name: J}}", 1),
        ("secrets", "{k: {from: env, name: Z, hosts: [a, b]}, l: {from: env, name: L}, j: {from: env, name: J}}", 1),
        ("policy", "{preset: strict}", 0),
        ("policy", "{preset: permissive}", 0),
        ("policy", "{preset: standard, default: allow_read}", 1),
    ],
)
def test_sections(section: str, text: str, count: int) -> None:
    assert len(told(build(), build(**{section: text}))) == count


@pytest.mark.parametrize(
    ("key", "looser", "tighter"),
    [
        ("when", "'has(args.y)'", ""),
        ("roles", "[manager, chief, intern]", "[chief]"),
        ("roles", "[]", "[manager]"),
        ("expires_seconds", "601", "60"),
        ("self", "true", ""),
        ("people", "", "2"),
        ("reason", "", "required"),
        ("escalate", "{after_seconds: 10, roles: [intern]}", ""),
        ("standing", "{times: 1, seconds: 1}", ""),
    ],
)
def test_an_approval(key: str, looser: str, tighter: str) -> None:
    people = "{a: {roles: [manager, chief, intern]}, b: {roles: [manager, chief]}}"
    old = build(people=people)
    if looser:
        assert told(old, build(people=people, approval={key: looser})) == [
            "approval 'managers' is relaxed or asks others"
        ]
    if tighter:
        assert told(old, build(people=people, approval={key: tighter})) == []
    assert told(old, build(people=people, approval={"when": ""})) == []


@pytest.mark.parametrize(
    ("key", "value", "other", "looser"),
    [
        ("reason", "required", "optional", True),
        ("escalate", "{after_seconds: 10, roles: [chief]}", "{after_seconds: 9, roles: [chief]}", True),
        ("escalate", "{after_seconds: 10, roles: [chief]}", "", False),
        ("standing", "{times: 5, seconds: 60}", "{times: 6, seconds: 60}", True),
        ("standing", "{times: 5, seconds: 60}", "{times: 5, seconds: 61}", True),
        ("standing", "{times: 5, seconds: 60}", "{times: 5, seconds: 59}", False),
        ("standing", "{times: 5, seconds: 60}", "", False),
    ],
)
def test_what_an_approval_had_besides(key: str, value: str, other: str, *, looser: bool) -> None:
    old = build(approval={key: value})
    assert bool(told(old, build(approval={key: other}))) is looser


def test_an_approval_that_is_asked_for_in_the_client() -> None:
    own = {"self": "true"}
    here, there = build(approval={**own, "in_client": "true"}), build(approval=own)
    assert told(there, here) == ["approval 'managers' is relaxed or asks others"]
    assert told(here, there) == []


RULE = "{id: a, action: %s, tool_patterns: ['x.*'], agents: ['l*'], environments: [development]%s}"


def policy(*rules: str, preset: str = "standard") -> config.Config:
    return build(policy=f"{{preset: {preset}, rules: [{', '.join(rules)}]}}")


@pytest.mark.parametrize("action", ["deny", "ask", "sandbox"])
def test_a_restricting_rule_may_come_but_not_go_or_change(action: str) -> None:
    old = policy(RULE % (action, ""))
    assert told(policy(), old) == []
    for new in (
        policy(),
        policy(RULE % (action, ", enabled: false")),
        policy(RULE % ("allow", "")),
        policy((RULE % (action, "")).replace("x.*", "xy.*")),
        policy((RULE % (action, "")).replace("[development]", "[production]")),
        policy(RULE % (action, ", when: 'has(args.x)'")),
        policy(RULE % (action, ", argument_patterns: {x: y}")),
    ):
        assert told(old, new) == [f"rule 'a' ({action}) is gone or changed"]
    # It speaks of argument patterns, and says nothing where there are none.
    assert told(old, policy(RULE % (action, ", normalize: false"))) == []
    found = ", argument_patterns: {x: y}"
    assert len(told(policy(RULE % (action, found)), policy(RULE % (action, f"{found}, normalize: false")))) == 1


def test_what_only_people_read_and_a_sharper_action_loosen_nothing() -> None:
    old = policy(RULE % ("ask", ""))
    assert told(old, policy(RULE % ("ask", ", name: n, description: d, owasp_asi_id: x, priority: 7"))) == []
    assert told(old, policy((RULE % ("ask", "")).replace("id: a", "id: b"))) == []
    assert told(old, policy((RULE % ("ask", "")).replace("[development]", "[]"))) == []
    assert told(old, policy(RULE % ("deny", ""))) == []
    assert len(told(policy(RULE % ("deny", "")), old)) == 1


@pytest.mark.parametrize("action", ["allow", "audit", "warn"])
def test_a_permitting_rule_counts_where_the_default_does(action: str) -> None:
    rule = RULE % (action, "")
    assert told(policy(), policy(rule)) == []  # the preset decides every mode already
    assert len(told(policy(preset="none"), policy(rule, preset="none"))) == 1
    assert told(policy(rule, preset="none"), policy(preset="none")) == []
    failing = RULE % (action, ", when: 'args.x == 1'")
    assert len(told(policy(failing), policy())) == 1  # where it failed, the call was denied


@pytest.mark.parametrize("action", ["ask", "sandbox"])
def test_even_a_restricting_rule_permits_what_nothing_matched(action: str) -> None:
    assert len(told(policy(preset="none"), policy(RULE % (action, ""), preset="none"))) == 1
    assert told(policy(preset="none"), policy(RULE % ("deny", ""), preset="none")) == []


@pytest.mark.parametrize(
    ("old", "new", "looser"),
    [
        ("permissive", "standard", False),
        ("standard", "strict", False),
        ("strict", "owasp-asi", False),
        ("strict", "standard", True),
        ("owasp-asi", "strict", True),
        ("none", "strict", True),
        ("none", "permissive", True),
        ("strict", "none", True),
    ],
)
def test_presets(old: str, new: str, looser: bool) -> None:
    assert bool(told(policy(preset=old), policy(preset=new))) is looser


def test_mounts_may_become_fewer_or_read_only() -> None:
    def mounted(*mounts: str) -> config.Config:
        filesystem = f"filesystem: {{mounts: [{', '.join(mounts)}]}}"
        return build(more_capabilities=f", run_shell: {{transport: sandboxed_exec, {filesystem}}}")

    one, two = "{host: /a, at: /w, mode: rw}", "{host: /b, at: /v}"
    assert told(mounted(one, two), mounted(one.replace("rw", "ro"))) == []
    assert len(told(mounted(one), mounted(one, two))) == 1
    assert len(told(mounted(two), mounted(two.replace("}", ", mode: rw}")))) == 1


def test_a_tool_of_a_server_may_come_to_see_less_of_what_its_server_sees(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()

    def mounted(*mounts: str) -> config.Config:
        every = "{host: ./a, at: /a, mode: rw}, {host: ./b, at: /b}"
        filesystem = f", filesystem: {{mounts: [{', '.join(mounts)}]}}" if mounts else ""
        text = f"servers: {{s: {{command: [x], mounts: [{every}]}}}}\ncapabilities: {{t: {{server: s{filesystem}}}}}"
        return config.loads(text, file="f", base=tmp_path)

    one, two = "{host: ./a, at: /a, mode: rw}", "{host: ./b, at: /b}"
    assert told(mounted(), mounted(one)) == told(mounted(one, two), mounted(one.replace("rw", "ro"))) == []
    assert len(told(mounted(one), mounted())) == len(told(mounted(two), mounted(one))) == 1


# ── What a box may do more or less: who listens in it, and which programs it has ──


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


@pytest.mark.parametrize("action", ["deny", "ask", "sandbox"])
def test_a_restricting_rule_that_is_put_into_shadow_mode_is_looser(action: str) -> None:
    here = RULE % (action, "")
    shadowed = RULE % (action, ", mode: shadow")
    assert told(policy(here), policy(shadowed)) == [
        f"rule 'a' ({action}) is in shadow mode now, where it decides nothing"
    ]
    assert told(policy(shadowed), policy(here)) == []


def test_rules_in_shadow_mode_come_go_and_change_freely() -> None:
    shadowed = [RULE % (action, ", mode: shadow") for action in ("deny", "allow")]
    for old in (policy(preset="none"), *(policy(each, preset="none") for each in shadowed)):
        for new in (policy(preset="none"), *(policy(each, preset="none") for each in shadowed)):
            assert told(old, new) == []
    allowing = policy(RULE % ("allow", ""), preset="none")
    assert len(told(policy(shadowed[1], preset="none"), allowing)) == 1, "then it allows"
    assert told(allowing, policy(shadowed[1], preset="none")) == []


AGENT = "agents: {a: {roles: [r], capabilities: [x, y], quota: {per_minute: 10}, os_user: u%s}%s}"


@pytest.mark.parametrize(
    ("before", "after", "looser"),
    [
        ((AGENT % ("", "")), (AGENT % ("", ", b: {}")), "agent 'b' is new and may call"),
        ((AGENT % ("", ", b: {}")), (AGENT % ("", "")), None),
        ((AGENT % ("", "")), "", "agents: the local user's programs may now call everything"),
        ((AGENT % ("", "")), (AGENT % ("", "")).replace("[x, y]", "[x]"), None),
        ((AGENT % ("", "")), (AGENT % ("", "")).replace("[x, y]", "[x, z]"), "capabilities changes"),
        ((AGENT % ("", "")), (AGENT % ("", "")).replace("10", "9"), None),
        ((AGENT % ("", "")), (AGENT % ("", "")).replace("10", "11"), "quota changes"),
        ((AGENT % ("", "")), (AGENT % ("", "")).replace("[r]", "[]"), "roles changes"),
        ((AGENT % ("", "")), (AGENT % (", tenant: t", "")), "tenant changes from local to t"),
        ((AGENT % ("", "")), (AGENT % ("", "")).replace("os_user: u", "os_user: v"), "os_user changes"),
        ((AGENT % ("", "")), (AGENT % ("", "")).replace(", os_user: u", ""), None),
        ((AGENT % ("", "")), (AGENT % (", environments: [development]", "")), None),
        ("people: {p: {}}", "people: {p: {tenant: t}}", "person 'p' is of another tenant: t"),
    ],
)
def test_what_agents_gain_is_told(before: str, after: str, looser: str | None) -> None:
    old, new = (config.loads(text, file="f", base=BASE) for text in (before, after))
    found = config.loosens(old, new)
    assert (found == []) if looser is None else any(looser in each for each in found), found
