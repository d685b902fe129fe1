"""`ringfence completion`: a script that has a shell complete verbs and options.

The script holds all of them, so that pressing a key starts no Python.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import typer

from ringfence.cli import common

_SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True, slots=True)
class CompletionPlace:
    """What may come after some words of a command line, each with a sentence that explains it."""

    words: str
    verbs: dict[str, str] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)


def verb(commands: Callable[[], Any]) -> Callable[..., None]:
    """The command. `commands` returns all commands, as Typer's own objects."""

    def completion(
        shell: str = typer.Argument(..., metavar="SHELL", help=f"One of {', '.join(_SHELLS)}."),
    ) -> None:
        """Print the script that has your shell complete verbs and options of ringfence.

        \b
        source <(ringfence completion bash)                                  for this bash; or in ~/.bashrc
        ringfence completion zsh > "${fpath[1]}/_ringfence"                  for every new zsh
        ringfence completion fish > ~/.config/fish/completions/ringfence.fish
        """
        if shell not in _SHELLS:
            common.fail(f"there is no completion for {shell!r}; there is for: {', '.join(_SHELLS)}", 2)
        print(script(shell, commands()), end="")

    return completion


def script(shell: str, commands: Any) -> str:
    """The script for a shell."""
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](list(_places(commands, "")))


def _places(command: Any, words: str) -> Iterator[CompletionPlace]:
    below: dict[str, Any] = getattr(command, "commands", {})
    options = {
        option: (each.help or "").partition(". ")[0].rstrip(".")
        for each in command.params
        for option in (*each.opts, *each.secondary_opts)
        if option.startswith("-")
    }
    yield CompletionPlace(
        words, {name: _brief(each) for name, each in below.items()}, {**options, "--help": "Show help"}
    )
    for name, each in below.items():
        yield from _places(each, f"{words} {name}".strip())


def _brief(command: Any) -> str:
    return str(command.help or "").strip().partition("\n")[0].partition(". ")[0].rstrip(".:")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _paths(places: list[CompletionPlace]) -> list[str]:
    """The words that lead to each verb."""
    return [_quoted(f"{each.words} {verb}".strip()) for each in places for verb in each.verbs]


def _place_reached(
    places: list[CompletionPlace], walk: tuple[str, str, str], listed: Callable[[dict[str, str]], str]
) -> str:
    """What bash and zsh have in common: the words before the cursor lead to a place, which sets `verbs` and `options`.
    `walk`: the number of the first word, that behind the last, and the word of the number `i`; `listed`: how the shell
    writes a list."""
    first, end, word = walk
    lead = "\n".join(f"      {path}) at=$next ;;" for path in _paths(places))
    there = "\n".join(
        f"    {_quoted(each.words)}) verbs={listed(each.verbs)}; options={listed(each.options)} ;;" for each in places
    )
    return f"""  for ((i = {first}; i < {end}; i++)); do
    next="${{at:+$at }}${{{word}}}"
    case $next in
{lead}
    esac
  done
  case $at in
{there}
  esac"""


def _bash(places: list[CompletionPlace]) -> str:
    place = _place_reached(places, ("1", "COMP_CWORD", "COMP_WORDS[i]"), lambda entries: _quoted(" ".join(entries)))
    return f"""# bash completion for ringfence
_ringfence() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} at='' next='' verbs='' options='' i
{place}
  if [[ $current == -* ]]; then
    COMPREPLY=($(compgen -W "$options" -- "$current"))
  elif [[ -n $verbs ]]; then
    COMPREPLY=($(compgen -W "$verbs" -- "$current"))
  else
    COMPREPLY=($(compgen -f -- "$current"))
  fi
}}
complete -o filenames -F _ringfence ringfence
"""


def _zsh(places: list[CompletionPlace]) -> str:
    def listed(entries: dict[str, str]) -> str:
        return f"({' '.join(_quoted(f'{name}:{text}' if text else name) for name, text in entries.items())})"

    place = _place_reached(places, ("2", "CURRENT", "words[i]"), listed)
    return f"""#compdef ringfence
_ringfence() {{
  local at='' next='' i
  local -a verbs options
{place}
  if [[ $PREFIX == -* ]]; then
    _describe option options
  elif (( $#verbs )); then
    _describe command verbs
  else
    _files
  fi
}}
if [[ $funcstack[1] == _ringfence ]]; then _ringfence "$@"; else compdef _ringfence ringfence; fi
"""


_FISH = """
# fish completion for ringfence
function __ringfence_at --description 'Whether the words so far lead to this verb'
    set --local at ''
    for word in (commandline --tokenize --cut-at-cursor --current-process)[2..]
        set --local next (string trim -- "$at $word")
        contains -- $next KNOWN; and set at $next
    end
    test "$at" = "$argv[1]"
end
"""


def _fish(places: list[CompletionPlace]) -> str:
    lines = [textwrap.dedent(_FISH).strip().replace("KNOWN", " ".join(_paths(places)))]
    for each in places:
        asked = f'__ringfence_at "{each.words}"'
        start = f"complete --command ringfence --condition {_quoted(asked)}"
        for verb, text in each.verbs.items():
            lines.append(f"{start} --no-files --arguments {verb} --description {_quoted(text)}")
        for option, text in each.options.items():
            kind = "--long-option" if option.startswith("--") else "--short-option"
            lines.append(f"{start} {kind} {option.lstrip('-')} --description {_quoted(text)}")
    return "\n".join(lines) + "\n"
