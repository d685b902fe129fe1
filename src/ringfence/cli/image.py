"""`ringfence image`: root file systems for boxes and containers."""

from __future__ import annotations

from pathlib import Path

import typer

from ringfence.cli import common, options
from ringfence.cli.progress import progress
from ringfence.cli.terminal import safe
from ringfence.compose import guests, images
from ringfence.compose.images import FORMS, Form, ImageWanted
from ringfence.core.errors import RingfenceError
from ringfence.core.model import Json
from ringfence.core.sizes import short_size
from ringfence.packages.images.build import BuiltImage

image = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

_As = typer.Option(
    None, "--as", metavar="FORM", help="`folder`, `tar` or `oci`, for --out. May be repeated. Default: all three."
)
_Out = typer.Option(None, "--out", metavar="DIR", help="Copy it there: DIR/root, DIR/root.tar, DIR/oci.")
_Packages = typer.Option(
    None,
    "--package",
    metavar="NAME[==VERSION]",
    help="A Python package to put in, with what it requires. May be repeated.",
)
_Environment = typer.Option(False, "--environment", help="Put in every package of Ringfence's own environment.")


@image.callback()
def group() -> None:
    """Make root file systems out of this host, for boxes and containers.

    \b
    ringfence image build                                    Python, a shell and usual programs
    ringfence image build --template data --out image/       with numpy and pandas; as folder, tar and OCI layout
    ringfence image kernel                                   a kernel for virtual machines
    """


@image.command()
def build(
    template: options.Template = None,
    package: list[str] | None = _Packages,
    environment: bool = _Environment,
    forms: list[str] | None = _As,
    out: Path | None = _Out,
    config_path: options.SandboxConfig = None,
    as_json: options.PrintJson = False,
) -> None:
    """Build a root file system from this host: its Python, standard library, a shell and usual programs.

    It needs no network (but for a --package that is not here), no privileges, and the same host gives the same bytes.
    It has the libraries that any of it needs, and can be read by any user, wherever the interpreter lies here. A
    --package that Ringfence's own environment has is taken from there; any other one, or one with a version, is
    installed first, like that of `ringfence run`.

    It is kept by its digest in the state (`ringfence state` shows it, `ringfence state prune` removes it), so that the
    next build of the same files takes no time.

    \b
    ringfence image build
    ringfence image build --template data --out image/
    ringfence image build --package requests --as oci --out image/
    ringfence image build --json
    """
    chosen = _forms(forms, out)
    settings = common.own_config(config_path, None)
    wanted = ImageWanted(template or "python", tuple(package or ()), environment)
    try:
        if out is not None:
            images.check_out(out, chosen)
        with progress("building an image") as line:
            asked = common.run(images.request, settings.gateway.state, settings.sandbox, wanted)
            made = images.make(settings.gateway.state, asked, lambda total: setattr(line, "total", total), line.step)
        copies = {} if out is None else _copies(made, out, chosen)
    except RingfenceError as exc:
        common.fail(str(exc))
    except OSError as exc:
        common.fail(f"{exc.filename or out}: {exc.strerror}")
    _tell(made, copies, as_json)


@image.command()
def kernel(config_path: options.SandboxConfig = None, as_json: options.PrintJson = False) -> None:
    """Fetch a kernel for the virtual machines of backend `microvm`: the distribution's own, by apt.

    It is unpacked into the state, and neither installed nor booted by this host. A host that has a kernel with its
    modules installed needs none; `sandbox.microvm_kernel` names any other.

    \b
    ringfence image kernel
    """
    settings = common.own_config(config_path, None)
    try:
        with progress("fetching a kernel"):
            made = guests.fetch_kernel(settings.gateway.state)
    except RingfenceError as exc:
        common.fail(str(exc))
    except OSError as exc:
        common.fail(f"{exc.filename}: {exc.strerror}")
    if as_json:
        common.dump({"release": made.release, "kernel": str(made.image), "modules": str(made.modules)})
    else:
        print(safe(f"{made.release}  {made.image}"))


def _forms(forms: list[str] | None, out: Path | None) -> tuple[Form, ...]:
    if forms and out is None:
        common.fail("--as: in which form it is copied; say where to with --out DIR", 2)
    for each in forms or ():
        if each not in FORMS:
            common.fail(f"--as {each}: there are {', '.join(FORMS)}", 2)
    return tuple(each for each in FORMS if not forms or each in forms)


def _copies(made: BuiltImage, out: Path, forms: tuple[Form, ...]) -> dict[str, tuple[Path, str | None]]:
    copies: dict[str, tuple[Path, str | None]] = {}
    total = images.size(made)
    for form in forms:
        with progress(f"writing it as {form}", total, sizes=True) as line:
            copies[form] = images.write(made, out, form, line.step)
    return copies


def _tell(made: BuiltImage, copies: dict[str, tuple[Path, str | None]], as_json: bool) -> None:
    size = images.size(made)
    if as_json:
        document: Json = {
            "digest": made.tree.digest,
            "folder": str(made.tree.folder),
            "bytes": size,
            "python": made.tree.about["python"],
            "packages": list(made.packages),
            "missing_libraries": list(made.missing),
            "copies": {
                form: {"path": str(place.absolute()), **({} if digest is None else {"manifest": digest})}
                for form, (place, digest) in copies.items()
            },
        }
        common.dump(document)
        return
    print(f"{made.tree.digest}  {short_size(size)}")
    print(safe(f"{'folder':<10}{made.tree.folder}"))
    print(safe(f"{'python':<10}{made.tree.about['python']}"))
    if made.packages:
        print(safe(f"{'packages':<10}{', '.join(made.packages)}"))
    for form, (place, digest) in copies.items():
        print(safe(f"{form:<10}{place}{'' if digest is None else f'  (manifest {digest})'}"))
    if made.missing:
        common.say(f"libraries that something in it names and this host does not have: {', '.join(made.missing)}")
