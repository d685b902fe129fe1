"""A value that a cell showed, in the forms that it came in.

All of it was made by code in the box and is a claim of that code. A notebook shows it without obeying it: HTML is put
into a frame in which no script runs, an SVG is an image, and scripts are never shown at all.
"""

from __future__ import annotations

import base64
import html as escaping
import json as parsing
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from ringfence.model import Json
from ringfence.plain import plain

_TYPES = {
    "text": "text/plain",
    "html": "text/html",
    "markdown": "text/markdown",
    "svg": "image/svg+xml",
    "png": "image/png",
    "jpeg": "image/jpeg",
    "pdf": "application/pdf",
    "latex": "text/latex",
    "json": "application/json",
    "javascript": "application/javascript",
}
_FRAME = '<iframe sandbox="" style="width:100%;height:24em;border:0" srcdoc="{}"></iframe>'


@plain
class Result:
    """One value, by MIME type in `data`. Images are in base64, as they come."""

    data: Mapping[str, str]
    is_main_result: bool = False
    """The value of the cell's last expression."""
    cut: Mapping[str, int] = field(default_factory=dict)
    """Forms that were too long, and how long they would have been."""

    @classmethod
    def of(cls, told: Json) -> Result:
        return cls(dict(told.get("data") or {}), bool(told.get("main")), dict(told.get("cut") or {}))

    @property
    def text(self) -> str | None:
        return self.data.get(_TYPES["text"])

    @property
    def html(self) -> str | None:
        return self.data.get(_TYPES["html"])

    @property
    def markdown(self) -> str | None:
        return self.data.get(_TYPES["markdown"])

    @property
    def svg(self) -> str | None:
        return self.data.get(_TYPES["svg"])

    @property
    def png(self) -> str | None:
        return self.data.get(_TYPES["png"])

    @property
    def jpeg(self) -> str | None:
        return self.data.get(_TYPES["jpeg"])

    @property
    def pdf(self) -> str | None:
        return self.data.get(_TYPES["pdf"])

    @property
    def latex(self) -> str | None:
        return self.data.get(_TYPES["latex"])

    @property
    def javascript(self) -> str | None:
        return self.data.get(_TYPES["javascript"])

    @property
    def json(self) -> Any:
        """The value that its JSON says; None where there is none, or none that can be read."""
        try:
            return parsing.loads(self.data[_TYPES["json"]])
        except (KeyError, ValueError, RecursionError):
            return None

    def formats(self) -> list[str]:
        """The short names of the forms that are there; of others, their MIME type."""
        short = {kind: name for name, kind in _TYPES.items()}
        return [short.get(kind, kind) for kind in self.data]

    def __str__(self) -> str:
        return self.text if self.text is not None else f"Result({', '.join(self.formats())})"

    # ── For notebooks ──

    def _repr_html_(self) -> str | None:
        if self.html is not None:
            return _FRAME.format(escaping.escape(self.html, quote=True))
        if self.svg is not None:
            return f'<img src="data:image/svg+xml;base64,{base64.b64encode(self.svg.encode()).decode()}">'
        return None

    def _repr_png_(self) -> str | None:
        return self.png

    def _repr_jpeg_(self) -> str | None:
        return self.jpeg

    def _repr_latex_(self) -> str | None:
        return self.latex

    def _repr_json_(self) -> Any:
        return self.json
