"""What people are used to from notebooks: magic commands, `!cmd`, and a small `IPython` for boxes that have none.

A command runs as a child of the interpreter, in the same box and with the same limits as everything else in it. An
`IPython` that is installed in the box is used instead of ours, which has `display` and the objects that one displays.
"""

from __future__ import annotations

import os
import sys

from ringfence.sandbox.process.guest import display

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, ModuleType
    from typing import Any

__builtins__ = display.BUILTINS  # type: ignore[assignment]

_NO_INSTALL = (
    "nothing can be installed from inside this box, which has no network. Name packages when it is made:"
    " Sandbox.create(packages=[…]), run_code(…, packages=[…]), or the argument `packages` of the tool;"
    " allow_packages=[…] lets pip install in it"
)
_SHELL_MAGICS = ("cat", "cp", "head", "ls", "mkdir", "mv", "rm", "rmdir", "tail", "touch")
_SCRIPTS = {"bash": "bash", "sh": "sh", "script": "", "perl": "perl", "ruby": "ruby", "node": "node"}
_TEXTS = {
    **{"html": "text/html", "HTML": "text/html", "markdown": "text/markdown", "latex": "text/latex"},
    **{"svg": "image/svg+xml", "SVG": "image/svg+xml", "javascript": "application/javascript"},
    "js": "application/javascript",
}
_QUIET = ("autosave", "autoreload", "colors", "load_ext", "precision", "reload_ext", "xmode")
"""They change how a notebook behaves, and have no meaning here."""


class UsageError(Exception):
    """A magic command that is not there, or cannot do what it is asked for."""

    __module__ = "IPython.core.error"


class OutputLines(list[str]):
    """The lines that a command wrote."""

    @property
    def n(self) -> str:
        return "\n".join(self)

    @property
    def s(self) -> str:
        return " ".join(self)

    @property
    def l(self) -> list[str]:  # noqa: E743 - the name that it has in notebooks
        return list(self)


class _Events:
    """Nobody is told anything."""

    def register(self, *_: object) -> None: ...

    def unregister(self, *_: object) -> None: ...


