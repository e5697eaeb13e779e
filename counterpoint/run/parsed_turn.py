"""What a turn says: its text, reasoning and calls of tools, as the servers' parsers and the tools' schemas have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from counterpoint.environments.base import Reply
from counterpoint.environments.chat import Chat, Tool
from counterpoint.environments.tools.calls import read_calls
from counterpoint.inference.base import ParsedText
from counterpoint.transport.records import Turn


@runtime_checkable
class ParsingPool(Protocol):
    """A pool whose servers parse, too."""

    @property
    def parses_reasoning(self) -> bool:
        """Whether a server in service says that it has a parser of reasoning."""

    async def parse(
        self,
        token_ids: list[int],
        tools: Sequence[Any],
        template_kwargs: dict[str, Any],
        *,
        cut: bool,
        server: str | None,
    ) -> ParsedText:
        """Returns what a completion says, of one that was `cut` no call that is not whole. Raises `InferenceError`."""


async def parsed_turn(
    pool: object,
    chat: Chat,
    turn: Turn,
    tools: Sequence[Tool],
    template_kwargs: dict[str, Any],
    new_call_id: Callable[[], str],
    *,
    reasoning: bool,
) -> Reply:
    """Returns what a turn says, as `environments.base.Model.parse`; `template_kwargs` rendered its prompt.

    Raises `TypeError` for a pool that does not parse, and `InferenceError`.
    """
    token_ids = turn.completion_ids.tolist()
    if not tools and not (reasoning and isinstance(pool, ParsingPool) and pool.parses_reasoning):
        return Reply(chat.decode(token_ids))
    cut = not token_ids or token_ids[-1] not in chat.stop_token_ids
    if not cut:
        token_ids.pop()
    if not isinstance(pool, ParsingPool):
        raise TypeError(f"{type(pool).__name__} generates, but does not parse")
    # What is cut matters to calls only.
    parsed = await pool.parse(token_ids, tools, template_kwargs, cut=cut and bool(tools), server=turn.server)
    if not tools:
        return Reply(parsed.content, parsed.reasoning, malformed=parsed.malformed)
    said = _said_of_cut(turn, parsed) if cut else ""
    return read_calls(
        parsed.calls, tools, new_call_id, parsed.content, parsed.reasoning, malformed=parsed.malformed, cut=said
    )


def _said_of_cut(turn: Turn, parsed: ParsedText) -> str:
    """Returns what a model is told of a turn that it did not end, and whose calls may be fewer than it meant; else nothing."""
    is_long = turn.finish_reason == "length"
    if not parsed.malformed and not (is_long and parsed.calls):
        return ""
    how = f"was cut at its limit of {len(turn.completion_ids)} tokens" if is_long else "was ended by a stop string"
    made = "only the calls that were complete by then were made" if parsed.calls else "no call was complete by then"
    return f"Your turn {how}; {made}."
