"""Cells in other languages than Python: the program that runs each, in the box like any command. They keep no state.

What the operator demands of `run_shell` is demanded of them as well (`toolkit.carried_code`).
"""

from __future__ import annotations

import shlex

from ringfence.core.box import BoxReport
from ringfence.core.errors import Unavailable

PYTHON = "python"
LANGUAGES = (PYTHON, "bash", "javascript")
_NOT_FOUND = 127
_BASH = 'if command -v bash >/dev/null; then exec bash -c "$1" bash; fi; exec sh -c "$1" sh'
_NODE = "node"
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


def require_there(language: str, report: BoxReport) -> None:
    """Raises Unavailable if there was no program for the language, so that nothing ran."""
    missing = report.ended == "exited" and report.exit_status == _NOT_FOUND
    if language == PYTHON or not missing or not report.stderr.head.startswith(f"{_NODE}: ".encode()):
        return
    text = "JavaScript needs Node.js in the box, and there is none: install it under /usr of this machine"
    raise Unavailable("no_program", f"{text} (apt-get install nodejs), or use a template or image that has it")
