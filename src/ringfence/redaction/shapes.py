"""Secrets that are known by their shape alone: each kind of token, key and header that says what it is.

A shape must be rare in honest text. Words that merely stand near a value (`password = …`) are no shape: programs and
documents are full of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from ringfence.redaction.grammar import Part, either, literal, maybe, secret, sequence, some, word

_ALNUM = "[A-Za-z0-9]"
_WORD = "[A-Za-z0-9_]"
_URLSAFE = "[A-Za-z0-9_-]"
_HEX = "[0-9a-f]"
_VALUE = "[A-Za-z0-9._~+/=-]"
_SPACE = r"[ \t]"
_QUOTE = r"[\x22\x27]"


def _text(word: str, *, any_case: bool = False) -> Part:
    return literal(word.encode(), any_case=any_case)


def _words(*words: str) -> Part:
    return either(*map(_text, words))


def _prefixed(prefix: Part | str, kind: str, least: int) -> Part:
    """A prefix that says what it is, at the start of a word, and at least so many characters."""
    start = _text(prefix) if isinstance(prefix, str) else prefix
    return word(sequence(start, some(kind, least, None)))


def _clouds() -> Mapping[str, Part]:
    account = sequence(_text("AccountKey="), secret(sequence(some("[A-Za-z0-9+/]", 86, None), some("=", 0, 2))))
    amazon = sequence(
        some("[Ss]"),
        *(_text("ecret", any_case=True), some("[_ ]", 0, 1), _text("access", any_case=True), some("[_ ]", 0, 1)),
        *(_text("key", any_case=True), some(_QUOTE, 0, 1), some(_SPACE, 0, 4), some("[:=]")),
        *(some(_SPACE, 0, 4), some(_QUOTE, 0, 1), secret(some("[A-Za-z0-9/+]", 40, None))),
    )
    return {
        "aws_access_key": _prefixed(_words("AKIA", "ASIA", "ABIA", "ACCA"), "[A-Z2-7]", 16),
        "aws_secret_key": amazon,
        "google_api_key": _prefixed("AIza", _URLSAFE, 35),
        "google_oauth": either(_prefixed("ya29.", _URLSAFE, 20), _prefixed("GOCSPX-", _URLSAFE, 28)),
        "azure_account_key": account,
        "digitalocean_token": _prefixed(_words("dop_v1_", "doo_v1_", "dor_v1_"), _HEX, 64),
        "hashicorp_token": _prefixed(_words("hvs.", "hvb.", "hvr."), _URLSAFE, 24),
        "databricks_token": _prefixed("dapi", _HEX, 32),
    }


def _forges() -> Mapping[str, Part]:
    kinds = ("glpat-", "gldt-", "glrt-", "glft-", "glptt-", "glcbt-", "glsoat-", "gloas-")
    index = "AgEIcHlwaS5vcmc"  # the name of the index, as the token writes it
    return {
        "github_token": _prefixed(_words("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), _WORD, 36),
        "github_pat": _prefixed("github_pat_", _WORD, 60),
        "gitlab_token": _prefixed(_words(*kinds), _URLSAFE, 20),
        "npm_token": _prefixed("npm_", _ALNUM, 36),
        "pypi_token": _prefixed(_words(f"pypi-{index}", "pypi-AgENdGVzdC5weXBpLm9yZ"), _URLSAFE, 50),
        "docker_token": _prefixed(_words("dckr_pat_", "dckr_oat_"), _URLSAFE, 20),
        "atlassian_token": _prefixed("ATATT3", "[A-Za-z0-9_=-]", 60),
    }


def _services() -> Mapping[str, Part]:
    slack = some("[0-9]", 1, 13)
    hook = sequence(_text("hooks.slack.com/services/T"), secret(some("[A-Za-z0-9/]", 30, None)))
    grid = sequence(_text("SG."), some(_URLSAFE, 16, 32), _text("."), some(_URLSAFE, 30, None))
    bot = sequence(some("[0-9]", 8, 10), _text(":AA"), some(_URLSAFE, 33, None))
    return {
        "slack_token": either(
            _prefixed(sequence(_text("xox"), some("[abeoprs]"), _text("-"), slack, _text("-")), "[A-Za-z0-9-]", 10),
            _prefixed(sequence(_text("xapp-"), slack, _text("-")), "[A-Za-z0-9-]", 20),
        ),
        "slack_webhook": hook,
        "openai_key": _prefixed(_words("sk-proj-", "sk-svcacct-", "sk-admin-"), _URLSAFE, 40),
        "anthropic_key": _prefixed("sk-ant-", _URLSAFE, 40),
        "model_key": _prefixed("sk-", _ALNUM, 40),
        "huggingface_token": _prefixed("hf_", _ALNUM, 34),
        "stripe_key": _prefixed(_words("sk_live_", "rk_live_", "sk_test_", "rk_test_", "whsec_"), _ALNUM, 24),
        "sendgrid_key": word(grid),
        "shopify_token": _prefixed(_words("shpat_", "shpca_", "shppa_", "shpss_"), "[0-9a-fA-F]", 32),
        "telegram_token": word(bot),
        "grafana_token": _prefixed(_words("glsa_", "glc_"), _WORD, 32),
        "age_key": _prefixed("AGE-SECRET-KEY-1", "[A-Z0-9]", 58),
    }


def _jwt() -> Part:
    piece = sequence(_text("eyJ"), some(_URLSAFE, 10, None), _text("."))
    return word(sequence(piece, piece, some(_URLSAFE, 10, None)))


def _private_key() -> Part:
    """A block in PEM, also with its lines' ends written as in JSON, also without its end."""
    label = sequence(some("[A-Z0-9 ]", 0, 20), _text("PRIVATE KEY"), maybe(_text(" BLOCK")), _text("-----"))
    end = either(some(r"[\r\n]"), sequence(some(r"\\", 1, 7), some("[rn]")))
    header = sequence(some("[A-Z]"), some("[A-Za-z-]", 3, 20), _text(": "), some(r"[^\r\n\\]", 1, 200))
    return sequence(
        *(_text("-----BEGIN "), label, end, maybe(end)),
        *(maybe(header, end, maybe(end)), maybe(header, end, maybe(end)), maybe(end)),
        some(r"[A-Za-z0-9+/=\r\n\t \\]", 60, None),
        maybe(_text("-----END "), label),
    )


