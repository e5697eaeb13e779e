"""Plays an environment as an orchestrator does, several rounds of it, and records what happens.

It uses the orchestrator's own parts, so a rollout fails here for the same reasons and with the same words as in training.
`counterpoint/job/environments/findings.py` says what it means.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import io
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from counterpoint.environments.base import Environment, EnvironmentContext, Example, Model, Score
from counterpoint.environments.chat import Chat
from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.lifecycle import START_SECONDS, check_chat, started
from counterpoint.environments.reward import Rewards, as_group_rewards, as_rewards, own_bounds
from counterpoint.environments.sampling import SamplingConfig
from counterpoint.inference.base import ParsedText, SamplingParameters
from counterpoint.job.environments import waiting
from counterpoint.job.environments.rehearsal import LONGEST, finish, rehearse, watched
from counterpoint.orchestrator.rollouts.play import (
    LoadedEnvironment,
    PolicyModel,
    play,
    sampling_parameters,
    score_group,
)
from counterpoint.orchestrator.rollouts.players import GeneratingPool
from counterpoint.orchestrator.step.boundary import give_memory_back
from counterpoint.run.loop_health.blame import LoopBlame
from counterpoint.run.loop_health.slow_spots import SlowSpot, SlowSpots
from counterpoint.run.loop_health.stacks import NOWHERE
from counterpoint.run.loop_health.threads import give_environments_threads
from counterpoint.run.parsed_turn import ParsingPool
from counterpoint.transport.process.resident import resident_bytes
from counterpoint.transport.records import Float32Array, Int32Array, Rollout, Turn

BLAME_SECONDS = 0.02
"""The event loop is late, and the code to blame is named, from here on."""

SETTLE_SECONDS = 2.0
"""How long tasks and threads of the environment may take to end after the last rollout."""


_LASTING_THREADS = ("environment", "orchestrator", "computing", "blame")
"""Names of threads that stay for later work: those of `asyncio.to_thread` and of the orchestrator."""


@dataclass(frozen=True, slots=True)
class PlayPlan:
    """How much is played."""

    examples: int = 4
    rollouts: int = 4
    """The rollouts of each example."""
    rounds: int = 3
    """The same again, which shows growth."""
    context: int = LONGEST
    """The most tokens that a server holds."""
    at_once: int = 128
    """The most rollouts that are played at once, as a job's `schedule.max_inflight_rollouts` has it."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """The seconds of one rollout, by what took them."""

    total: float
    model: float
    """Time in calls of the model, counted once where calls overlap."""
    scoring: float


@dataclass(slots=True)
class Observations:
    """What was seen of the rollouts."""

    name: str
    kind: str
    timeout_seconds: float
    size: int
    """Examples that the environment has."""
    groups: list[list[Rollout]] = field(default_factory=list)
    given: dict[str, Float32Array | None] = field(default_factory=dict)
    """The rewards of turns that `Model.reward` gave, which `score` reads, by the rollout's id."""
    seconds: list[Seconds] = field(default_factory=list)
    changed_examples: list[int] = field(default_factory=list)
    """Examples that were not the same when they were asked for again."""
    changed_scores: list[tuple[str, float, float]] = field(default_factory=list)
    """Rollouts that another scoring gave another reward: id, first reward, second one."""
    scored_again: int = 0
    """Rollouts that got a second reward."""
    not_scored_again: list[str] = field(default_factory=list)
    """Why others got none: what the environment raised when it was asked twice."""
    slow_spots: SlowSpots = field(default_factory=SlowSpots)
    memory: list[int] = field(default_factory=list)
    """Resident bytes of the process after each round."""
    left_tasks: list[str] = field(default_factory=list)
    """Tasks that still ran after the last rollout."""
    left_threads: list[str] = field(default_factory=list)
    left_processes: list[int] = field(default_factory=list)
    not_awaited: list[str] = field(default_factory=list)
    """Coroutines that nobody awaited, each with the line that made it."""
    printed: list[str] = field(default_factory=list)
    """What the environment printed."""
    answers: dict[int, str] = field(default_factory=dict)
    """The right answer of each example that was played."""
    chat: Chat | None = None

    @property
    def rollouts(self) -> list[Rollout]:
        """All rollouts, in the order in which their groups began."""
        return [rollout for group in self.groups for rollout in group]


