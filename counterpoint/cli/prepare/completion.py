"""`counterpoint completion SHELL`: prints a script with which the shell completes commands, flags and files.

The flags come from the commands' help. The script contains them all, so completion starts no process.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable

from counterpoint.cli.main import COMMANDS, command_of
from counterpoint.transport.errors import UserError

USAGE = """usage: counterpoint completion bash|zsh|fish

Prints a completion script for that shell. To install it:
  bash   counterpoint completion bash > ~/.local/share/bash-completion/completions/counterpoint
  zsh    counterpoint completion zsh > DIRECTORY/_counterpoint, with DIRECTORY in $fpath before compinit
  fish   counterpoint completion fish > ~/.config/fish/completions/counterpoint.fish"""

FLAG = re.compile(r"(?<![\w`-])--[a-z][\w.-]*\w")
"""A flag in a help text. One in backticks is mentioned in a description, and may be another command's."""

PLACEHOLDER = "--section.key"
"""What stands for every key in a usage (`counterpoint/cli/arguments/help_text.py`:`usage_of`)."""


def main(arguments: list[str]) -> int:
    """Runs the command. Raises `UserError` for an unknown shell."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    if arguments not in [[shell] for shell in SHELLS]:
        raise UserError(f"completion: {' '.join(arguments)}: expected one of {', '.join(SHELLS)}")
    print(SHELLS[arguments[0]](words_of_commands()), end="")
    return 0


def words_of_commands() -> dict[str, list[str]]:
    """Returns the words that may follow each command, by its name: flags, or the shells' names."""
    words = {name: _flags(name) for name in COMMANDS if name != "completion"}
    return {**words, "completion": list(SHELLS)}


def _flags(command: str) -> list[str]:
    """The flags in a command's help, except those for entries of a list, whose number is unknown.

    A key at the top is there with dashes, too, as the commands' own flags are written.
    """
    run, shown = command_of(command), io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        run(["--help", "all"])
    flags = {flag for flag in FLAG.findall(shown.getvalue()) if ".N" not in flag} - {PLACEHOLDER}
    dashed = {flag.replace("_", "-") for flag in flags if "." not in flag}
    return sorted(flags | dashed | {"--help"})


def _bash(words: dict[str, list[str]]) -> str:
    cases = "\n".join(f"        {name}) words={_quoted(' '.join(flags))} ;;" for name, flags in words.items())
    return f"""# counterpoint completion for bash
_counterpoint() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} words=
    if [ "$COMP_CWORD" -eq 1 ]; then
        words={_quoted(" ".join(words))}
    else
        case ${{COMP_WORDS[1]}} in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    if [ "${{#COMPREPLY[@]}}" -eq 0 ]; then
        COMPREPLY=($(compgen -f -- "$current"))
    fi
}}
complete -o filenames -F _counterpoint counterpoint
"""


def _zsh(words: dict[str, list[str]]) -> str:
    cases = "\n".join(f"        {name}) words_here=({' '.join(flags)}) ;;" for name, flags in words.items())
    return f"""#compdef counterpoint
_counterpoint() {{
    local -a words_here
    if (( CURRENT == 2 )); then
        compadd -- {" ".join(words)}
        return
    fi
    case ${{words[2]}} in
{cases}
    esac
    compadd -- $words_here
    [[ $PREFIX == -* ]] || _files
}}
if [[ $funcstack[1] == _counterpoint ]]; then _counterpoint "$@"; else compdef _counterpoint counterpoint; fi
"""


def _fish(words: dict[str, list[str]]) -> str:
    lines = ["# counterpoint completion for fish"]
    for name, flags in words.items():
        summary = _quoted(COMMANDS[name][1])
        lines.append(f"complete -c counterpoint -n __fish_use_subcommand -f -a {name} -d {summary}")
        given = _quoted(f"__fish_seen_subcommand_from {name}")
        for flag in flags:
            option = f"-l {flag[2:]}" if flag.startswith("--") else f"-f -a {flag}"
            lines.append(f"complete -c counterpoint -n {given} {option}")
    return "\n".join([*lines, ""])


def _quoted(text: str) -> str:
    """The text quoted for any of the three shells; it must not contain a backslash."""
    return "'" + text.replace("'", "'\\''") + "'"


SHELLS: dict[str, Callable[[dict[str, list[str]]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
