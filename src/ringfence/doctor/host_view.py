"""How the harness finds a box on the host."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ringfence.core.model import Json
from ringfence.doctor.props import Props


def box_processes(facts: Json) -> list[Path]:
    """The processes of a box, as the host sees them, by the namespace that the box says it is in."""
    wanted = facts.get("spaces", {}).get("pid")
    found = []
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdigit() and os.readlink(path / "ns" / "pid") == wanted:
                found.append(path)
        except OSError:
            continue
    return found


def is_first(process: Path) -> bool:
    """Whether it is the first process of its pid namespace."""
    return (process / "status").read_text().partition("\nNSpid:")[2].partition("\n")[0].split()[-1] == "1"


def outer_namespaces(props: Props, facts: Json) -> Json:
    """The namespaces of the processes outside that made the box."""
    inside = box_processes(facts)
    outside = {parent_of(process) for process in inside} - set(inside) - {Path("/proc/0")}
    found: dict[str, list[str]] = {}
    for process in outside:
        for name in facts.get("spaces", {}):
            with suppress(OSError):
                found.setdefault(name, []).append(os.readlink(process / "ns" / name))
    return {"outside": found, "processes": len(inside)}


def parent_of(process: Path) -> Path:
    try:
        text = (process / "stat").read_text()
    except OSError:
        return Path("/proc/0")
    return Path("/proc", text.rpartition(")")[2].split()[1])
