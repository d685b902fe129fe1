"""A question to the person who sits at the client that made the call: how it is put, and what its answer says.

It goes out on the call's own way back, as an elicitation (in 2026-07-28 as `input_required`). What the
client holds meanwhile is sealed, and good once, for the same caller and the same call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from ringfence.core import invisible
from ringfence.core.model import Json
from ringfence.governance import question
from ringfence.store import Approval

KEY = "ringfence_approval"
ABOUT = "about"
"""Beside a question, for the way back to its client: which approval it is of. It goes no further."""
_MAX_CHARACTERS = 8_000
"""Characters. What is longer is read in the console, or on the terminal: nobody is asked about what they do not see."""

Verdict = Literal["approve", "deny", "open"]


def can_be_asked(capabilities: Json) -> bool:
    """Whether the client can show a form."""
    declared = capabilities.get("elicitation")
    return isinstance(declared, dict) and (not declared or "form" in declared)


def put(approval: Approval) -> Json | None:
    """The question, with all that its answerer must see; None where that is too long for a client to show."""
    if approval.terms.get("reason"):
        return None  # a client has no field for it that everybody sees
    lines = [f"Ringfence: a person must approve this call ({approval.id}).", question.subject(approval, invisible.name)]
    about = [*question.caller(approval), *question.terms(approval, invisible.name), *question.consequences(approval)]
    lines += [f"{label}: {text}" if label else text for label, text in (*about, *question.unshown(approval))]
    sent = [f"{label}: {invisible.json_text(value)}" for label, value in question.sent(approval)]
    message = "\n".join([*map(invisible.visible, lines), *sent])
    if len(message) > _MAX_CHARACTERS:
        return None
    schema = {
        "type": "object",
        "properties": {"answer": {"type": "string", "enum": ["approve", "deny"], "title": "Your answer"}},
        "required": ["answer"],
    }
    return {"method": "elicitation/create", "params": {"mode": "form", "message": message, "requestedSchema": schema}}


def said(answers: Mapping[str, Any]) -> Verdict | None:
    """What was answered; `open` where the person left it to others. None where it is no answer at all."""
    answer = answers.get(KEY)
    if not isinstance(answer, dict) or answer.get("action") not in ("accept", "decline", "cancel"):
        return None
    if answer["action"] != "accept":
        return "open"
    content = answer.get("content")
    verdict = content.get("answer") if isinstance(content, dict) else None
    return verdict if verdict in ("approve", "deny") else None
