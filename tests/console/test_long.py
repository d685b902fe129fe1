"""The page of a call with more on record than a page holds."""

from __future__ import annotations

from ringfence.audit.chain import Record
from ringfence.console.calls import _fitting


def test_a_page_holds_a_million_characters_of_records_and_names_the_others() -> None:
    def record(seq: int, length: int) -> Record:
        text = f'{{"note":"{"x" * length}"}}'
        return Record("chain", seq, 1.0 + seq, "started", "c1", text, "hash")

    story = [(each, each.body) for each in (record(1, 200_000), *(record(number, 90_000) for number in range(2, 20)))]
    shown = _fitting(story)
    assert [each["seq"] for each in shown] == list(range(1, 20))
    whole = [each["seq"] for each in shown if "note" in each["body"]]
    assert whole == list(range(2, 13)) and shown[0]["body"] == shown[-1]["body"]
    assert "audit show" in str(shown[0]["body"])