async def observe(
    config: EnvironmentConfig,
    environment: Environment,
    sampling: SamplingConfig,
    model: Path,
    serving: AbstractAsyncContextManager[GeneratingPool],
    plan: PlayPlan,
    directory: Path,
    say: Callable[[str], None] = lambda text: None,
    opponents: Sequence[str] = (),
) -> Observations:
    """Plays the environment, which `config` describes, on the running loop.

    `model` is a model's directory, `directory` one for the environment's files. `serving` starts what answers, also as each of
    the `opponents`; before, an environment of the user's is played with made-up answers. `say` gets a line when a round has
    ended, and, from a thread, while one is waited for (`counterpoint/job/environments/waiting.py`). Raises `ValueError` if the
    environment cannot be started, and if most rollouts with made-up answers fail.
    """
    give_environments_threads(plan.examples * plan.rollouts)
    chat = (await asyncio.to_thread(Chat, model)).with_template_kwargs(sampling.chat_template_kwargs)
    check_chat(config.name, environment, chat)
    seen = Observations(config.name, config.kind, config.rollout_timeout_seconds, len(environment), chat=chat)
    parameters = sampling_parameters(sampling, chat)
    before = _Leftovers.now()
    context = EnvironmentContext(config.name, directory, model, seed=0, own_process=config.workers > 0)
    with LoopBlame(BLAME_SECONDS) as blame, _noting(seen):
        async with AsyncExitStack() as resources:
            start = resources.enter_async_context(started(environment, context))
            await watched(start, environment, say, START_SECONDS)
            if ":" in config.kind:
                await _rehearse(seen, config, environment, parameters, plan.context, say, opponents)
            earlier = _Leftovers.now()
            async with serving as pool:
                before = before.with_fresh(earlier)
                for number in range(plan.rounds):
                    await _play_round(seen, config, environment, pool, parameters, plan, number, say, opponents)
                    seen.memory.append(await asyncio.to_thread(_settled_memory))
                    say(f"round {number + 1} has been played")
            seen.changed_examples = _changed_examples(environment, plan)
            await _score_again(seen, environment)
        seen.left_tasks, seen.left_threads, seen.left_processes = await _left_since(before)
    seen.slow_spots.add(_with_own_code(blame.take().by_key.values(), environment))
    return seen


def _with_own_code(spots: Iterable[SlowSpot], environment: Environment) -> Iterator[SlowSpot]:
    """Yields the slow spots, those in the environment's module as its own code also if it is a built-in one."""
    source = getattr(sys.modules.get(type(environment).__module__), "__file__", None) or ""
    for spot in spots:
        is_own = spot.place != NOWHERE and source.endswith(spot.place.file)
        yield replace(spot, place=replace(spot.place, ours=False)) if is_own else spot


@contextmanager
def _noting(seen: Observations) -> Iterator[None]:
    """Notes, during the block, what is printed, which standard output does not get, and coroutines that nobody awaits."""
    shown = warnings.showwarning

    def note(message: Warning | str, *others: Any, **named: Any) -> None:
        if (found := re.search(r"coroutine '(?:.*\.)?(\w+)' was never awaited", str(message))) is None:
            return shown(message, *others, **named)
        *_, (file, line, caller) = re.findall(r'File "(.+)", line (\d+), in (\S+)', str(message)) or [("?", "?", "?")]
        seen.not_awaited.append(f"`await` is missing before the call of {found[1]} (in {caller}, {file}:{line})")

    class Printed(io.StringIO):
        def write(self, text: str) -> int:
            if text.strip():
                seen.printed.append(text)
            return sys.stderr.write(text)

        def fileno(self) -> int:  # for processes that the environment starts
            return sys.stderr.fileno()

    depth = sys.get_coroutine_origin_tracking_depth()
    with warnings.catch_warnings(), redirect_stdout(Printed()):
        warnings.simplefilter("always", RuntimeWarning)
        warnings.showwarning = note
        sys.set_coroutine_origin_tracking_depth(1)
        try:
            yield
        finally:
            sys.set_coroutine_origin_tracking_depth(depth)


