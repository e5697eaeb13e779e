"""Jobs with rollouts as the orchestrator writes them, for tests of what is shown of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from counterpoint.environments.chat import Chat
from counterpoint.orchestrator.rollouts.token_file import TOKENS_FILE
from counterpoint.orchestrator.rollouts.transcripts import Transcriber
from counterpoint.orchestrator.step.records import write_records
from counterpoint.transport.files.atomic import publish_directory
from counterpoint.transport.records import Rollout
from tests.support.rollouts import make_rollout, make_turn

HOSTILE = "<script>alert(1)</script>\x1b[2J\u202eevil\u202c\x00 & <img src=x onerror=alert(1)>"

OF_TURNS: dict[str, Any] = {
    "turn_rewards": np.array([0.25, -1.0], np.float32),
    "turn_advantages": np.array([0.5, 0.0], np.float32),
}
"""The rewards and advantages of a rollout's two turns."""


def write_step(
    job: Path, run: str, step: int, rollouts: Sequence[Rollout], chat: Chat | None = None, tokens: int = 4096
) -> Path:
    """Publishes a step's rollouts, with text and tokens if there is a `chat`; returns the file of records."""
    directory = job / f"run_{run}" / "rollouts" / f"step_{step}"
    names = {rollout.environment: ["answer"] for rollout in rollouts}
    with publish_directory(directory, durable=False) as partial:
        transcribe = Transcriber(chat.transcribe, tokens) if chat is not None else None
        write_records(partial / "rollouts.jsonl", rollouts, names, transcribe, partial / TOKENS_FILE)
    return directory / "rollouts.jsonl"


def write_lines(job: Path, run: str, step: int, lines: bytes) -> Path:
    """Publishes a step's file of records with these bytes; returns it."""
    directory = job / f"run_{run}" / "rollouts" / f"step_{step}"
    with publish_directory(directory, durable=False) as partial:
        (partial / "rollouts.jsonl").write_bytes(lines)
    return directory / "rollouts.jsonl"


def spoken(chat: Chat, group: int, *said: str, player: str = "", **fields: object) -> Rollout:
    """A rollout of a conversation in which the model said this."""
    turns, prompt = [], list(chat.start([{"role": "user", "content": f"question {group}"}]))
    for answer in said:
        completion = [*chat.encode(answer), *chat.stop_token_ids]
        values = [-0.01 * (index + 1) for index in range(len(completion))]
        turn = make_turn(prompt, completion, log_probabilities=values)
        turns.append(replace(turn, policy_version=2, player=player))
        prompt = list(chat.extend(turns[-1], [{"role": "user", "content": "and then?"}]))
    return make_rollout(group, 0, turns=turns, **fields)


def name_model(job: Path, model: Path) -> None:
    """Writes as much of a job's `job.json` as says which model it has."""
    (job / "job.json").write_bytes(orjson.dumps({"trainer": {"model": str(model)}, "orchestrator": {}}))
