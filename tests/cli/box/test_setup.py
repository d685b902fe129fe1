"""`ringfence box create --setup` and `--fresh`; and what stands between an agent and such a session."""

from __future__ import annotations

from pathlib import Path

from tests.gateways import run, write

_RULES = """\
version: 1
gateway: {state: ./state}
policy:
  default: allow_read
  rules:
    - {id: sessions, action: allow, tool_patterns: [".*_session"]}
    - id: no-requests
      action: deny
      priority: 50
      tool_patterns: [open_session]
      when: "has(args.setup) && args.setup.contains('requests')"
"""


def test_a_box_begins_with_a_file_of_its_makers(box: str, tmp_path: Path) -> None:
    (tmp_path / "setup.py").write_text("rates = {'eur': 2}\n")
    made = run("box", "create", "--setup", str(tmp_path / "setup.py"))
    assert made.returncode == 0, made.stderr
    shown = run("box", "exec", made.stdout.strip(), "-c", "rates['eur'] * 21")
    assert shown.stdout == "42\n", shown.stderr
    assert run("box", "rm", made.stdout.strip()).returncode == 0


def test_one_that_fails_is_told_with_its_traceback(box: str, tmp_path: Path) -> None:
    (tmp_path / "setup.py").write_text("import math\n\nmath.floor(None)\n")
    made = run("box", "create", "--setup", str(tmp_path / "setup.py"))
    assert (made.returncode, made.stdout) == (1, "")
    assert 'File "<setup>", line 3' in made.stderr and "TypeError" in made.stderr
    missing = run("box", "create", "--setup", str(tmp_path / "none.py"))
    assert missing.returncode == 2 and "none.py" in missing.stderr


def test_a_layout_of_its_own(box: str) -> None:
    made = run("box", "create", "--fresh", "--json")
    assert made.returncode == 0 and '"memory_layout": "fresh"' in made.stdout


def test_policy_sees_the_code(box: str, tmp_path: Path) -> None:
    config = write(tmp_path, _RULES)

    def opened(arguments: str) -> tuple[int, str]:
        done = run("call", "open_session", "--args", arguments, "--config", config)
        return done.returncode, done.stdout + done.stderr

    assert opened('{"setup": "import requests"}')[0] == 126
    assert opened('{"setup": "x = 1", "lifetime_seconds": 5}')[0] == 0
    code, said = opened('{"setup": "1/0"}')
    assert code == 1 and "ZeroDivisionError" in said
