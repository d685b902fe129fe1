"""How values are shown: their text, and the richer forms that they offer.

Everything is text in the end: binary data is in base64, JSON is JSON text. This runs in the box, in the middle of the
user's code, so it relies on nothing that a value does; and what takes time to load is loaded on first use.
"""

from __future__ import annotations

import io
import sys

from ringfence.sandbox.process.guest import later, mainfile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

__builtins__ = BUILTINS = mainfile.BUILTINS  # type: ignore[assignment]

_METHODS = (
    ("_repr_html_", "text/html"),
    ("_repr_markdown_", "text/markdown"),
    ("_repr_svg_", "image/svg+xml"),
    ("_repr_png_", "image/png"),
    ("_repr_jpeg_", "image/jpeg"),
    ("_repr_pdf_", "application/pdf"),
    ("_repr_latex_", "text/latex"),
    ("_repr_json_", "application/json"),
    ("_repr_javascript_", "application/javascript"),
)
_TEXT_ALONE = frozenset((int, float, complex, bool, str, bytes, bytearray, tuple, set, frozenset, type, range))
_MAX_FORMS = 32
_MAX_JSON = 1_000_000
"""Characters. A value whose text is longer is not also written as JSON."""
_MIME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789!#$&-^_.+")
_PARAMETERS = _MIME | frozenset('=; "')
_PATHS: list[str] = []


def forms(value: object, figures: Figures) -> dict[str, str]:
    """The forms of a value by MIME type. An error of `repr` goes to the caller; a richer form that fails is left out
    with a note on stderr."""
    found: dict[str, str] = {"text/plain": repr(value)}
    kind = type(value)
    if kind in _TEXT_ALONE:
        return found
    if kind is dict or kind is list:
        if len(found["text/plain"]) <= _MAX_JSON and (text := _json_text(value)) is not None:
            found["application/json"] = text
        return found
    if figures.is_one(value):
        found.update(figures.forms(value))
    for method, mime in _METHODS:
        given = _ask(value, method)
        if given is not None and (text := _as_text(mime, given, method)) is not None:
            found[mime] = text
    found.update(bundle(_ask(value, "_repr_mimebundle_")))
    return found


def bundle(given: Any) -> dict[str, str]:
    """Forms that the user's code put together by hand; it may also return `(forms, metadata)`."""
    if isinstance(given, tuple) and given:
        given = given[0]
    if not isinstance(given, dict):
        return {}
    found = {}
    for mime, value in list(given.items())[:_MAX_FORMS]:
        if _is_mime(mime) and value is not None and (text := _as_text(mime, value, "a bundle")) is not None:
            found[mime] = text
    return found


def remember_paths(paths: list[str] | None = None) -> None:
    """Remember where modules are found, while no path of the user's is among them."""
    _PATHS[:] = sys.path if paths is None else paths


def standard(name: str) -> Any:
    """A module of the standard library, whatever a cell has put into its folder under that name."""
    if name not in sys.modules:
        found, sys.path = sys.path, _PATHS or [path for path in sys.path if path]
        try:
            __import__(name)
        finally:
            sys.path = found
    return sys.modules[name]


class Figures:
    """Open figures of matplotlib, if it was loaded: they are shown at the end of a cell, or at `plt.show()`."""

    def __init__(self, show: Callable[[], None]) -> None:
        self.kinds: Sequence[str] = ("png",)
        self.describe: Callable[[Any], dict[str, str]] = lambda _: {}
        """Further forms of a figure: its data."""
        self._shown: list[Any] = []
        self._show = show

    def is_one(self, value: object) -> bool:
        module = sys.modules.get("matplotlib.figure")
        kind = getattr(module, "Figure", None)
        return isinstance(kind, type) and isinstance(value, kind)

    def forms(self, figure: Any) -> dict[str, str]:
        found = {"text/plain": repr(figure)}
        for kind in self.kinds:
            drawn = io.BytesIO()
            figure.savefig(drawn, format=kind, bbox_inches="tight")
            mime = "image/svg+xml" if kind == "svg" else f"image/{kind}"
            text = _as_text(mime, drawn.getvalue(), "savefig")
            if text is not None:
                found[mime] = text
        self._shown.append(figure)
        try:
            return {**found, **self.describe(figure)}
        except Exception:  # what it is made of may be anything; its picture is there
            return found

    def take(self) -> list[Any]:
        """Take all open figures that were not shown yet, and close them."""
        pyplot = sys.modules.get("matplotlib.pyplot")
        shown, self._shown = self._shown, []
        if pyplot is None or not hasattr(pyplot, "get_fignums"):
            return []
        found = [pyplot.figure(number) for number in pyplot.get_fignums()]
        if found:
            pyplot.close("all")
        return [figure for figure in found if not any(figure is other for other in shown)]

    def adopt(self, pyplot: Any) -> None:
        """There is no screen: a figure to be shown becomes a result."""

        def show(*_: object, **__: object) -> None:
            """Show all open figures as results, and close them."""
            self._show()

        pyplot.show = show


