"""Checks the messages and tools of a chat request, and gives them the form that templates read.

That form is of `counterpoint/environments/messages.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from counterpoint.environments.chat import Message, Tool
from counterpoint.environments.gateway.errors import GatewayRefused
from counterpoint.environments.gateway.json_body import count_values, refuse_many
from counterpoint.environments.messages import Faulty, Normaliser, json_of

MOST_MESSAGES = 10_000
MOST_TOOLS = 512

Made = TypeVar("Made")


def template_messages(messages: object) -> list[Message]:
    """Returns the messages in the form that templates read. Raises `GatewayRefused`, which names the field at fault."""
    if isinstance(messages, list) and len(messages) > MOST_MESSAGES:
        raise GatewayRefused(f"{len(messages)} messages; at most {MOST_MESSAGES} are taken", parameter="messages")
    return _made(Normaliser(is_row=False, parse=_Arguments().parse).messages, messages)


def template_tools(tools: object) -> list[Tool]:
    """Returns the tools, whose schemas are only shown to the model.

    Raises `GatewayRefused` for what is no function of OpenAI's API.
    """
    if isinstance(tools, list) and len(tools) > MOST_TOOLS:
        raise GatewayRefused(f"{len(tools)} tools; at most {MOST_TOOLS} are taken", parameter="tools")
    return _made(Normaliser(is_row=False).tools, tools)


class _Arguments:
    """Parses the arguments of a request's calls. The check of the body sees them as text, and does not count their values."""

    def __init__(self) -> None:
        self._values = self._digits = 0

    def parse(self, text: str) -> object:
        """Returns what the text says; None if it is not JSON.

        Raises `GatewayRefused` if all that was parsed has too many values.
        """
        values, digits = count_values(text.encode())
        self._values += values
        self._digits += digits
        refuse_many("messages: the arguments of its calls have", self._values, self._digits, "messages")
        return json_of(text)


def _made(make: Callable[[object], list[Made]], given: object) -> list[Made]:
    try:
        return make(given)
    except Faulty as error:
        raise GatewayRefused(str(error), parameter=error.where) from error
