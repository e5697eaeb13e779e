"""What the runs that share a connection to the trainer have said and heard: no thread, no clock and no event loop.

Each run greets the trainer by each connection, has a session of its own, and is refused or evicted alone. `link.py` runs it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from counterpoint.transport import codec
from counterpoint.transport.arrays import CodecError
from counterpoint.transport.files.atomic import Buffer
from counterpoint.transport.messages import (
    Acknowledged,
    Answered,
    Ask,
    Bye,
    Commit,
    Evicted,
    Hello,
    HelloRefused,
    Offer,
    Ready,
    Rejected,
    ToOrchestrator,
    Waiting,
)
from counterpoint.transport.outages import OutageKind, Outages
from counterpoint.transport.wires.zmq_wire import ZmqConnection

logger = logging.getLogger(__name__)

_DISPLACEMENTS = 3
"""How often a run that was replaced greets again before another batch has come through. Its own earlier `Hello`, read late, may
have replaced it. If another orchestrator of the run did, the run gives up after these attempts."""


@dataclass(slots=True)
class Conversation:
    """What one run has said and heard."""

    hello: Hello
    """The greeting, which is said first on each connection."""
    heard: Callable[[ToOrchestrator], None]
    """Is called with each message of the trainer."""
    session: int | None = None
    next_step: int = 0
    """The next step by the last READY."""
    awaits_answer: bool = False
    """Whether nothing has come since `hello` was said."""
    displaced: int = 0
    may_hear_of_earlier: bool = False
    """Whether what comes may be meant for its earlier self, which has left by this connection."""


class Conversations:
    """The conversations of all runs of one connection."""

    def __init__(self, connection: ZmqConnection, outages: Outages) -> None:
        """Reports the trainer's outages to `outages`."""
        self._connection = connection
        self._peer = connection.peer
        self._outages = outages
        self._of: dict[str, Conversation] = {}
        self._left: set[str] = set()
        """The runs that have left by this connection."""
        self._has_left = False
        """Whether the trainer's last message was BYE, which says more about its absence than what the wire sees."""
        self.connected = False
        self._is_out("is not connected", "it was not reached yet", level=logging.INFO)

    def __len__(self) -> int:
        """Returns the number of conversations."""
        return len(self._of)

    # --- this end ---

    def join(self, conversation: Conversation) -> None:
        """Begins a run's conversation: it greets now, or once there is a connection."""
        run_id = conversation.hello.run_id
        self._of[run_id] = conversation
        conversation.may_hear_of_earlier = run_id in self._left
        if self.connected:
            self._greet(conversation)

    def say(self, conversation: Conversation, message: Offer | Ask | Commit) -> None:
        """Says something in the run's session, or drops it if that is over. Raises `ValueError` for what cannot travel."""
        run_id = conversation.hello.run_id
        if message.session != conversation.session:
            logger.debug("dropped a message of an earlier session of run %s with %s", run_id, self._peer)
            return
        try:
            match message:
                case Commit():
                    frames = codec.encode_message(message, run_id)
                case Ask():
                    frames = codec.encode_ask(message, run_id)
                case Offer():
                    frames = codec.encode_offer(message)
        except Exception as error:  # whatever is wrong with it, the other runs go on
            raise ValueError(f"what run {run_id} sends cannot travel: {error!r}") from error
        self._connection.write(frames)

    def leave(self, conversation: Conversation) -> None:
        """Ends a run's conversation with `Bye`."""
        run_id = conversation.hello.run_id
        del self._of[run_id]
        self._left.add(run_id)
        if self.connected:
            self._connection.write(codec.encode_message(Bye(), run_id))
            self._end_outage()

    # --- the connection ---

    def begin(self) -> None:
        """Notes that there is a connection: every run greets."""
        self.connected, self._has_left = True, False
        self._left.clear()
        for conversation in self._of.values():
            conversation.may_hear_of_earlier = False
            self._greet(conversation)

    def lose(self, reason: str, since: float) -> None:
        """Notes that the connection is lost; the trainer was last heard of at `since`, in Unix seconds."""
        self.connected = False
        for conversation in self._of.values():
            conversation.session = None
        if not self._has_left:
            self._is_out("is not connected", reason, since=since, level=logging.WARNING)

    def hear(self, frames: Sequence[Buffer]) -> bool:
        """Takes a message of the trainer. Returns whether it is the answer to a greeting."""
        try:
            run_id, message = codec.run_of(frames), codec.decode_message(frames)
        except CodecError as error:
            logger.warning("dropped a message from %s: %s", self._peer, error)
            if self._unanswered:
                self._is_out("is of another version, or no trainer", f"its answer to HELLO cannot be read: {error}")
            return False
        if isinstance(message, Hello | Commit):
            logger.warning("dropped a %s from %s: it is no trainer", type(message).__name__.upper(), self._peer)
        elif isinstance(message, Rejected) and not run_id:  # of a trainer of another version
            for conversation in self._unanswered:
                conversation.awaits_answer = False
                conversation.heard(HelloRefused(message.step, message.reason))
        elif (addressed := self._of.get(run_id)) is None:
            logger.debug("dropped a message from %s for run %s, which has left", self._peer, run_id)
        elif not self._is_displaced(addressed, message):
            return self._take(addressed, message)
        return False

    def _is_displaced(self, conversation: Conversation, message: ToOrchestrator) -> bool:
        """Whether the message says that another connection has the run's place, which it then takes back for some times.

        Also whether it sends the run's earlier self away: if it means this one, the trainer says it again.
        """
        if isinstance(message, Evicted) and conversation.may_hear_of_earlier:
            conversation.may_hear_of_earlier = False
            self._greet(conversation)
            return True
        if not isinstance(message, Rejected) or message.session is not None:
            return False
        if conversation.session is not None:
            if conversation.displaced == _DISPLACEMENTS:
                return False
            conversation.displaced += 1
            run_id = conversation.hello.run_id
            logger.warning("%s took another connection for run %s's newest; greeting anew", self._peer, run_id)
            self._greet(conversation)
        return True  # without a session it is about what was said before the newest greeting

    def _take(self, conversation: Conversation, message: ToOrchestrator) -> bool:
        conversation.awaits_answer = False
        is_answer = isinstance(message, Ready | Waiting | Evicted)
        if isinstance(message, Ready):
            conversation.session, conversation.next_step = message.session, message.next_step
        elif (isinstance(message, Acknowledged) and message.step >= conversation.next_step) or isinstance(
            message, Answered
        ):
            conversation.displaced = 0  # a batch of this session has come through
        elif isinstance(message, Evicted | Bye):
            conversation.session = None
        self._note_bye(conversation, message)
        if is_answer:
            self._end_outage()
        conversation.heard(message)
        return is_answer

    def _note_bye(self, conversation: Conversation, message: ToOrchestrator) -> None:
        self._has_left = isinstance(message, Bye) and all(each.session is None for each in self._of.values())
        reason = (message.reason if isinstance(message, Bye) else "") or "it gave no reason"
        if self._has_left:
            self._is_out("has left", reason, level=logging.WARNING)
        elif isinstance(message, Bye):
            logger.warning("%s said BYE to run %s alone: %s", self._peer, conversation.hello.run_id, reason)

    def _greet(self, conversation: Conversation) -> None:
        conversation.session, conversation.awaits_answer = None, True
        self._connection.write(codec.encode_message(conversation.hello))
        level = None if self._outages.of(self._peer) else logging.INFO
        self._is_out("has not answered HELLO", "it is connected, and answers between two steps", level=level)

    def _end_outage(self) -> None:
        if self._of and not (self._has_left or self._unanswered):
            self._outages.end(self._peer)

    @property
    def _unanswered(self) -> list[Conversation]:
        return [each for each in self._of.values() if each.awaits_answer]

    def _is_out(self, what: str, reason: str, *, since: float | None = None, level: int | None = None) -> None:
        self._outages.begin(OutageKind.TRAINER, self._peer, what, reason, since=since, level=level)
