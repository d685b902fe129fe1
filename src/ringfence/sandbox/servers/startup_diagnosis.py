"""What a server that ended in its box may have lacked, read from its last output, and the grant for it.

Only a guess: a box simply does not have what it may not see, so there is no refusal to count. The output of the server
is not trusted: it is searched for paths and hosts, and a grant is only ever proposed to a person.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Literal

from ringfence.core.box import BoxReport
from ringfence.core.record import dataclass

Kind = Literal["path", "network", "memory", "processes", "disk", "call"]
_MAX_HINTS = 5
_READ_CHARACTERS = 16_384
_IN_PATH = r"[^\s'\"`:,;)\]}]"
_PATH = rf"['\"`]?(/{_IN_PATH}+)"
_LONGEST_PATH = 4096
_BACKWARDS = re.compile(f"{_IN_PATH}*+")
_ABSENT = (
    re.compile(r"No such file or directory:? " + _PATH),
    re.compile(r"ENOENT: no such file or directory, \w+ " + _PATH),
    re.compile(r"(?:Cannot find module|ERR_MODULE_NOT_FOUND\S*:?) " + _PATH),
    re.compile(r"(?:can't open file|cannot access|cannot open|does not exist:?|not found:?) " + _PATH),
)
_AFTER_ABSENT = re.compile(r"['\"`]?:? (?:No such file or directory|does not exist|not found|is not a directory)")
_UNWRITABLE = (
    re.compile(r"(?:Read-only file system|Permission denied):? " + _PATH),
    re.compile(r"(?:EROFS|EACCES|EPERM): [\w -]+, \w+ " + _PATH),
)
_AFTER_UNWRITABLE = re.compile(r"['\"`]?:? (?:Read-only file system|Permission denied)")
_HOST = r"([A-Za-z0-9][A-Za-z0-9.-]*\.[A-Za-z]{2,})"
_UNREACHED = (
    re.compile(r"(?:ENOTFOUND|EAI_AGAIN) " + _HOST),
    re.compile(r"(?:host=|resolve host:? |lookup |https?://)['\"]?" + _HOST),
)
_NO_NETWORK = re.compile(
    r"Temporary failure in name resolution|Name or service not known|Network is unreachable|ENETUNREACH|ENOTFOUND|"
    r"EAI_AGAIN|Could not resolve host|ECONNREFUSED|Connection refused"
)


_FILES = "it wanted files that its box does not have, and the operator's log says which of them it could be given"


@dataclass(frozen=True, slots=True)
class MissingGrant:
    """Something that a server seems to have lacked."""

    kind: Kind
    what: str
    line: str
    """The line of its entry in the configuration that would grant it."""
    option: str = ""
    """The option of `ringfence wrap` that would grant it."""


def diagnose(report: BoxReport, stderr: str) -> tuple[MissingGrant, ...]:
    """`stderr`: the last part of what it wrote there."""
    found: dict[str, MissingGrant] = {}
    for want in (*_of_limits(report), *_of_words(stderr[-_READ_CHARACTERS:])):
        found.setdefault(want.what, want)
    if not found and report.ended in ("signalled", "policy"):
        found = {want.what: want for want in _of_calls(report.denials)}
    return tuple(found.values())[:_MAX_HINTS]


def _of_limits(report: BoxReport) -> Iterator[MissingGrant]:
    if report.ended == "oom" or report.limit == "memory":
        yield MissingGrant("memory", "more memory", "limits: {memory_mb: 1024}", "--memory 1024")
    if report.ended == "pids" or report.limit == "pids":
        yield MissingGrant("processes", "more processes or threads", "limits: {processes: 512}", "--pids 512")
    if report.limit in ("disk", "inodes", "file_size"):
        yield MissingGrant("disk", "more room in its workspace", "limits: {disk_mb: 2048}", "--disk 2048")


def _of_words(stderr: str) -> Iterator[MissingGrant]:
    for named in _paths(stderr, _UNWRITABLE, _AFTER_UNWRITABLE):
        path = _folder_of(named)
        if path is not None:
            yield _mount(f"to write to {path}", path, "rw")
    for named in _paths(stderr, _ABSENT, _AFTER_ABSENT):
        path = _on_the_host(named)
        if path is not None:
            yield _mount(f"to see {path}", path, "ro")
    if _NO_NETWORK.search(stderr):
        hosts = dict.fromkeys(match[1] for pattern in _UNREACHED for match in pattern.finditer(stderr))
        named = ", ".join(f'"{host}:443"' for host in list(hosts)[:_MAX_HINTS] or ["HOST"])
        text = f"a network that reaches {', '.join(list(hosts)[:_MAX_HINTS])}" if hosts else "a network"
        line = f"network: NAME, and networks: {{NAME: {{allow: [{named}]}}}}"
        yield MissingGrant(
            "network", text, line, " ".join(f"--allow {host}:443" for host in list(hosts)[:_MAX_HINTS] or ["HOST"])
        )


def _paths(stderr: str, before: Iterable[re.Pattern[str]], after: re.Pattern[str]) -> Iterator[str]:
    """The paths that stand behind some words, and before others."""
    for pattern in before:
        yield from (match[1] for match in pattern.finditer(stderr))
    for match in after.finditer(stderr):
        # Read backwards from the words: a search for what may be a path begins anew at each slash of a row of them.
        ahead = stderr[max(0, match.start() - _LONGEST_PATH) : match.start()]
        found = _BACKWARDS.match(ahead[::-1])
        _, slash, rest = (found[0][::-1] if found else "").partition("/")
        if rest:
            yield slash + rest


def _mount(what: str, path: str, mode: str) -> MissingGrant:
    line = f"mounts: [{{host: {path}, at: {path}, mode: {mode}}}]"
    return MissingGrant("path", what, line, f"--mount {path}:{path}:{mode}")


def _of_calls(denials: Mapping[str, int]) -> Iterator[MissingGrant]:
    for name in denials:
        yield MissingGrant("call", f"the system call {name}", "placement: unsafe_host  # no box allows it")


def _on_the_host(path: str) -> str | None:
    """The path, where it exists outside of the box; what exists nowhere cannot be granted."""
    path = os.path.normpath(path)
    return path if path != "/" and os.path.lexists(path) else None


def _folder_of(path: str) -> str | None:
    """The folder of a file that it wanted to write."""
    path = os.path.normpath(path)
    if not os.path.isdir(path):
        path = os.path.dirname(path)
    return _on_the_host(path)


def explain(name: str, found: Iterable[MissingGrant]) -> str:
    """The diagnosis in words, for the operator."""
    return "; ".join(f"it wanted {want.what} (servers.{name}: {want.line})" for want in found)


def explain_to_callers(name: str, report: BoxReport, stderr: str) -> str:
    """The same for those who called it, without a word on files: which of them are on the host is for the operator to
    know, and what is said here must not depend on it."""
    found = [want for want in diagnose(report, stderr) if want.kind != "path"]
    said = stderr[-_READ_CHARACTERS:]
    wanted = chain(_paths(said, _ABSENT, _AFTER_ABSENT), _paths(said, _UNWRITABLE, _AFTER_UNWRITABLE))
    files = next(wanted, None) is not None
    return "; ".join(filter(None, (explain(name, found), _FILES if files else "")))
