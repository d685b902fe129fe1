"""`ringfence call`: one governed call from a shell. Its exit code tells how the call ended."""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import anyio
import typer

from ringfence import __version__, config, identity
from ringfence.cli import common, options
from ringfence.cli.common import EXIT_CODES, TerminalChannel, say
from ringfence.cli.terminal import json_text, safe
from ringfence.config import Config
from ringfence.core import canonical, system
from ringfence.core.errors import OutcomeUnknown, Refused, StoreError, Unavailable
from ringfence.core.model import Call, Json, Outcome, Status
from ringfence.core.record import dataclass
from ringfence.upstream.http import reason_of

_REVISION = "2025-11-25"
_ACCEPT = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
_CONNECT_SECONDS = 10.0
_PARTING_SECONDS = 2.0
_MAX_BYTES = 16_000_000
_CALL_ID = 2
_LONGEST_WAIT = 3600
_UNIX = "unix:"
_AT_A_SOCKET = "http://localhost/mcp"
_INVALID = (-32700, -32600, -32602)
"""JSON-RPC: no JSON, no request, wrong parameters."""
_GRACE_SECONDS = 0.5
_PAIR = re.compile(r"([A-Za-z_][A-Za-z0-9_-]*)=(\S*)")
_SHORT = 200


@dataclass(frozen=True, slots=True)
class CallResult:
    """How a call ended, wherever it was made."""

    status: Status
    reason_code: str
    content: list[Any] = field(default_factory=list)
    structured: Any = None
    facts: Json = field(default_factory=dict)
    more: Json = field(default_factory=dict)
    """Call id, approval id, trust and receipt, as far as they are known."""


@dataclass(frozen=True, slots=True)
class TypedCall:
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
    url: options.GatewayUrl = None,
    as_json: bool = typer.Option(False, "--json", help="Print status, reason_code, content, structured, facts."),
    timeout: float | None = typer.Option(None, "--timeout", min=0.001, metavar="S", help="Give up after S seconds."),
    key: str | None = typer.Option(
        None,
        "--idempotency-key",
        metavar="K",
        help="A second call with the same key returns the first outcome, and does not run again.",
    ),
    demo: bool = common.DemoOption,
    agent: str | None = common.AgentOption,
    token_file: options.TokenFile = None,
) -> None:
    """Call one tool, through a running gateway (--url) or in this process (--config, ./ringfence.yaml, --demo).

    The tool's text goes to stdout, the status of the call and the reason to stderr. Exit code: 0 success, 1 the tool
    failed, 2 usage or invalid arguments, 124 timeout, 125 unavailable or unknown, 126 denied or approval needed,
    137 killed.

    \b
    ringfence call search_docs --args '{"query": "refunds"}' --url http://127.0.0.1:8700/mcp
    ringfence call search_docs --args '{"query": "refunds"}' --demo --json
    """
    if url is not None and (config_path is not None or demo):
        common.fail("--url names a running gateway, --config and --demo one in this process: give one of them", 2)
    if url is None and token_file is not None:
        common.fail("--token-file is for --url", 2)
    if url is not None and agent is not None:
        common.fail("--agent is for a gateway in this process; to --url, a token says which agent it is", 2)
    wanted = _wanted(tool, args, timeout, key)
    if url is not None:
        channel = TerminalChannel(" (with the --config or --demo of that gateway)")
        ended = common.run(call_there, wanted, url, channel, token_for(url, token_file))
    else:
        settings = common.demo_config() if demo else common.load(config_path)
        channel = TerminalChannel(" --demo" if demo else f" --config {settings.path}")
        ended = common.run(call_here, wanted, settings, channel, common.local_agent(settings, agent))
    _show(ended, as_json)
    if ended.status is Status.APPROVAL_REQUIRED and "approval_id" in ended.more:
        channel.left_open(str(ended.more["approval_id"]))
    raise typer.Exit(EXIT_CODES[ended.status])


def _wanted(tool: str, args: str, timeout: float | None, key: str | None) -> TypedCall:
    """Arguments that are not JSON are a usage error. Any JSON is sent, and wrong arguments are refused on record."""
    fault: str | None = None
    value: Any
    try:
        value = canonical.loads(args.encode("utf-8", "surrogateescape"))
    except canonical.NotCanonical as exc:
        value = exc.value
        fault = str(exc)
        if value is None:
            common.fail(f"--args: {exc}; write a JSON object: --args {_example(args)}", 2)
    if not isinstance(value, dict):
        value, fault = {}, fault or "arguments must be an object"
    name = tool.encode("utf-8", "surrogateescape").decode("utf-8", "replace")  # a shell passes any bytes
    return TypedCall(name, args, value, fault, timeout, key)


