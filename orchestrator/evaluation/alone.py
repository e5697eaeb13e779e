"""Plays evaluations alone, beside no training, for `counterpoint eval`, which gives it the servers.

Plays rollouts as beside training (`attempt.py`), up to as many at once as the run may have in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from counterpoint.environments.chat import Chat
from counterpoint.inference.base import WeightUpdate
from counterpoint.inference.loads import Stated
from counterpoint.inference.pool.pool import InferencePool
from counterpoint.orchestrator.evaluation.attempt import EvaluationAttempt
from counterpoint.orchestrator.evaluation.lines import EVALUATIONS_FILE
from counterpoint.orchestrator.evaluation.loading import LoadedEvaluation, environments_started, load_evaluation
from counterpoint.orchestrator.evaluation.result import EvaluationResult
from counterpoint.orchestrator.opponents import opponents_of
from counterpoint.orchestrator.other_servers import check_reading
from counterpoint.orchestrator.rollouts.transcripts import Transcriber
from counterpoint.orchestrator.step.records import write_records
from counterpoint.run.config import RunConfig
from counterpoint.run.loop_health.threads import give_environments_threads, in_thread
from counterpoint.transport.files.atomic import flush
from counterpoint.transport.files.json_lines import append_line

PROGRESS_SECONDS = 15.0
"""Seconds between two reports of an evaluation's progress."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The weights to evaluate, and their name."""

    name: str
    """The model's name at the servers: the base model's, or an adapter's."""
    described: dict[str, Any]
    """Its description in each line of the results."""
    step: int | None = None
    """The run's step of its weights, if known."""
    update: WeightUpdate | None = None
    """The adapter to load first, or None if the servers have the model."""
    follows: bool = False
    """Whether the servers belong to others, with runs that may load newer weights at any time. The evaluation then takes the
    weights that they report."""


def load_evaluations(run: RunConfig, names: Sequence[str]) -> list[LoadedEvaluation]:
    """Loads the run's evaluations with these names, or all. Raises `ValueError`."""
    known = [evaluation.name for evaluation in run.evaluations]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"there is no evaluation {unknown[0]!r}; the file has {', '.join(known) or 'none'}")
    if not known:
        raise ValueError("the file has no evaluations; write [[orchestrator.evaluations]] (docs/evaluation.md)")
    chat = Chat(run.model)
    return [load_evaluation(run, each, chat) for each in run.evaluations if not names or each.name in names]


async def play_evaluations(
    run: RunConfig,
    evaluations: Sequence[LoadedEvaluation],
    subject: Subject,
    directory: Path,
    on_result: Callable[[EvaluationResult], None],
    on_progress: Callable[[str], None] = lambda words: None,
) -> list[EvaluationResult]:
    """Plays the evaluations one after the other, writes lines and records to `directory`, and returns the results.

    Makes the directory for the first of them. Calls `on_progress` every `PROGRESS_SECONDS`.

    Raises `InferenceError` if no server is ready or takes the weights, its subclass `ModelNotServed` if none has the model,
    `ValueError` if an environment does not start, `OSError` if a result cannot be written.
    """
    give_environments_threads(run.schedule.most_in_flight)
    transcribe = Transcriber(Chat(run.model).transcribe, run.recorded_tokens) if run.recorded_tokens else None
    results: list[EvaluationResult] = []
    async with AsyncExitStack() as resources:
        servers = InferencePool(run.inference)
        pool = servers.model(subject.name, follows=subject.follows)
        resources.push_async_callback(pool.release)
        await pool.start()
        if subject.update is not None:
            await pool.update(subject.update)
        else:
            await pool.check_model(subject.name)
        if run.inference.protocol == "openai":
            reads = partial(pool.detokenize, affinity="the tokenizer of the servers")
            await check_reading(reads, await in_thread(Chat, run.model), "inference")
        opponents = await resources.enter_async_context(opponents_of(run, servers))
        environments = environments_started(evaluations, directory / "environments", Path(run.model), run.seed)
        await resources.enter_async_context(environments)
        for loaded in evaluations:
            attempt = EvaluationAttempt(loaded, subject.step or 0, pool, opponents)
            held = await pool.stated() if subject.follows else {}
            await _play(attempt, run.schedule.most_in_flight, on_progress)
            weights = [held, await pool.stated()] if subject.follows else []
            result = _of_subject(await attempt.result(), subject, weights)
            await in_thread(_write, directory, loaded, result, attempt, transcribe)
            results.append(result)
            on_result(result)
    return results


async def _play(attempt: EvaluationAttempt, most: int, on_progress: Callable[[str], None]) -> None:
    """Plays all rollouts, up to `most` at a time, in order."""

    async def say() -> None:
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            ended, total = attempt.ended, len(attempt.rollouts)
            on_progress(f"evaluation {attempt.name}: {ended} of {total} rollouts have ended")

    indices = iter(range(len(attempt.rollouts)))

    async def play_next() -> None:
        for index in indices:
            await attempt.play(index)

    saying = asyncio.create_task(say(), name="progress of the evaluation")
    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(most, len(attempt.rollouts))):
                tasks.create_task(play_next())
    finally:
        saying.cancel()


def _of_subject(
    result: EvaluationResult, subject: Subject, weights: Sequence[Mapping[str, Stated]]
) -> EvaluationResult:
    """Returns the result with the step or versions of the weights.

    A subject has one step. Others' servers reported their versions before and afterwards, in `weights`: a run that goes on
    loads newer ones. The weights that a server started with have no number.
    """
    versions: list[int | None] = [each.version for held in weights for each in held.values()] or [subject.step]
    known = [version for version in versions if version is not None]
    if len(known) < len(versions) or len({frozenset(held) for held in weights}) > 1:  # one did not say it each time
        known = []
    first, last = min(known, default=None), max(known, default=None)
    line = {"step": first if first == last else None, "policy_version/min": first, "policy_version/max": last}
    described = [{"server": url, **asdict(each)} for held in weights for url, each in held.items()]
    unique = [each for place, each in enumerate(described) if each not in described[:place]]
    return replace(result, line=result.line | line | subject.described | ({"weights": unique} if unique else {}))


def _write(
    directory: Path,
    loaded: LoadedEvaluation,
    result: EvaluationResult,
    attempt: EvaluationAttempt,
    transcribe: Transcriber | None,
) -> None:
    own = directory / loaded.config.name
    own.mkdir(parents=True, exist_ok=True)
    columns: Mapping[str, Sequence[str]] = {each.name: each.state_columns for each in loaded.config.environments}
    write_records(own / "rollouts.jsonl", attempt.rollouts, columns, transcribe)
    flush(own / "rollouts.jsonl")
    append_line(directory / EVALUATIONS_FILE, result.line, durable=True)
