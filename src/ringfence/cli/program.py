"""The options of `ringfence run` and `box` that name programs, files and variables, checked before anything runs."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from pathlib import Path

from ringfence.cli import named_paths, running
from ringfence.config.settings import Config
from ringfence.core.box import MAX_SOURCE_BYTES, Input
from ringfence.core.record import dataclass

_INSIDE = "/workspace/input"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_RUN_BY = {".js": "node", ".mjs": "node", ".cjs": "node", ".sh": "sh"}


@dataclass(frozen=True, slots=True)
class RunTarget:
    """Python source, or the words of a command; and the file that the command needs, if it is a script."""

    code: str | None = None
    command: str | None = None
    argv: tuple[str, ...] = ()
    name: str | None = None
    script: Input | None = None
    reads_stdin: bool = False
    """The source itself came from stdin."""


def chosen(words: list[str], code: str | None, shell: str | None, *, in_image: bool = False) -> RunTarget:
    """The one program that the command line names. `in_image`: what it needs is in its image, or not."""
    if code is not None and shell is not None:
        running.fail("-c and --shell: give one of them", 2)
    for word in (*words, code or "", shell or ""):
        _proper(word)
    if code is not None:
        return RunTarget(code=source_text(code.encode(), "-c"), argv=tuple(words))
    if shell is not None:
        return RunTarget(argv=("/bin/sh", "-c", shell, "sh", *words)) if words else RunTarget(command=shell)
    if not words:
        running.fail("nothing to run: give a FILE, -c CODE or --shell CMD (ringfence run --help)", 2)
    return _file(words[0], words[1:], in_image)


def _proper(word: str) -> None:
    try:
        word.encode()
    except UnicodeEncodeError:
        running.fail("the command line is not UTF-8", 2)


def _file(given: str, words: list[str], in_image: bool) -> RunTarget:
    data = _read(given)
    text = source_text(data, given)
    if given == "-":
        return RunTarget(code=text, argv=tuple(words), reads_stdin=True)
    by = _interpreter(given, text)
    name = Path(given).name
    if by is None:
        # Its own path is as if it had been copied into the workspace.
        folder = "/workspace/tmp" if name in ("input", "output", "tmp") else "/workspace"
        return RunTarget(code=text, argv=tuple(words), name=f"{folder}/{name}")
    if not in_image and not by[0].startswith("/") and shutil.which(by[0], path=_PATH) is None:
        running.fail(f"{given}: {by[0]} is not installed where boxes find it ({_PATH})", 2)
    return RunTarget(argv=(*by, f"{_INSIDE}/{name}", *words), script=Input(name, data))


def source(path: Path) -> str:
    """The source in a file that an option names."""
    return source_text(_read(str(path)), str(path))


def _read(given: str) -> bytes:
    try:
        with open(0 if given == "-" else given, "rb", closefd=given != "-") as file:
            data = file.read(MAX_SOURCE_BYTES + 1)
    except (OSError, ValueError) as exc:
        running.fail(f"{given}: {exc.strerror if isinstance(exc, OSError) else exc}", 2)
    if len(data) > MAX_SOURCE_BYTES:
        running.fail(f"{given}: longer than {MAX_SOURCE_BYTES // 1024 // 1024} MiB, which is the most for a program", 2)
    return data


def source_text(data: bytes, what: str) -> str:
    """Source code, or the end of this command with what is wrong."""
    if len(data) > MAX_SOURCE_BYTES:
        running.fail(f"{what}: longer than {MAX_SOURCE_BYTES // 1024 // 1024} MiB, which is the most for a program", 2)
    if b"\0" in data:
        running.fail(f"{what}: a NUL byte at offset {data.index(0)}: this is not source code", 2)
    try:
        return data.decode()
    except UnicodeDecodeError as exc:
        running.fail(f"{what}: not UTF-8: byte 0x{data[exc.start]:02x} at offset {exc.start}", 2)


def _interpreter(given: str, text: str) -> tuple[str, ...] | None:
    """The command that runs this file; None where that is Python."""
    if text.startswith("#!"):
        # As the kernel reads it: a program, and the rest of the line as one argument.
        words = text.partition("\n")[0].removeprefix("#!").strip().split(maxsplit=1)
        through = words[-1].split() if words and Path(words[0]).name == "env" and len(words) > 1 else words
        names = [Path(word).name for word in through if not word.startswith("-")]
        if names:
            return None if names[0].startswith(("python", "pypy")) else tuple(words)
    by = _RUN_BY.get(Path(given).suffix.lower())
    return None if by is None else (by,)


def places(given: list[str]) -> tuple[str, ...]:
    """The hosts and addresses that `--allow` names."""
    if not given:
        return ()
    from ringfence.egress import rules  # noqa: PLC0415 - most name none

    for text in given:
        try:
            rules.pattern(text)
        except ValueError as exc:
            running.fail(f"--allow {text}: {exc}", 2)
    return tuple(given)


# ── Files in and out ──────────────────────────────────────────────────────────────────────────────


def inputs(given: list[Path], script: Input | None) -> tuple[Input, ...]:
    """The files that `--input` names, each by its own name; for a folder, everything below it."""
    found = [script] if script is not None else []
    for path in given:
        place = named_paths.resolve("--input", path)
        found += _tree(path, place) if place.is_dir() else [Input(path.name, _readable(path, place))]
    names: set[str] = set()
    for each in found:
        try:
            each.name.encode()
        except UnicodeEncodeError:
            running.fail(f"--input: the name {each.name} is not UTF-8", 2)
        if each.name in names:
            running.fail(f"--input: two of them are called {each.name}", 2)
        names.add(each.name)
    return tuple(found)


def _readable(path: Path, real: Path) -> Path:
    """The path of the file without links. Nothing that is opened later by this path is looked up again."""
    try:
        regular = stat.S_ISREG(real.stat(follow_symlinks=False).st_mode)
    except (OSError, ValueError) as exc:
        running.fail(f"--input {path}: {exc.strerror if isinstance(exc, OSError) else exc}", 2)
    if not regular:
        running.fail(f"--input {path}: neither a file nor a folder", 2)
    if not os.access(real, os.R_OK):
        running.fail(f"--input {path}: cannot be read", 2)
    return real


def _tree(folder: Path, real: Path) -> list[Input]:
    out: list[Input] = []
    left_out = 0
    for root, folders, files in os.walk(real, onerror=_unreadable):
        left_out += sum((Path(root) / name).is_symlink() for name in folders)
        for name in sorted(files):
            path = Path(root) / name
            # A link could lead to a file that is not meant for the box; that file can be named instead.
            if path.is_symlink() or not path.is_file():
                left_out += 1
                continue
            out.append(Input(str(Path(real.name) / path.relative_to(real)), _readable(path, path)))
    if left_out:
        print(f"ringfence: --input {folder}: {left_out} links and special files left out", file=sys.stderr)
    return out


def _unreadable(exc: OSError) -> None:
    running.fail(f"--input {exc.filename}: {exc.strerror}", 2)


def output_folder(path: Path) -> Path:
    """The folder that `--output` names, made if necessary."""
    real = named_paths.resolve("--output", path)
    try:
        real.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as exc:
        running.fail(f"--output {path}: {exc.strerror if isinstance(exc, OSError) else exc}", 2)
    if not os.access(real, os.W_OK | os.X_OK):
        running.fail(f"--output {path}: cannot be written to", 2)
    return real


def check_output(option: str, place: Path, settings: Config) -> None:
    """What a program leaves must not replace what rules over it."""
    from ringfence.config.folders import governs  # noqa: PLC0415 - most copy nothing

    if (what := governs(place, settings)) is not None:
        why = f"what comes out of a box could replace {what}"
        running.fail(f"{option} {place}: {why}; name another folder that holds nothing of the kind", 2)


def trees(given: list[Path]) -> tuple[Path, ...]:
    """The folders that `--tree` names."""
    if not given:
        return ()
    from ringfence.config.folders import touches_credentials  # noqa: PLC0415 - most name none

    found: list[Path] = []
    for path in given:
        place = named_paths.resolve("--tree", path)
        if not place.is_dir():
            running.fail(f"--tree {path}: not a folder", 2)
        if not os.access(place, os.R_OK | os.X_OK):
            running.fail(f"--tree {path}: cannot be read", 2)
        if why := touches_credentials(str(place)):
            running.fail(f"--tree {path}: holds {why}; name a folder without it", 2)
        found.append(place)
    return tuple(found)


def image(given: str) -> str:
    """What `--image` names; a path is told from a name of a registry by how it begins."""
    if not given.startswith(("/", "./", "../")):
        return given
    return str(named_paths.resolve("--image", Path(given)))


def environment(given: list[str], option: str = "--env") -> dict[str, str]:
    out: dict[str, str] = {}
    for pair in given:
        _proper(pair)
        name, equals, value = pair.partition("=")
        if not name or not equals:
            running.fail(f"{option} {pair}: write it as NAME={'PORT' if option == '--port' else 'VALUE'}", 2)
        out[name] = value
    return out
