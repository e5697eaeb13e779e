"""Conversations to imitate, as token ids and a loss mask: what the assistant wrote is trained, everything else is read.

A turn is split as in a rollout: its prompt up to where the assistant is to write (`Chat.start`), then what the assistant wrote
up to and including the token that ends it. The turn is encoded as what follows the prompt, whose tokens stay those that the
model reads when it writes the turn: a tokenizer may put a space before every text, which no turn begins with. Where the
template renders a conversation differently once further turns follow (it drops earlier reasoning, say), the turn begins a
sample of its own, as a rollout's turn does whose prompt does not extend the one before. Where a template writes no end of a
turn, and the model ends it by the token that begins the next role's, as GLM's do, that token is trained.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from counterpoint.environments.chat import Chat, Message, Tool


@dataclass(slots=True)
class Demonstration:
    """One sequence to train on."""

    token_ids: list[int] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    """Whether each token is trained."""

    def add(self, token_ids: Sequence[int], trained: int) -> None:
        """Appends tokens of which the first `trained` are trained."""
        self.token_ids += token_ids
        self.trained += [index < trained for index in range(len(token_ids))]


def demonstrations_of(
    chat: Chat, messages: Sequence[Message], tools: Sequence[Tool] = (), untrained: Container[int] = ()
) -> list[Demonstration]:
    """Returns the sequences of one conversation, in order; what follows the last assistant message is left out.

    `untrained` are the positions of messages that are read and not trained, whatever their role.

    Raises `ValueError` where nothing would be trained, or the template cannot be split at the assistant's turns.
    """
    chat.check_kept(messages, tools, answers=True)
    found: list[Demonstration] = []
    text, is_ended, is_trained = "", True, False
    for index, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        prompt = chat.render(messages[:index], tools, add_generation_prompt=True)
        whole = chat.render(messages[: index + 1], tools, add_generation_prompt=False)
        if not whole.startswith(prompt):
            raise ValueError(
                f"the chat template writes message {index} of role assistant differently from where it lets the assistant write: "
                f"{prompt[-40:]!r} does not begin it; set chat_template_kwargs, or another chat template, so that it does"
            )
        if not found or not prompt.startswith(text):
            found.append(Demonstration())
            text, is_ended = "", True
        if index not in untrained:
            chat.warn_of_lost(messages[: index + 1], tools, whole, len(text))
        before = chat.encode(prompt[len(text) :])
        ends_turn = not is_ended and bool(before) and before[0] in chat.stop_token_ids
        found[-1].add(before, int(ends_turn and is_trained))
        joined = chat.encode(whole[len(text) :])
        follows = joined[: len(before)] == before
        written = joined[len(before) :] if follows else chat.encode(whole[len(prompt) :])
        ends = [place for place, token in enumerate(written) if token in chat.stop_token_ids]
        is_trained = index not in untrained
        found[-1].add(written, (ends[-1] + 1 if ends else len(written)) if is_trained else 0)
        text, is_ended = whole, bool(ends)
    if not found:
        raise ValueError("it has no message of role assistant; there is nothing to train")
    for each in found:
        each.trained[:1] = [False] * len(each.trained[:1])  # nothing comes before it that could predict it
    if untrained:
        found = [each for each in found if any(each.trained)]
        if not found:
            raise ValueError("no message of role assistant is to be trained; there is nothing to train")
    if not any(any(each.trained) for each in found):
        raise ValueError("the chat template writes nothing of what its assistant says; there is nothing to train")
    return found
