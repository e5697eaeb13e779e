"""Rehearses a job's own environments before a server starts: in a child process, with made-up answers in the model's place.

The parent, `counterpoint run` and its `--dry-run`, refuses the job if every rollout fails for a reason that no model can change,
such as a `score` that returns None. Whatever else is odd is one line, since a made-up answer proves less than a model's: the
rewards do not tell a right answer from wrong ones, or an environment takes long to start. `counterpoint env check` says more.
"""

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
from counterpoint.job.check import in_child, own_answer
from counterpoint.job.config import JobConfig
from counterpoint.job.configuration.layers import forget_environment
from counterpoint.job.environments.rehearsal import answers_to, rehearse
from counterpoint.orchestrator.rollouts.failures import NO_TURN, kind_of
from counterpoint.orchestrator.rollouts.play import sampling_parameters
from counterpoint.orchestrator.step.advantages import differ
from counterpoint.run.config import RunConfig
from counterpoint.transport.errors import UserError
from counterpoint.transport.printable import printable, shortened
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


def rehearse_runs(config: JobConfig, model: Path) -> None:
    """Rehearses the environments of the job's own kinds; prints what is odd on standard error.

    `model` is the model's directory. Raises `UserError` for an environment of which nothing can succeed.
    """
    runs = [run for run in config.every_run if any(_is_own(each) for each, _ in run.every_environment.values())]
    if not runs:
        return
    given = b"\n".join(run.model_copy(update={"model": str(model)}).model_dump_json().encode() for run in runs)
    code, said = in_child(["-m", __name__, str(config.inference.max_model_len)], given, {})
    if code != 0:  # a process that is killed, or that waits without end, shows nothing
        return
    found = orjson.loads(said)
    for text in found["odd"]:
        _say(f"warning: {text}")
    if found["hopeless"]:
        raise UserError(found["hopeless"][0])


def main() -> int:
    """Runs the child: one run's configuration a line on standard input; `{"hopeless": [...], "odd": [...]}` on its output."""
    context = int(sys.argv[1])
    runs = [RunConfig.model_validate_json(line) for line in sys.stdin.buffer]
    forget_environment()
    found: dict[str, list[str]] = {"hopeless": [], "odd": []}
    with own_answer() as answer:
        for run in runs:
            chat = Chat(run.model)
            for config, sampling in _different(run):
                kind, text = _rehearsed(run, config, sampling, chat, context)
                if text:
                    found[kind].append(f"{f'run {run.run_id!r}: ' if len(runs) > 1 else ''}{text}")
        answer.write(orjson.dumps(found).decode())
    return 0


def _different(run: RunConfig) -> Iterator[tuple[EnvironmentConfig, SamplingConfig]]:
    """Yields each environment of the run's own kinds once, however often training and evaluations name it."""
    seen: list[tuple[str, object]] = []
    for config, sampling in run.every_environment.values():
        if _is_own(config) and (config.kind, config.args) not in seen:
            seen.append((config.kind, config.args))
            yield config, sampling


def _is_own(config: EnvironmentConfig) -> bool:
    return ":" in config.kind


def _rehearsed(
    run: RunConfig, config: EnvironmentConfig, sampling: SamplingConfig, chat: Chat, context: int
) -> tuple[str, str]:
    """Returns the list that a sentence about the environment belongs to, and the sentence; an empty one if all is well."""
    where = f"environment {config.name!r} ({config.kind})"
    chat = chat.with_template_kwargs(sampling.chat_template_kwargs)
    environment = load_here(config)

    async def played() -> list[Rollout]:
        async with asyncio.timeout(PATIENCE_SECONDS), started(environment, place):
            parameters = sampling_parameters(sampling, chat)
            return await rehearse(config, environment, parameters, chat, context, _say, [*run.opponents])

    with tempfile.TemporaryDirectory(prefix="counterpoint-") as directory:
        place = EnvironmentContext(
            config.name, Path(directory), Path(run.model), seed=0, own_process=config.workers > 0
        )
        try:
            return _verdict(where, asyncio.run(played()), environment.example(0))
        except TimeoutError:
            return "odd", f"{where} was not rehearsed: it does not start and play within {PATIENCE_SECONDS:g} s"
        except ValueError as error:  # of its start, which may need what runs only beside the job
            return "odd", f"{where} was not rehearsed: {error}"


def _say(text: str) -> None:
    sys.stderr.write(f"{printable(text)}\n")


def _verdict(where: str, played: list[Rollout], example: Example) -> tuple[str, str]:
    failed = [rollout.error for rollout in played if rollout.error is not None]
    if failed:
        hopeless = len(failed) == len(played) and all(kind_of(error) in _HOPELESS for error in failed)
        words = f"{where}: with made-up answers in the model's place {len(failed)} of {len(played)} rollouts failed: {failed[-1]}"
        return "hopeless" if hopeless else "odd", words
    rewards = [rollout.reward for rollout in played if rollout.reward is not None]
    right, *wrong = answers_to(example)
    if example.answer and len(rewards) == 1 + len(wrong) and not differ(rewards):
        shown, others = shortened(right, _LONGEST), " and ".join(map(repr, wrong))
        return "odd", (
            f"{where}: the first example's own answer {shown!r} has the reward {rewards[0]:g}, as {others} have. That is right "
            "only where an answer takes more than that text: nothing is learned from groups with equal rewards "
            "(`counterpoint env check` plays a model)"
        )
    return "odd", ""


if __name__ == "__main__":
    sys.exit(main())
