"""`ringfence top`: what goes on just now, in a terminal."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import anyio
import typer

from ringfence.cli import common, options
from ringfence.cli.terminal import cut, foreign, safe, table
from ringfence.compose.overview import Overview
from ringfence.compose.runs import default_config
from ringfence.config import Config
from ringfence.core.model import Json
from ringfence.core.sizes import short_size

_MAX_ROWS = 12
"""Of one kind; how many more there are is said."""
_FRESH = "\x1b[?1049h\x1b[?25l"
_HOME = "\x1b[H"
_REST = "\x1b[J"
_LINE_END = "\x1b[K\n"
_BACK = "\x1b[?25h\x1b[?1049l"
_NAME = 32


def top(
    config_path: Path | None = common.ConfigOption,
    demo: bool = common.DemoOption,
    once: bool = typer.Option(False, "--once", help="Print it once and end."),
    every: float = typer.Option(1.0, "--every", min=0.1, max=3600, metavar="SECONDS", help="How often to look again."),
    as_json: options.PrintJson = False,
) -> None:
    """Show calls under way, questions that wait, sessions with CPU and memory, servers and rates, as they change.

    It shows all processes with this state, whether a gateway runs or not. Ctrl-C ends it. In a pipe it prints plain
    text, once for each look; with --json, an object a line.

    \b
    ringfence top
    ringfence top --once --json
    ringfence top --every 5 > top.log
    """
    settings = _settings(config_path, demo)
    try:
        common.run(partial(_show, settings, every=None if once else every, as_json=as_json))
    except (KeyboardInterrupt, BrokenPipeError):
        return


def _settings(config_path: Path | None, demo: bool) -> Config:
    """Without any configuration, the user's own state."""
    if demo:
        return common.demo_config()
    return default_config() if common.find_config(config_path) is None else common.load(config_path)


async def _show(settings: Config, *, every: float | None, as_json: bool) -> None:
    with common.reading(settings.gateway.state) as reader:
        overview = Overview(settings, reader)
        screen = every is not None and not as_json and sys.stdout.isatty()
        with _full_screen() if screen else _nothing():
            while True:
                found = await overview.look()
                if as_json:
                    print(json.dumps(found), flush=True)
                elif screen:
                    size = shutil.get_terminal_size()
                    shown = lines(found)[: size.lines - 1]
                    text = "".join(f"{cut(line, size.columns)}{_LINE_END}" for line in shown)
                    print(f"{_HOME}{text}{_REST}", end="", flush=True)
                else:
                    print("\n".join(lines(found)), flush=True)
                if every is None:
                    return
                if not screen and not as_json:
                    print()
                await anyio.sleep(every)


@contextmanager
def _full_screen() -> Iterator[None]:
    """What stood on the terminal before stands there again afterwards, however this ends."""
    os.write(1, _FRESH.encode())
    try:
        yield
    finally:
        os.write(1, _BACK.encode())


@contextmanager
def _nothing() -> Iterator[None]:
    yield


# ── What is shown ─────────────────────────────────────────────────────────────────────────────────


def lines(found: Json) -> list[str]:
    """The whole view as lines of plain text."""
    rates = found["rates"]
    status = ", ".join(f"{name} {count}" for name, count in rates["by_status"].items()) or "none ended"
    at = time.strftime("%H:%M:%S", time.localtime(found["at"]))
    sessions = found["sessions"]
    out = [
        f"ringfence top, {at}, {safe(found['state'])}",
        f"{rates['per_second']:g} calls/s in the last {rates['seconds']:g} s ({status});"
        f" p50 {_ms(rates['p50_ms'])}, p95 {_ms(rates['p95_ms'])}",
    ]
    calls = [
        (f"{c['seconds']:g}", *map(_word, (c["tool"], c["agent"], c["server"])), c["call_id"]) for c in found["calls"]
    ]
    out += _part("CALLS UNDER WAY", ("SECONDS", "TOOL", "AGENT", "SERVER", "CALL"), calls)
    asked = [
        (f"{a['seconds']:g}", *map(_word, (a["tool"], a["principal"], a["rule"])), f"{a['expires_in']:.0f} s", a["id"])
        for a in found["approvals"]
    ]
    out += _part("WAITING FOR A PERSON", ("SECONDS", "TOOL", "PRINCIPAL", "RULE", "EXPIRES IN", "APPROVAL"), asked)
    if sessions is None:
        out += ["", "SESSIONS: the keeper does not answer"]
    else:
        rows = [
            (
                _percent(each["cpu_percent"]),
                _bytes(each["memory_bytes"]),
                _bytes(each["memory_limit_bytes"]),
                each["state"],
                each["step"],
                _word(each["agent"]),
                each["id"],
            )
            for each in sessions
        ]
        out += _part("SESSIONS", ("CPU", "MEMORY", "OF", "STATE", "STEP", "AGENT", "SESSION"), rows)
    servers = [
        (s["calls"], s["failed"], _ms(s["p50_ms"]), _ms(s["p95_ms"]), _word(s["name"])) for s in found["servers"]
    ]
    return [*out, *_part("SERVERS", ("CALLS", "FAILED", "P50", "P95", "SERVER"), servers)]


def _part(title: str, heads: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    if not rows:
        return ["", f"{title}: none"]
    more = [f"… {len(rows) - _MAX_ROWS} more"] if len(rows) > _MAX_ROWS else []
    return ["", f"{title}: {len(rows)}", *table(heads, rows[:_MAX_ROWS]).splitlines(), *more]


def _word(text: str | None) -> str:
    return "-" if text is None else foreign(cut(text, _NAME))


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:g} ms"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}%"


def _bytes(value: int | None) -> str:
    return "-" if value is None else short_size(value)
