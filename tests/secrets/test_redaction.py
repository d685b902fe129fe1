"""Known values are found in every form, whole and in pieces; nothing else is touched."""

from __future__ import annotations

import html
import json
import os
import random
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.core.secret import REPLACEMENT, Secret
from ringfence.secrets.patterns import shapes
from ringfence.secrets.redaction import (
    KNOWN,
    MAX_HELD,
    Redacted,
    RedactingStream,
    SecretMatcher,
    TenantRedactor,
)
from tests.secrets import encoders
from tests.tooling import ROOT

SECRETS = 10_000 if os.environ.get("RINGFENCE_FULL") else 60
TOGETHER = 20
TEXT = "the box has no network and writes its answer to a file ; done , ok ( see below ) [ 1 2 ] { } < > # % \n"
WORDS = TEXT.split(" ")


def filler(dice: random.Random) -> str:
    return " ".join(dice.choice(WORDS) for _ in range(dice.randint(1, 30)))


def pieces(dice: random.Random, data: bytes) -> list[bytes]:
    most = dice.choices((1, 5, 17, 64, 200), (1, 2, 10, 20, 20))[0]
    out = []
    while data:
        length = dice.randint(1, most)
        out.append(data[:length])
        data = data[length:]
    return out


def streamed(values: SecretMatcher, chunks: list[bytes]) -> tuple[bytes, RedactingStream]:
    stream = RedactingStream(values)
    return b"".join([*map(stream.feed, chunks), stream.finish()]), stream


@cache
def batches() -> list[list[str]]:
    dice = random.Random(20)
    made = [encoders.value(dice) for _ in range(SECRETS)]
    return [made[at : at + TOGETHER] for at in range(0, SECRETS, TOGETHER)]


