"""Writes src/ringfence/sdk/blocking.py: the classes of the SDK without await, from the asynchronous ones.

    python scripts/blocking.py

Each public method of `AsyncX` becomes one of `X` with the same parameters and docstring, which waits for it. A test
checks that the file is what this writes. Why it is generated: docs/decisions/0033-blocking-sdk-is-generated.md.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SDK = Path(__file__).parents[1] / "src" / "ringfence" / "sdk"
TARGET = SDK / "blocking.py"
CLASSES = {
    "AsyncSandbox": "sandbox",
    "AsyncCommands": "commands",
    "AsyncCommandHandle": "commands",
    "AsyncFiles": "files",
    "AsyncWatch": "files",
}
"""In the order of the file, each with its module."""
OURS = {"SessionClient", "CallTool", "Attached"}
"""A method that takes one of these is for the rest of the package."""
WITHOUT = {"on_change"}
"""Callbacks of what goes on after the call: there is no thread that waits, and could call them."""
BY_HAND = {
    "Sandbox.id": '''
    @property
    def id(self) -> str:
        """Its id. The sandbox is opened for it, if it was not used yet."""
        return self.open()
'''
}

HEAD = '''"""Sandboxes without await, for programs that have no event loop of their own.

    with Sandbox.create() as sandbox:
        sandbox.run_code("x = 6")
        print(sandbox.run_code("x * 7").text)

