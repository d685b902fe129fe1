"""What to paste into an MCP client so that it starts Ringfence instead of its servers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ringfence.cli.common import own_command
from ringfence.cli.init.planning import Asked
from ringfence.cli.terminal import json_text
from ringfence.config.clientfiles import ClientFile
from ringfence.model import Json

_VALUE = "(the value that stands in {file} now)"


def pasted(file: ClientFile, secrets: Iterable[Asked], written: Path) -> str:
    """The client's own file, with one server in it. Values of secrets are not in it: references are."""
    entry: Json = {"command": own_command()[0], "args": [*own_command()[1:], *_arguments(written)]}
    if file.client in ("claude-code", "vscode"):
        entry = {"type": "stdio", **entry}
    env = {asked.variable: asked.given or _VALUE.format(file=file.path.name) for asked in secrets}
    if env:
        entry["env"] = env
    top = "servers" if file.client == "vscode" else "mcpServers"
    return json_text({top: {"ringfence": entry}})


def _arguments(written: Path) -> list[str]:
    return ["serve", "--stdio", "--config", str(written.absolute())]
