"""The one list of names of files and folders that programs of the host run or obey by themselves.

A name is here if some program reads it unasked, because it lies in the folder that the program is started in or opens,
and then runs its content or grants trust because of it. Not here is what runs only when a person asks for exactly that,
and what an agent is meant to write: `Makefile`, `package.json`, `conftest.py`, `tox.ini`, `.eslintrc.js`, `.pylintrc`,
`babel.config.js`, `webpack.config.js`, `ansible.cfg`, the workflows in `.github`; nor what such a program treats as
data or text only, such as the number of a version that is installed: `.env`, `.editorconfig`, `.gitattributes`,
`AGENTS.md`, `.nvmrc`, `.node-version`, `.python-version`, `.ruby-version`.

A box may not change them where it may write to a folder of the host (`guarded`), and they are not copied out of it
(`collect`).
"""

from __future__ import annotations

from collections.abc import Sequence

FOLDERS = (".config", ".cargo", ".julia", ".local", ".yarn")
"""They hold such files among others: the appearance of such a folder means nothing."""
PINNED = (".git", *FOLDERS)
"""Pinned in place, so that they cannot be replaced; their contents may be changed."""
WITH_PROJECTS = (
    ".agents",
    ".amazonq",
    ".claude",
    ".codex",
    ".continue",
    ".cursor",
    ".gemini",
    ".kiro",
    ".roo",
    ".windsurf",
)
"""Agents keep whole projects in these, which may be mounted."""

_VERSION_CONTROL = (
    ".git",
    ".git/hooks",
    ".git/config",
    ".git/config.worktree",
    ".git/commondir",
    ".git/modules",
    ".git/worktrees",
    ".gitconfig",
    ".gitmodules",
    ".githooks",
    ".husky",
    ".lefthook-local",
    ".lefthook-local.json",
    ".lefthook-local.jsonc",
    ".lefthook-local.toml",
    ".lefthook-local.yaml",
    ".lefthook-local.yml",
    ".lefthook.json",
    ".lefthook.jsonc",
    ".lefthook.toml",
    ".lefthook.yaml",
    ".lefthook.yml",
    ".overcommit.yml",
    ".pre-commit-config.yaml",
    ".pre-commit-config.yml",
    "prek.toml",
    ".huskyrc",
    ".huskyrc.js",
    ".huskyrc.json",
    ".jjconfig.toml",
    ".tigrc",
    ".hg",
    ".arcconfig",
    ".hgrc",
    ".jj",
    ".sl",
    ".svn",
    ".bzr",
    "_darcs",
    "lefthook-local.json",
    "lefthook-local.jsonc",
    "lefthook-local.toml",
    "lefthook-local.yaml",
    "lefthook-local.yml",
    "lefthook.json",
    "lefthook.jsonc",
    "lefthook.toml",
    "lefthook.yaml",
    "lefthook.yml",
)
_EDITORS = (
    ".devcontainer",
    ".devcontainer.json",
    ".dir-locals.el",
    ".emacs",
    ".emacs.d",
    ".emacs.el",
    ".exrc",
    ".gitpod.yml",
    ".gvimrc",
    ".helix",
    ".idea",
    ".nvim.lua",
    ".nvimrc",
    ".vim",
    ".vimrc",
    ".vscode",
    ".zed",
    ".dir-locals-2.el",
    ".fleet",
    ".lvimrc",
    ".theia",
    ".vs",
    ".doom.d",
    ".spacemacs",
    ".ropeproject",
    ".ycm_extra_conf.py",
)
_AGENTS = (
    *WITH_PROJECTS,
    ".aider.conf.yml",
    ".claude.json",
    ".clinerules",
    ".cursorrules",
    ".mcp.json",
    ".windsurfrules",
    ".crush",
    ".crush.json",
    ".opencode",
    ".qwen",
    ".trae",
    ".augment",
    ".factory",
    ".junie",
    "crush.json",
    "opencode.json",
    "opencode.jsonc",
    ".kilocode",
    ".openhands",
    ".roomodes",
    ".agent",
    ".amp",
    ".cline",
    ".copilot",
    ".goose",
    ".grok",
    ".codebuddy",
    ".iflow",
    ".pi",
    # Ours: it names commands that give secrets, and servers that run in no box.
    "ringfence.yaml",
)
_SHELLS = (
    ".autoenv",
    ".autoenv.zsh",
    ".bash_aliases",
    ".bash_completion",
    ".bash_login",
    ".bash_logout",
    ".bash_profile",
    ".bashrc",
    ".bashrc.d",
    ".cshrc",
    ".envrc",
    ".inputrc",
    ".kshrc",
    ".login",
    ".logout",
    ".mise",
    ".mise.local.toml",
    ".mise.toml",
    ".profile",
    ".tcshrc",
    ".mkshrc",
    ".xinitrc",
    ".xinputrc",
    ".xserverrc",
    ".xprofile",
    ".xsession",
    ".xsessionrc",
    ".zlogin",
    ".zlogout",
    ".zprofile",
    ".zshenv",
    ".zshrc",
    ".rvmrc",
    "mise.local.toml",
    "mise.toml",
    # Shims run the version that these name, which may be a path of the project's.
    ".asdfrc",
    ".tool-versions",
    ".direnvrc",
    ".pam_environment",
    ".wezterm.lua",
)
_PACKAGES = (
    ".bundle",
    ".cargo",
    ".cargo/config",
    ".cargo/config.toml",
    ".cargo/env",
    ".condarc",
    ".gemrc",
    ".jvmopts",
    ".mvn",
    ".npmrc",
    ".pip",
    ".pnpmfile.cjs",
    ".pnpmfile.mjs",
    ".pypirc",
    ".yarn",
    ".yarn/plugins",
    ".yarn/releases",
    ".yarnrc",
    ".yarnrc.yml",
    "bunfig.toml",
    # Builds run the compiler, the version manager or the Java machine that these name.
    ".bazeliskrc",
    ".bazelrc",
    ".bazelversion",
    ".lein",
    ".pdm-python",
    ".sbt",
    ".sbtopts",
    "rust-toolchain",
    "rust-toolchain.toml",
)
_TOOLS = (
    ".Rprofile",
    ".config",
    ".config/autostart",
    ".config/fish",
    ".config/git",
    ".config/mise",
    ".config/mise.toml",
    ".config/systemd",
    ".byebugrc",
    ".curlrc",
    ".duckdbrc",
    ".erlang",
    ".forward",
    ".gdbearlyinit",
    ".gdbinit",
    ".ghci",
    ".hie-bios",
    "hie.yaml",
    ".irbrc",
    ".lldbinit",
    ".mongorc.js",
    ".mongoshrc.js",
    ".pdbrc",
    ".pryrc",
    ".psysh.php",
    ".psqlrc",
    ".rdbgrc",
    ".ripgreprc",
    ".screenrc",
    ".sqliterc",
    ".tmux.conf",
    ".wgetrc",
    ".RData",
    ".Renviron",
    ".iex.exs",
    ".ocamlinit",
    ".octaverc",
    ".ansible.cfg",
    ".ipython",
    ".julia",
    ".julia/config",
    ".local",
    ".local/bin",
    ".local/lib",
    ".local/share/applications",
    ".local/share/systemd",
    ".pdbrc.py",
    ".perldb",
    ".config/direnv",
    ".config/emacs",
    ".config/environment.d",
    ".config/nvim",
    ".config/starship.toml",
    ".gnuplot",
    ".guile",
    ".latexmkrc",
    ".lesskey",
    ".lessfilter",
    ".mailcap",
    ".muttrc",
    ".procmailrc",
    ".pythonrc",
    ".pythonrc.py",
    ".racketrc",
    ".radare2rc",
    ".sbclrc",
    ".swiplrc",
    "latexmkrc",
    "matplotlibrc",
    "sitecustomize.py",
    "usercustomize.py",
    # Jupyter reads its settings, which are Python, from the folder that it is started in.
    ".jupyter",
    "jupyter_config.json",
    "jupyter_config.py",
    "jupyter_lab_config.json",
    "jupyter_lab_config.py",
    "jupyter_notebook_config.json",
    "jupyter_notebook_config.py",
    "jupyter_server_config.json",
    "jupyter_server_config.py",
    # Web servers obey these in every folder that they serve.
    ".htaccess",
    ".htpasswd",
    ".user.ini",
)
_CREDENTIALS = (
    ".aws",
    ".docker",
    ".gnupg",
    ".kube",
    ".my.cnf",
    ".k5login",
    ".netrc",
    ".rhosts",
    ".shosts",
    ".ssh",
    ".terraformrc",
)
"""Several of these also name programs to run, such as credential helpers."""