Callbacks are called in the thread that waits. Generated from the asynchronous classes by scripts/blocking.py: change
those, and run it.
"""

from __future__ import annotations

@IMPORTS@

A = TypeVar("A")


class _Blocking(Generic[A]):
    """The blocking counterpart of an asynchronous object."""

    _inner: A

    @classmethod
    def _of(cls, inner: A) -> Self:
        made = cls.__new__(cls)
        made._inner = inner
        return made
'''
TAIL = '''

_COUNTERPARTS: dict[type[Any], type[_Blocking[Any]]] = {@PAIRS@}


def _blocking(found: object) -> Any:
    """The blocking counterpart of whatever is asynchronous in `found`."""
    if type(found) in _COUNTERPARTS:
        return _COUNTERPARTS[type(found)]._of(found)
    if isinstance(found, AsyncIterator):
        return engine.steps(found)
    return [_blocking(each) for each in found] if isinstance(found, list) else found
'''


def generated() -> str:
    """The text of the file."""
    modules = {name: _Module(name) for name in dict.fromkeys(CLASSES.values())}
    body = "".join(_Class(name, modules[module]).text() for name, module in CLASSES.items())
    pairs = ", ".join(f"{name}: {_plain(name)}" for name in CLASSES)
    text = HEAD + body + TAIL.replace("@PAIRS@", pairs)
    used = {node.id for node in ast.walk(ast.parse(text.replace("@IMPORTS@", ""))) if isinstance(node, ast.Name)}
    homes = {"Generic": "typing", "TypeVar": "typing", "Any": "typing", "Self": "typing", "engine": "ringfence.sdk"}
    homes |= {"Iterator": "collections.abc", "AsyncIterator": "collections.abc"}
    for module in modules.values():
        homes |= module.homes
    imports = "\n".join(f"from {homes[name]} import {name}" for name in sorted(used & homes.keys()))
    return _formatted(text.replace("@IMPORTS@", imports))


def _plain(text: str) -> str:
    """The same without `Async`."""
    return re.sub(r"\bAsync(?=[A-Z])", "", text)


class _Module:
    """A module of asynchronous classes, and where the names in it come from."""

    def __init__(self, name: str) -> None:
        self.tree = ast.parse((SDK / f"{name}.py").read_text(encoding="utf-8"))
        self.homes: dict[str, str] = {}
        for node in self.tree.body:
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                self.homes |= {alias.name: node.module for alias in node.names}
            elif isinstance(node, ast.ClassDef):
                self.homes[node.name] = f"ringfence.sdk.{name}"
            elif isinstance(node, ast.Assign):
                self.homes |= {each.id: f"ringfence.sdk.{name}" for each in node.targets if isinstance(each, ast.Name)}


class _Class:
    def __init__(self, name: str, module: _Module) -> None:
        self.name = name
        self.plain = _plain(name)
        found = (node for node in module.tree.body if isinstance(node, ast.ClassDef) and node.name == name)
        self.node = next(found)
        methods = [node for node in self.node.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        self.overloaded = {each.name for each in methods if "overload" in map(ast.unparse, each.decorator_list)}

    def text(self) -> str:
        doc = ast.get_docstring(self.node, clean=False)
        return f'\n\nclass {self.plain}(_Blocking[{self.name}]):\n    """{doc}"""\n' + "".join(self._members())

    def _members(self) -> Iterator[str]:
        for node, after in zip(self.node.body, [*self.node.body[1:], None], strict=True):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                yield self._attribute(node.target.id, ast.unparse(node.annotation), after)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                method = _Method(self, node)
                by_hand = BY_HAND.get(f"{self.plain}.{node.name}")
                if by_hand is not None:
                    yield by_hand
                elif method.public:
                    yield f"\n{method.text()}\n"

    def _attribute(self, name: str, kind: str, after: ast.stmt | None) -> str:
        doc = ast.literal_eval(after.value) if isinstance(after, ast.Expr) else ""
        value = f"self._inner.{name}"
        value = value if kind == _plain(kind) else f"{_plain(kind)}._of({value})"
        head = f"\n    @property\n    def {name}(self) -> {_plain(kind)}:"
        return f'{head}\n        """{doc}"""\n        return {value}\n'


_SPECIAL = {"__aenter__": "__enter__", "__aexit__": "__exit__", "__aiter__": "__iter__"}


@dataclass
class _Method:
    owner: _Class
    node: ast.FunctionDef | ast.AsyncFunctionDef

    @property
    def public(self) -> bool:
        named = {each.id for each in ast.walk(self.node.args) if isinstance(each, ast.Name)}
        own = self.node.name in (*_SPECIAL, "__init__") or not self.node.name.startswith("_")
        return own and not named & OURS

    def text(self) -> str:
        lines = [f"@{ast.unparse(each)}" for each in self.node.decorator_list]
        lines.append(f"def {_SPECIAL.get(self.node.name, self.node.name)}({self._parameters()}) -> {self._returns()}:")
        if self._decorated("overload"):
            lines[-1] += " ..."
        else:
            lines += [f"    {line}" for line in (*self._docstring(), *self._body())]
        return "\n".join(f"    {line}" if line.strip() else "" for line in lines)

    def _decorated(self, name: str) -> bool:
        return name in map(ast.unparse, self.node.decorator_list)

    def _parameters(self) -> str:
        given = self.node.args
        plain = [*given.posonlyargs, *given.args]
        assert not {each.arg for each in given.kwonlyargs} & WITHOUT
        for place, each in reversed(list(enumerate(plain))):
            if each.arg in WITHOUT:
                assert given.defaults
                del given.defaults[place - len(plain)]
                given.args.remove(each)
        return _plain(ast.unparse(given))

    def _returns(self) -> str:
        assert self.node.returns is not None, f"{self.owner.name}.{self.node.name} says not what it returns"
        return _plain(ast.unparse(self.node.returns))

    def _docstring(self) -> Iterator[str]:
        doc = ast.get_docstring(self.node)
        if doc is None:
            return
        paragraphs = [each for each in doc.split("\n\n") if not any(name in each for name in WITHOUT)]
        lines = "\n\n".join(paragraphs).split("\n")
        yield f'"""{lines[0]}' + ('"""' if len(lines) == 1 else "")
        yield from lines[1:]
        if len(lines) > 1:
            yield '"""'

    def _body(self) -> Iterator[str]:
        name = self.node.name
        asynchronous = isinstance(self.node, ast.AsyncFunctionDef)
        if name == "__init__":
            yield f"self._inner = {self.owner.name}({self._arguments()})"
        elif name == "__aiter__":
            yield "return engine.steps(aiter(self._inner))"
        elif name == "__aenter__":
            yield "return self"
        elif not asynchronous:
            assert self._decorated("property"), f"{self.owner.name}.{name}: neither a property nor asynchronous"
            yield f"return self._inner.{name}"
        else:
            yield from self._waiting()

    def _waiting(self) -> Iterator[str]:
        name = self.node.name
        inner = self.owner.name if self._decorated("classmethod") else "self._inner"
        waited = "engine.waited"
        if name in self.owner.overloaded:
            yield "waited: Any = engine.waited  # which no type checker can match with overloads"
            waited = "waited"
        call = f"{waited}({', '.join(filter(None, (f'{inner}.{name}', self._arguments())))})"
        returns = ast.unparse(self.node.returns) if self.node.returns is not None else ""
        if returns == "None":
            yield call
        elif returns == "Self":
            yield f"return cls._of({call})"
        elif returns != _plain(returns) or name in self.owner.overloaded:
            yield f"found: {_plain(returns)} = _blocking({call})"
            yield "return found"
        else:
            yield f"return {call}"

    def _arguments(self) -> str:
        """What is passed on. Callbacks go by name, by which `engine.waited` knows them."""
        given = self.node.args
        words = [each.arg for each in (*given.posonlyargs, *given.args) if each.arg not in ("self", "cls")]
        out = [f"{word}={word}" if word.startswith("on_") else word for word in words]
        out += [f"{each.arg}={each.arg}" for each in given.kwonlyargs]
        return ", ".join([*out, *([f"**{given.kwarg.arg}"] if given.kwarg is not None else [])])


def _formatted(text: str) -> str:
    ruff = [sys.executable, "-m", "ruff"]
    for words in (["check", "--fix-only", "--quiet"], ["format"]):
        command = [*ruff, *words, "--stdin-filename", str(TARGET), "-"]
        text = subprocess.run(command, input=text, text=True, capture_output=True, check=True).stdout
    return text


if __name__ == "__main__":
    TARGET.write_text(generated(), encoding="utf-8")