def _example(args: str) -> str:
    """How the arguments would be right, as a shell takes them: with the ones that were given as NAME=VALUE, if so."""
    pairs = [_PAIR.fullmatch(word) for word in args.split()] if len(args) <= _SHORT else []
    given = {pair[1]: pair[2] for pair in pairs if pair is not None} if pairs and all(pairs) else {"query": "refunds"}
    return shlex.quote(json.dumps(given))


def failed(status: Status, reason_code: str, message: str, call_id: str | None = None) -> CallResult:
    content = [{"type": "text", "text": message}]
    return CallResult(status, reason_code, content, more={} if call_id is None else {"call_id": call_id})


# ── In this process ───────────────────────────────────────────────────────────────────────────────


async def call_here(
    wanted: TypedCall, configured: Config, channel: TerminalChannel, agent: str | None = None
) -> CallResult:
    """Open a gateway for this one call."""
    from ringfence.compose.gateway import App  # noqa: PLC0415 - a call through a gateway need not load one

    call_id = canonical.new_id("call")
    limit = wanted.timeout
    try:
        async with App.open(configured, servers=_needed(wanted.tool, configured), agent=agent) as app:
            made = Call(
                id=call_id,
                principal=app.agent,
                tool=wanted.tool,
                arguments=wanted.arguments,
                origin="cli",
                idempotency_key=wanted.key,
                fault=wanted.fault,
                deadline=None if limit is None else time.monotonic() + limit,
            )
            # The deadline ends the call itself; this ends what comes before it, such as waiting for an approval.
            with anyio.move_on_after(None if limit is None else limit + _GRACE_SECONDS):
                return result_of(await app.handle(made, channel), call_id)
    except StoreError as exc:
        return failed(Status.UNAVAILABLE, "store", str(exc))
    return failed(Status.TIMEOUT, "caller_timeout", f"gave up after {limit:g} s; the call is cancelled", call_id)


def _needed(tool: str, configured: Config) -> Collection[str] | None:
    """The server that the call needs: none, the one that its contract names, or (None) any of them."""
    contract = configured.contracts.get(tool)
    if contract is None or not contract.is_served:
        return ()
    return None if contract.server is None else (contract.server,)


def result_of(outcome: Outcome, call_id: str) -> CallResult:
    more: Json = {"call_id": call_id, "trust": outcome.trust}
    if outcome.approval_id is not None:
        more["approval_id"] = outcome.approval_id
    if outcome.receipt is not None:
        receipt = outcome.receipt
        more["receipt"] = {"chain": receipt.chain, "seq": receipt.seq, "head": receipt.head}
    return CallResult(outcome.status, outcome.reason_code, outcome.content, outcome.structured, outcome.facts, more)


# ── Through a running gateway ─────────────────────────────────────────────────────────────────────


async def call_there(wanted: TypedCall, url: str, channel: TerminalChannel, token: str | None) -> CallResult:
    """Have the gateway at `url` make this call."""
    request = GatewayRequest(url, wanted.tool, wanted.text, wanted.key, wanted.timeout, token)
    try:
        return _of_result(await call_gateway(request, channel.progress))
    except Refused as exc:
        return failed(exc.status, exc.reason_code, exc.message)
    except OutcomeUnknown as exc:
        return failed(Status.UNKNOWN, exc.reason_code, exc.message)
    except Unavailable as exc:
        return failed(Status.UNAVAILABLE, exc.reason_code, exc.message)


def token_for(url: str, file: Path | None) -> str | None:
    """What proves to the gateway at `url` who calls, where it needs that. From the file, if one is named."""
    return _own_token(url) if file is None else _read(file)


