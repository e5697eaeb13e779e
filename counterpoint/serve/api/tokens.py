"""`.../rollouts/{number}/turns/{turn}/tokens`: single tokens with their log-probabilities."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from counterpoint.job.reading.rollouts.line_index import record_in
from counterpoint.job.reading.rollouts.step_indexes import moment
from counterpoint.job.reading.rollouts.tokens import TokensAnswer, turn_tokens
from counterpoint.serve.api.rollout_entries import ROLLOUT, OneRollout, line_of
from counterpoint.serve.endpoint import Endpoint, reads
from counterpoint.serve.errors import NotFound
from counterpoint.serve.jobs import Jobs

TOKENS_SECONDS = 3.0


class TokensParameters(OneRollout):
    """Which tokens."""

    turn: int = Field(ge=0, le=100_000)
    """The turn, from 0."""
    begin: int = Field(default=0, ge=0, le=100_000_000)
    """Recorded tokens to pass over."""
    most: int = Field(default=4096, ge=1, le=8192)
    """Most tokens that are returned."""


@reads(f"{ROLLOUT}/turns/{{turn}}/tokens", "Shows a turn's tokens.", reads_records=True)
def show_tokens(jobs: Jobs, given: TokensParameters) -> TokensAnswer:
    """Answers single tokens."""
    (_, row), line = line_of(jobs, given)
    record = record_in(line) if row.outcome != "damaged" else None
    if record is None:
        raise NotFound("this line of the step's file is no record", where="number", value=str(given.number))
    directory = jobs.get(given.job).directory
    return turn_tokens(
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


ENDPOINTS: tuple[Endpoint[Any, Any], ...] = (show_tokens,)
