"""The batches of supervised fine-tuning: rows of data in a shuffled order, as samples with the assistant's tokens trained.

Step s takes the rows at positions (s - 1) * samples_per_step up to s * samples_per_step of one endless stream of epochs
(`counterpoint/environments/shuffle.py`), so that a batch depends on its step alone and a resume needs no state. Only the last
batch may be shorter. If `epochs` grows after it was trained, the next one begins where it ended: these ends are all that a resume
is told.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from counterpoint.environments.chat import Chat, Message, Tool
from counterpoint.environments.data.load import load_rows
from counterpoint.environments.data.rows import DataError, Row, digest, unwritable
from counterpoint.environments.demonstrations import Demonstration, demonstrations_of
from counterpoint.environments.messages import Faulty, Normaliser
from counterpoint.environments.shuffle import EpochOrder
from counterpoint.trainer.sft.config import ENVIRONMENT, SftConfig
from counterpoint.transport.rate_limited_log import RateLimitedLog
from counterpoint.transport.records import Batch, SampleInfo

logger = logging.getLogger(__name__)

KNOWN_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython", "observation"})
"""A message of another role is read, as the chat template allows; more likely it is a misspelt `assistant`."""


def conversation_in(row: Row, drawn_by: str | None = None) -> tuple[list[Message], list[Tool], set[int]]:
    """Returns messages and tools of a row in the form that chat templates read, and the messages that are not trained.

    `drawn_by` is the column of the row's own weight. Raises `Faulty`.
    """
    normaliser = Normaliser(is_row=True)
    normaliser.refuse_row(row, drawn_by)
    for name in ("messages", "tools"):
        if found := unwritable(row.get(name)):
            raise Faulty(name, row[name], f"and holds {found}; expected values of JSON")
    messages, tools = normaliser.messages(row.get("messages")), normaliser.tools(row.get("tools"))
    untrained = {index for index, each in enumerate(messages) if each.get("weight") == 0}
    return [{name: each[name] for name in each if name != "weight"} for each in messages], tools, untrained


class SftBatches:
    """The batches of one run, by step."""

    def __init__(self, config: SftConfig, ends: Mapping[int, int] | None = None) -> None:
        """Reads the data and the chat template of `config.model`, a directory. Raises `ValueError` for either.

        `ends`: by step that is trained and had a shorter batch, the position after its last row.
        """
        self._trained_ends = dict(ends or {})
        self._config = config
        self._rows = load_rows(config.data)
        self._chat = Chat(config.model).with_template_kwargs(config.chat_template_kwargs)
        weights = self._rows.weights
        self._order = EpochOrder(len(self._rows), f"{config.seed}/sft", None if weights is None else weights.tolist())
        self._log = RateLimitedLog(logger)
        self._roles = set(KNOWN_ROLES)
        """And those that were logged."""
        self._trains, self._first_made = False, sys.maxsize
        """Whether a batch had a trained token, and the step of the first batch that was asked for."""
        self._left_out = 0
        """Conversations of which nothing was trained, since they are too long."""
        self._drawn = math.ceil(config.epochs * len(self._rows))
        self._ends = {step: end for step, end in sorted((ends or {}).items()) if end < self._drawn}
        step, end = max(self._ends.items(), default=(0, 0))
        self.steps = step + math.ceil((self._drawn - end) / config.samples_per_step)
        """The steps of all epochs; the last may have fewer rows."""
        # It names a column that is missing, or a template that cannot be used, now.
        self._first = self._conversation(0)

    @property
    def identity(self) -> dict[str, object]:
        """What must not change when a run is resumed, for JSON. The tokens of the first row stand for template and tokenizer."""
        config, weights = self._config, self._rows.weights
        tokens = np.array([token for each in self._first for token in each.token_ids], np.int32)
        return {
            "model": config.model,
            "chat_template": digest(tokens.tobytes()),
            "data": self._rows.fingerprint,
            "weights": None if weights is None else digest(weights.tobytes()),
            "seed": config.seed,
            "samples_per_step": config.samples_per_step,
            "longest": config.longest,
            "on_long": config.on_long,
            "chat_template_kwargs": config.chat_template_kwargs,
        }

    @property
    def ends(self) -> dict[int, int]:
        """The position after the last row of each step with a shorter batch, the last one included."""
        return self._ends | ({self.steps: self._drawn} if self._is_short(self.steps) else {})

    def refuse_fewer_epochs(self, trained: int) -> None:
        """Raises `ValueError` if the epochs end before the last row of step `trained`, which would be counted anew."""
        step, end = max(self._trained_ends.items(), default=(0, 0))
        end += (trained - step) * self._config.samples_per_step
        if self._drawn < end:
            raise ValueError(
                f"epochs = {self._config.epochs:g} are {self._drawn} rows, and {end} are trained after step {trained}; epochs "
                "may grow, but not end before what is trained"
            )

    def check_lengths(self) -> None:
        """Reads the rows of all steps. Raises `DataError` for one that is too long with "error", or cannot be trained on."""
        weights = self._rows.weights
        most = len(self._rows) if weights is None else np.count_nonzero(weights)
        drawn: set[int] = set()
        for position in range(self._drawn):
            drawn.add(self._order.at(position))
            if len(drawn) == most:
                break
        logger.info("looks for conversations of more than %d tokens among %d rows", self._config.longest, len(drawn))
        for row in sorted(drawn):
            for each in self._conversation(row):
                self._shortened(row, each)

    def epoch(self, step: int) -> float:
        """Returns how many epochs are trained after `step`."""
        return self._positions(step).stop / len(self._rows)

    def batch(self, step: int) -> Batch:
        """Returns the batch of a step. Raises `DataError`, naming the row, for one that cannot be trained on."""
        samples: list[tuple[str, Demonstration]] = []
        for position in self._positions(step):
            row = self._order.at(position)
            for part, each in enumerate(self._conversation(row)):
                kept = self._shortened(row, each)
                self._left_out += kept is None
                if kept is not None:
                    samples.append((f"{position}-{row}-{part}", kept))
        trained = np.concatenate([np.zeros(0, bool), *(each.trained for _, each in samples)])
        self._count(step, bool(trained.any()))
        zeros_T = np.zeros(len(trained), np.float32)
        return Batch(
            run_id=self._config.run_id,
            step=step,
            samples=tuple(SampleInfo(name, ENVIRONMENT, step - 1, 0.0, 1.0) for name, _ in samples),
            columns={
                "token_ids_T": np.array([token for _, each in samples for token in each.token_ids], np.int32),
                "loss_mask_T": trained.astype(np.uint8),
                "log_probabilities_T": zeros_T,
                "advantages_T": zeros_T,
                "sample_offsets": np.cumsum([0, *(len(each.token_ids) for _, each in samples)], dtype=np.int64),
            },
        )

    def _count(self, step: int, trains: bool) -> None:
        """Says at the end what was left out. Raises `DataError` if all was, since a run without any training is no success."""
        self._first_made = min(self._first_made, step)
        self._trains = self._trains or trains
        if step < self.steps:
            return
        if not self._trains and self._first_made == 1:
            raise DataError(
                f"none of the {self._drawn} rows drawn has an answer within its first {self._config.longest} tokens, so that "
                "nothing would be trained; look at a row (tools as text?), or raise max_length or trainer.max_tokens"
            )
        if self._left_out:
            logger.warning("%d conversations were left out, and not trained", self._left_out)

    def _positions(self, step: int) -> range:
        """Returns the positions of a step's rows in the stream."""
        before, end = max((each for each in self._ends.items() if each[0] < step), default=(0, 0))
        first = end + (step - 1 - before) * self._config.samples_per_step
        return range(first, min(first + self._config.samples_per_step, self._ends.get(step, self._drawn)))

    def _is_short(self, step: int) -> bool:
        return len(self._positions(step)) < self._config.samples_per_step

    def _conversation(self, row: int) -> list[Demonstration]:
        where = self._rows.where(row)
        try:
            messages, tools, untrained = conversation_in(self._rows[row], self._config.data.weight)
            for number, each in enumerate(messages):
                self._warn_of(f"{where}: messages[{number}]", each)
            return demonstrations_of(self._chat, messages, tools, untrained)
        except DataError:
            raise
        except ValueError as error:
            at = error.where if isinstance(error, Faulty) else ""
            advice = " (data.columns takes it from another column)" if at in ("messages", "tools") else ""
            raise DataError(f"{where}: {error}{advice}") from error

    def _warn_of(self, place: str, message: Mapping[str, Any]) -> None:
        """Logs what is allowed, and most likely not meant."""
        role = message["role"]
        if role not in self._roles:
            self._roles.add(role)
            known = ", ".join(sorted(KNOWN_ROLES))
            logger.warning("%s.role is %r, which is read and not trained; known: %s", place, role[:80], known)
        if role == "assistant" and not message.get("content") and not message.get("tool_calls"):
            self._log.note(logging.WARNING, f"{place} is an empty answer; the model learns to end its turn at once")

    def _shortened(self, row: int, each: Demonstration) -> Demonstration | None:
        longest = self._config.longest
        if len(each.token_ids) <= longest:
            return each
        said = f"{self._rows.where(row)}: a conversation of {len(each.token_ids)} tokens; at most {longest} are trained"
        if self._config.on_long == "error":
            raise DataError(f'{said}; raise max_length or trainer.max_tokens, or set on_long = "truncate" or "drop"')
        kept = (
            Demonstration(each.token_ids[:longest], each.trained[:longest])
            if self._config.on_long == "truncate"
            else None
        )
        self._log.note(logging.WARNING, f"{said}: it is {'left out' if kept is None else 'cut'}")
        if kept is not None and not any(kept.trained):
            self._log.note(logging.WARNING, f"{said}, and what is left of it has no answer to train: it is left out")
            return None
        return kept