def _read(file: Path) -> str:
    """The token in a file: on a command line, every user of the machine could see it."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as exc:
        common.fail(f"--token-file: {file} cannot be read: {getattr(exc, 'strerror', None) or 'it is no text'}", 2)
    if not text or len(text.split()) != 1:
        common.fail(f"--token-file: {file} holds no token", 2)
    return text


def _own_token(url: str) -> str | None:
    """Our token, for a gateway on this machine, if its kernel does not say which user a connection belongs to."""
    try:
        host = urlsplit(url).hostname
    except ValueError:
        return None
    if system.tells_peers() or host is None or not config.is_loopback(host):
        return None
    return identity.known_token(config.key_folder())


def _of_result(result: Json) -> CallResult:
    meta = result.get("_meta")
    meta = meta if isinstance(meta, dict) else {}
    about = meta.get("ringfence/outcome")
    facts = meta.get("ringfence/facts")
    content = result.get("content")
    if not isinstance(about, dict):  # some other MCP server
        about = {"status": "failed", "reason_code": "tool_error"} if result.get("isError") else {"status": "success"}
    try:
        status = Status(str(about.get("status")))
    except ValueError:
        status = Status.UNKNOWN
    more = {name: about[name] for name in ("call_id", "trust", "approval_id") if name in about}
    if "ringfence/receipt" in meta:
        more["receipt"] = meta["ringfence/receipt"]
    return CallResult(
        status=status,
        reason_code=str(about.get("reason_code", "ok")),
        content=content if isinstance(content, list) else [],
        structured=result.get("structuredContent"),
        facts=facts if isinstance(facts, dict) else {},
        more=more,
    )


# ── MCP over Streamable HTTP, to a gateway ────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class GatewayRequest:
    """What is asked of the gateway at `url`."""

    url: str
    tool: str
    arguments: str
    """JSON as it was typed: well-formed, and not checked further."""
    idempotency_key: str | None = None
    timeout: float | None = None
    token: str | None = field(default=None, repr=False)
    """Proves to the gateway which user calls, if it cannot see that by itself."""


async def call_gateway(request: GatewayRequest, tell: Callable[[Json], None]) -> Json:
    """The raw result. `tell` gets the parameters of each progress notification meanwhile.

    Raises Unavailable where the call never left, Refused for an error or when the time was up, and OutcomeUnknown
    where the answer was lost.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
    path = request.url.removeprefix(_UNIX) if request.url.startswith(_UNIX) else None
    connector = None if path is None else _at_socket(path)
    jar = aiohttp.DummyCookieJar()
    async with aiohttp.ClientSession(timeout=timeout, cookie_jar=jar, connector=connector) as http:
        gateway = _Gateway(http, request.url if path is None else _AT_A_SOCKET, request.token)
        try:
            await gateway.greet()
        except (aiohttp.InvalidURL, ValueError):
            raise Unavailable(
                "bad_url", f"{request.url} is not the address of a gateway: write http://HOST:PORT/mcp or unix:PATH"
            ) from None
        except (aiohttp.ClientError, TimeoutError) as exc:
            raise Unavailable(
                "unreachable", f"no gateway answers at {request.url} ({reason_of(exc)}); start one: ringfence serve"
            ) from None
        except (Refused, OutcomeUnknown) as exc:
            raise Unavailable("no_gateway", f"what answers at {request.url} is not a gateway: {exc}") from None
        try:
            with anyio.move_on_after(request.timeout):
                return await gateway.call(request, tell)
            text = f"gave up after {request.timeout:g} s; the call is cancelled"
            raise Refused(Status.TIMEOUT, "caller_timeout", text)
        except (aiohttp.ClientError, TimeoutError) as exc:
            raise OutcomeUnknown("answer_lost", f"the gateway's answer was lost: {reason_of(exc)}") from None
        finally:
            await gateway.part()


def _at_socket(path: str) -> aiohttp.UnixConnector:
    """Raises Unavailable for a socket of another user, who would learn what is meant for our gateway."""
    try:
        info = os.lstat(path)
    except OSError as exc:
        raise Unavailable("unreachable", f"no gateway answers at {_UNIX}{path}: {exc.strerror}") from None
    if not stat.S_ISSOCK(info.st_mode) or system.stranger(info):
        raise Unavailable(
            "unreachable", f"{path} is not a socket of this user: no gateway that serves you listens there"
        )
    return aiohttp.UnixConnector(path)


