"""Our code for interpreters that are started by exec: a box does not see our source, so they read it from a descriptor,
compiled.
"""

from __future__ import annotations

import marshal
import sys
from functools import cache
from pathlib import Path

from ringfence.core.box import Program
from ringfence.sandbox.process.guest import later

CODE_FD = 3
"""Where a new interpreter finds its code."""
_OURS = sys.version_info[:2]
OLDEST = (3, 11)
"""The oldest version that serves cells."""
_FORM = 4
"""Of `marshal`: every version that serves cells reads it."""
_PACKAGE = "ringfence.sandbox.process.guest"
_OF_PROGRAMS = ("mainfile", "c_output", "later", "source", "runner")
_OF_CELLS = ("mainfile", "c_output", "later", "source", "display", "runner", "claims", "repl")
"""Each after those that it needs; the last is the one that is wanted."""
LOAD = f"""\
import sys
if not sys.flags.safe_path:
    del sys.path[0]  # until ours are loaded, no modules are found in the working folder
sys.orig_argv = sys.orig_argv[:1]
def load(compiled):
    import marshal
    for name, code in marshal.loads(compiled):
        module = sys.modules[name] = type(sys)(name)
        if code is not None:
            if type(code) is bytes:
                code = compile(code, "<" + name.rpartition(".")[2] + ">", "exec")
            exec(code, module.__dict__)
    sys.modules["{_PACKAGE}.runner"].forget_ourselves()
    return module
"""
"""Defines a function that loads our code, and returns the module that is wanted. It takes bytes: from a file, `marshal`
would read each number by itself, which takes longer than the start of an interpreter."""
_RUN = f"""\
{LOAD}
def begin():
    import marshal
    with open({CODE_FD}, "rb") as file:
        compiled, order = marshal.loads(file.read())
    runner = load(compiled)
    runner.name_a_parent()
    program = runner.GuestProgram()
    if sys.flags.safe_path:
        del sys.path[0]
    program.take(order["source"], "-c", order["argv"], cell=order["cell"])
    if sys.version_info >= (3, 13):
        program.show_lines()  # or those of this text would be quoted
    return program, runner.os._exit
program, leave = begin()
try:
    exec(program.code(), program.namespace)
    if program.last is not None:
        program.answer(eval(program.last, program.namespace))
except BaseException as exc:
    program.failed(exc)
leave(program.finish())
"""


_RUN_SOURCE = (
    "exec(compile((lambda file: (file.read(), file.close())[0])"
    f'(__import__("os").fdopen({CODE_FD}, "rb")), "<string>", "exec"))'
)
"""Leaves no name behind. A word of the command line could not hold a program of more than 128 KiB."""


def of_cells(version: tuple[int, int] = _OURS) -> bytes:
    """What `LOAD` reads for an interpreter of this version that serves cells."""
    return _parts(_OF_CELLS, compiled=version == _OURS)


def of_program(program: Program) -> bytes:
    """What a new interpreter reads from its descriptor: a program that came as text, after what runs it. A program
    that is to lie in a file is only put there."""
    if program.name != "-c":
        return program.source
    order = {"source": program.source, "argv": list(program.argv), "cell": program.cell}
    return marshal.dumps((_parts(_OF_PROGRAMS), order))


def words(program: Program) -> list[str]:
    """The arguments of a new interpreter that runs a program."""
    return [program.name, *program.argv] if program.name != "-c" else ["-c", _RUN, *program.argv]


def plain_words(program: Program) -> list[str]:
    """The same for an interpreter that is none of ours, and gets the source alone."""
    return [program.name, *program.argv] if program.name != "-c" else ["-c", _RUN_SOURCE, *program.argv]


def sources() -> list[tuple[str, bytes | None]]:
    """The modules that run a program, each after those that it needs, as source for an interpreter of any version.
    Packages among them have none."""
    parts: list[tuple[str, bytes | None]] = marshal.loads(_parts(_OF_PROGRAMS, compiled=False))  # noqa: S302 - ours
    return parts


@cache
def _parts(modules: tuple[str, ...], *, compiled: bool = True) -> bytes:
    """Modules of the guest, compiled for an interpreter of the same version as this one, or as source for any."""
    parts: list[tuple[str, object]] = [
        (name, None) for name in ("ringfence", "ringfence.sandbox", "ringfence.sandbox.process", _PACKAGE)
    ]
    folder = Path(__file__).with_name("guest")
    for name in modules:
        source = (folder / f"{name}.py").read_bytes()
        if name == "later":
            kept = {each: (folder / f"{each}.py").read_bytes() for each in later.MODULES}
            source += f"\nSOURCES.update({kept!r})\n".encode()
        code = compile(source, f"<{name}>", "exec", dont_inherit=True) if compiled else source
        parts.append((f"{_PACKAGE}.{name}", code))
    return marshal.dumps(parts, _FORM)
