"""Cells in other languages than Python: the program that runs each, in the box like any command. They keep no state.

What the operator demands of `run_shell` is demanded of them as well (`toolkit.carried_code`).
"""

from __future__ import annotations

import shlex

from ringfence.core.box import BoxReport
from ringfence.core.model import Json

PYTHON = "python"
LANGUAGES = (PYTHON, "bash", "javascript")
_NOT_FOUND = 127
_BASH = 'if command -v bash >/dev/null; then exec bash -c "$1" bash; fi; exec sh -c "$1" sh'
_NODE = "node"
_NO_NODE = (
    "If there is no Node.js in the box, which JavaScript needs: install it under /usr of this machine "
    "(apt-get install nodejs), or use a template or image that has it."
)
_JAVASCRIPT = """\
const vm = require("node:vm"), util = require("node:util"), code = process.argv[1]
Object.assign(globalThis, { require, module, exports })
let script
try {
  script = new vm.Script(code, { filename: "cell.js" })
} catch (error) {
  if (!/\\b(await|import|export)\\b/.test(code)) { console.error(error.stack); process.exit(1) }
}
if (script) {
  const value = script.runInThisContext()
  if (value !== undefined) console.log(typeof value === "string" ? value : util.inspect(value))
} else {
  const words = ["--input-type=module", "-e", code]
  const done = require("node:child_process").spawnSync(process.execPath, words, { stdio: "inherit" })
  process.exit(done.status ?? 1)
}
"""
"""Runs a script, and writes the value of its last expression. What is no script, since it imports or awaits at its top,
is a module, which has no value."""


def words(language: str, code: str) -> tuple[str, ...]:
    """The command that runs code in a language."""
    if language == "bash":
        return ("/bin/sh", "-c", _BASH, "sh", code)
    return (_NODE, "-e", _JAVASCRIPT, "--", code)


def as_shell(language: str, code: str) -> str:
    """The line of a shell that would run the same, for rules about commands."""
    return code if language == "bash" else f"{_NODE} -e {shlex.quote(code)}"


def add_hint(result: Json, language: str, report: BoxReport) -> None:
    """Say what to do if there seems to be no program for the language.

    A program can end in the same way, so this is advice beside its result, and takes nothing from what was seen of it.
    """
    missing = report.ended == "exited" and report.exit_status == _NOT_FOUND
    if language != PYTHON and missing and report.stderr.head.startswith(f"{_NODE}: ".encode()):
        result["content"].append({"type": "text", "text": _NO_NODE})