@pytest.mark.parametrize("number", range(-(-SECRETS // TOGETHER)))
def test_no_form_of_any_secret_is_missed_however_it_is_cut(number: int) -> None:
    dice = random.Random(number)
    texts = batches()[number]
    values = SecretMatcher([Secret(f"s{index}", text) for index, text in enumerate(texts)])
    for index, text in enumerate(texts):
        for form, encode in encoders.EXACT.items():
            before, after = filler(dice), filler(dice)
            data = f"{before} {encode(text)} {after}".encode()
            expected = f"{before} {REPLACEMENT} {after}".encode()
            whole = values.redacted(data)
            assert whole.data == expected, (form, text)
            assert whole.rules == {KNOWN: 1} and f"s{index}" in whole.secrets, (form, text)
            parts, stream = streamed(values, pieces(dice, data))
            assert parts == expected and stream.rules == {KNOWN: 1}, (form, text)
        for form, wrap in encoders.WITHIN.items():
            lead, tail = dice.randbytes(dice.randint(0, 80)), dice.randbytes(dice.randint(0, 80))
            data = f"{filler(dice)} {wrap(lead + text.encode() + tail)} {filler(dice)}".encode()
            whole = values.redacted(data)
            assert whole.rules.get(KNOWN), (form, text)
            assert encoders.core(text, len(lead)) not in encoders.unwrapped(whole.data.decode()), (form, text)
            parts, _ = streamed(values, pieces(dice, data))
            assert parts == whole.data, (form, text)


def test_masked_it_is_as_long_as_before_and_without_shapes_they_stay() -> None:
    values = SecretMatcher([Secret("horse", "correct-horse-battery-staple")], shaped=False)
    key = b"AKIA" + b"ABCDEFGHIJKLMNOP"
    data = b"a correct-horse-battery-staple b " + key
    stream = RedactingStream(values, masked=True)
    assert stream.feed(data) + stream.finish() == b"a " + b"*" * 28 + b" b " + key
    assert values.matches(data) and not values.matches(key) and SecretMatcher().matches(key)
    assert values.reach >= 28 and SecretMatcher().reach == 0


@pytest.mark.parametrize("value", ["correct-Horse-battery-Staple", "tökén/Ünd &mehr\nZeilen"])
def test_capitals_and_small_letters_are_one(value: str) -> None:
    values = SecretMatcher([Secret("horse", value)])
    for text in (value, json.dumps(value)[1:-1], quote(value), html.escape(value)):
        for form in (text.upper(), text.lower(), text.swapcase(), text[::-1].upper() if text == value else text):
            assert values.redact(f"<{form}>") == ("<[redacted]>", {KNOWN: 1}), form


def test_a_cut_is_where_it_was_wanted_and_never_inside_of_a_match() -> None:
    values = SecretMatcher([Secret("horse", "correct-horse-battery-staple")])
    data = b"0123456789 correct-horse-battery-staple 0123456789"
    assert values.within(data, 3, len(data) - 3).data == b"3456789 [redacted] 0123456"
    assert values.within(data, 0, 20) == Redacted(b"0123456789 [redacted]", {KNOWN: 1}, {"horse": 1})
    assert values.within(data, 20, len(data)).data == b"[redacted] 0123456789"
    assert values.within(data, 0, 11).data == b"0123456789 "
    half = b"0123456789 correct-horse-battery 0123456789"
    assert values.within(half, 0, 20).data == half[:20], "what is no secret moves nothing"


# ── Shapes ───────────────────────────────────────────────────────────────────────────────────────

LETTERS = "aB3dE5fG7hJ9kL2mN4pQ6rS8tU1vW0xY"
# Put together here, so that no scanner of sources takes them for real.
EXAMPLES = {
    "aws_access_key": "AKIA" + "IOSFODNN7EXAMPLE",
    "aws_secret_key": "aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/" + "bPxRfiCYEXAMPLEKEY",
    "google_api_key": "AIza" + LETTERS + "abc",
    "google_oauth": "ya29." + LETTERS,
    "azure_account_key": "AccountName=x;AccountKey=" + (LETTERS * 3)[:86] + "==",
    "digitalocean_token": "dop_v1_" + "0123456789abcdef" * 4,
    "hashicorp_token": "hvs." + LETTERS,
    "databricks_token": "dapi" + "0123456789abcdef" * 2,
    "github_token": "ghp_" + LETTERS + "abcd",
    "github_pat": "github_pat_" + LETTERS * 2,
    "gitlab_token": "glpat-" + LETTERS,
    "npm_token": "npm_" + LETTERS + "abcd",
    "pypi_token": "pypi-AgEIcHlwaS5vcmc" + LETTERS * 2,
    "docker_token": "dckr_pat_" + LETTERS,
    "atlassian_token": "ATATT3" + LETTERS * 3,
    "slack_token": "xoxb-" + "123456789012-" + LETTERS,
    "slack_webhook": "https://hooks.slack.com/services/T" + "00000000/B00000000/" + LETTERS,
    "openai_key": "sk-proj-" + LETTERS * 2,
    "anthropic_key": "sk-ant-api03-" + LETTERS * 2,
    "model_key": "sk-" + LETTERS * 2,
    "huggingface_token": "hf_" + LETTERS + "abcd",
    "stripe_key": "sk_live_" + LETTERS,
    "sendgrid_key": "SG." + LETTERS[:22] + "." + LETTERS + "abcdefghijk",
    "ringfence_token": "rft_" + "0123456789abcdef0123" + "_" + (LETTERS * 2)[:43],
    "shopify_token": "shpat_" + "0123456789abcdef" * 2,
    "telegram_token": "123456789:AA" + LETTERS + "ab",
    "grafana_token": "glsa_" + LETTERS + "_12345678",
    "age_key": "AGE-SECRET-KEY-1" + "ABCDEFGH2J" * 6,
    "jwt": "eyJhbGciOiJIUzI1NiJ9." + "eyJzdWIiOiIxMjM0NTY3ODkwIn0." + LETTERS,
    "private_key": f"-----BEGIN RSA PRIVATE KEY-----\n{LETTERS * 2}\n{LETTERS * 2}\n-----END RSA PRIVATE KEY-----",
    "authorization": "Authorization: Basic " + LETTERS,
    "connection_string": "postgres://robot:" + "s3cr3t-enough@db.corp.example/x",
}


def test_every_shape_has_an_example() -> None:
    assert set(EXAMPLES) == set(shapes())


@pytest.mark.parametrize("rule", EXAMPLES)
def test_shape_is_removed_whole_and_cut_anywhere(rule: str) -> None:
    values = SecretMatcher()
    data = f"before {EXAMPLES[rule]} after\n".encode()
    whole = values.redacted(data)
    assert whole.rules == {rule: 1} and whole.secrets == {}
    assert whole.data.startswith(b"before ") and whole.data.endswith(b" after\n") and REPLACEMENT.encode() in whole.data
    for cut in range(1, len(data)):
        stream = RedactingStream(values)
        assert stream.feed(data[:cut]) + stream.feed(data[cut:]) + stream.finish() == whole.data, cut


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ('{"Authorization": "Bearer ' + LETTERS + '"}', '{"Authorization": "Bearer [redacted]"}'),
        ("X-Api-Key: " + LETTERS, "X-Api-Key: [redacted]"),
        ("curl -H 'authorization: token " + LETTERS + "'", "curl -H 'authorization: token [redacted]'"),
        ("redis://:" + "hunter2hunter2@cache:6379/0", "redis://:[redacted]@cache:6379/0"),
        (
            "Server=db;User=sa;Password=" + "hunter2hunter2;Encrypt=yes",
            "Server=db;User=sa;Password=[redacted];Encrypt=yes",
        ),
        (r"-----BEGIN PRIVATE KEY-----\n" + LETTERS * 3 + r"\n-----END PRIVATE KEY-----\n", r"[redacted]\n"),
    ],
)
def test_only_the_secret_piece_goes(text: str, left: str) -> None:
    assert SecretMatcher().redact(text)[0] == left


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer <token>",
        "Authorization: Bearer ${TOKEN}",
        "https://user:${PASSWORD}@host/ and https://{user}:{password}@host/",
        "http://[::1]:8080/path and time 12:34:56@noon",
        "if data.startswith(b'-----BEGIN PRIVATE KEY-----'): raise ValueError('a key')",
        "a disk-" + "abcdefgh" * 6,
        "sha256:" + "0123456789abcdef" * 4,
        "password = input('password: ')",
    ],
)
def test_honest_text_stays(text: str) -> None:
    assert SecretMatcher().redact(text) == (text, {})


