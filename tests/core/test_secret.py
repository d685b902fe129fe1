"""A handle shows its value to nobody but `reveal`."""

from __future__ import annotations

import ast
import copy
import json
import pickle
import traceback

import pytest

from ringfence.core.errors import Unavailable
from ringfence.core.secret import Secret, reveal
from tests.tooling import ROOT

VALUE = "correct-horse-battery"


def test_nothing_that_prints_shows_the_value() -> None:
    secret = Secret("one", VALUE)
    shown = [repr(secret), str(secret), f"{secret}", f"{secret:>40}", f"{secret!r}", f"{[secret]}", str({"a": secret})]
    shown += [str(dir(secret)), str([getattr(secret, name) for name in dir(secret) if name != "again"])]
    assert not any(VALUE in text for text in shown)
    assert reveal(secret) == VALUE


@pytest.mark.parametrize("dump", [pickle.dumps, copy.copy, copy.deepcopy, json.dumps])
def test_a_handle_cannot_be_dumped(dump) -> None:
    with pytest.raises(TypeError) as caught:
        dump(Secret("one", VALUE))
    assert VALUE not in "".join(traceback.format_exception(caught.value))


def test_a_revoked_handle_reveals_nothing_and_others_still_do() -> None:
    secret = Secret("one", VALUE)
    other = secret.again()
    other.revoke()
    with pytest.raises(Unavailable, match="revoked"):
        reveal(other)
    assert reveal(secret) == VALUE


@pytest.mark.parametrize("value", ["", "elevenchars", " " * 20, "a" * 70_000, "zero\0zero\0zero", "\ud800" * 12])
def test_a_value_that_cannot_be_kept_is_refused_without_a_word_of_it(value: str) -> None:
    with pytest.raises(ValueError, match="secret 'one'") as caught:
        Secret("one", value)
    assert not value or value not in str(caught.value)


MAY_REVEAL = {
    "core/secret.py": "defines it, and makes another handle",
    "governance/broker.py": "puts values into headers, and into the environment of a server that needs one",
    "secrets/signing.py": "signs with one",
    "secrets/redaction.py": "searches for values",
    "secrets/vault.py": "tells whether a value changed",
}


def test_only_these_modules_reveal() -> None:
    source = ROOT / "src" / "ringfence"
    calling = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Name) and node.id == "reveal"
    }
    assert calling == set(MAY_REVEAL)