async def _rehearse(
    seen: Observations,
    config: EnvironmentConfig,
    environment: Environment,
    parameters: SamplingParameters,
    context: int,
    say: Callable[[str], None],
    opponents: Sequence[str],
) -> None:
    """Plays with made-up answers. Raises `ValueError` if most rollouts fail; of fewer, `say` gets a line."""
    assert seen.chat is not None
    played = await rehearse(config, environment, parameters, seen.chat, context, say, opponents)
    failed = [f"{rollout.error}" for rollout in played if rollout.error is not None]
    if failed and 2 * len(failed) >= len(played):
        missing = [] if "`await`" in failed[-1] else [*dict.fromkeys(seen.not_awaited)]
        raise ValueError(
            f"environment {config.kind!r}: with made-up answers in the model's place {len(failed)} of {len(played)} rollouts "
            f"failed: {'; '.join([failed[-1], *missing])}"
        )
    for error in dict.fromkeys(failed):
        say(f"with a made-up answer in the model's place a rollout failed: {error}")


class _Timed:
    """The environment, with the time that scoring takes."""

    def __init__(self, inner: Environment) -> None:
        self.group_scoring = inner.group_scoring
        self.reward_bounds = own_bounds(inner)
        self._inner = inner
        self.scoring_seconds = 0.0

        @functools.wraps(inner.score)  # which is named where it returns no reward
        async def score(example: Example, rollout: Rollout) -> Score:
            began = time.perf_counter()
            try:
                return await inner.score(example, rollout)
            finally:
                self.scoring_seconds += time.perf_counter() - began

        self.score = score

    def __len__(self) -> int:
        return len(self._inner)

    def example(self, index: int) -> Example:
        return self._inner.example(index)

    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        await self._inner.rollout(example, model, state)

    async def score_group(self, example: Example, rollouts: Sequence[Rollout]) -> Sequence[Score]:
        return await self._inner.score_group(example, rollouts)


class _TimedPool:
    """The pool, with the time during which at least one call of a rollout was open."""

    def __init__(self, inner: GeneratingPool) -> None:
        self._inner = inner
        self._open = 0
        self._since = 0.0
        self.seconds = 0.0

    @property
    def parses_reasoning(self) -> bool:
        return isinstance(self._inner, ParsingPool) and self._inner.parses_reasoning

    async def parse(self, *arguments: Any, **keywords: Any) -> ParsedText:
        assert isinstance(self._inner, ParsingPool)
        return await self._inner.parse(*arguments, **keywords)

    async def generate(self, prompt_ids: Int32Array, sampling: SamplingParameters, **keywords: Any) -> Turn:
        if not self._open:
            self._since = time.perf_counter()
        self._open += 1
        try:
            return await self._inner.generate(prompt_ids, sampling, **keywords)
        finally:
            self._open -= 1
            if not self._open:
                self.seconds += time.perf_counter() - self._since


async def _play_round(
    seen: Observations,
    config: EnvironmentConfig,
    environment: Environment,
    pool: GeneratingPool,
    parameters: SamplingParameters,
    plan: PlayPlan,
    number: int,
    say: Callable[[str], None],
    opponents: Sequence[str],
) -> None:
    """Plays each example's group once, all at once as far as the job allows it, as an orchestrator would."""
    assert seen.chat is not None
    chat = seen.chat

    places = asyncio.Semaphore(plan.at_once)

    async def one(rollout: Rollout) -> None:
        async with places:
            timed, timed_pool, began = _Timed(environment), _TimedPool(pool), time.perf_counter()
            model = PolicyModel(rollout, chat, timed_pool, parameters, dict.fromkeys(opponents, timed_pool))
            await play(LoadedEnvironment(config, timed), rollout, model)
            seen.given[rollout.rollout_id] = model.turn_rewards.array()
        seen.seconds.append(Seconds(time.perf_counter() - began, timed_pool.seconds, timed.scoring_seconds))

    groups = []
    for index in range(min(plan.examples, seen.size)):
        group_id = number * plan.examples + index
        groups.append([Rollout(f"{group_id}-{each}", group_id, config.name, index) for each in range(plan.rollouts)])
    seen.answers = {group[0].example_index: environment.example(group[0].example_index).answer for group in groups}
    async with asyncio.TaskGroup() as tasks:
        played = [tasks.create_task(one(each), name=f"rollout {each.rollout_id}") for group in groups for each in group]
        with waiting.saying(played, type(environment).__module__, say, config.rollout_timeout_seconds):
            await asyncio.wait(played)
    for group in groups:
        if environment.group_scoring:
            scored = score_group(LoadedEnvironment(config, environment), group)
            await watched(scored, environment, say, config.rollout_timeout_seconds)
        for rollout in group:
            finish(rollout)
    seen.groups += groups


