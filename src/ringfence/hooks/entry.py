"""The process of a hook in Python: `python -m ringfence.hooks.entry TARGET`.

It reads a record from each line of stdin, and writes an answer to each. When stdin ends it exits at once, even if the
function still runs: the gateway is gone, and the next one will deliver the record again.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from importlib import metadata
from typing import Any

GROUP = "ringfence.hooks"
"""The group of entry points that installed packages offer hooks in."""


def main(target: str) -> int:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the function prints is for people
    try:
        function = load(target)
    except BaseException as exc:  # whatever a module does when it is loaded
        traceback.print_exc()
        _answer(answers, {"loaded": False, "error": type(exc).__name__})
        return 1
    _answer(answers, {"loaded": True})
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    while True:
        record = json.loads(lines.get())
        try:
            result = function(record)
            if inspect.isawaitable(result):
                asyncio.run(_awaited(result))
        except Exception as exc:  # the function's own: it is tried again later
            traceback.print_exc()
            _answer(answers, {"taken": False, "error": type(exc).__name__})
        else:
            _answer(answers, {"taken": True})


def _read(lines: queue.SimpleQueue[bytes]) -> None:
    for line in sys.stdin.buffer:
        lines.put(line)
    os._exit(0)


def _answer(answers: Any, answer: dict[str, object]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


async def _awaited(result: Any) -> None:
    await result


def load(target: str) -> Callable[[Any], Any]:
    """The function of `FILE.py:NAME`, `MODULE:NAME`, or of an entry point by its name."""
    place, colon, name = target.rpartition(":")
    if not colon:
        (point,) = metadata.entry_points(group=GROUP, name=target)
        found = point.load()
    elif place.endswith(".py"):
        spec = importlib.util.spec_from_file_location("ringfence_hook", place)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        found = getattr(module, name)
    else:
        found = getattr(importlib.import_module(place), name)
    if not callable(found):
        raise TypeError(f"{target} is no function")
    made: Callable[[Any], Any] = found
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
