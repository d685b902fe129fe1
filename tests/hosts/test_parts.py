"""What is tried in guests, and which guests there are."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from hosts import parts as trying
from hosts.guests import ALL_CLASSES, GUESTS, Guest
from hosts.image import PYTHONS
from hosts.places import Trouble
from ringfence.doctor import CLASSES
from tests.tooling import ROOT

INSIDE = ROOT / "hosts" / "inside" / "tries.py"


def of(guest: Guest) -> list[trying.Part]:
    return list(trying.parts(guest, ROOT))


@pytest.mark.parametrize("guest", GUESTS, ids=lambda guest: guest.name)
def test_every_part_is_one_that_the_guest_can_do(guest: Guest) -> None:
    defined = {node.name for node in ast.walk(ast.parse(INSIDE.read_text())) if isinstance(node, ast.FunctionDef)}
    found = of(guest)
    assert {f"part_{part.name}" for part in found} <= defined
    assert len({part.key for part in found}) == len(found)
    assert guest.release in PYTHONS


def test_both_machines_and_the_special_guests_are_there() -> None:
    assert len({guest.name for guest in GUESTS}) == len(GUESTS)
    for machine in ("amd64", "arm64"):
        suites = {guest.suite for guest in GUESTS if guest.machine == machine and guest.groups == "v2"}
        assert {"bookworm", "bookworm-backports", "trixie-backports"} <= suites
        assert [guest.suite for guest in GUESTS if guest.machine == machine and guest.doctor == ALL_CLASSES]
    assert {guest.groups for guest in GUESTS} == {"v2", "v1", "none"}
    assert any(not guest.namespaces for guest in GUESTS) and any(guest.container for guest in GUESTS)


def test_the_cases_of_the_doctor_are_tried_class_by_class() -> None:
    assert set(ALL_CLASSES) == set(CLASSES)
    for guest in GUESTS:
        classes = [part.words[-1] for part in of(guest) if part.name == "doctor" and part.who == "root"]
        assert "".join(classes) == guest.doctor


def test_limits_are_held_by_the_kernel_where_systemd_has_control_groups() -> None:
    for guest in GUESTS:
        held = {part.who: part.limits for part in of(guest) if part.name == "run" and not part.label}
        if guest.groups == "v2" and not guest.container:
            assert None not in held.values() and set(held) == {"root", "user"}
        if guest.groups == "v1":
            assert held["root"] is not None and held["user"] is None


def test_without_user_namespaces_a_user_is_refused_first_and_served_after_the_mending() -> None:
    (guest,) = (guest for guest in GUESTS if not guest.namespaces)
    order = [(part.who, part.name) for part in of(guest)]
    assert order.index(("user", "refused")) < order.index(("root", "mend")) < order.index(("user", "run"))


def test_a_container_gets_the_options_that_the_documentation_gives() -> None:
    (guest,) = (guest for guest in GUESTS if guest.container)
    options = trying.documented(ROOT)
    assert "--security-opt" in options
    chosen = {part.container for part in of(guest)}
    assert chosen == {(), options}
    user = next(part for part in of(guest) if part.who == "user" and part.container)
    assert "--user 1000:1000" in user.argv()[-1] and "seccomp=unconfined" in user.argv()[-1]


def test_documentation_without_podman_is_a_trouble(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "hosts.md").write_text("# Hosts\n")
    with pytest.raises(Trouble, match="Podman"):
        trying.documented(tmp_path)


def test_parts_of_one_person_are_tried_in_one_process() -> None:
    guest = next(guest for guest in GUESTS if guest.namespaces and not guest.container)
    found = of(guest)
    first, second = found[:2]
    assert first.alike(second) and f"{first.name} {second.name}" in first.argv(second)[-1]
    root, user = (next(part for part in found if part.who == who) for who in ("root", "user"))
    assert not root.alike(user)