NAMES = (*_VERSION_CONTROL, *_EDITORS, *_AGENTS, *_SHELLS, *_PACKAGES, *_TOOLS, *_CREDENTIALS)
"""Relative to a folder that is opened, outer ones first."""

_TOPS = frozenset(name.partition("/")[0].casefold() for name in NAMES)


_REPOSITORY = "head"
"""Git takes any folder for a repository that has a file HEAD beside `objects` and `refs`, or beside `commondir`; then
its `config` names programs, whatever the folder is called."""
WHY = "tools on the host act upon a file of this name by themselves"


def is_acted_upon(name: str, *, folder: bool = False) -> bool:
    """Whether an entry of this name is one of them, or may hold one; some file systems ignore case."""
    plain = name.casefold()
    if plain.startswith(".psqlrc-"):  # with the version of psql
        return True
    return plain in _TOPS or (plain == _REPOSITORY and not folder)


_ALL = frozenset(name.casefold() for name in NAMES)
_MAY_CHANGE = frozenset(name.casefold() for name in PINNED)


def acts(parts: Sequence[str]) -> str | None:
    """The part of a path that names, or lies in, what such a program obeys; None where there is none. The folders in
    PINNED may not be replaced themselves, and the rest of what is in them may be changed."""
    for at, name in enumerate(parts):
        inner = [part.casefold() for part in parts[at:]]
        if not is_acted_upon(name, folder=len(inner) > 1):
            continue
        if inner[0] not in _MAY_CHANGE or len(inner) == 1:
            return name
        if any("/".join(inner[:end]) in _ALL for end in range(2, len(inner) + 1)):
            return "/".join(parts[at:])
    return None
