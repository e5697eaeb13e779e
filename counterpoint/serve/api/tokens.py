"""`.../rollouts/{number}/turns/{turn}/tokens`: single tokens with their log-probabilities."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from counterpoint.serve.api.rollout_entries import ROLLOUT, OneRollout, line_of
from counterpoint.serve.endpoint import Endpoint, reads
from counterpoint.serve.errors import NotFound
from counterpoint.serve.jobs import Jobs
from counterpoint.serve.readers.rollouts.line_index import record_in
from counterpoint.serve.readers.rollouts.step_indexes import moment
from counterpoint.serve.readers.rollouts.tokens import turn_tokens
from counterpoint.transport.config import Config

TOKENS_SECONDS = 3.0


class TokensParameters(OneRollout):
    """Which tokens."""

    turn: int = Field(ge=0, le=100_000)
    """The turn, from 0."""
    begin: int = Field(default=0, ge=0, le=100_000_000)
    """Recorded tokens to pass over."""
    most: int = Field(default=4096, ge=1, le=8192)
    """Most tokens that are returned."""


class TokensAnswer(Config):
    """The tokens of one completion, as columns of equal length."""

    positions: list[int]
    """The positions in the completion, from 0."""
    token_ids: list[int]
    """The ids in the model's vocabulary."""
    texts: list[str]
    """A character of several tokens is in the last of them; the others are empty."""
    log_probabilities: list[float | None]
    """Log-probabilities at inference, when they were sampled."""
    trainer: list[float | None]
    """Log-probabilities at the trainer; all None where it is not known."""
    trained: list[bool]
    """Whether it may be trained: its environment has not left it out."""
    total: int
    """Tokens of the completion."""
    recorded: int
    """How many of these were recorded."""
    missing: str
    """Why there are no tokens; empty if there are."""
    no_text: str
    """Why the texts are numbers; empty if they are not."""
    no_trainer: str
    """Why the trainer's log-probabilities are not known; empty if they are."""


@reads(f"{ROLLOUT}/turns/{{turn}}/tokens", "Shows a turn's tokens.", reads_records=True)
def show_tokens(jobs: Jobs, given: TokensParameters) -> TokensAnswer:
    """Answers single tokens."""
    (_, row), line = line_of(jobs, given)
    record = record_in(line) if row.outcome != "damaged" else None
    if record is None:
        raise NotFound("this line of the step's file is no record", where="number", value=str(given.number))
    directory = jobs.get(given.job).directory
    found = turn_tokens(
        directory,
        given.run,
        given.step,
        given.number,
        record,
        given.turn,
        given.begin,
        given.most,
        moment(TOKENS_SECONDS),
    )
    return TokensAnswer(
        positions=[token.position for token in found.tokens],
        token_ids=[token.token_id for token in found.tokens],
        texts=[token.text for token in found.tokens],
        log_probabilities=[token.log_probability for token in found.tokens],
        trainer=[token.trainer for token in found.tokens],
        trained=[token.is_trained for token in found.tokens],
        total=found.total,
        recorded=found.recorded,
        missing=found.missing,
        no_text=found.no_text,
        no_trainer=found.no_trainer,
    )


ENDPOINTS: tuple[Endpoint[Any, Any], ...] = (show_tokens,)
