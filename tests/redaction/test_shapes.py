"""What has the shape of a secret goes; honest programs and documents stay as they are."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from ringfence.redaction import REPLACEMENT, Stream, Values
from ringfence.redaction.shapes import shapes
from tests.tooling import ROOT

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
    values = Values()
    data = f"before {EXAMPLES[rule]} after\n".encode()
    whole = values.redacted(data)
    assert whole.rules == {rule: 1} and whole.secrets == {}
    assert whole.data.startswith(b"before ") and whole.data.endswith(b" after\n") and REPLACEMENT.encode() in whole.data
    for cut in range(1, len(data)):
        stream = Stream(values)
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
    assert Values().redact(text)[0] == left


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
    assert Values().redact(text) == (text, {})


def corpus() -> list[Path]:
    library = Path(sysconfig.get_path("stdlib"))
    own = [path for folder in ("src", "docs", "examples") for path in sorted((ROOT / folder).rglob("*.*"))]
    return [
        path for path in (*own, *sorted(library.glob("*.py")), *sorted(library.glob("[a-t]*/*.py"))) if path.is_file()
    ]


def test_at_most_one_in_a_thousand_programs_and_documents_is_touched() -> None:
    files = [path for path in corpus() if path.suffix in {".py", ".md", ".yaml", ".sql"}]
    values = Values()
    lines, struck = 0, []
    for path in files:
        data = path.read_bytes()
        lines += data.count(b"\n")
        struck += [(path.name, data[span.begins : span.end]) for span in values.find(data)]
    assert len(files) > 500
    assert len({name for name, _ in struck}) <= len(files) / 1000, struck
    assert len(struck) <= lines / 100_000, struck