def corpus() -> list[Path]:
    library = Path(sysconfig.get_path("stdlib"))
    own = [path for folder in ("src", "docs", "examples") for path in sorted((ROOT / folder).rglob("*.*"))]
    return [
        path for path in (*own, *sorted(library.glob("*.py")), *sorted(library.glob("[a-t]*/*.py"))) if path.is_file()
    ]


def test_at_most_one_in_a_thousand_programs_and_documents_is_touched() -> None:
    files = [path for path in corpus() if path.suffix in {".py", ".md", ".yaml", ".sql"}]
    values = SecretMatcher()
    lines, hits = 0, []
    for path in files:
        data = path.read_bytes()
        lines += data.count(b"\n")
        hits += [(path.name, data[span.begins : span.end]) for span in values.find(data)]
    assert len(files) > 500
    assert len({name for name, _ in hits}) <= len(files) / 1000, hits
    assert len(hits) <= lines / 100_000, hits


# ── Streams ──────────────────────────────────────────────────────────────────────────────────────

VALUE = "hunter2-Hunter2/+="
LETTERS_IN_BYTES = b"aB3dE5fG7hJ9kL2mN4pQ6rS8tU1vW0xY"


@pytest.fixture(scope="module")
def values() -> SecretMatcher:
    return SecretMatcher([Secret("one", VALUE)])


def fed(stream: RedactingStream, chunks: Iterator[bytes]) -> bytes:
    return b"".join([*map(stream.feed, chunks), stream.finish()])


