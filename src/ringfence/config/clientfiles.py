"""The files in which MCP clients keep their servers, read as hostile input: they come with repositories.

Claude Code (`.mcp.json`), Claude Desktop, Cursor and VS Code. What comes out is plain data. A value that is a secret,
or may be one, is never in it: only its name is, and where the client takes it from.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ringfence.config import docker_run, env_command, validators
from ringfence.config.docker_run import ContainerRun
from ringfence.config.env_command import SetVariables
from ringfence.config.yaml import read_file
from ringfence.core import canonical
from ringfence.core.errors import ConfigError, Problem
from ringfence.core.quoting import quoted
from ringfence.core.record import dataclass
from ringfence.secrets.redaction import SecretMatcher

MAX_SERVERS = 100
MAX_WORDS = 256
MAX_SETTINGS = 256
LONGEST_TEXT = 32_768
LONGEST_NAME = 200

Client = Literal["claude-code", "claude-desktop", "cursor", "vscode"]

_REFERENCE = re.compile(r"\$\{(?:(env|input):)?([A-Za-z_][A-Za-z0-9_.-]*)(?::-[^}]*)?\}")
_MAYBE_SECRET = re.compile(
    r"token|secret|passw|passphrase|pwd|credential|api.?key|access.?key|private.?key|auth|cookie|session"
    r"|dsn|connection|database.?url|webhook|signature|(^|[_-])(key|pass|pat|jwt)($|[_-])",
    re.IGNORECASE,
)
"""Names of settings whose values are not copied. Wider than what `checks` warns of: a copied secret is worse than a
setting that has to be written again."""
_ASSIGNED = re.compile(r"""(?:^|[\s'"{,;&?/])([A-Za-z_][A-Za-z0-9_.-]*)['"]?\s*[=:]\s*['"]?(?=([^\s'"$][^\s'"]*))""")
_HEADER_OPTION = "header"
_RUN = re.compile(r"[A-Za-z0-9+]{16,}")
_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_DIGEST = re.compile(r"sha(256|512)[:-][0-9a-f]{64,}")
_PREDEFINED = {"workspaceFolder", "workspaceRoot", "userHome", "pathSeparator", "/"}
_KNOWN = {"type", "command", "args", "env", "cwd", "url", "headers", "disabled", "envFile"}
_HARMLESS = {"name", "description", "gallery", "version", "timeout", "alwaysAllow", "autoApprove"}
_OPAQUE_BITS = 3.0
"""Of entropy in each character: words of a language and paths have less."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A variable of a server's environment, or a header."""

    name: str
    kind: Literal["plain", "reference", "hidden"]
    """`hidden`: the file has it in plain text, and it is or may be a secret."""
    text: str = ""
    """The value where it is plain; where it is a reference, the words of the file (`Bearer ${TOKEN}`)."""
    variables: tuple[str, ...] = ()
    """What a reference names."""
    value: str = field(default="", repr=False, compare=False)
    """What the file has where it is hidden: to be compared with, never to be copied or shown."""


@dataclass(frozen=True, slots=True)
class ClientServer:
    """One server as a client would start or reach it."""

    name: str
    command: tuple[str, ...] = ()
    url: str | None = None
    cwd: str | None = None
    env: tuple[Setting, ...] = ()
    headers: tuple[Setting, ...] = ()
    unusable: tuple[str, ...] = ()
    """Why it cannot be taken over as it stands."""
    notes: tuple[str, ...] = ()
    container: ContainerRun | None = None
    """Where the command runs an image: what it comes to. Its variables are in `env`."""


@dataclass(frozen=True, slots=True)
class ClientFile:
    path: Path
    client: Client
    servers: tuple[ClientServer, ...]
    inputs: tuple[str, ...] = ()
    """What VS Code asks its user for, by id."""


def read(path: Path) -> ClientFile:
    """The servers of a client's file. Raises ConfigError with every problem."""
    text, problems = read_file(path, str(path))
    if text is None:
        raise ConfigError(problems)
    return parse(text, path)


def parse(text: str, path: Path) -> ClientFile:
    """The same from text that was read already."""
    value, problems = parse_jsonc(text, str(path))
    if problems:
        raise ConfigError(problems)
    reader = _Reader(path)
    found = reader.file(value)
    if reader.problems:
        raise ConfigError(reader.problems)
    return found


def looks_secret(name: str, value: str) -> bool:
    """Whether a value must not be copied. In doubt it is one."""
    if not value:
        return False
    if _MAYBE_SECRET.search(name) and value.lower() not in ("true", "false", "0", "1", "none", "null"):
        return True
    if _shapes().redact(value)[1]:
        return True
    if value.startswith(("/", "~/", "./", "../")):
        return False  # a path; folders of caches have such names
    return _UUID.search(value) is not None or any(map(_opaque, _RUN.findall(_DIGEST.sub("", value))))


@cache
def _shapes() -> SecretMatcher:
    """Made once: a file may assign ten thousand values."""
    return SecretMatcher()


def _assigns_secret(word: str) -> bool:
    """`API_TOKEN=…`, `Authorization: …`, `{"password": …}`, whatever stands before it: `-e`, `env`, an engine that is
    not known here, words of a shell."""
    return any(looks_secret(found[1], found[2]) for found in _ASSIGNED.finditer(word))


def _opaque(text: str) -> bool:
    """Whether no person would have made this up: many different characters, with digits among letters."""
    digits = sum(c.isdigit() for c in text)
    if not digits or digits == len(text):
        return False
    counts = Counter(text).values()
    return -sum(n / len(text) * math.log2(n / len(text)) for n in counts) >= _OPAQUE_BITS


class _Reader:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = str(path)
        self.problems: list[Problem] = []

    def _problem(self, where: str, text: str) -> None:
        # Names come from the file: whatever shows them escapes, and they are short here.
        self.problems.append(Problem(self._file, 1, 1, f"{where}: {text}" if where else text))

    # ── The file ──

    def file(self, value: Any) -> ClientFile:
        top = value if isinstance(value, dict) else {}
        if isinstance(top.get("mcp"), dict) and "servers" in top["mcp"]:  # settings.json of VS Code
            top = top["mcp"]
        present = [key for key in ("mcpServers", "servers") if key in top]
        if len(present) != 1:
            found = "has both mcpServers and servers" if present else "has neither mcpServers nor servers"
            self._problem("", f"{found}: it is no file of an MCP client")
            return ClientFile(self._path, "claude-code", ())
        section = top[present[0]]
        if not isinstance(section, dict):
            self._problem(present[0], "must be a mapping of servers by name")
            section = {}
        if len(section) > MAX_SERVERS:
            self._problem(present[0], f"has {len(section)} servers; at most {MAX_SERVERS} are read")
            section = {}
        client = self._client(present[0])
        servers = tuple(self._server(str(name), entry) for name, entry in section.items())
        return ClientFile(self._path, client, servers, self._inputs(top.get("inputs", [])))

    def _client(self, key: str) -> Client:
        if key == "servers":
            return "vscode"
        if self._path.parent.name == ".cursor":
            return "cursor"
        return "claude-desktop" if self._path.name.startswith("claude_desktop") else "claude-code"

    def _inputs(self, value: Any) -> tuple[str, ...]:
        if not isinstance(value, list):
            self._problem("inputs", "must be a list")
            return ()
        ids = (item.get("id") if isinstance(item, dict) else None for item in value[:MAX_SETTINGS])
        return tuple(ident for ident in ids if isinstance(ident, str) and len(ident) <= LONGEST_NAME)

    # ── One server ──

    def _server(self, name: str, entry: Any) -> ClientServer:
        where = f"servers.{name[:LONGEST_NAME]}"
        if not 0 < len(name) <= LONGEST_NAME:
            self._problem(where, f"a name has 1 to {LONGEST_NAME} characters")
        if not isinstance(entry, dict):
            self._problem(where, "must be a mapping")
            return ClientServer(name)
        unusable: list[str] = []
        words = self._words(where, entry)
        before = env_command.before(words)
        words = words[before.length :]
        command = self._command(words, unusable)
        url = self._url(where, entry, unusable)
        if bool(command) == bool(url):
            self._problem(where, "needs a command or a url, and not both")
        kind = self._text(f"{where}.type", entry.get("type", ""))
        if kind == "sse":
            unusable.append(
                "it speaks the old SSE transport, which Ringfence does not; ask for its Streamable HTTP URL"
            )
        if entry.get("disabled") is True:
            unusable.append("it is disabled in the file")
        if command and _is_ringfence(command):
            unusable.append("it is Ringfence itself")
        cwd = self._text(f"{where}.cwd", entry["cwd"]) if entry.get("cwd") is not None else None
        notes = list(_notes(entry))
        env = self._settings(f"{where}.env", entry.get("env"), validators.variable)
        env = self._set_by_command(before, env, unusable, notes)
        container = docker_run.parse_run(command) if docker_run.is_container(command) else None
        if container is not None:
            unusable += container.refused
            notes += container.notes
            env = self._of_container(words, container, env, notes)
        return ClientServer(
            name=name,
            command=command,
            url=url,
            cwd=None if cwd is None else self._expanded(cwd, "its working folder", unusable),
            env=env,
            headers=self._settings(f"{where}.headers", entry.get("headers"), validators.header),
            unusable=tuple(unusable),
            notes=tuple(notes),
            container=container,
        )

    def _words(self, where: str, entry: Mapping[str, Any]) -> tuple[str, ...]:
        if entry.get("command") is None:
            return ()
        args = entry.get("args", [])
        if not isinstance(args, list) or len(args) > MAX_WORDS:
            self._problem(f"{where}.args", f"must be a list of at most {MAX_WORDS} words")
            return ()
        found = [self._text(f"{where}.command", entry["command"])]
        found += [self._text(f"{where}.args[{index}]", word) for index, word in enumerate(args)]
        if not found[0]:
            self._problem(f"{where}.command", "is empty")
        return tuple(found)

    def _set_by_command(
        self, before: SetVariables, given: tuple[Setting, ...], unusable: list[str], notes: list[str]
    ) -> tuple[Setting, ...]:
        """The variables that the server gets: those of `env`, and those that its command sets before it runs it."""
        gone = {setting.name for setting in given if before.cleared or setting.name in before.unset}
        found = {setting.name: setting for setting in given if setting.name not in gone}
        for name, value in before.variables:
            try:
                found[validators.variable(name)] = _setting(name, value)
            except ValueError:
                unusable.append("its command sets a variable whose name is none; give it as env")
        if before.variables:
            named = ", ".join(dict.fromkeys(name[:40] for name, _ in before.variables if name in found))
            notes.append(f"its command sets {named}: taken over as env")
        if gone - found.keys():
            notes.append(f"{', '.join(sorted(gone - found.keys()))} of its env is left out: its command removes it")
        return tuple(found.values())

    def _command(self, words: tuple[str, ...], unusable: list[str]) -> tuple[str, ...]:
        found = list(words)
        for index in env_command.left(words):
            unusable.append(f"argument {index} sets a variable, which may be a secret; give it as env")
            found[index] = "[not shown]"
        run = docker_run.parse_run(words) if docker_run.is_container(words) else ContainerRun()
        for index, word in enumerate(found):
            if index in run.hidden:  # a variable like those of `env`
                found[index] = run.shown[index]
                continue
            before = found[index - 1] if index and index - 1 not in run.hidden else ""
            named = before.lstrip("-") if before.startswith("-") else ""
            option, _, given = word.lstrip("-").partition("=") if word.startswith("-") else (named, "", word)
            shown = option != _HEADER_OPTION and not looks_secret(option, given) and not _assigns_secret(given)
            if given and not shown and not _REFERENCE.search(given):
                unusable.append(f"argument {index} may be a secret, and arguments are written down; give it as env")
                found[index] = "[not shown]"
        return tuple(self._expanded(word, f"argument {index}", unusable) for index, word in enumerate(found))

    def _of_container(
        self, words: tuple[str, ...], run: ContainerRun, given: tuple[Setting, ...], notes: list[str]
    ) -> tuple[Setting, ...]:
        """The variables that it gives to its container; the engine has those that `env` names."""
        known = {setting.name: setting for setting in given}
        found: dict[str, Setting] = {}
        for path in run.env_files:
            for name, value in docker_run.variables(self._path, path, notes):
                found[name] = _setting(name, value)
        for variable in docker_run.parse_run(words).env:
            name = variable.name
            try:
                validators.variable(name)
            except ValueError:
                notes.append(f"the variable {quoted(name, 40)} is left out: that is no name for one")
                continue
            asked = known.get(name) or Setting(name, "reference", f"${{{name}}}", (name,))
            found[name] = asked if variable.value is None else _setting(name, variable.value)
        for name in sorted(known.keys() - found.keys()):
            notes.append(f"{name} of its env is left out: it is for the engine, and not given to the container (-e)")
        return tuple(found.values())

    def _url(self, where: str, entry: Mapping[str, Any], unusable: list[str]) -> str | None:
        if entry.get("url") is None:
            return None
        url = self._text(f"{where}.url", entry["url"])
        try:
            validators.url(url)
        except ValueError as exc:
            unusable.append("its url is none that can be taken over" + ("" if "user" in str(exc) else f": {exc}"))
            return "[not shown]"
        if "?" in url or looks_secret("url", url):
            unusable.append("its url may hold a secret; give that as a header")
            return "[not shown]"
        return self._expanded(url, "its url", unusable)

    def _expanded(self, text: str, what: str, unusable: list[str]) -> str:
        """What editors put in by themselves; whatever else is a reference cannot be known here."""
        folder = self._path.parent
        project = folder.parent if folder.name in (".vscode", ".cursor") else folder
        known = {"workspaceFolder": str(project), "workspaceRoot": str(project), "userHome": "~"}
        for name, value in known.items():
            text = text.replace(f"${{{name}}}", value)
        text = text.replace("${pathSeparator}", os.sep).replace("${/}", os.sep)
        left = _REFERENCE.search(text)
        if left is not None:
            unusable.append(f"{what} takes {left[0]} from its client, which a command here cannot; write the value")
        return text

    def _settings(self, where: str, value: Any, named: Any) -> tuple[Setting, ...]:
        if value is None:
            return ()
        if not isinstance(value, dict) or len(value) > MAX_SETTINGS:
            self._problem(where, f"must be a mapping of at most {MAX_SETTINGS} names")
            return ()
        out: list[Setting] = []
        for name, given in value.items():
            try:
                named(name)
            except ValueError as exc:
                self._problem(where, str(exc))
                continue
            text = str(given) if isinstance(given, int | float) else given
            out.append(_setting(name, self._text(f"{where}.{name[:LONGEST_NAME]}", text)))
        return tuple(out)

    def _text(self, where: str, value: Any) -> str:
        if not isinstance(value, str):
            self._problem(where, "must be text")
            return ""
        if len(value) > LONGEST_TEXT:
            self._problem(where, f"is longer than {LONGEST_TEXT} characters")
            return ""
        if "\0" in value:
            self._problem(where, "holds a NUL")
            return ""
        return value


def _setting(name: str, value: str) -> Setting:
    found = [match for match in _REFERENCE.finditer(value) if match[2] not in _PREDEFINED]
    # A default stands in the file: it is a value like any other.
    if found and not any(":-" in match[0] for match in found):
        rest = _REFERENCE.sub("", value)
        if not looks_secret("", rest):
            return Setting(name, "reference", value, tuple(match[2] for match in found))
        return Setting(name, "hidden", value=value)
    if "${" in value or looks_secret(name, value):
        return Setting(name, "hidden", value=value)
    return Setting(name, "plain", value)


def _is_ringfence(command: tuple[str, ...]) -> bool:
    return os.path.basename(command[0]) == "ringfence" or "ringfence.cli.main" in command


def _notes(entry: Mapping[str, Any]) -> list[str]:
    notes = [f"{key} is not known here and was left out" for key in sorted(entry.keys() - _KNOWN - _HARMLESS)]
    if "envFile" in entry:
        notes.append("envFile is not read: name what it needs under secrets:, or under env:")
    return notes


# ── JSON with comments ────────────────────────────────────────────────────────────────────────────
#
# As editors write it: with comments, and with a comma after the last item; otherwise read strictly. Comments and such
# commas become spaces, so that every line and column stays what it was.


_AT = re.compile(r"line (\d+) column (\d+)")
_PIECE = re.compile(r'"(?:[^"\\\n]|\\.)*"?|//[^\n]*|/\*.*?(?:\*/|\Z)|,', re.DOTALL)
_FILLER = re.compile(r"(?:\s|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_DEEPEST = 32


def parse_jsonc(text: str, file: str) -> tuple[Any, list[Problem]]:
    """One value, or what is wrong with the text: duplicate keys, NaN, lone surrogates and deep nesting are refused."""
    text = text.removeprefix("\ufeff")
    try:
        return canonical.loads(_plain(text), max_depth=_DEEPEST), []
    except canonical.NotCanonical as exc:
        said = str(exc)
        at = _AT.search(said)
        line, column = (int(at[1]), int(at[2])) if at else (1, 1)
        said = _AT.sub("", said).removesuffix(": ").split(":  (char")[0]
        return None, [Problem(file, line, column, said)]


def _plain(text: str) -> str:
    def kept(match: re.Match[str]) -> str:
        piece = match[0]
        if piece.startswith('"'):
            return piece
        if piece == ",":
            after = _FILLER.match(text, match.end())
            assert after is not None  # it may match nothing, and then it is empty
            return " " if text[after.end() : after.end() + 1] in ("}", "]") else ","
        return re.sub(r"[^\n]", " ", piece)

    return _PIECE.sub(kept, text)


__all__ = ["Client", "ClientFile", "ClientServer", "Setting", "looks_secret", "parse", "read"]
