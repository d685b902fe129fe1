"""`ringfence call`: one governed call from a shell. Its exit code tells how the call ended."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import typer

from ringfence import canonical, config, identity, system
from ringfence.cli import common, remote
from ringfence.cli.telling import EXIT, Told, say
from ringfence.cli.terminal import json_text, safe
from ringfence.errors import OutcomeUnknown, Refused, Unavailable
from ringfence.model import Json, Status


@dataclass(frozen=True, slots=True)
class Ended:
    """How a call ended, wherever it was made."""

    status: Status
    reason_code: str
    content: list[Any] = field(default_factory=list)
    structured: Any = None
    facts: Json = field(default_factory=dict)
    more: Json = field(default_factory=dict)
    """Call id, approval id, trust and receipt, as far as they are known."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The call as it was typed."""

    tool: str
    text: str
    arguments: Json
    fault: str | None
    timeout: float | None
    key: str | None


def call(
    tool: str = typer.Argument(..., metavar="TOOL", help="The capability's name."),
    args: str = typer.Option("{}", "--args", metavar="JSON", help="Its arguments, a JSON object."),
    config_path: Path | None = common.ConfigOption,
    url: str | None = typer.Option(None, "--url", help="A gateway's endpoint, as `serve` prints it; also unix:PATH."),
    as_json: bool = typer.Option(False, "--json", help="Print status, reason_code, content, structured, facts."),
    timeout: float | None = typer.Option(None, "--timeout", min=0.001, metavar="S", help="Give up after S seconds."),
    key: str | None = typer.Option(
        None, "--idempotency-key", metavar="K", help="The same key again gives the same outcome, not another run."
    ),
    demo: bool = common.DemoOption,
) -> None:
    """Call one tool, through a running gateway (--url) or in this process (--config, ./ringfence.yaml, --demo).

    Text goes to stdout; what became of the call, and why, to stderr. Exit code: 0 success, 1 the tool failed,
    2 usage or invalid arguments, 124 timeout, 125 unavailable or unknown, 126 denied or approval needed, 137 killed.

    \b
    ringfence call search_docs --args '{"query": "refunds"}' --url http://127.0.0.1:8700/mcp
    ringfence call search_docs --args '{"query": "refunds"}' --demo --json
    """
    if url is not None and (config_path is not None or demo):
        common.fail("--url names a running gateway, --config and --demo one in this process: give one of them", 2)
    wanted = _wanted(tool, args, timeout, key)
    if url is not None:
        where = " (with the --config or --demo of that gateway)"
        ended = common.run(_there, wanted, url, Told(where))
    else:
        here = common.loaded("ringfence.cli.here")
        settings = here.settings(config_path, demo)
        where = " --demo" if demo else f" --config {settings.path}"
        ended = common.run(here.call, wanted, settings, Told(where))
    _show(ended, as_json)
    raise typer.Exit(EXIT[ended.status])


def _wanted(tool: str, args: str, timeout: float | None, key: str | None) -> Wanted:
    """Arguments that are no JSON at all are a slip of the typist; what is JSON goes on, to be refused on record."""
    fault: str | None = None
    value: Any
    try:
        value = canonical.loads(args.encode("utf-8", "surrogateescape"))
    except canonical.NotCanonical as exc:
        value, fault = exc.value, str(exc)
        if value is None:
            common.fail(f"--args: {exc}", 2)
    if not isinstance(value, dict):
        value, fault = {}, fault or "arguments must be an object"
    name = tool.encode("utf-8", "surrogateescape").decode("utf-8", "replace")  # a shell passes any bytes
    return Wanted(name, args, value, fault, timeout, key)


def failed(status: Status, reason_code: str, message: str, call_id: str | None = None) -> Ended:
    content = [{"type": "text", "text": message}]
    return Ended(status, reason_code, content, more={} if call_id is None else {"call_id": call_id})


# ── Through a gateway ─────────────────────────────────────────────────────────────────────────────


async def _there(wanted: Wanted, url: str, told: Told) -> Ended:
    request = remote.Request(url, wanted.tool, wanted.text, wanted.key, wanted.timeout, _token(url))
    try:
        return _of_result(await remote.call(request, told.progress))
    except Refused as exc:
        return failed(exc.status, exc.reason_code, exc.message)
    except OutcomeUnknown as exc:
        return failed(Status.UNKNOWN, exc.reason_code, exc.message)
    except Unavailable as exc:
        return failed(Status.UNAVAILABLE, exc.reason_code, exc.message)


def _token(url: str) -> str | None:
    """Ours, for a gateway on this machine, where its kernel does not say whose a connection is."""
    try:
        host = urlsplit(url).hostname
    except ValueError:
        return None
    if system.tells_peers() or host is None or not config.is_loopback(host):
        return None
    return identity.known_token(config.key_folder())


def _of_result(result: Json) -> Ended:
    meta = result.get("_meta")
    meta = meta if isinstance(meta, dict) else {}
    about, facts, content = meta.get("ringfence/outcome"), meta.get("ringfence/facts"), result.get("content")
    if not isinstance(about, dict):  # no gateway of ours, but it answered
        about = {"status": "failed", "reason_code": "tool_error"} if result.get("isError") else {"status": "success"}
    try:
        status = Status(str(about.get("status")))
    except ValueError:
        status = Status.UNKNOWN
    more = {name: about[name] for name in ("call_id", "trust", "approval_id") if name in about}
    if "ringfence/receipt" in meta:
        more["receipt"] = meta["ringfence/receipt"]
    return Ended(
        status=status,
        reason_code=str(about.get("reason_code", "ok")),
        content=content if isinstance(content, list) else [],
        structured=result.get("structuredContent"),
        facts=facts if isinstance(facts, dict) else {},
        more=more,
    )


# ── Showing ───────────────────────────────────────────────────────────────────────────────────────


def _show(ended: Ended, as_json: bool) -> None:
    if as_json:
        told = {"status": str(ended.status), "reason_code": ended.reason_code, "content": ended.content}
        common.dump({**told, "structured": ended.structured, "facts": ended.facts, **ended.more})
        return
    for block in ended.content:
        text = _block(block)
        # A file gets what the tool said; a terminal gets nothing that it would act upon.
        print(safe(text, lines=True) if sys.stdout.isatty() else text)
    sys.stdout.flush()
    call_id, explanation = ended.more.get("call_id"), ended.facts.get("explanation")
    line = f"{ended.status} ({ended.reason_code})"
    line += f", call {call_id}" if call_id else ""
    say(f"{line}: {explanation}" if explanation else line)


def _block(block: Any) -> str:
    """A content block as a person reads it."""
    if not isinstance(block, dict):
        return json.dumps(block)
    inner = block.get("resource")
    held = inner if isinstance(inner, dict) else block
    if isinstance(held.get("text"), str):
        return str(held["text"])
    data = held.get("data", held.get("blob"))
    if isinstance(data, str):
        return f"[{block.get('type')}, {held.get('mimeType', 'unknown type')}, {len(data) * 3 // 4} bytes]"
    return json_text(block, indent=None)
