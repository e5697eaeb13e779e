"""The child of `before_start.py`: rehearses environments of runs, and says what is hopeless and what is odd."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import orjson

from counterpoint.environments.base import EnvironmentContext, Example
from counterpoint.environments.chat import Chat
from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.lifecycle import started
from counterpoint.environments.registry import load_here
from counterpoint.environments.sampling import SamplingConfig
from counterpoint.job.check import own_answer
from counterpoint.job.configuration.layers import forget_environment
from counterpoint.job.environments.before_start import played_of, say
from counterpoint.job.environments.rehearsal import answers_to, rehearse
from counterpoint.orchestrator.credit.equal_rewards import differ
from counterpoint.orchestrator.rollouts.failures import NO_TURN, kind_of
from counterpoint.orchestrator.rollouts.play import sampling_parameters
from counterpoint.run.config import RunConfig
from counterpoint.transport.printable import shortened
from counterpoint.transport.records import Rollout

PATIENCE_SECONDS = 20.0
"""An environment that takes longer to start and to play is not rehearsed to its end."""

_HOPELESS = frozenset(
    {"ImportError", "ModuleNotFoundError", "NameError", "NoReward", "NotImplementedError", "StateError", NO_TURN}
    | {"UnboundLocalError"}
)
"""Kinds of errors that no answer of a model changes. Others may be about the made-up answer, such as an `AttributeError` where a
pattern does not match it."""

_LONGEST = 80


def main() -> int:
    """Reads one run's configuration a line on standard input; `{"hopeless": [...], "odd": [...]}` on its output."""
    context = int(sys.argv[1])
    runs = [RunConfig.model_validate_json(line) for line in sys.stdin.buffer]
    forget_environment()
    found: dict[str, list[str]] = {"hopeless": [], "odd": []}
    with own_answer() as answer:
        for run in runs:
            chat = Chat(run.model)
            for config, sampling, is_whole in _different(run):
                kind, text = _rehearsed(run, config, sampling, chat, context, is_whole)
                if text:
                    found[kind].append(f"{f'run {run.run_id!r}: ' if len(runs) > 1 else ''}{text}")
        answer.write(orjson.dumps(found).decode())
    return 0


def _different(run: RunConfig) -> Iterator[tuple[EnvironmentConfig, SamplingConfig, bool]]:
    """Yields each environment that is played once, however often training and evaluations name it, and whether it is whole."""
    seen: list[tuple[str, object]] = []
    for config, sampling in run.every_environment.values():
        if (played := played_of(config)) is not None and (config.kind, config.args) not in seen:
            seen.append((config.kind, config.args))
            yield played, sampling, played == config


def _rehearsed(
    run: RunConfig, config: EnvironmentConfig, sampling: SamplingConfig, chat: Chat, context: int, is_whole: bool
) -> tuple[str, str]:
    """Returns the list that a sentence about the environment belongs to, and the sentence; an empty one if all is well."""
    where = f"environment {config.name!r} ({config.kind})"
    chat = chat.with_template_kwargs(sampling.chat_template_kwargs)
    environment = load_here(config)

    async def played() -> list[Rollout]:
        async with asyncio.timeout(PATIENCE_SECONDS), started(environment, place):
            parameters = sampling_parameters(sampling, chat)
            return await rehearse(config, environment, parameters, chat, context, say, [*run.opponents])

    with tempfile.TemporaryDirectory(prefix="counterpoint-") as directory:
        place = EnvironmentContext(
            config.name, Path(directory), Path(run.model), seed=0, own_process=config.workers > 0
        )
        try:
            return _verdict(where, asyncio.run(played()), environment.example(0), is_whole)
        except TimeoutError:
            return "odd", f"{where} was not rehearsed: it does not start and play within {PATIENCE_SECONDS:g} s"
        except ValueError as error:  # of its start, which may need what runs only beside the job
            return "odd", f"{where} was not rehearsed: {error}"


def _verdict(where: str, played: list[Rollout], example: Example, is_whole: bool) -> tuple[str, str]:
    failed = [rollout.error for rollout in played if rollout.error is not None]
    if failed:
        hopeless = len(failed) == len(played) and all(map(_is_hopeless, failed))
        words = f"{where}: with made-up answers in the model's place {len(failed)} of {len(played)} rollouts failed: {failed[-1]}"
        return "hopeless" if hopeless else "odd", words
    rewards = [rollout.reward for rollout in played if rollout.reward is not None]
    right, *wrong = answers_to(example)
    if is_whole and example.answer and len(rewards) == 1 + len(wrong) and not differ(rewards):
        shown, others = shortened(right, _LONGEST), " and ".join(map(repr, wrong))
        return "odd", (
            f"{where}: the first example's own answer {shown!r} has the reward {rewards[0]:g}, as {others} have. That is right "
            "only where an answer takes more than that text: nothing is learned from groups with equal rewards "
            "(`counterpoint env check` plays a model)"
        )
    return "odd", ""


def _is_hopeless(error: str) -> bool:
    """Whether no answer of a model changes the error, which a function in a process of its own may have raised."""
    return not _HOPELESS.isdisjoint((kind_of(error), kind_of(error.partition(" raised ")[2])))


if __name__ == "__main__":
    sys.exit(main())
