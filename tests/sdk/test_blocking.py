"""The blocking classes: generated from the asynchronous ones, documented, callbacks in the thread that waits."""

from __future__ import annotations

import inspect
import threading

import pytest

from ringfence import AsyncSandbox, Sandbox
from ringfence.sdk import blocking
from scripts import blocking as generator

CLASSES = [getattr(blocking, name.removeprefix("Async")) for name in generator.CLASSES]


def test_the_file_is_what_is_generated() -> None:
    assert generator.TARGET.read_text() == generator.generated(), "run: python scripts/blocking.py"


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_method_has_a_signature_and_says_what_it_does(kind: type) -> None:
    for name, member in vars(kind).items():
        if name[0] == "_":
            continue
        assert inspect.getdoc(member), f"{kind.__name__}.{name}"
        found = member.fget if isinstance(member, property) else getattr(kind, name)
        assert callable(found)
        signature = inspect.signature(found)
        assert "Async" not in str(signature) and signature.return_annotation is not inspect.Parameter.empty


def test_nothing_that_callers_use_is_missing() -> None:
    theirs = {name for name in dir(AsyncSandbox) if name[0] != "_"} - {"over", "outcome"}
    assert theirs <= {name for name in dir(Sandbox) if name[0] != "_"}


@pytest.mark.usefixtures("state")
def test_callbacks_of_a_command_in_the_background_are_called_in_the_thread_that_waits() -> None:
    heard: list[tuple[str, threading.Thread]] = []
    with Sandbox.create() as sandbox:
        job = sandbox.commands.run(
            "echo hello", background=True, on_stdout=lambda text: heard.append((text, threading.current_thread()))
        )
        waiting = threading.Thread(target=job.wait)
        waiting.start()
        waiting.join()
    assert heard == [("hello\n", waiting)]