def _authorization() -> Part:
    """A header that authorizes, as it goes over the wire or stands in JSON and in source."""
    named = either(
        *(_text(word, any_case=True) for word in ("authorization", "x-api-key", "x-auth-token", "private-token")),
        _text("x-vault-token", any_case=True),
    )
    schemes = either(*(_text(word, any_case=True) for word in ("bearer", "basic", "token", "apikey", "digest")))
    header = sequence(
        named,
        *(some(r"\\", 0, 3), some(_QUOTE, 0, 1), some(_SPACE, 0, 4), some("[:=]"), some(_SPACE, 0, 4)),
        *(some(r"\\", 0, 3), some(_QUOTE, 0, 1)),
        *(maybe(schemes, some(" ", 1, 4)), secret(some(_VALUE, 20, None))),
    )
    bare = sequence(some("[Bb]"), _text("earer "), secret(some(_VALUE, 32, None)))
    return either(header, word(bare))


def _connection() -> Part:
    """A password within a URL, or between the semicolons of a connection string."""
    user = some(r"[A-Za-z0-9._%+~-]", 0, 64)
    password = secret(some(r"[A-Za-z0-9._%+~!#&*,;:?^=-]", 6, 200))
    url = sequence(some("[a-z0-9]", 2, 2), _text("://"), user, _text(":"), password, _text("@"), some(r"[A-Za-z0-9\[]"))
    names = either(_text("Password", any_case=True), _text("Pwd", any_case=True))
    listed = sequence(
        _text(";"), some(" ", 0, 1), names, _text("="), secret(some(r"[^;\s\x22\x27{}<>$%]", 6, 200)), _text(";")
    )
    return either(url, listed)


def shapes() -> Mapping[str, Part]:
    """Every shape by the name of its rule."""
    return {
        **_clouds(),
        **_forges(),
        **_services(),
        "jwt": _jwt(),
        "private_key": _private_key(),
        "authorization": _authorization(),
        "connection_string": _connection(),
    }