class _Gateway:
    """A session with one gateway."""

    def __init__(self, http: aiohttp.ClientSession, url: str, token: str | None) -> None:
        self._http = http
        self._url = url
        self._headers = dict(_ACCEPT)
        if token is not None:
            self._headers["authorization"] = f"Bearer {token}"

    async def greet(self) -> None:
        about = {"name": "ringfence-cli", "version": __version__}
        params = {"protocolVersion": _REVISION, "capabilities": {}, "clientInfo": about}
        hello = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}
        result = await self._request(json.dumps(hello), 1, lambda _: None)
        self._headers["mcp-protocol-version"] = str(result.get("protocolVersion", _REVISION))
        await self._send({"jsonrpc": "2.0", "method": "notifications/initialized"})

    async def call(self, request: GatewayRequest, tell: Callable[[Json], None]) -> Json:
        # A person sits here: as long as the gateway lets a call wait.
        meta: Json = {"progressToken": "progress", "ringfence/wait_seconds": _LONGEST_WAIT}
        if request.idempotency_key is not None:
            meta["ringfence/idempotency_key"] = request.idempotency_key
        name = json.dumps(request.tool)
        about = json.dumps(meta)
        params = f'{{"name": {name}, "arguments": {request.arguments}, "_meta": {about}}}'
        body = f'{{"jsonrpc": "2.0", "id": {_CALL_ID}, "method": "tools/call", "params": {params}}}'
        try:
            return await self._request(body, _CALL_ID, tell)
        except anyio.get_cancelled_exc_class():
            # A closed connection does not cancel a call: without this message, it would run on.
            note = {"requestId": _CALL_ID, "reason": "the caller gave up"}
            with anyio.move_on_after(_PARTING_SECONDS, shield=True):
                await self._send({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": note})
            raise

    async def part(self) -> None:
        with anyio.move_on_after(_PARTING_SECONDS, shield=True):
            try:
                async with self._http.delete(self._url, headers=self._headers, allow_redirects=False):
                    pass
            except aiohttp.ClientError:
                return  # the gateway ends our session by itself

    async def _send(self, message: Json) -> None:
        async with self._http.post(self._url, json=message, headers=self._headers, allow_redirects=False):
            pass

    async def _request(self, body: str, ident: int, tell: Callable[[Json], None]) -> Json:
        posting = self._http.post(
            self._url, data=body.encode("utf-8", "surrogateescape"), headers=self._headers, allow_redirects=False
        )
        async with posting as response:
            if "mcp-session-id" in response.headers:
                self._headers["mcp-session-id"] = response.headers["mcp-session-id"]
            async for message in _messages(response):
                if message.get("method") == "notifications/progress" and isinstance(message.get("params"), dict):
                    tell(message["params"])
                elif "error" in message:
                    raise _rpc_failed(message["error"])
                elif message.get("id") == ident and isinstance(message.get("result"), dict):
                    return dict(message["result"])
            raise _http_failed(response.status, self._url)


async def _messages(response: aiohttp.ClientResponse) -> AsyncIterator[Json]:
    """The messages of a response: one, or those of an event stream; none if it is something else."""
    kind = response.headers.get("content-type", "")
    streams = kind.startswith("text/event-stream")
    if not streams and not kind.startswith("application/json"):
        return
    buffer = b""
    async for chunk in response.content.iter_any():
        buffer += chunk
        if len(buffer) > _MAX_BYTES:
            raise OutcomeUnknown("answer_unusable", f"the gateway sent more than {_MAX_BYTES} bytes in one message")
        if streams:
            *events, buffer = buffer.replace(b"\r\n", b"\n").split(b"\n\n")
            for event in events:
                data = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
                if data:
                    yield _message(b"\n".join(data))
    if not streams:
        yield _message(buffer)


def _message(data: bytes) -> Json:
    try:
        value = canonical.loads(data)
    except canonical.NotCanonical as exc:
        raise OutcomeUnknown("answer_unusable", f"the gateway's answer cannot be read: {exc}") from None
    return value if isinstance(value, dict) else {}


def _rpc_failed(error: object) -> Refused:
    error = error if isinstance(error, dict) else {}
    status = Status.VALIDATION_FAILURE if error.get("code") in _INVALID else Status.FAILED
    return Refused(status, "rpc_error", f"{error.get('message', 'no message')} (JSON-RPC error {error.get('code')})")


def _http_failed(status: int, url: str) -> Exception:
    if status == 413:
        return Refused(Status.VALIDATION_FAILURE, "too_large", "the arguments are larger than the gateway takes")
    if status >= 300:
        return Unavailable("http", f"{url} answered HTTP {status}: is it a gateway of this user, and its /mcp?")
    return OutcomeUnknown("answer_lost", "the gateway ended its answer before the result")


# ── Showing ───────────────────────────────────────────────────────────────────────────────────────


def _show(ended: CallResult, as_json: bool) -> None:
    if as_json:
        printed = {"status": str(ended.status), "reason_code": ended.reason_code, "content": ended.content}
        common.dump({**printed, "structured": ended.structured, "facts": ended.facts, **ended.more})
        return
    for block in ended.content:
        text = _block(block)
        # A file gets the tool's exact text; a terminal gets nothing that it would act upon.
        print(safe(text, lines=True) if sys.stdout.isatty() else text)
    sys.stdout.flush()
    call_id = ended.more.get("call_id")
    explanation = ended.facts.get("explanation")
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