class Shell:
    """Carries out the magic commands of one interpreter; `get_ipython()` returns it."""

    def __init__(self, names: dict[str, Any], show: Callable[..., Any], figures: display.Figures) -> None:
        """`names` are those of the main module; `show` shows values, as `display` does."""
        self.user_ns = names
        self.config: dict[str, Any] = {}
        self.events = _Events()
        self._show = show
        self._figures = figures
        self._before: list[str] = []
        self._finishing: list[Callable[[], None]] = []

    def get_ipython(self) -> Shell:
        """The interpreter's magic commands."""
        return self

    def finish(self) -> None:
        """The cell is over: do what a cell magic has left for its end."""
        while self._finishing:
            self._finishing.pop()()

    def enable_gui(self, *_: object) -> None:
        """There is no screen."""

    # ── Commands ──

    def system(self, command: str) -> None:
        """Run a command; its output is the cell's."""
        text = _expanded(command, _Where(sys._getframe(1)))
        self.user_ns["_exit_code"] = _run(_shell(text))

    def getoutput(self, command: str) -> OutputLines:
        """The lines that a command writes."""
        return self._output(_expanded(command, _Where(sys._getframe(1))))

    def _output(self, command: str) -> OutputLines:
        subprocess = display.standard("subprocess")
        display.flush()
        done = subprocess.run(_shell(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        self.user_ns["_exit_code"] = done.returncode
        return OutputLines(done.stdout.decode("utf-8", "replace").splitlines())

    def run_line_magic(self, name: str, line: str, _stack_depth: int = 1) -> Any:
        where = _Where(sys._getframe(1))
        if name in _SHELL_MAGICS:
            self.user_ns["_exit_code"] = _run(_shell(f"{name} {_expanded(line, where)}"))
            return None
        if name in _QUIET:
            return None
        method = getattr(self, f"_line_{name}", None)
        if method is None:
            raise UsageError(f"there is no magic %{name} here; there are {', '.join(self._known('_line_', '%'))}")
        return method(line, where)

    def run_cell_magic(self, name: str, line: str, cell: str) -> Any:
        where = _Where(sys._getframe(1))
        if name in _SCRIPTS:
            return self._script(_SCRIPTS[name], line, cell)
        if name in _TEXTS:
            self._show({"text/plain": cell, _TEXTS[name]: cell}, raw=True)
            return None
        method = getattr(self, f"_cell_{name}", None)
        if method is None:
            raise UsageError(f"there is no magic %%{name} here; there are {', '.join(self._known('_cell_', '%%'))}")
        return method(line, cell, where)

    magic = run_line_magic

    def _known(self, begin: str, sign: str) -> list[str]:
        own = [name.removeprefix(begin) for name in dir(type(self)) if name.startswith(begin)]
        more = _SHELL_MAGICS if sign == "%" else ("capture", "time", *_SCRIPTS, *_TEXTS)
        return [sign + name for name in sorted({*own, *more})]

    def help(self, name: str) -> None:
        """Write what there is to know of a name."""
        where = _Where(sys._getframe(1))
        try:
            value = eval(name, where.globals, where.locals)  # noqa: S307 - a name that a cell asks about
        except Exception:  # it is no value, or its making fails
            sys.stdout.write(f"Object `{name}` not found.\n")
            return
        inspect = display.standard("inspect")
        said = [f"Type:      {type(value).__name__}"]
        if callable(value):
            try:
                said.insert(0, f"Signature: {name}{inspect.signature(value)}")
            except (TypeError, ValueError):
                said.insert(0, f"Signature: {name}(…)")
        else:
            said.append(f"Value:     {repr(value)[:200]}")
        sys.stdout.write("\n".join([*said, "Docstring:", inspect.getdoc(value) or "<no docstring>", ""]))

    # ── Line magics ──

    def _line_matplotlib(self, line: str, where: _Where) -> None:
        matplotlib = sys.modules.get("matplotlib")
        if matplotlib is not None:
            matplotlib.use("Agg")

    _line_pylab = _line_matplotlib

    def _line_config(self, line: str, where: _Where) -> None:
        name, _, value = line.partition("=")
        if name.strip().endswith(("figure_format", "figure_formats")):
            self._figures.kinds = ("svg",) if "svg" in value else ("png",)

    def _line_time(self, line: str, where: _Where) -> Any:
        with self.timed():
            try:
                code = compile(line, "<%time>", "eval")
            except SyntaxError:
                exec(compile(line, "<%time>", "exec"), where.globals, where.locals)  # noqa: S102 - of the cell
                return None
            return eval(code, where.globals, where.locals)  # noqa: S307 - of the cell

    def _line_timeit(self, line: str, where: _Where) -> Any:
        return self._timeit(line, "", where)

    def _line_cd(self, line: str, where: _Where) -> None:
        wanted = _expanded(line, where).strip("\"'")
        here = os.getcwd()
        if wanted == "-":
            if not self._before:
                raise UsageError("%cd -: there is no folder before this one")
            wanted = self._before.pop()
        os.chdir(os.path.expanduser(wanted or "~"))
        self._before.append(here)
        sys.stdout.write(f"{os.getcwd()}\n")

    def _line_pwd(self, line: str, where: _Where) -> str:
        return os.getcwd()

    def _line_env(self, line: str, where: _Where) -> Any:
        if not line:
            return dict(os.environ)
        name, equals, value = (line if "=" in line else line.replace(" ", "=", 1)).partition("=")
        if not equals:
            return os.environ.get(name)
        os.environ[name.strip()] = _expanded(value.strip(), where)
        sys.stdout.write(f"env: {name.strip()}={os.environ[name.strip()]}\n")
        return None

    _line_set_env = _line_env

    def _line_pip(self, line: str, where: _Where) -> None:
        words = display.standard("shlex").split(_expanded(line, where))
        if words[:1] in (["install"], ["download"]) and "https_proxy" not in os.environ:
            raise UsageError(f"%pip: {_NO_INSTALL}")
        self.user_ns["_exit_code"] = _run([sys.executable, "-m", "pip", *words])
        display.standard("importlib").invalidate_caches()

    def _line_conda(self, line: str, where: _Where) -> None:
        raise UsageError(f"%conda: there is no conda here, and {_NO_INSTALL}")

    _line_mamba = _line_conda

    def _line_run(self, line: str, where: _Where) -> None:
        words = display.standard("shlex").split(_expanded(line, where))
        if not words:
            raise UsageError("%run: which file?")
        with open(words[0], "rb") as file:
            code = compile(file.read(), words[0], "exec", dont_inherit=True)
        before, sys.argv = sys.argv, words
        try:
            exec(code, self.user_ns)  # noqa: S102 - of the user
        finally:
            sys.argv = before

    def _line_who(self, line: str, where: _Where) -> None:
        module = type(sys)
        names = [name for name, value in self.user_ns.items() if name[:1] != "_" and not isinstance(value, module)]
        sys.stdout.write("\t".join(names) + "\n")

    _line_whos = _line_who

    def _line_lsmagic(self, line: str, where: _Where) -> None:
        sys.stdout.write(" ".join([*self._known("_line_", "%"), *self._known("_cell_", "%%")]) + "\n")

    def _line_reset(self, line: str, where: _Where) -> None:
        for name in [name for name in self.user_ns if name[:1] != "_"]:
            del self.user_ns[name]

    # ── Cell magics ──

    def begin_time(self, line: str) -> None:
        """The rest of the cell is timed."""
        clock = self.timed()
        clock.__enter__()
        self._finishing.append(lambda: clock.__exit__())

    def begin_capture(self, line: str) -> None:
        """What the rest of the cell writes goes into a variable, or nowhere."""
        io = display.standard("io")
        before = sys.stdout, sys.stderr
        taken = sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
        name = line.split(" ")[0]

        def end() -> None:
            sys.stdout, sys.stderr = before
            if name and not name.startswith("-"):
                self.user_ns[name] = CapturedCell(taken[0].getvalue(), taken[1].getvalue())

        self._finishing.append(end)

    def _cell_timeit(self, line: str, cell: str, where: _Where) -> Any:
        return self._timeit(line, cell, where)

    def _cell_writefile(self, line: str, cell: str, where: _Where) -> None:
        words = display.standard("shlex").split(_expanded(line, where))
        append = words[:1] == ["-a"] or words[:1] == ["--append"]
        if len(words) != 1 + append:
            raise UsageError("%%writefile: give one path, after -a to append to it")
        said = "Appending to" if append else "Overwriting" if os.path.exists(words[-1]) else "Writing"
        sys.stdout.write(f"{said} {words[-1]}\n")
        with open(words[-1], "a" if append else "w", encoding="utf-8") as file:
            file.write(cell)

    _cell_file = _cell_writefile

    def _cell_python(self, line: str, cell: str, where: _Where) -> None:
        self._script(sys.executable, line, cell)

    _cell_python3 = _cell_python

    def _script(self, program: str, line: str, cell: str) -> None:
        words = display.standard("shlex").split(line)
        command = [program, *words] if program else words
        if not command:
            raise UsageError("%%script: which program?")
        shutil = display.standard("shutil")
        if shutil.which(command[0]) is None:
            if program != "bash":
                raise UsageError(f"there is no program {command[0]!r} in this box")
            command[0] = "sh"
        status = _run(command, cell.encode("utf-8", "surrogateescape"))
        self.user_ns["_exit_code"] = status
        if status:
            subprocess = display.standard("subprocess")
            raise subprocess.CalledProcessError(status, " ".join(command))

    # ── Time ──

    def timed(self) -> _Clock:
        """Within this, time is taken, and told at its end."""
        return _Clock()

    def _timeit(self, line: str, cell: str, where: _Where) -> Any:
        getopt, timeit = display.standard("getopt"), display.standard("timeit")
        given, rest = getopt.getopt(line.split(" "), "n:r:tcp:qov:")
        options = dict(given)
        statement, setup = (cell, " ".join(rest)) if cell else (" ".join(rest), "")
        names = {**where.globals, **where.locals}
        timer = timeit.Timer(statement.strip("\n") or "pass", setup or "pass", globals=names)
        loops = int(options.get("-n") or 0) or timer.autorange()[0]
        runs = [total / loops for total in timer.repeat(int(options.get("-r") or 7), loops)]
        mean = sum(runs) / len(runs)
        spread = (sum((run - mean) ** 2 for run in runs) / len(runs)) ** 0.5
        if "-q" not in options:
            how = f"mean ± std. dev. of {len(runs)} runs, {loops:,} loop{'' if loops == 1 else 's'} each"
            sys.stdout.write(f"{_seconds(mean)} ± {_seconds(spread)} per loop ({how})\n")
        return runs if "-o" in options else None


class CapturedCell:
    """What a cell under `%%capture` wrote."""

    def __init__(self, stdout: str, stderr: str) -> None:
        self.stdout, self.stderr = stdout, stderr

    def __str__(self) -> str:
        return self.stdout

    def show(self) -> None:
        sys.stdout.write(self.stdout)
        sys.stderr.write(self.stderr)

    __call__ = show


class _Where:
    """The names that a command in a cell sees."""

    def __init__(self, frame: FrameType) -> None:
        self.globals, self.locals = frame.f_globals, frame.f_locals


class _Clock:
    def __enter__(self) -> None:
        self._began = self._now()

    def __exit__(self, *_: object) -> None:
        user, system, wall = (now - then for now, then in zip(self._now(), self._began, strict=True))
        cpu = f"user {_seconds(user)}, sys: {_seconds(system)}, total: {_seconds(user + system)}"
        sys.stdout.write(f"CPU times: {cpu}\nWall time: {_seconds(wall)}\n")

    def _now(self) -> tuple[float, float, float]:
        resource, time = display.standard("resource"), display.standard("time")
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(each.ru_utime for each in used), sum(each.ru_stime for each in used), time.perf_counter()


def _seconds(value: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


# ── Commands ──────────────────────────────────────────────────────────────────────────────────────


def _shell(command: str) -> list[str]:
    return ["/bin/bash" if os.access("/bin/bash", os.X_OK) else "/bin/sh", "-c", command]


def _run(words: list[str], given: bytes | None = None) -> int:
    """Run a command in a process group of its own, which ends with the cell if that is interrupted."""
    subprocess = display.standard("subprocess")
    display.flush()
    stdin = None if given is None else subprocess.PIPE
    out, err = (_descriptor(stream, number) for stream, number in ((sys.stdout, 1), (sys.stderr, 2)))
    streams = [subprocess.PIPE if each is None else each for each in (out, err)]
    with subprocess.Popen(words, stdin=stdin, stdout=streams[0], stderr=streams[1], process_group=0) as process:
        try:
            said = process.communicate(given)
        except BaseException:
            try:
                os.killpg(process.pid, 9)
            except OSError:
                process.kill()
            raise
    for stream, text in zip((sys.stdout, sys.stderr), said, strict=True):
        if text:
            stream.write(text.decode("utf-8", "replace"))
    return int(process.returncode)


def _descriptor(stream: Any, number: int) -> int | None:
    """Where a command writes to; None if a cell has put something else in the place of the stream."""
    try:
        return number if stream.fileno() == number else None
    except Exception:  # it has none
        return None


def _expanded(text: str, where: _Where) -> str:
    """With `{expression}` and `$name` replaced by values of the cell; what is none of these stays as it is."""
    if "{" not in text and "$" not in text:
        return text
    re = display.standard("re")

    def value(found: Any) -> str:
        if found[0].startswith("$$"):
            return str(found[0][1:])
        name = found["expression"] or found["name"]
        try:
            return str(eval(name, where.globals, where.locals))  # noqa: S307 - of the cell
        except Exception:  # then it means something to the command
            return str(found[0])

    return str(re.sub(r"\$\$\w*|\{(?P<expression>[^{}\n]+)\}|\$(?P<name>[A-Za-z_][\w.]*)", value, text))


# ── Objects that are displayed ────────────────────────────────────────────────────────────────────


class DisplayObject:
    """Something to display: data, or a file that has them."""

    _binary = False

    def __init__(self, data: Any = None, url: Any = None, filename: Any = None, metadata: Any = None, **_: Any) -> None:
        if hasattr(data, "__fspath__"):
            filename, data = os.fspath(data), None
        elif data is None and filename is None and isinstance(url, str) and "://" not in url:
            filename, url = url, None
        elif isinstance(data, str) and data.startswith(("http://", "https://")):
            data, url = None, data
        self.data, self.url, self.filename, self.metadata = data, url, filename, metadata
        self.reload()

    def __repr__(self) -> str:
        return f"<IPython.core.display.{type(self).__name__} object>"

    def reload(self) -> None:
        """Read the file again."""
        if self.filename is None:
            return
        if self._binary:
            with open(self.filename, "rb") as file:
                self.data = file.read()
        else:
            with open(self.filename, encoding="utf-8") as file:
                self.data = file.read()


class Pretty(DisplayObject):
    def __repr__(self) -> str:
        return str(self.data)


class HTML(DisplayObject):
    def _repr_html_(self) -> Any:
        return self.data


class Markdown(DisplayObject):
    def _repr_markdown_(self) -> Any:
        return self.data


class Latex(DisplayObject):
    def _repr_latex_(self) -> Any:
        return self.data


class Math(DisplayObject):
    def _repr_latex_(self) -> str:
        return f"$\\displaystyle {str(self.data).strip('$')}$"


class SVG(DisplayObject):
    def _repr_svg_(self) -> Any:
        return self.data


class Javascript(DisplayObject):
    def _repr_javascript_(self) -> Any:
        return self.data


class JSON(DisplayObject):
    def _repr_json_(self) -> Any:
        if isinstance(self.data, str | bytes):
            return display.standard("json").loads(self.data)
        return self.data


class GeoJSON(JSON):
    pass


class Code(DisplayObject):
    def __repr__(self) -> str:
        return str(self.data)

    def _repr_markdown_(self) -> str:
        return f"```\n{self.data}\n```"


class Image(DisplayObject):
    """A picture: its bytes, a file, or an address, which is not fetched."""

    _binary = True
    _KINDS = ((b"\x89PNG", "png"), (b"\xff\xd8", "jpeg"), (b"GIF8", "gif"), (b"RIFF", "webp"))

    def __init__(
        self, data: Any = None, url: Any = None, filename: Any = None, format: Any = None, **more: Any
    ) -> None:
        if isinstance(data, str) and "://" not in data:
            filename, data = data, None
        super().__init__(data, url, filename, **more)
        found = (kind for begin, kind in self._KINDS if isinstance(self.data, bytes) and self.data.startswith(begin))
        given = {"jpg": "jpeg"}.get(format, format) if format else None
        self.format = next(found, given or "png")

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        if self.data is None:
            return {"text/html": f'<img src="{self.url}"/>'}
        return {f"image/{self.format}": self.data}


class IFrame:
    """A page in a frame."""

    def __init__(self, src: str, width: Any = "100%", height: Any = 400, **_: Any) -> None:
        self.src, self.width, self.height = src, width, height

    def _repr_html_(self) -> str:
        return f'<iframe src="{self.src}" width="{self.width}" height="{self.height}"></iframe>'


class FileLink:
    """A file that the reader is to look at."""

    def __init__(self, path: Any, **_: Any) -> None:
        self.path = os.fspath(path)

    def __repr__(self) -> str:
        return str(os.path.abspath(self.path))


class DisplayHandle:
    """Something displayed that is displayed again when it changes."""

    def __init__(self, display_id: str, show: Callable[..., Any]) -> None:
        self.display_id = display_id
        self._show = show

    def __repr__(self) -> str:
        return f"<DisplayHandle display_id={self.display_id}>"

    def display(self, value: Any, **how: Any) -> None:
        self._show(value, **how)

    update = display


OBJECTS: tuple[Any, ...] = (
    *(DisplayObject, Pretty, HTML, Markdown, Latex, Math, SVG, Javascript, JSON, GeoJSON, Code, Image, IFrame),
    *(FileLink, DisplayHandle),
)
for _each in OBJECTS:
    _each.__module__ = "IPython.display"


# ── IPython, where there is none ──────────────────────────────────────────────────────────────────


class StandIn:
    """Loads our `IPython` and its modules."""

    def __init__(self, shell: Shell, show: Callable[..., Any]) -> None:
        self._shell = shell
        self._names: dict[str, dict[str, Any]] = {
            "IPython": {"version_info": (9, 0, 0, ""), "__version__": "9.0.0", "get_ipython": shell.get_ipython},
            "IPython.core": {},
            "IPython.core.error": {"UsageError": UsageError},
            "IPython.core.getipython": {"get_ipython": shell.get_ipython},
            **dict.fromkeys(
                ("IPython.display", "IPython.core.display", "IPython.core.display_functions", "IPython.lib.display"),
                self._shown(show),
            ),
            "IPython.lib": {},
        }

    def spec(self, name: str) -> Any:
        if name not in self._names:
            return None
        made = sys.modules["_frozen_importlib"].ModuleSpec(name, self, origin="Ringfence")
        if name in ("IPython", "IPython.core", "IPython.lib"):
            made.submodule_search_locations = []
        return made

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = "A small stand-in for IPython. Install IPython in the box for all of it."
        module.__dict__.update(self._names[module.__name__])
        if module.__name__ == "IPython":
            __import__("IPython.display")

    def _shown(self, show: Callable[..., Any]) -> dict[str, Any]:
        def display(*values: Any, **how: Any) -> Any:
            """Show values as results of the running cell."""
            return show(*values, **how)

        def update_display(value: Any, *, display_id: str = "", **how: Any) -> None:
            """Show a value again."""
            show(value, **how)

        def clear_output(wait: bool = False) -> None:
            """What was shown stays: all of it is the result of the cell."""

        def set_matplotlib_formats(*kinds: str, **_: Any) -> None:
            """Show figures as PNG or SVG."""
            self._shell._figures.kinds = [kind for kind in kinds if kind in ("png", "svg")] or ["png"]

        made = {made.__name__: made for made in (display, update_display, clear_output, set_matplotlib_formats)}
        made["publish_display_data"] = lambda data, *_, **__: show(data, raw=True)
        for kind in ("html", "markdown", "svg", "png", "jpeg", "latex", "json", "javascript", "pretty"):
            made[f"display_{kind}"] = display
        return {**made, **{each.__name__: each for each in OBJECTS}}


def handle(display_id: object, show: Callable[..., Any]) -> DisplayHandle:
    name = display_id if isinstance(display_id, str) else os.urandom(8).hex()
    return DisplayHandle(name, show)


def chosen(forms: dict[str, str], include: Any, exclude: Any) -> dict[str, str]:
    """The forms that a caller wants shown."""
    kept = [mime for mime in forms if (not include or mime in include) and mime not in (exclude or ())]
    return {mime: forms[mime] for mime in kept} or {"text/plain": forms.get("text/plain", "")}
