"""The verbs, each with its line in the list of commands; and that list itself, for which nothing has to be loaded."""

from __future__ import annotations

import os
import sys

VERBS = {
    "run": "Run a program in a fresh box.",
    "box": "Make, use, pause, fork and remove boxes that stay.",
    "host": "Check what boxes need of this host, and fix what is missing.",
    "doctor": "Test every promise of a box on this host.",
    "init": "Write a ringfence.yaml, optionally from an MCP client's file.",
    "wrap": "Run any stdio MCP server in a box, as a drop-in command.",
    "serve": "Serve the gateway that a ringfence.yaml describes.",
    "check": "Check a ringfence.yaml and report every problem.",
    "policy": "Test the rules of policy by cases, and on the calls on record.",
    "can": "Tell what would happen to a call and why, without making it.",
    "call": "Call one tool, through a running gateway or in this process.",
    "top": "Show calls, questions, sessions and servers as they change.",
    "undo": "Take back what calls did, the last first.",
    "console": "Print a link that logs you in to the console.",
    "approvals": "List the calls that wait for an approval, and answer them.",
    "token": "Create, list and revoke bearer tokens of agents and people.",
    "audit": "Read, explain, verify and export the audit log.",
    "image": "Build root file systems for boxes out of this host.",
    "state": "Show and prune what Ringfence keeps on this machine.",
    "bench": "Measure what calls and boxes cost on this machine.",
    "completion": "Print a shell completion script.",
}

_OVERVIEW = """\
Usage: ringfence [OPTIONS] COMMAND [ARGS]...

  The layer between an AI agent and everything it can do: an MCP gateway with
  contracts, policy, approvals and an audit log that can be verified, and
  boxes for untrusted code.

  ringfence run -c 'print(6 * 7)'     run something in a box
  ringfence serve --demo              try it without any configuration
  ringfence check                     check ./ringfence.yaml
  ringfence audit explain last        why was the last call allowed or refused?

Options:
  --version      Print the version.
  -v, --verbose  Print more on stderr.
  -h, --help     Show this message and exit.

Commands:
"""
"""As Typer prints it. A test compares."""
_COLUMNS = 80
"""Typer prints it like this if there are so many columns or more."""


def overview() -> str | None:
    """What `ringfence --help` prints; None if the terminal is too narrow for it: then Typer wraps its lines."""
    if _columns() < _COLUMNS:
        return None
    return _OVERVIEW + "".join(f"  {verb:<10}  {summary}\n" for verb, summary in VERBS.items())


def _columns() -> int:
    """As `shutil.get_terminal_size` finds it, which takes longer to load than all else here."""
    try:
        columns = int(os.environ.get("COLUMNS", "0"))
    except ValueError:
        columns = 0
    if columns > 0:
        return columns
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or _COLUMNS
    except (AttributeError, ValueError, OSError):
        return _COLUMNS
