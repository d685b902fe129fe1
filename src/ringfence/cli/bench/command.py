"""`ringfence bench [NAME]`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import typer

from ringfence.cli import common
from ringfence.cli.bench import audit, backends, batch, box, console, egress, gateway, servers, session, start
from ringfence.cli.bench.measure import Row, as_json, row, table
from ringfence.core import canonical
from ringfence.core.model import Action, Call, Principal, Rule
from ringfence.governance.contract import build
from ringfence.governance.policy import Policy

NAMES = ("policy", "gateway", "box", "session", "egress", "audit", "start", "console", "backends")


def bench(
    name: str | None = typer.Argument(None, metavar="NAME", help=f"Which to run: {', '.join(NAMES)}. Default: all."),
    as_json_: bool = typer.Option(False, "--json", help="Print rows as JSON."),
    calls: int = typer.Option(
        300, "--calls", metavar="N", min=10, help="Calls per case, spread over interleaved rounds."
    ),
    rounds: int = typer.Option(6, "--rounds", metavar="N", min=1, help="Rounds in which the cases alternate."),
    concurrent: int = typer.Option(
        32, "--concurrent", metavar="N", min=1, help="Callers at once for calls per second."
    ),
    runs: int = typer.Option(
        500,
        "--runs",
        metavar="N",
        min=10,
        help="For `box`, `session`, `egress` and `backends`: runs per case; fewer of what is slow.",
    ),
    programs: int = typer.Option(1000, "--programs", metavar="N", min=10, help="For `box`: programs of a batch."),
    records: int = typer.Option(100_000, "--records", metavar="N", min=1000, help="For `audit`: how long the log is."),
    config_path: Path | None = typer.Option(
        None, "--config", metavar="FILE", help="For `backends`: a ringfence.yaml. Default: the user's own, if any."
    ),
) -> None:
    """Measure this machine: each case interleaved with its baseline, as p50, p95, p99 and their ratio.

    \b
    policy   one decision over 100 rules
    gateway  a governed call against the same call made directly, also with everything on: tokens, rates, budgets,
             labels, traces and a log of calls; and an idle gateway's share of a core
    box      a program in a fresh box against the same program started bare: kept ready and not, by exec, with packages
             loaded, over MCP, 1, 2 and 8 at once, a burst of 100, and the memory of live boxes; and a batch of 1000
             programs by map_code with 2 and with 8 workers
    session  a box that stays: a step in it, resume of a paused one, a box of a template, of a snapshot of 100 MiB, and
             the memory of idle and paused ones
    egress   a request out of a box against a direct one: in a tunnel, where TLS ends at the proxy, and with a secret
             put in, each on a connection that is kept and on a new one; how fast output is searched for secrets; and
             a call of a server in a box, and its start, against the same server in none
    audit    a long log: how fast it is verified, what a call leaves in it, and how long list and explain take
    start    `ringfence run -c pass`, `--version`, `--help` and the first `run_code`, each in a process of its own
    backends  every backend that makes boxes here: a program, cold and warm, a step of a session, pause and resume,
             snapshot and restore, what a box needs, and programs a second, against `docker run` of the same program
             where an engine answers
    console  from a call that a person must approve to the event at an open page of the console

    `cpu_ms` is the processor time of one run, of all processes together. Run it on a machine that does nothing else.

    \b
    ringfence bench box
    ringfence bench gateway --json
    """
    if name is not None and name not in NAMES:
        common.fail(f"there is no benchmark {name!r}; there are: {', '.join(NAMES)}", 2)
    rows: list[Row] = []
    if name in (None, "policy"):
        print("policy: 100 rules …", file=sys.stderr, flush=True)
        rows.append(_policy(2000))
    if name in (None, "gateway"):
        print(f"gateway: {calls} calls per case in {rounds} rounds …", file=sys.stderr, flush=True)
        rows.extend(gateway.run(calls, rounds, concurrent))
    if name in (None, "box"):
        print(f"box: {runs} runs per case …", file=sys.stderr, flush=True)
        rows.extend(box.run(runs))
        rows.extend(batch.run(programs))
    if name in (None, "session"):
        print(f"session: {runs} runs per case …", file=sys.stderr, flush=True)
        rows.extend(session.run(runs))
    if name in (None, "egress"):
        print(f"egress: {runs} requests per case …", file=sys.stderr, flush=True)
        rows.extend(egress.run(runs))
        print("egress: redaction …", file=sys.stderr, flush=True)
        rows.extend(egress.run_redaction())
        print(f"egress: {runs} calls of servers …", file=sys.stderr, flush=True)
        rows.extend(servers.run(runs))
    if name in (None, "audit"):
        print(f"audit: a log of {records} records …", file=sys.stderr, flush=True)
        rows.extend(audit.run(records))
    if name in (None, "start"):
        few = max(10, runs // 20)
        print(f"start: {few} processes per case …", file=sys.stderr, flush=True)
        rows.extend(start.run(few))
    if name in (None, "console"):
        few = max(10, runs // 10)
        print(f"console: {few} questions …", file=sys.stderr, flush=True)
        rows.extend(console.run(few))
    if name in (None, "backends"):
        many = max(10, runs // 5)
        print(f"backends: at most {many} runs per case …", file=sys.stderr, flush=True)
        rows.extend(backends.run(many, settings=common.own_config(config_path)))
    if as_json_:
        common.dump(as_json(rows))
    else:
        print(table(rows))


def _policy(count: int) -> Row:
    """CPU of one decision: 100 rules, the last of which matches and has a condition."""
    rules = [
        Rule(
            id=f"r{n}", action=Action.AUDIT, tool_patterns=(f"tool_{n}_.*",), argument_patterns={"path": f"^/srv/{n}/"}
        )
        for n in range(99)
    ]
    rules.append(Rule(id="last", action=Action.AUDIT, tool_patterns=("echo_.*",), when='args.text != "never"'))
    policy = Policy(rules, environment="development")
    contract, _ = build("echo_read", {"transport": "mcp", "server": "echo", "mode": "read"})
    times: list[float] = []
    for n in range(count):
        call = Call(canonical.new_id("call"), Principal("local"), "echo_read", {"text": f"hello {n}"})
        began = time.process_time()
        policy.decide(call, contract)
        times.append(time.process_time() - began)
    result = row("policy decision, 100 rules (CPU)", times)
    result.cpu_ms = round(sum(times) / count * 1000, 4)
    return result
