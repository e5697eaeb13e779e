"""A step's rollouts as a table, and one rollout in full.

A model, an environment or a guest wrote their texts. So control characters are escaped, markup is not interpreted, and texts
are indented so that they cannot look like a line of ours.
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from counterpoint.job.reading.rollouts.conversation import messages_of, without_end
from counterpoint.job.reading.rollouts.rollout_records import RolloutRecord, finite_number
from counterpoint.transport.exact_json import dumps
from counterpoint.transport.printable import clipped, printable

INDENT = 4

MOST_TEXTS = 20
"""Turns, and messages of a prompt, that are printed of a rollout whose texts are cut."""

LONGEST_CELL = 160
"""Most characters in a cell of the table. A rollout printed in full is not cut."""


def rollout_table(where: str, records: Sequence[RolloutRecord]) -> Table:
    """Builds a table with a row for each rollout, by falling reward. `where` names run and step."""
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        title=f"{where}: {len(records)} rollouts",
        title_justify="left",
    )
    for name in ("rollout", "environment", "example"):
        table.add_column(name, no_wrap=True)
    for name in ("reward", "advantage", "turns", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("outcome", overflow="fold")
    for record in sorted(records, key=lambda record: (record.reward is None, -(record.reward or 0.0))):
        table.add_row(*(Text(_one_line(clipped(cell, LONGEST_CELL))) for cell in _cells(record)))
    return table


def _cells(record: RolloutRecord) -> list[str]:
    reward = "" if record.reward is None else f"{record.reward:.4g}"
    cells = [record.rollout_id, record.environment, record.example, reward, _signed(record.advantage)]
    return [*cells, str(len(record.turns)), str(record.completion_tokens), record.outcome]


def print_rollout(
    console: Console,
    where: str,
    record: RolloutRecord,
    *,
    tokens: bool = False,
    longest: int | None = None,
    outcome: str | None = None,
) -> None:
    """Prints a rollout in full: its numbers, the right answer, what was kept of it, and its turns as a conversation.

    With `tokens` prompts and completions are as they were sent, the template's tokens included. Of a text of more than `longest`
    characters the middle is left out, as are turns and messages after the first `MOST_TEXTS`. `outcome` is said
    in place of what training made of it.
    """
    most = None if longest is None else MOST_TEXTS

    def heading(text: str, style: str = "bold") -> None:
        console.print(Text(_one_line(text if longest is None else clipped(text, 4 * longest)), style), soft_wrap=True)

    def say(title: str, text: object, style: str) -> None:
        if longest is not None:
            title, text = clipped(title, longest), clipped(text, longest) if isinstance(text, str) else text
        _print_text(console, title, text, style)

    heading(f"rollout {record.rollout_id} of {where}: example {record.example} of {record.environment}")
    reward = "none" if record.reward is None else f"{record.reward:.6g}"
    outcome = outcome or f"advantage {_signed(record.advantage) or 'none'}, {record.outcome}"
    heading(f"reward {reward}, {outcome}", "" if record.error is None else "red")
    if record.answer is not None:
        say("right answer", record.answer, "yellow")
    for name in ("metrics", "state", "player_rewards", "player_advantages"):
        if content := record.fields.get(name):
            shown = _as_json(content)
            heading(f"{name} {shown if longest is None else clipped(shown, longest)}", "")
    turns = record.turns
    others = _opponent_turns(record)[:most]
    for number, turn in enumerate(turns[:most], start=1):
        while others and others[0][0] < number:
            say(*others.pop(0)[1:], "magenta")
        title = f"turn {number} of {len(turns)}" + (f", {player}" if (player := turn.get("player")) else "")
        prompt: object = turn.get("prompt")
        completion: object = turn.get("completion")
        spoken = messages_of(prompt) if isinstance(prompt, str) and not tokens else []
        if any(role for role, _ in spoken):
            for role, content in spoken[:most]:
                say(f"{title}, {role or 'prompt'}", content, "cyan")
            completion = without_end(completion) if isinstance(completion, str) else completion
        else:
            say(f"{title}, prompt: {turn.get('prompt_tokens')} tokens", prompt, "cyan")
        name = "answer" if number == len(turns) else "completion"
        how = (
            f"{turn.get('completion_tokens')} tokens, {turn.get('finish_reason')}, policy {turn.get('policy_version')}"
        )
        if untrained := turn.get("untrained_tokens"):
            how += f", {untrained} tokens untrained"
        if (reward_of_turn := finite_number(turn.get("reward"))) is not None:
            how += f", reward {reward_of_turn:.6g}"
        if (advantage := finite_number(turn.get("advantage"))) is not None:
            how += f", advantage {_signed(advantage)}"
        say(f"{title}, {name}: {how}", completion, "green")
    if most is not None and len(turns) > most:
        heading(f"and {len(turns) - most} turns more")
    for _, title, text in others:
        say(title, text, "magenta")


def _opponent_turns(record: RolloutRecord) -> list[tuple[int, str, object]]:
    """Returns after how many turns of the policy each other one spoke, who, and what, in order; the record may hold anything."""
    turns = [(turn.get("before"), turn) for turn in record.opponent_turns]
    return [
        (after if isinstance(after, int) else 0, f"opponent {turn.get('opponent')}", turn.get("completion"))
        for after, turn in turns
    ]


def _print_text(console: Console, title: str, text: object, style: str) -> None:
    console.print(Text(_one_line(title), f"bold {style}"), soft_wrap=True)
    if not isinstance(text, str):
        shown = Text("no text was recorded (recorded_tokens = 0, or an older version wrote the record)", "dim")
    else:
        shown = Text(printable(text).expandtabs())
    if console.is_terminal:
        console.print(Padding(shown, (0, 0, 0, INDENT), expand=False))
    else:  # the lines as they are, however long
        for line in shown.plain.split("\n"):
            console.print(Text(" " * INDENT + line), soft_wrap=True)


def _one_line(text: str) -> str:
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def _as_json(value: object) -> str:
    try:
        return dumps(value).decode()
    except orjson.JSONEncodeError:
        return "(nested too deeply to show)"


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.4g}"
