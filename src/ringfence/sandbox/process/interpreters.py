"""Programs that run code by themselves, by name: with one of them at hand, whoever writes a command can do what other
programs do without having them. Data only."""

from __future__ import annotations

import re

_LIST = """
python pypy ipython perl ruby irb jruby node nodejs deno bun qjs php lua luajit luatex texlua tclsh wish expect
guile racket scheme chicken csi gosh sbcl clisp ecl emacs vi vim view vimdiff rvim nvim ex octave R Rscript julia
ghci runghc runhaskell erl escript elixir iex scala kotlin groovy clojure java jshell dotnet mono fsi csharp pwsh
powershell bash rbash dash ash zsh ksh mksh pdksh fish csh tcsh elvish nu xonsh busybox toybox awk gawk mawk nawk
original-awk bpftrace stap gdb lldb perf tcc lli cling root gs wasmtime wasmer iwasm valgrind crystal nim swift
ocaml utop coqtop prolog swipl gforth maxima gp sage matlab psql mysql sqlite3 mongosh redis-cli uv uvx npx pipx
"""
_NAMES = frozenset(_LIST.split())
_PREFIXES = ("qemu-",)
_VERSION = re.compile(r"[-_.]?v?\d[\d.]*[a-z]?$")


def runs_code(name: str) -> bool:
    """By the name of its file, with or without a version behind it."""
    return name in _NAMES or _VERSION.sub("", name) in _NAMES or name.startswith(_PREFIXES)