def test_what_no_secret_could_begin_in_goes_on_at_once(values: SecretMatcher) -> None:
    stream = RedactingStream(values)
    data = bytes(range(256)) * 64
    assert stream.feed(data) == data[: -(values.reach - 1)]
    assert stream.finish() == data[-(values.reach - 1) :]
    assert RedactingStream(SecretMatcher()).feed(b"nothing else waits. ") == b"nothing else waits. "


def test_as_much_waits_whether_or_not_it_begins_a_secret() -> None:
    """Otherwise whoever has a guess echoed learns from what comes at once whether it was right so far."""
    values = SecretMatcher([Secret("one", VALUE)], shaped=False)
    filler = b"." * 3000

    def lengths(text: str) -> list[int]:
        stream = RedactingStream(values)
        return [len(stream.feed(data)) for data in (filler, text.encode(), b"x", filler)]

    for length in range(1, len(VALUE)):
        for guess in (VALUE[:length], VALUE[-length:], VALUE[:length][::-1]):
            assert lengths(guess) == lengths("~" * length)


@given(st.binary(max_size=60), st.lists(st.integers(0, 400), max_size=6))
def test_how_much_waits_depends_on_lengths_alone(end: bytes, sizes: list[int]) -> None:
    values = _known()
    ours, other = RedactingStream(values), RedactingStream(values)
    for size in sizes:
        data = b"." * size + end
        assert len(ours.feed(data)) == len(other.feed(b"." * len(data)))
        assert len(ours.release()) == len(other.release())


def test_a_secret_that_is_complete_goes_on_without_it(values: SecretMatcher) -> None:
    stream = RedactingStream(values)
    out = stream.feed(f"it is {VALUE}\n> ".encode()) + stream.finish()
    assert out == f"it is {REPLACEMENT}\n> ".encode()
    assert (stream.rules, stream.secrets) == ({KNOWN: 1}, {"one": 1})


def test_what_was_released_in_the_middle_of_a_secret_takes_the_rest_with_it(values: SecretMatcher) -> None:
    stream = RedactingStream(values)
    assert stream.feed(b"it is hunter2-Hun") + stream.release() == b"it is hunter2-Hun"
    assert stream.feed(b"ter2/+= really") + stream.finish() == b"[redacted] really"
    assert stream.rules == {KNOWN: 1}


@pytest.mark.parametrize("size", range(1, len(VALUE)))
def test_whatever_part_of_a_secret_was_released_takes_the_rest_with_it(values: SecretMatcher, size: int) -> None:
    stream = RedactingStream(values)
    assert stream.feed(VALUE[:size].encode()) + stream.release() == VALUE[:size].encode()
    assert stream.feed(VALUE[size:].encode() + b".") + stream.finish() == b"[redacted]."


def test_what_was_released_is_told_once(values: SecretMatcher) -> None:
    stream = RedactingStream(values)
    assert stream.feed(VALUE.encode()) + stream.release() == b"[redacted]"
    assert stream.feed(b" and on") + stream.release() + stream.feed(b".") + stream.finish() == b" and on."
    assert stream.rules == {KNOWN: 1}


@given(st.lists(st.binary(max_size=40) | st.just(VALUE.encode()), max_size=8))
def test_releases_between_pieces_lose_nothing(parts: list[bytes]) -> None:
    stream = RedactingStream(_known())
    out = b"".join(stream.feed(part) + stream.release() for part in parts) + stream.finish()
    assert VALUE.encode() not in out
    if VALUE.encode() not in b"".join(parts):
        assert out == _known().redacted(b"".join(parts)).data


def test_the_end_gives_what_was_only_a_beginning(values: SecretMatcher) -> None:
    stream = RedactingStream(values)
    stream.feed(b"hunter2-Hun")
    assert stream.finish() == b"hunter2-Hun"
    assert stream.rules == {}