class Notebook:
    """What a session's interpreter and a program that runs once offer alike: `display`, figures, magic commands and the
    stand-in for IPython. What is shown goes where `_claim` of either puts it."""

    def __init__(self, names: dict[str, Any]) -> None:
        """`names` are those of the main module."""
        self._names = names
        self._figures = Figures(self.show_figures)
        self._figures.describe = _described_chart
        self._shell: Any = None
        """Carries out magic commands, once there was one."""
        self._stand_in: Any = None

    def display(self, *values: object, raw: bool = False, **how: Any) -> Any:
        """Show values as results of the running code. `raw`: they are dicts from MIME type to content."""
        for value in values:
            found = bundle(value) if raw else forms(value, self._figures)
            if how.get("include") or how.get("exclude"):
                found = later.load("notebook").chosen(found, how.get("include"), how.get("exclude"))
            self._claim(found, main=False)
        self._was_shown()
        if how.get("display_id") is not None:
            return later.load("notebook").handle(how["display_id"], self.display)
        return None

    def show_figures(self) -> None:
        for figure in self._figures.take():
            self._claim(self._figures.forms(figure), main=False)
            self._was_shown()

    def shell(self) -> Any:
        if self._shell is None:
            self._shell = later.load("notebook").Shell(self._names, self.display, self._figures)
        return self._shell

    def ipython(self) -> Any:
        if self._stand_in is None:
            self._stand_in = later.load("notebook").StandIn(self.shell(), self.display)
        return self._stand_in

    def _claim(self, forms: dict[str, str], *, main: bool) -> None:
        """Say that this was shown; `main`: as the value of the last expression."""
        raise NotImplementedError

    def _was_shown(self) -> None:
        """A moment between pieces of the user's code."""


def _described_chart(figure: Any) -> dict[str, str]:
    found: dict[str, str] = later.load("charts").forms(figure)
    return found


def flush() -> None:
    """Flush what the user's code has put in the place of the streams; this is a part of its cell."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name, None)
        try:
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
        except Exception:  # noqa: S112 - there is no place left to say so
            continue


# ── Helpers ───────────────────────────────────────────────────────────────────────────────────────


def _ask(value: object, method: str) -> Any:
    # Asked of the type: an instance that answers to every name would answer to this one, too.
    if getattr(type(value), method, None) is None:
        return None
    try:
        return getattr(value, method)()
    except NotImplementedError:
        return None
    except Exception as exc:  # a bug in the value; its text is still there
        _complain(method, exc)
        return None


def _as_text(mime: str, value: Any, method: str) -> str | None:
    try:
        if _is_binary(mime):
            return _base64(value)
        if isinstance(value, str):
            return value
        if isinstance(value, bytes | bytearray):
            return bytes(value).decode("utf-8", "replace")
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict):  # (form, metadata)
            return _as_text(mime, value[0], method)
        text = _json_text(value, exactly=False)
    except Exception as exc:  # code of the program may raise anything
        _complain(method, exc)
        return None
    if text is None:
        _complain(method, TypeError(f"a {type(value).__name__} is not {mime}"))
    return text


def _base64(value: Any) -> str:
    binascii = standard("binascii")
    if isinstance(value, tuple):
        value = value[0]
    if isinstance(value, str):  # it is base64 already, with or without line breaks
        value = binascii.a2b_base64("".join(value.split()), strict_mode=True)
    data = bytes(value)
    return str(binascii.b2a_base64(data, newline=False), "ascii")


def _json_text(value: object, *, exactly: bool = True) -> str | None:
    try:
        json = standard("json")
        text: str = json.dumps(value, allow_nan=False, ensure_ascii=False)
        # Tuples and keys that are no text would come back as something else.
        return text if not exactly or json.loads(text) == value else None
    except Exception:  # then it has no JSON form
        return None


def _is_binary(mime: str) -> bool:
    return mime == "application/pdf" or (mime.startswith(("image/", "audio/", "video/")) and not mime.endswith("+xml"))


def _is_mime(name: object) -> bool:
    """Whether it is a MIME type as `untrusted_reply` accepts it; a form with another name is not shown."""
    if not isinstance(name, str) or not 3 <= len(name) <= 100:
        return False
    kind, _, rest = name.partition("/")
    form, _, parameters = rest.partition(";")
    named = kind[:1].isalnum() and form[:1].isalnum() and _MIME.issuperset(kind + form)
    return named and _PARAMETERS.issuperset(parameters)


def _complain(method: str, exc: BaseException) -> None:
    try:
        sys.stderr.write(f"{method} failed: {type(exc).__name__}: {exc}\n")
    except Exception:  # there is nowhere left to report it
        return