def _changed_examples(environment: Environment, plan: PlayPlan) -> list[int]:
    indices = range(min(plan.examples, len(environment)))
    return [index for index in indices if environment.example(index) != environment.example(index)]


async def _score_again(seen: Observations, environment: Environment) -> None:
    """Scores what was played once more. What cannot be asked twice has no second reward, and is told."""
    for group in seen.groups:
        scored = [rollout for rollout in group if rollout.reward is not None and rollout.error is None]
        if environment.group_scoring:
            asked = [scored] if scored and len(scored) == len(group) else []
        else:
            asked = [[rollout] for rollout in scored]
        for rollouts in asked:
            try:
                async with asyncio.timeout(seen.timeout_seconds):
                    shown = [replace(each, turn_rewards=seen.given[each.rollout_id]) for each in rollouts]
                    scores = await _scores_of(environment, shown)
            except Exception as error:  # noqa: BLE001 - an operator's class may fail in any way
                seen.not_scored_again.append(f"{type(error).__name__}: {error}")
                continue
            for rollout, (again, by_player, turns) in zip(rollouts, scores, strict=True):
                seen.scored_again += 1
                same = np.array_equal(cast(Any, turns), cast(Any, rollout.turn_rewards))
                if not same or (again, by_player) != (rollout.reward, rollout.player_rewards):
                    seen.changed_scores.append((rollout.rollout_id, cast(float, rollout.reward), again))


async def _scores_of(environment: Environment, rollouts: list[Rollout]) -> list[Rewards]:
    example = environment.example(rollouts[0].example_index)
    if environment.group_scoring:
        return as_group_rewards(await environment.score_group(example, rollouts), rollouts, environment.score_group)
    return [as_rewards(await environment.score(example, rollouts[0]), environment.score, rollouts[0])]


def _settled_memory() -> int:
    """Returns the resident bytes without garbage and without what the allocator holds back."""
    gc.collect()
    give_memory_back()
    return resident_bytes()


@dataclass(frozen=True, slots=True)
class _Leftovers:
    tasks: frozenset[asyncio.Task[Any]]
    threads: frozenset[threading.Thread]
    processes: frozenset[int]

    def with_fresh(self, earlier: _Leftovers) -> _Leftovers:
        """Returns these and what began since `earlier`."""
        now = self.now()
        return _Leftovers(
            self.tasks | (now.tasks - earlier.tasks),
            self.threads | (now.threads - earlier.threads),
            self.processes | (now.processes - earlier.processes),
        )

    @classmethod
    def now(cls) -> _Leftovers:
        return cls(frozenset(asyncio.all_tasks()), frozenset(threading.enumerate()), frozenset(_children()))


async def _left_since(before: _Leftovers) -> tuple[list[str], list[str], list[int]]:
    """Returns the tasks, threads and processes that began since `before` and do not end within `SETTLE_SECONDS`."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        now = _Leftovers.now()
        tasks = sorted(task.get_name() for task in now.tasks - before.tasks)
        threads = sorted(
            thread.name for thread in now.threads - before.threads if not thread.name.startswith(_LASTING_THREADS)
        )
        processes = sorted(now.processes - before.processes)
        if not (tasks or threads or processes) or time.monotonic() > deadline:
            return tasks, threads, processes
        await asyncio.sleep(0.05)


def _children() -> list[int]:
    found: list[int] = []
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            found += map(int, (thread / "children").read_text().split())
    return found