def test_a_value_that_begins_another_takes_nothing_from_it() -> None:
    values = SecretMatcher([Secret("short", "correct-horse"), Secret("long", "correct-horse-battery-staple")])
    stream = RedactingStream(values)
    assert fed(stream, iter([b"a correct-horse", b"-battery", b"-staple b"])) == b"a [redacted] b"
    assert stream.rules == {KNOWN: 1}


def test_values_that_overlap_go_together() -> None:
    values = SecretMatcher([Secret("one", "abcdefghijklmnop"), Secret("two", "mnopqrstuvwxyz12")])
    assert values.redact("<abcdefghijklmnopqrstuvwxyz12>") == ("<[redacted]>", {KNOWN: 1})


@pytest.mark.parametrize("size", [1000, 5000, 100_000])
def test_a_shape_without_end_is_gone_and_memory_stays(values: SecretMatcher, size: int) -> None:
    stream = RedactingStream(values)
    out = stream.feed(b"token ghp_")
    for _ in range(2_000_000 // size):
        out += stream.feed((LETTERS_IN_BYTES * (size // 32 + 1))[:size])
        assert stream.held <= MAX_HELD + size
    out += stream.feed(b" done\n") + stream.finish()
    assert out == b"token [redacted] done\n"
    assert stream.rules == {"github_token": 1}


def test_what_never_becomes_a_secret_is_not_held_for_ever(values: SecretMatcher) -> None:
    stream = RedactingStream(values)
    data = b"eyJ" + LETTERS_IN_BYTES * 4000
    assert stream.feed(data) != b""
    assert stream.held <= MAX_HELD


def test_a_long_value_goes_in_all_its_pieces() -> None:
    value = "".join(chr(33 + index * 7 % 90) for index in range(3000))
    values = SecretMatcher([Secret("key", value)])
    redacted = values.redacted(f"a {value} b".encode())
    assert redacted.data == b"a [redacted] b"
    assert redacted.secrets == {"key": 1}
    assert values.redacted(f"a {value[500:900]} b".encode()).secrets == {"key": 1}


@given(
    st.lists(
        st.binary(max_size=40) | st.sampled_from([VALUE.encode(), b"AKIAIOSFODNN7EXAMPLE", b"Bearer "]), max_size=8
    )
)
def test_pieces_and_the_whole_agree(parts: list[bytes]) -> None:
    values = _shared()
    stream = RedactingStream(values)
    assert fed(stream, iter(parts)) == values.redacted(b"".join(parts)).data


@cache
def _shared() -> SecretMatcher:
    return SecretMatcher([Secret("one", VALUE)])


@cache
def _known() -> SecretMatcher:
    return SecretMatcher([Secret("one", VALUE)], shaped=False)


# ── Secrets that rotate ──────────────────────────────────────────────────────────────────────────


def test_a_rotated_value_is_searched_from_the_next_text_on() -> None:
    known: tuple[Secret, ...] = (Secret("one", "the-first-value"),)
    current = TenantRedactor(lambda: known)
    assert current.redact("the-first-value the-second-value") == ("[redacted] the-second-value", {KNOWN: 1})
    before = current.values
    assert current.values is before
    known = (Secret("one", "the-second-value"), *known)
    assert current.redact("the-first-value the-second-value") == ("[redacted] [redacted]", {KNOWN: 2})
    assert current.redacted(b"the-second-value").secrets == {"one": 1}
    stream = current.stream()
    assert stream.feed(b"the-second-") + stream.feed(b"value.") + stream.finish() == b"[redacted]."


def test_a_text_with_thousands_of_hits_is_withheld_whole() -> None:
    matcher = SecretMatcher()
    some, rules = matcher.redact("AKIAIOSFODNN7EXAMPLQ " * 1500)
    assert some.startswith("[redacted] [redacted]") and sum(rules.values()) == 1500
    whole, rules = matcher.redact("begin " + "AKIAIOSFODNN7EXAMPLQ " * 5000 + "end")
    assert whole == "[redacted]" and set(rules) == set(matcher.redact("AKIAIOSFODNN7EXAMPLQ")[1])
