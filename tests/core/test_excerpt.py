"""Excerpts: what is short stays as it is, of what is long head and tail are kept, and all of it fits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ringfence.core.excerpt import excerpt, share, shortened
from ringfence.core.model import Json

LENGTHS = st.lists(st.integers(0, 5_000), max_size=8)


@given(LENGTHS, st.integers(1, 10_000))
def test_texts_cut_to_their_share_fit_together_and_nothing_is_cut_that_fits(lengths: list[int], most: int) -> None:
    room = share(lengths, most)
    assert sum(min(length, room) for length in lengths) <= most
    if sum(lengths) <= most:
        assert all(length <= room for length in lengths)


def test_a_short_text_leaves_its_rest_to_a_long_one() -> None:
    assert share([10, 9_000, 9_000], 10_010) == 5_000


@given(st.text(max_size=400), st.integers(80, 300))
def test_an_excerpt_is_as_long_as_it_may_be_and_keeps_both_ends(text: str, most: int) -> None:
    short = excerpt(text, most)
    assert len(short) <= most
    if len(text) <= most:
        assert short == text
    else:
        assert short[0] == text[0] and short[-1] == text[-1] and "characters left out" in short


def test_it_says_how_much_is_missing() -> None:
    head, said, tail = excerpt("a" * 600 + "b" * 600, 200).split("\n")
    assert set(head) == {"a"} and set(tail) == {"b"}
    assert said == f"… {1200 - len(head) - len(tail)} characters left out …"


def of_program(stdout: str, stderr: str = "", value: str = "") -> Json:
    claimed = {"results": [{"data": {"text/plain": value}, "main": True}], "error": None}
    return {
        "content": [
            {"type": "text", "text": stdout},
            {"type": "text", "text": stderr},
            {"type": "text", "text": value},
        ],
        "structuredContent": {"stdout": stdout, "stderr": stderr, "exit_code": 0, "claimed": claimed},
    }


def test_a_result_that_fits_is_the_very_same() -> None:
    result = of_program("42\n", "", "'x'")
    assert shortened(result, 1000, structured=True) is result


def test_both_forms_of_a_long_result_are_small_and_say_so() -> None:
    result = shortened(of_program("o" * 50_000, "warning", "v" * 50_000), 1000, structured=True)
    assert sum(len(block["text"]) for block in result["content"]) <= 1000
    structured = result["structuredContent"]
    shown = structured["claimed"]["results"][0]["data"]["text/plain"]
    assert len(structured["stdout"] + structured["stderr"] + shown) <= 1000
    assert structured["stderr"] == "warning" and structured["truncated"] is True


def test_pictures_stay_and_a_drawing_that_is_too_long_is_named() -> None:
    picture = {"type": "image", "data": "A" * 5000, "mimeType": "image/png"}
    drawing = {"type": "resource", "resource": {"uri": "x:y", "mimeType": "image/svg+xml", "text": "<svg>" * 500}}
    result = shortened({"content": [picture, drawing]}, 1000, structured=True)
    assert result["content"] == [
        picture,
        {"type": "text", "text": "[image/svg+xml, 2500 characters: too long to be shown]"},
    ]


def test_texts_of_resources_count_with_the_others() -> None:
    resource = {"type": "resource", "resource": {"uri": "x:y", "mimeType": "text/plain", "text": "r" * 300}}
    result = shortened({"content": [{"type": "text", "text": "t" * 300}, *[resource] * 150]}, 1000, structured=False)
    shown = [block["resource"]["text"] if block["type"] == "resource" else block["text"] for block in result["content"]]
    assert sum(map(len, shown)) <= 1000 + len("… 200 more texts left out …")


def test_the_structured_content_of_a_server_is_its_own() -> None:
    result = shortened({"content": [], "structuredContent": {"stdout": "x" * 5000}}, 1000, structured=False)
    assert result["structuredContent"] == {"stdout": "x" * 5000}


@given(st.lists(st.text(max_size=30), max_size=200), st.integers(80, 400))
def test_many_short_texts_are_no_longer_together_than_a_long_one_may_be(texts: list[str], most: int) -> None:
    result = {"content": [{"type": "text", "text": text} for text in texts]}
    short = shortened(result, most, structured=False)
    kept = [block["text"] for block in short["content"]]
    assert sum(map(len, kept)) <= most + len("… 200 more texts left out …")
    if sum(map(len, texts)) <= most:
        assert short is result
    elif len(kept) < len(texts):
        assert kept[-1] == f"… {len(texts) - len(kept) + 1} more texts left out …"


def test_what_earlier_steps_left_is_cut_as_well() -> None:
    result = of_program("42\n")
    result["structuredContent"]["late"] = {"stdout": "x" * 5_000}
    result["content"].append({"type": "text", "text": "x" * 5_000})
    short = shortened(result, 1000, structured=True)["structuredContent"]
    assert len(short["late"]["stdout"]) <= 1000 and short["truncated"]
