"""The corpora as data: what is in `corpus/`, `second/` and `third/`, read once. All are of the same tools."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"


def _read(path: Path) -> Any:
    return YAML(typ="safe").load(path.read_text("utf-8"))


@dataclass(frozen=True, slots=True)
class ScenarioStep:
    """One call of a scenario, and what comes back."""

    tool: str
    """SERVER.TOOL"""
    arguments: dict[str, Any]
    back: str
    leak: bool = False
    session: str | None = None
    agent: str = "main"
    again: bool = False
    """The client connects anew before it."""
    restart: bool = False
    """The gateway does."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One attempt or one twin."""

    id: str
    attempt: bool
    held_out: bool
    about: str
    steps: tuple[ScenarioStep, ...]


def _step(written: list[Any]) -> ScenarioStep:
    tool, arguments, back, *words = written
    said = words[0].split() if words else []
    named = dict(word.split(":", 1) for word in said if ":" in word)
    plain = {word for word in said if ":" not in word}
    assert plain <= {"leak", "again", "restart"} and named.keys() <= {"in", "by"}, written
    return ScenarioStep(
        tool=tool,
        arguments={name: _text(value) for name, value in arguments.items()},
        back=str(back),
        leak="leak" in plain,
        session=named.get("in"),
        agent=named.get("by", "main"),
        again="again" in plain,
        restart="restart" in plain,
    )


def _text(value: Any) -> Any:
    """Dates are texts here; `BULK:N` stands for N characters of ordinary text."""
    text = value if isinstance(value, int) else str(value)
    if isinstance(text, str) and text.startswith("BULK:"):
        most = int(text.removeprefix("BULK:"))
        return ("the quick brown fox jumps over the lazy dog\n" * (most // 44 + 1))[:most]
    return text


@cache
def tools() -> dict[str, dict[str, Any]]:
    """What is declared of each tool, by SERVER.TOOL."""
    written = _read(CORPUS / "tools.yaml")
    return {f"{server}.{name}": declared for server, all_ in written.items() for name, declared in all_.items()}


@cache
def scenarios(corpus: str = "corpus") -> tuple[Scenario, ...]:
    """All attempts and twins, in the order of the files."""
    found = []
    for path in sorted((HERE / corpus).glob("*.yaml")):
        if path.name == "tools.yaml":
            continue
        for pair in _read(path):
            assert pair.keys() == {"id", "about", "held_out", "attempt", "twin"}, pair["id"]
            for half in ("attempt", "twin"):
                steps = tuple(map(_step, pair[half]))
                found.append(
                    Scenario(f"{pair['id']}-{half}", half == "attempt", pair["held_out"], pair["about"], steps)
                )
    return tuple(found)
