"""Two runs compared, part by part."""

from __future__ import annotations

from typing import Any

import pytest

from ringfence.governance.replaying import Reruns, can_be_held, differences, environment_changes


def seen(stdout: str = "same", files: dict[str, str] | None = None, denied: int = 0, ending: str = "exited") -> Any:
    empty = {"sha256": "", "text": ""}
    return {
        "ending": ending,
        "stdout": {"sha256": stdout, "text": stdout},
        "stderr": empty,
        "value": empty,
        "files": files or {},
        "network": {"allowed": 0, "denied": denied, "failed": 0},
    }


def kinds(then: Any, runs: Reruns, *, changed: bool = False) -> dict[str, tuple[str, ...]]:
    return {each.what: each.kinds for each in differences(then, runs, changed)}


def test_what_is_the_same_is_not_told() -> None:
    assert kinds(seen(), Reruns((seen(), seen()))) == {}


def test_a_request_that_is_refused_now_is_why() -> None:
    assert kinds(seen("page"), Reruns((seen("error", denied=1), seen("error", denied=1)))) == {"stdout": ("network",)}


def test_what_is_stable_now_and_was_other_then_is_the_environments_where_that_changed() -> None:
    runs = Reruns((seen("3.14"), seen("3.14")))
    assert kinds(seen("3.13"), runs, changed=True) == {"stdout": ("environment",)}
    assert kinds(seen("3.13"), runs) == {"stdout": ("output",)}


def test_a_day_that_is_over_is_the_clock() -> None:
    now = seen("Friday")
    assert kinds(seen("Thursday"), Reruns((now, now), held_clock=(seen("Thursday"), seen("Thursday")))) == {
        "stdout": ("clock",)
    }


def test_what_is_drawn_once_for_many_boxes_is_randomness() -> None:
    now, held = seen("1234"), seen("99")
    runs = Reruns((now, now), held_clock=(now, now), held_random=(held, held), held_both=(held, held))
    assert kinds(seen("5678"), runs) == {"stdout": ("randomness",)}


def test_files_that_are_missing_or_new_are_told() -> None:
    now = seen(files={"new": "1", "both": "2"})
    assert kinds(seen(files={"old": "1", "both": "2"}), Reruns((now, now))) == {"old": ("files",), "new": ("files",)}


@pytest.mark.parametrize(
    ("then", "now", "kind"),
    [
        ("at 2026-11-19T01:02:03Z", "at 2026-11-20T04:05:06Z", ("clock",)),
        ("at 0x7f00aabbccdd", "at 0x7f11aabbccdd", ("randomness",)),
        ("12:00:00 0x7f00aabbccdd", "12:00:01 0x7f11aabbccdd", ("clock", "randomness")),
        ("12 apples", "13 apples", ("output",)),
    ],
)
def test_of_what_cannot_be_held_the_look_tells(then: str, now: str, kind: tuple[str, ...]) -> None:
    assert kinds(seen(then), Reruns((seen(now), seen(now)))) == {"stdout": kind}


def test_only_python_that_may_begin_with_another_line_is_held() -> None:
    assert can_be_held({"code": "1"})
    assert not can_be_held({"command": "date"})
    assert not can_be_held({"code": "1", "language": "bash"})
    assert not can_be_held({"code": "from __future__ import annotations"})


def test_what_is_another_around_it_is_named() -> None:
    (only,) = environment_changes({"python": "3.13.1", "kernel": "6"}, {"python": "3.13.2", "kernel": "6"})
    assert (only.what, only.then, only.now) == ("python", "3.13.1", "3.13.2")
