"""Outcomes as MCP results and errors, and what the two revisions want around them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mcp.shared.exceptions import MCPError
from mcp_types import INVALID_PARAMS, ClientCapabilities

from ringfence.core.model import Call, Json, Outcome, Status
from ringfence.governance.guard import looks_ours
from ringfence.upstream.link import MODERN

_PREFIX = "io.modelcontextprotocol/"
_SERVER_INFO = f"{_PREFIX}serverInfo"
_CACHEABLE = frozenset({"tools/list", "resources/list", "resources/templates/list", "resources/read", "prompts/list"})
_PASS_ON = (-32021, -32042)
"""Errors of a server that a client acts upon by itself: a missing capability, a URL to visit first."""
_OUR_OWN = frozenset({-32700, -32600, -32601, -32020, -32022})
"""Errors of the protocol between the client and us, which no server can speak of."""
_NOT_FOUND_2025 = -32002
_LINKS_SINCE = "2025-06-18"


def meta_of(params: Mapping[str, Any] | None) -> Json:
    meta = (params or {}).get("_meta")
    return meta if isinstance(meta, dict) else {}


def declared(capabilities: ClientCapabilities | None) -> Json:
    """What a client declared, as it sent it."""
    return {} if capabilities is None else capabilities.model_dump(by_alias=True, mode="json", exclude_none=True)


def forwardable(meta: Json) -> Json:
    """The keys of a client's `_meta` that are neither MCP's nor ours; the contract says which of them go on."""
    return {k: v for k, v in meta.items() if not (k.startswith((_PREFIX, "ringfence/")) or k == "progressToken")}


def with_fault(call: Call, fault: str) -> Call:
    return replace(call, fault=fault)


def _ident(outcome: Outcome, call: Call) -> str:
    """The id under which the call is on record: of one that was resumed, that of the request that began it."""
    return str(outcome.facts.get("call_id") or call.id)


def outcome_meta(outcome: Outcome, call: Call) -> Json:
    about: Json = {"status": str(outcome.status), "reason_code": outcome.reason_code, "call_id": _ident(outcome, call)}
    about["trust"] = outcome.trust
    if outcome.approval_id is not None:
        about["approval_id"] = outcome.approval_id
    meta: Json = {"ringfence/outcome": about, "ringfence/facts": outcome.facts}
    labels = outcome.facts.get("labels")
    if labels and labels["result"] and outcome.result is not None:
        meta["ringfence/labels"] = labels["result"]
    if outcome.receipt is not None:
        receipt = outcome.receipt
        meta["ringfence/receipt"] = {"chain": receipt.chain, "seq": receipt.seq, "head": receipt.head}
    return meta


def with_meta(result: Json, outcome: Outcome, call: Call) -> Json:
    meta = result.get("_meta")
    return {**result, "_meta": {**(meta if isinstance(meta, dict) else {}), **outcome_meta(outcome, call)}}


def tool_result(outcome: Outcome, call: Call, version: str = MODERN) -> Json:
    """A `tools/call` result. A refusal is one too: readable, marked as an error, with reason and call id."""
    if outcome.error is not None and outcome.error.get("code") in _PASS_ON:
        raise MCPError(outcome.error["code"], outcome.error["message"], _error_data(outcome, call))
    if outcome.result is not None:
        result = outcome.result
        if outcome.within is not None and version < _LINKS_SINCE:
            result = {**result, "content": [_link_as_text(block) for block in result["content"]]}
        return with_meta(result, outcome, call)
    text = f"{outcome.message} [{outcome.status}/{outcome.reason_code}, call {_ident(outcome, call)}]"
    return with_meta({"content": [{"type": "text", "text": text}], "isError": True}, outcome, call)


def _link_as_text(block: Json) -> Json:
    """A resource link as text, for clients older than links."""
    if block.get("type") != "resource_link":
        return block
    return {"type": "text", "text": f"[{block['name']}: {block['uri']}]"}


def _error_data(outcome: Outcome, call: Call) -> Json:
    """What goes with an error: a server's own data beside ours, and never in the place of ours."""
    about: Json = {"status": str(outcome.status), "reason_code": outcome.reason_code, "call_id": _ident(outcome, call)}
    if outcome.error is None:
        return about
    own = outcome.error.get("data")
    if own is not None and not isinstance(own, dict):
        own = {"data": own}
    theirs = {name: value for name, value in (own or {}).items() if not looks_ours(name)}
    return {**theirs, **about, "trust": outcome.trust}


def item_error(outcome: Outcome, call: Call, version: str) -> MCPError:
    """Resources, prompts and completions have no result that says no; theirs is a JSON-RPC error."""
    data = _error_data(outcome, call)
    if outcome.error is not None:
        code = int(outcome.error["code"])
        if code == _NOT_FOUND_2025 and version == MODERN:
            code = INVALID_PARAMS  # 2026-07-28 gave up the special code
        return MCPError(-32603 if code in _OUR_OWN else code, outcome.error["message"], data)
    if outcome.status is Status.VALIDATION_FAILURE:
        missing = outcome.reason_code.startswith("unknown_resource") and version != MODERN
        return MCPError(_NOT_FOUND_2025 if missing else INVALID_PARAMS, outcome.message, data)
    return MCPError(-32603, f"{outcome.message} [{outcome.status}/{outcome.reason_code}]", data)


def stamp(result: Json, method: str, server_info: Json) -> Json:
    """What 2026-07-28 requires of every result."""
    result.setdefault("resultType", "complete")
    if method in _CACHEABLE and result["resultType"] == "complete":
        result.setdefault("ttlMs", 0)
        result["cacheScope"] = "private"  # what is offered depends on who asks
    meta = result.get("_meta")
    result["_meta"] = {**(meta if isinstance(meta, dict) else {}), _SERVER_INFO: server_info}
    return result


def unstamp(result: Json) -> Json:
    """Remove the envelope of 2026-07-28 from a server's result, for a client that speaks an older version."""
    for key in ("resultType", "ttlMs", "cacheScope"):
        result.pop(key, None)
    return result
