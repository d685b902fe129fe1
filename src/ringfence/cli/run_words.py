"""The words of `ringfence run` where they are well-formed, read without Typer.

What is wrong, rare or only asks for help is left to `run_command`, which has the words for it: `read` then returns
None. A test compares the two, option by option.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ringfence.cli.sizes import size_in_bytes

_WHOLE = re.compile(r"[0-9]{1,7}", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?", re.ASCII)


def read(words: list[str]) -> dict[str, Any] | None:
    """The arguments of `run.perform` that these words give, or None where Typer is to read them."""
    given: dict[str, Any] = {}
    names: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--":
            names.extend(rest)
        elif word == "-" or not word.startswith("-"):
            names.append(word)
        elif word in FLAGS:
            given[FLAGS[word]] = True
        else:
            option, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
            value = value if equals else next(rest, "")
            if option not in OPTIONS or not value:
                return None
            name, read_value, repeated = OPTIONS[option]
            try:
                found = read_value(value)
            except ValueError:
                return None
            if repeated:
                given.setdefault(name, []).append(found)
            else:
                given[name] = found
    return given | {"words": names}


def _processes(text: str) -> int:
    number = int(text) if _WHOLE.fullmatch(text) else 0
    if not 1 <= number <= 1_000_000:
        raise ValueError(text)
    return number


def _seconds(text: str) -> float:
    number = float(text) if _NUMBER.fullmatch(text) else 0.0
    if not 0.001 <= number <= 86_400:
        raise ValueError(text)
    return number


FLAGS = {"--listen": "listen", "--fresh": "fresh"}
OPTIONS: dict[str, tuple[str, Callable[[str], Any], bool]] = {
    "-c": ("code", str, False),
    "--shell": ("shell", str, False),
    "--backend": ("backend", str, False),
    "--timeout": ("timeout", _seconds, False),
    "--memory": ("memory", size_in_bytes(16), False),
    "--disk": ("disk", size_in_bytes(1), False),
    "--pids": ("pids", _processes, False),
    "--allow": ("allow", str, True),
    "--package": ("package", str, True),
    "--allow-package": ("allow_package", str, True),
    "--input": ("inputs", Path, True),
    "--output": ("output", Path, False),
    "--env": ("env", str, True),
    "--secret": ("secret", str, True),
    "--facts": ("facts", str, False),
    "--template": ("template", str, False),
    "--image": ("image", str, False),
    "--tree": ("tree", Path, True),
    "--config": ("config_path", Path, False),
}
"""Each option: the argument that it gives, how its value is read (ValueError: by Typer), and whether it is repeated."""
