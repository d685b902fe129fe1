"""The guard: what passes untouched, what is cut out, and what does not get through at all."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.core import canonical
from ringfence.core.errors import Refused
from ringfence.core.model import Contract, Definition, Json, ResultPolicy
from ringfence.core.secret import Secret
from ringfence.governance.contract import Schemas
from ringfence.governance.guard import ONLY_FIELDS, Guard, Guarded
from ringfence.secrets.redaction import TenantRedactor
from tests.making import READ, definition

PLAIN = definition("search_docs", "docs")
TYPED = definition("search_docs", "docs", outputSchema={"type": "object", "required": ["id"]})


class Known:
    """Stands in for the vault: knows one secret by its value."""

    basis = None

    def matches(self, data: bytes) -> bool:
        return b"hunter2" in data

    knows = matches

    def secrets(self, text: str) -> Mapping[str, int]:
        return {"the_token": text.count("hunter2")}

    def marked(self, text: str) -> tuple[str, Mapping[str, int]]:
        return self.redact(text)

    def redact(self, text: str, most: int | None = None) -> tuple[str, Mapping[str, int]]:
        found = text.count("hunter2")
        return text.replace("hunter2", "[secret]"), {"token": found} if found else {}


def inspect(result: Json, contract: Contract = READ, known: Definition | None = PLAIN, **more: Any) -> Guarded:
    return Guard(Schemas().result_problem, **more).inspect(contract, known, result)


def text_result(text: str, **more: Any) -> Json:
    return {"content": [{"type": "text", "text": text}], **more}


def policy(**result: Any) -> Contract:
    return replace(READ, result=ResultPolicy(**result))


ODD: Json = {
    "content": [
        {"type": "text", "text": "line\nline\ttab\r\n", "annotations": {"audience": ["user"], "unknown": 1}},
        {"type": "image", "data": "aGVsbG8=", "mimeType": "image/png"},
        {"type": "resource", "resource": {"uri": "file:///a", "text": "t", "blob": "aGk="}},
        {"type": "hologram", "voxels": [[1, 2], None], "unknown": {"deep": True}},
    ],
    "structuredContent": {"id": 1, "größe": "1 m²", "emoji": "👩‍👩‍👧", "persian": "می\u200cخواهم"},
    "isError": True,
    "_meta": {"vendor/x": {"y": 12345678901234567890}},
    "vendorField": [None, 1.5],
}


def test_where_no_rule_matches_the_very_same_object_goes_on() -> None:
    guarded = inspect(ODD)
    assert guarded.result is ODD
    assert (guarded.problem, guarded.redactions) == (None, {})
    assert inspect(ODD, redactor=Known()).result is ODD
    assert inspect(ODD, replace(READ, redact=("[0-9]{3}-[0-9]{2}",))).result is ODD


class Counting(Known):
    """How much text was searched."""

    searched = 0

    def marked(self, text: str) -> tuple[str, Mapping[str, int]]:
        return self.redact(text)

    def redact(self, text: str, most: int | None = None) -> tuple[str, Mapping[str, int]]:
        self.searched += len(text)
        return super().redact(text)


def test_a_long_message_costs_what_is_shown_of_it_and_a_little_more() -> None:
    counting = Counting()
    guard = Guard(Schemas().result_problem, counting)
    shown = guard.message(("hunter2 " + "plain " * 20) * 100_000)
    assert shown.startswith("[secret] plain") and "hunter" not in shown
    assert counting.searched < 1_000_000


def test_a_message_full_of_texts_in_the_shape_of_secrets_goes_whole_and_nobody_asks_which_they_were() -> None:
    asked: list[str] = []

    class Asked(TenantRedactor):
        def secrets(self, text: str) -> Mapping[str, int]:
            asked.append(text)
            return super().secrets(text)

    guard = Guard(Schemas().result_problem, Asked(lambda: ()))
    keys = [f"AKIAIOSFODNN7{number:07}".translate(str.maketrans("0189", "GHJK")) for number in range(60)]
    for end in ("", "\x1b[2J", "." * 5000):
        assert guard.message(" ".join(keys) + end) == "[redacted]"
        assert guard.message(" ".join(keys[:40]) + end).count("[redacted]") == 40
    assert not asked


def test_many_keys_that_look_alike_once_cleaned_stay_apart() -> None:
    """With a search from the first number on for each, this would take hours."""
    guarded = inspect(
        text_result("x", structuredContent={f"hunter2{'hunter2' * n}": n for n in range(3)}), redactor=Known()
    )
    assert guarded.result is not None
    shapes = Guard(Schemas().result_problem, TenantRedactor(lambda: ()))
    many = {f"AKIAIOSFODNN7{number:07}".translate(str.maketrans("0189", "GHJK")): number for number in range(2000)}
    whole = shapes.inspect(policy(max_bytes=8_000_000), PLAIN, text_result("x", structuredContent=many))
    assert whole.result is not None
    assert sorted(whole.result["structuredContent"].values()) == list(range(2000))


@pytest.mark.parametrize("said", ["true", 1, None, []])
def test_an_error_mark_is_true_or_false(said: Any) -> None:
    guarded = inspect(text_result("x", isError=said), known=TYPED)
    assert guarded.problem is not None and guarded.problem[0] == "invalid_result"


@pytest.mark.anyio
async def test_what_a_server_says_besides_results_has_a_length() -> None:
    guard = Guard(Schemas().result_problem, Known())
    words = "hunter2 " + "plain " * 13_000
    assert (await guard.said(READ, {"data": words}))["data"].startswith("[secret] ")
    with pytest.raises(Refused, match="may have 262144"):
        await guard.said(READ, {"data": words * 4})
    assert await guard.error_data(READ, {"why": "hunter2"}) == {"why": "[secret]"}
    with pytest.raises(Refused, match="may have 65536"):
        await guard.error_data(READ, [words])


@pytest.mark.anyio
async def test_a_long_result_is_inspected_as_a_short_one_is() -> None:
    guard = Guard(Schemas().result_problem, Known())
    result = text_result(("hunter2 " + "plain " * 20) * 2000)
    apart = await guard.inspect_async(READ, PLAIN, result)
    assert apart == guard.inspect(READ, PLAIN, result) and apart.redactions == {"token": 2000}


KEYS = [f"AKIA{number:016d}".translate(str.maketrans("0123456789", "ABCDEFGHIJ")) for number in range(41_000)]


@pytest.mark.parametrize("size", [2600, 41_000])
def test_a_result_full_of_what_looks_like_secrets_is_withheld_whole(size: int) -> None:
    guard = Guard(Schemas().result_problem, TenantRedactor(lambda: ()))
    for result in (text_result("x", structuredContent={"a": KEYS[:size]}), text_result(" ".join(KEYS[:size]))):
        guarded = guard.inspect(policy(max_bytes=8_000_000), PLAIN, result)
        shown = json.dumps(guarded.result) if guarded.result else ""
        assert "AKIA" not in shown and len(shown) < 200
    hidden = text_result("x", structuredContent={"a": [f"{key[:9]}\u200b{key[9:]}" for key in KEYS[:size]]})
    assert guard.inspect(policy(max_bytes=8_000_000), PLAIN, hidden).problem is not None


@pytest.mark.anyio
async def test_what_a_server_says_is_cleaned_beside_the_loop_where_that_takes_long() -> None:
    guard = Guard(Schemas().result_problem, TenantRedactor(lambda: ()))
    threads: set[threading.Thread] = set()
    walk = guard._walk

    def watched(*given: Any, **named: Any) -> Any:
        threads.add(threading.current_thread())
        return walk(*given, **named)

    guard._walk = watched  # type: ignore[method-assign]
    assert (await guard.said(READ, {"data": KEYS[:1000]}))["data"] == ["[redacted]"] * 1000
    assert (await guard.error_data(READ, KEYS[:1000])) == ["[redacted]"] * 1000
    few = await guard.inspect_async(READ, PLAIN, text_result("x", structuredContent={"a": KEYS[:1000]}))
    assert few.result is not None and threading.main_thread() not in threads
    for attempt in (guard.said(READ, {"data": KEYS[:2600]}), guard.error_data(READ, KEYS[:2600])):
        with pytest.raises(Refused, match="more than 2000 pieces"):
            await attempt
    assert threading.main_thread() not in threads


@pytest.mark.anyio
async def test_nothing_is_made_of_a_long_result_on_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    where: list[int] = []
    really = canonical.dumps

    def dumps(value: Any) -> bytes:
        where.append(threading.get_ident())
        return really(value)

    monkeypatch.setattr(canonical, "dumps", dumps)
    guard = Guard(Schemas().result_problem)
    for long in (text_result("x" * 100_000), {"content": [], "structuredContent": {"many": list(range(10_000))}}):
        assert (await guard.inspect_async(READ, PLAIN, long)).problem is None
    assert where and threading.get_ident() not in where


@pytest.mark.parametrize("trust", ["trusted", "partial", "untrusted"])
def test_the_trust_label_is_the_contracts(trust: Any) -> None:
    assert inspect({}, policy(trust=trust)).trust == trust
    assert inspect({"a": "x" * 99}, policy(trust=trust, max_bytes=5)).trust == trust


# ── Size and schema ───────────────────────────────────────────────────────────────────────────────


def test_a_result_over_the_cap_is_dropped() -> None:
    result = text_result("x" * 100)
    size = len(canonical.dumps(result))
    assert inspect(result, policy(max_bytes=size)).problem is None
    guarded = inspect(result, policy(max_bytes=size - 1))
    assert guarded.result is None
    assert guarded.problem is not None
    assert guarded.problem[0] == "result_too_large"
    assert str(size) in guarded.problem[1]


def test_the_cap_counts_bytes_not_characters() -> None:
    assert inspect(text_result("€" * 100), policy(max_bytes=200)).problem is not None


@pytest.mark.parametrize("bad", ["\ud800", float("nan"), object()])
def test_a_result_that_is_no_plain_json_is_dropped(bad: Any) -> None:
    guarded = inspect({"content": [], "structuredContent": {"a": bad}})
    assert (guarded.result, guarded.problem and guarded.problem[0]) == (None, "bad_output")


@pytest.mark.parametrize("levels", [100, 5_000])
def test_a_result_nested_too_deeply_is_dropped(levels: int) -> None:
    deep: Any = "x"
    for _ in range(levels):
        deep = [deep]
    guarded = inspect({"structuredContent": deep}, redactor=Known())
    assert (guarded.result, guarded.problem and guarded.problem[0]) == (None, "bad_output")


def test_defect_6_structured_content_is_kept_and_checked() -> None:
    good = text_result("{}", structuredContent={"id": 1})
    assert inspect(good, known=TYPED).result is good
    for bad in (text_result("x", structuredContent={}), text_result("x")):
        guarded = inspect(bad, known=TYPED)
        assert (guarded.result, guarded.problem and guarded.problem[0]) == (None, "bad_output")


def test_an_error_is_held_to_no_output_schema() -> None:
    result = text_result("it broke", isError=True)
    assert inspect(result, known=TYPED).result is result


def test_resources_prompts_and_completions_pass_by_the_same_way() -> None:
    results: list[Json] = [
        {"contents": [{"uri": "file:///a", "text": "hunter2"}]},
        {"messages": [{"role": "user", "content": {"type": "text", "text": "hunter2"}}]},
        {"completion": {"values": ["hunter2"], "total": 1}},
    ]
    for result in results:
        guarded = inspect(result, known=None, redactor=Known())
        assert "hunter2" not in json.dumps(guarded.result)
        assert guarded.redactions == {"token": 1}


# ── Declared fields ───────────────────────────────────────────────────────────────────────────────

WHOLE = {"id": 7, "title": "t", "ssn": "123-45-6789"}


def test_only_declared_fields_go_on_and_nothing_else_carries_the_rest() -> None:
    result = {
        "content": [
            {"type": "text", "text": json.dumps(WHOLE, indent=2)},
            {"type": "text", "text": "the SSN is 123-45-6789"},
            {"type": "image", "data": "c3Nu", "mimeType": "image/png"},
            {"type": "resource", "resource": {"uri": "x:y", "text": "123-45-6789"}},
        ],
        "structuredContent": WHOLE,
        "_meta": {"vendor/raw": WHOLE, "io.modelcontextprotocol/serverInfo": {"name": "s"}},
        "raw": WHOLE,
    }
    guarded = inspect(result, policy(fields=("id", "title", "absent")))
    assert guarded.result == {
        "content": [{"type": "text", "text": '{"id": 7, "title": "t"}'}],
        "structuredContent": {"id": 7, "title": "t"},
    }
    assert "123-45" in json.dumps(result)  # what came in is left as it was


def test_a_tool_without_structured_content_is_filtered_in_its_text() -> None:
    guarded = inspect(text_result(json.dumps(WHOLE)), policy(fields=("id",)))
    assert guarded.result == {"content": [{"type": "text", "text": '{"id": 7}'}]}


@pytest.mark.parametrize("text", ["no object", "[1]", "5", '{"a": 1, "a": 2}'])
def test_where_there_is_no_object_nothing_goes_on(text: str) -> None:
    guarded = inspect(text_result(text), policy(fields=("id",)))
    assert (guarded.result, guarded.problem and guarded.problem[0]) == (None, "bad_output")


@pytest.mark.parametrize("text", ["no such ticket 123-45-6789", '{"ssn": "123-45-6789"}'])
def test_of_an_error_declared_fields_pass_and_no_other_words(text: str) -> None:
    result = text_result(text, isError=True, structuredContent={"id": 1, "ssn": "123-45-6789"})
    guarded = inspect(result, policy(fields=("id",)))
    assert guarded.result == text_result(ONLY_FIELDS, isError=True, structuredContent={"id": 1})


def test_an_error_that_is_an_object_is_written_anew_with_its_declared_fields() -> None:
    guarded = inspect(text_result(json.dumps(WHOLE), isError=True), policy(fields=("id",)))
    texts = [{"type": "text", "text": text} for text in (ONLY_FIELDS, '{"id": 7}')]
    assert guarded.result == {"isError": True, "content": texts}


def test_an_empty_list_of_fields_lets_none_through() -> None:
    guarded = inspect(text_result("{}", structuredContent=WHOLE), policy(fields=()))
    assert guarded.result == {"content": [], "structuredContent": {}}


# ── Redaction ─────────────────────────────────────────────────────────────────────────────────────


def test_patterns_and_known_secrets_are_cut_out_of_every_text() -> None:
    result = {
        "content": [
            {"type": "text", "text": "hunter2 and 123-45-6789"},
            {"type": "resource", "resource": {"uri": "x:hunter2", "text": "123-45-6789"}},
            {"type": "hologram", "caption": ["hunter2"]},
        ],
        "structuredContent": {"deep": [{"a": "123-45-6789"}], "hunter2": "key"},
        "_meta": {"vendor": "hunter2"},
        "vendorField": "hunter2",
    }
    guarded = inspect(result, replace(READ, redact=("absent", "[0-9]{3}-[0-9]{2}-[0-9]{4}")), redactor=Known())
    told = json.dumps(guarded.result)
    assert "hunter2" not in told
    assert "123-45-6789" not in told
    assert guarded.redactions == {"token": 6, "redact[1]": 3}
    assert guarded.result is not None
    assert guarded.result["content"][0]["text"] == "[secret] and [redacted]"
    assert guarded.result["structuredContent"]["[secret]"] == "key"
    assert "hunter2" in json.dumps(result)


def test_only_what_changed_is_copied() -> None:
    result = {"content": [{"type": "text", "text": "hunter2"}], "structuredContent": {"big": [1, 2, 3]}}
    guarded = inspect(result, redactor=Known())
    assert guarded.result is not None
    assert guarded.result["structuredContent"] is result["structuredContent"]


def test_keys_that_look_alike_once_cleaned_both_stay() -> None:
    result = {"structuredContent": {"user 111": 1, "user 222": 2, "user 333": 3}}
    guarded = inspect(result, replace(READ, redact=("[0-9]+",)))
    assert guarded.result is not None
    assert sorted(guarded.result["structuredContent"].values()) == [1, 2, 3]
    assert "111" not in json.dumps(guarded.result)


def test_an_operators_pattern_leaves_the_protocol_and_base64_alone() -> None:
    image = {"type": "image", "data": "aW1hZ2U=", "mimeType": "image/png"}
    result = {"content": [image, {"type": "odd", "data": "an image of 5"}]}
    guarded = inspect(result, replace(READ, redact=("image|aW1",)))
    assert guarded.result == {"content": [image, {"type": "odd", "data": "an [redacted] of 5"}]}


def test_a_pattern_that_matches_nothing_in_particular_changes_nothing() -> None:
    result = text_result("abc")
    assert inspect(result, replace(READ, redact=("x*",))).result is result


def test_a_text_that_is_matched_all_over_is_withheld_whole() -> None:
    guarded = inspect(text_result("a b " * 5000), replace(READ, redact=("a.*c|a",)))
    assert guarded.result == text_result("[redacted]")


# ── Control characters ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("dirty", "clean", "count"),
    [
        ("a\x00b\x08c", "abc", 2),
        ("tab\tnewline\nreturn\r", "tab\tnewline\nreturn\r", 0),
        ("\x0b\x0c\x1f\x7f", "", 4),
        ("del\x7f", "del", 1),  # the one that is written into JSON as it is, among nothing but ASCII
        ("c1\x85\x9a", "c1", 2),
        ("\x1b[31mred\x1b[0m", "red", 2),
        ("\x9b1;31mred", "red", 1),
        ("\x1b]0;title\x07shown", "shown", 1),
        ("\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\", "link", 2),
        ("\x1bPdevice\x1b\\x", "x", 1),
        ("\x1b]unterminated", "unterminated", 1),
        ("\x1bcreset", "creset", 1),
    ],
)
def test_control_characters_are_removed_and_counted(dirty: str, clean: str, count: int) -> None:
    guarded = inspect(text_result(dirty, structuredContent={"x": dirty}))
    assert guarded.result == text_result(clean, structuredContent={"x": clean})
    assert guarded.redactions == ({"control_characters": 2 * count} if count else {})


def test_a_secret_cannot_be_hidden_behind_control_characters() -> None:
    guarded = inspect(
        text_result("hun\x00ter\x1b[0m2 and 123\u202e-45"), replace(READ, redact=("123-45",)), redactor=Known()
    )
    assert guarded.result == text_result("[secret] and [redacted]")


@pytest.mark.parametrize(
    ("dirty", "clean", "count"),
    [
        ("hidden\U000e0069\U000e0067\U000e006e", "hidden", 3),
        ("user\u202eexe.txt\u202c \u2066a\u2069", "userexe.txt a", 4),
        ("\u200eleft \u200fright é 👩‍👧 한글", "left right é 👩‍👧 한글", 2),
        ("smile 😀\ufe00\ufe01\ufe02\U000e0150", "smile 😀", 4),
        ("a\u3164\u200b\xad\u2062\ufeff\u180eb", "ab", 6),
        ("☂\ufe0f 1\ufe0f\u20e3 می\u200cخواهم", "☂\ufe0f 1\ufe0f\u20e3 می\u200cخواهم", 0),
    ],
)
def test_what_nobody_sees_is_removed_from_results_and_counted(dirty: str, clean: str, count: int) -> None:
    guarded = inspect(text_result(dirty, structuredContent={"x": dirty}))
    assert guarded.result == text_result(clean, structuredContent={"x": clean})
    assert guarded.redactions == ({"invisible": 2 * count} if count else {})


def test_in_keys_of_a_result_it_is_escaped() -> None:
    guarded = inspect({"content": [], "structuredContent": {"a\u200b": 1, "\ufeffa": 2, "a": 3, "b\x1b[m": 4}})
    assert guarded.result is not None
    assert guarded.result["structuredContent"] == {r"a\u{200b}": 1, r"\u{feff}a": 2, "a": 3, r"b\u{1b}[m": 4}
    assert guarded.redactions == {"invisible": 1, "control_characters": 1}


def test_two_keys_that_would_look_the_same_refuse_a_result() -> None:
    guarded = inspect({"content": [], "structuredContent": {"a\u200b": 1, r"a\u{200b}": 2}})
    assert guarded.result is None
    assert guarded.problem is not None and guarded.problem[0] == "bad_output"


def test_bytes_of_blobs_are_never_altered() -> None:
    data = base64.b64encode("a\u200b\x1b[m\ufeff".encode()).decode()
    result = {"contents": [{"uri": "file:///a", "blob": data}], "content": [{"type": "image", "data": data}]}
    assert inspect(result).result is result


UNSEEN = "pay\u200b\U000e0041 \x1b[8mnow"
ESCAPED = r"pay\u{200b}\u{e0041} \u{1b}[8mnow"


def test_in_definitions_and_in_what_people_see_it_is_escaped() -> None:
    guard = Guard(Schemas().result_problem)
    tool = {"name": "pay", "description": UNSEEN, "inputSchema": {"properties": {UNSEEN: {"title": UNSEEN}}}}
    assert guard.listed(tool) == {
        "name": "pay",
        "description": ESCAPED,
        "inputSchema": {"properties": {ESCAPED: {"title": ESCAPED}}},
    }
    shown, hits = guard.redact_with_counts(READ, {UNSEEN: [UNSEEN]})
    assert shown == {ESCAPED: [ESCAPED]}
    assert hits == {"invisible": 4, "control_characters": 2}
    assert guard.message(UNSEEN) == ESCAPED
    fine = {"name": "a", "description": "👩‍👧 می\u200cخواهم"}
    assert guard.listed(fine) == fine


@pytest.mark.parametrize(
    "facts",
    [
        {"files": [{"path": "/workspace/output/\u200bx"}]},
        {"skipped": {"\u200bx": "a link"}},
        {"late": {"files": [{"path": "\u200bx"}]}},
        {"planted": [".git/hooks/\u200bx"]},
        {"network": {"denied": [{"host": "\u200bx"}]}},
        {"network": {"wondered_about": [{"host": "\u200bx"}]}},
        {"session": {"id": "s", "context": "\u200bx"}},
        {"largest_file": "\u200bx"},
    ],
    ids=lambda facts: next(iter(facts)),
)
def test_names_that_a_program_chose_pass_the_guard_wherever_they_stand_in_facts(facts: Json) -> None:
    guarded = Guard(Schemas().result_problem).facts(facts)
    assert "\u200b" not in str(guarded) and "\\u{200b}" in str(guarded).replace("\\\\", "\\")


@pytest.mark.parametrize("name", ["❤\ufe0f", "👩\u200d👧", "क्\u200dष"])
def test_a_key_with_a_joiner_that_is_kept_is_like_no_other(name: str) -> None:
    guard = Guard(Schemas().result_problem)
    assert guard.listed({name: 1, "other": 2}) == {name: 1, "other": 2}
    assert guard.redacted(READ, {name: 1}) == {name: 1}
    assert inspect(text_result("x", structuredContent={name: 3})).problem is None
    assert guard.facts({"skipped": {name: "it is a pipe"}}) == {"skipped": {name: "it is a pipe"}}


def test_facts_are_there_whatever_names_a_program_chose() -> None:
    alike = {"a\u200b": "it is a pipe", r"a\u{200b}": "it is a pipe"}
    network = {"allowed": [], "denied": [{"host": "\u200bx"}], "bytes_out": 7}
    session = {"id": "s", "context": "\u200by"}
    given = {"ended": "exited", "skipped": alike, "network": network, "session": session, "trouble": ["slow"]}
    facts = Guard(Schemas().result_problem).facts(given)
    assert "skipped" not in facts and facts["trouble"][0] == "slow" and "left out" in facts["trouble"][1]
    assert facts["ended"] == "exited" and facts["network"]["bytes_out"] == 7
    assert "\u200b" not in str(facts) and facts["session"]["context"] == "\\u{200b}y"


def test_what_has_keys_that_would_look_the_same_is_refused() -> None:
    guard = Guard(Schemas().result_problem)
    alike = {"a\u200b": 1, r"a\u{200b}": 2}
    for refused in (
        lambda: guard.listed(alike),
        lambda: guard.redact_with_counts(READ, alike),
        lambda: guard.redacted(READ, alike),
    ):
        with pytest.raises(Refused, match="look the same"):
            refused()


@pytest.mark.parametrize("between", ["\u200b", "\x00", "\ufe0f", "\xad"])
def test_a_secret_cannot_be_hidden_behind_an_escape(between: str) -> None:
    guard = Guard(Schemas().result_problem, Known())
    split, ssn = f"hun{between}ter2", f"123{between}-45"
    contract = replace(READ, redact=("123-45",))
    assert guard.message(f"{split} {ssn}", contract) == "[secret] [redacted]"
    assert guard.listed({"description": split, split: 1}) == {"description": "[secret]", "[secret]": 1}
    assert guard.redact_with_counts(contract, {ssn: split})[0] == {"[redacted]": "[secret]"}


def test_a_secret_cannot_be_hidden_behind_a_selector_that_is_kept() -> None:
    class Digits(Known):
        def marked(self, text: str) -> tuple[str, Mapping[str, int]]:
            return self.redact(text)

        def redact(self, text: str, most: int | None = None) -> tuple[str, Mapping[str, int]]:
            return text.replace("tok1234", "[secret]"), {"token": 1} if "tok1234" in text else {}

        def matches(self, data: bytes) -> bool:
            return b"tok1234" in data

    assert inspect(text_result("tok1\ufe0f23\ufe0f4"), redactor=Digits()).result == text_result("[secret]")
    assert Guard(Schemas().result_problem, Digits()).message("tok1\ufe0f234") == "[secret]"


def test_literal_backslashes_are_no_control_characters() -> None:
    result = text_result(r"a\b \u0000 C:\foo")
    assert inspect(result).result == result


# ── Other texts ───────────────────────────────────────────────────────────────────────────────────


def test_messages_are_cleaned_redacted_and_cut() -> None:
    guard = Guard(Schemas().result_problem, Known())
    assert guard.message("fine") == "fine"
    assert guard.message("token hunter2\x1b[2J leaked") == "token [secret]\\u{1b}[2J leaked"
    assert guard.message("ssn 123-45", replace(READ, redact=("[0-9-]+",))) == "ssn [redacted]"
    assert len(guard.message("x" * 100_000)) == 4000
    assert "hunt" not in guard.message("x" * 3996 + "hunter2")
    assert guard.message("odd", most=2) == "od"
    assert guard.message("odd \ud800") == "odd ?"


@pytest.mark.parametrize("place", range(3980, 4010))
def test_a_message_is_cut_where_it_was_to_be_and_never_inside_of_what_goes(place: int) -> None:
    guard = Guard(Schemas().result_problem, Known())
    text = "." * place + "hunter2" + " 123-45 " + "." * 5000
    cut = guard.message(text, replace(READ, redact=("[0-9-]{6}",)))
    inside = place < 4000 < place + 7 or place + 8 < 4000 < place + 14
    assert "hunt" not in cut.replace("[secret]", "") and "3-4" not in cut
    assert cut.startswith("." * min(place - 6, 4000) if inside else "." * min(place, 4000))
    if not inside:
        plain = text[:4000].replace("hunter2", "[secret]").replace("123-45", "[redacted]")
        assert cut == plain
    half = "." * place + "hunter" + "." * 5000
    assert guard.message(half) == half[:4000], "what is no secret moves nothing"


@pytest.mark.parametrize("number", [739104628855, 739104628855.0, -739104628855])
def test_a_known_secret_of_digits_does_not_pass_as_a_number(number: float) -> None:
    known = (Secret("pin", "739104628855"),)
    guard = Guard(Schemas().result_problem, TenantRedactor(lambda: known))
    structured = {"n": number, "list": [1, number, 2.5, True, None], "near": 739104628856}
    seen = guard.inspect(READ, PLAIN, {"content": [], "structuredContent": structured})
    assert seen.result is not None
    gone = {"n": "[redacted]", "list": [1, "[redacted]", 2.5, True, None], "near": 739104628856}
    assert (seen.result["structuredContent"], seen.redactions) == (gone, {"known_secret": 2})
    assert dict(seen.secrets) == {"pin": 2}
    assert guard.redacted(READ, structured) == gone, "nor onto the record"


def test_what_a_person_judges_says_what_is_missing_in_it() -> None:
    value = "s3cr3t-Tok3n-value-ABCDEFGH-9876543210"
    known = (Secret("token", value),)
    guard = Guard(Schemas().result_problem, TenantRedactor(lambda: known))
    shown, removed = guard.redact_for_approval(READ, {"code": f"run('AKIAIOSFODNN7EXAMPLE', '{value}')"})
    assert shown == {"code": "run('[redacted: 20 characters that look like aws_access_key]', '[redacted]')"}
    assert removed == {"aws_access_key": 1, "known_secret": 1}
    assert guard.redact_with_counts(READ, ["AKIAIOSFODNN7EXAMPLE"])[0] == ["[redacted]"]


def test_what_a_person_could_not_judge_is_refused_before_all_of_it_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    known = (Secret("token", "s3cr3t-Tok3n-value-ABCDEFGH-9876543210"),)
    guard = Guard(Schemas().result_problem, TenantRedactor(lambda: known))
    looks: list[str] = []
    plain = TenantRedactor.marked

    def counted(self: TenantRedactor, text: str) -> tuple[str, Mapping[str, int]]:
        looks.append(text)
        return plain(self, text)

    monkeypatch.setattr(TenantRedactor, "marked", counted)
    assert guard.redact_for_approval(READ, ["AKIAIOSFODNN7EXAMPLE"] * 500)[1] == {"aws_access_key": 500}
    looks.clear()
    with pytest.raises(Refused) as refused:
        guard.redact_for_approval(READ, ["AKIAIOSFODNN7EXAMPLE"] * 30_000)
    assert (refused.value.reason_code, len(looks)) == ("not_to_be_judged", 501)
    many = "\u200b" * 600 + "AKIAIOSFODNN7EXAMPLE"
    assert guard.redact_for_approval(READ, [many])[1]["aws_access_key"] == 1, (
        "what is shown as an escape is not missing"
    )


def test_any_value_can_be_redacted_to_be_kept() -> None:
    guard = Guard(Schemas().result_problem, Known())
    value = {"a": ["hunter2", 5], "hunter2": None}
    assert guard.redacted(READ, value) == {"a": ["[secret]", 5], "[secret]": None}
    assert guard.redacted(READ, "plain") == "plain"


# ── Whatever comes ────────────────────────────────────────────────────────────────────────────────

TEXT = st.text() | st.sampled_from(
    ["hunter2", "\x1b[31m", "\x00", "\x7f", "\u202e", "a\nb", "\U000e0041", "\u3164", "\ufe0f"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


def strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for key, item in value.items() for text in (key, *strings(item))]
    return [text for item in value for text in strings(item)] if isinstance(value, list) else []


@given(JSON, JSON, st.sampled_from([Known(), None]))
def test_whatever_comes_in_comes_out_clean_and_only_once_changed(structured: Any, text: Any, known: Any) -> None:
    guard = Guard(Schemas().result_problem, known)
    first = guard.inspect(READ, PLAIN, {"structuredContent": structured, "content": [{"type": "text", "text": text}]})
    assert first.result is not None
    for found in strings(first.result):
        assert known is None or "hunter2" not in found
        assert not any(character in found for character in "\x00\x1b\x7f\u202e\U000e0041\u3164")
    again = guard.inspect(READ, PLAIN, first.result)
    assert again.result is first.result
    assert again.redactions == {}


# ── How much a model is given to read ─────────────────────────────────────────────────────────────


def test_a_server_s_text_is_shortened_where_its_contract_says_so() -> None:
    long = text_result("a" * 5_000 + "b" * 5_000)
    assert inspect(long).result is long
    guarded = inspect(long, policy(max_chars=1000))
    shown = guarded.result
    assert shown is not None and guarded.shortened and not inspect(long).shortened
    (block,) = shown["content"]
    assert len(block["text"]) <= 1000 and block["text"].startswith("aaa") and block["text"].endswith("bbb")


@pytest.mark.parametrize("before", range(485, 505))
def test_no_cut_leaves_half_of_a_secret_or_shows_how_long_it_was(before: int) -> None:
    text = "a" * before + "hunter2" + "b" * 2_000
    shown = inspect(text_result(text), policy(max_chars=1000), redactor=Known()).result
    assert shown is not None
    assert "hunter" not in str(shown) and "unter2" not in str(shown)
    longer = inspect(text_result(text.replace("hunter2", "[secret]")), policy(max_chars=1000)).result
    assert shown == longer
