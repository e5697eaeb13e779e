"""Plays one rollout: the model that an environment calls, the deadline, the score, and the handling of exceptions.

A call requests only the routing that earlier turns lack (`trajectories.OpenBranches.rows_held`), so that bytes over the wire grow
with tokens, not with turns squared.

Next in the reading order of `docs/architecture.md`: `orchestrator/rollouts/trajectories.py`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from counterpoint.environments.base import Environment, Model, Reply, Unavailable, answer_of
from counterpoint.environments.chat import Chat, Tool
from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.describe_error import describe_error
from counterpoint.environments.reward import (
    RewardBounds,
    Rewards,
    TurnRewards,
    as_group_rewards,
    as_rewards,
    check_bounds,
    own_bounds,
    with_zeros,
)
from counterpoint.environments.sampling import SAMPLED, CallOverrides, SamplingConfig, SamplingOverrides
from counterpoint.inference.base import InferenceError, RequestRefused, SamplingParameters
from counterpoint.inference.pool.deadlines import BlockDeadlines
from counterpoint.orchestrator.rollouts.players import GeneratingPool, OpponentModel, PlayerModel, as_prompt
from counterpoint.orchestrator.rollouts.trajectories import OpenBranches
from counterpoint.run.loop_health.watchdog import awaiting
from counterpoint.run.parsed_turn import parsed_turn
from counterpoint.transport.records import Int32Array, OpponentTurn, Rollout, Turn

logger = logging.getLogger(__name__)

_CANCELLING_SECONDS = 10.0
"""Seconds that an environment's code has to end once it is cancelled: it may have to end a process or a container."""

_given_up: set[asyncio.Task[BaseException | None]] = set()
"""Tasks of environments that ignore their cancellation."""

_deadlines = BlockDeadlines()
"""The deadlines of all environments' work."""

_WAITED_SHARE = 0.5
"""A share of a rollout's deadline. If a rollout fails after one of its model calls waited longer than this and was cancelled,
inference failed, not the environment."""


@dataclass(frozen=True, slots=True)
class LoadedEnvironment:
    """An environment of the mix and its configuration."""

    config: EnvironmentConfig
    environment: Environment
    reward_bounds: RewardBounds | None = field(init=False)
    """The least and the greatest reward, if known, as of the environment's loading, whatever it reports later."""

    def __post_init__(self) -> None:
        """Raises `ValueError` for impossible bounds."""
        object.__setattr__(self, "reward_bounds", self.config.reward_bounds or own_bounds(self.environment))

    def checked(self, rewards: Rewards) -> Rewards:
        """Returns the environment's rewards. Raises `ValueError` for one outside its bounds."""
        return check_bounds(rewards, self.reward_bounds, self.config.name)


def sampling_parameters(config: SamplingConfig, chat: Chat) -> SamplingParameters:
    """Returns the sampling parameters of every request."""
    return SamplingParameters(**config.model_dump(include=set(SAMPLED)), stop_token_ids=chat.stop_token_ids)


def _overridden(parameters: SamplingParameters, overrides: SamplingOverrides | None) -> SamplingParameters:
    if overrides is None:
        return parameters
    given = overrides.model_dump(exclude={"chat_template_kwargs"}, exclude_none=True)
    return parameters.replaced(**given)


class PolicyModel:
    """The `environments.base.Model` of one rollout. Appends every turn to `rollout.turns`. Calls may overlap."""

    def __init__(
        self,
        rollout: Rollout,
        chat: Chat,
        pool: GeneratingPool,
        sampling: SamplingParameters,
        opponents: Mapping[str, GeneratingPool] | None = None,
    ) -> None:
        self.chat = chat
        self._rollout = rollout
        self._pool = pool
        self._opponents = opponents or {}
        self._sampling = sampling
        self._awaited = f"a completion for rollout {rollout.rollout_id}"
        self._branches = OpenBranches()
        self.turn_rewards = TurnRewards(rollout.turns)
        self._has_ended = False
        self._calls = 0
        """Calls of tools so far."""
        self._unanswered = False
        """A call failed because it got no answer."""
        self._cancelled_after = 0.0
        """The longest wait of a cancelled call, in seconds."""
        self._template_kwargs: dict[int, dict[str, Any]] = {}
        """The template variables of a turn's prompt, if not the chat's, by the turn's identity."""

    @property
    def rollout(self) -> Rollout:
        """The rollout that it records. An environment with workers receives its names."""
        return self._rollout

    @property
    def sampling(self) -> SamplingConfig:
        """See `environments.base.Model`. The variables of the template are the chat's."""
        return SamplingConfig(**self._sampling.model_dump(include=set(SAMPLED)))

    @property
    def sampling_args(self) -> dict[str, Any]:
        """All parameters of a call that overrides nothing, for the records."""
        dumped = self._sampling.dumped.items()
        return {name: [*value] if isinstance(value, list) else value for name, value in dumped}

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingOverrides | None = None) -> Turn:
        """Calls the model with the environment's sampling parameters, and returns the turn. `prompt_ids` is `[tokens]`.

        `sampling` overrides them for this call. Its `chat_template_kwargs` are those of `parse`. Raises `ValueError` for an
        empty prompt or an answer with routing that does not join that of earlier turns, `InferenceError` if no server answers,
        `RuntimeError` once the rollout has ended.
        """
        return await self.generate_as("", prompt_ids, sampling)

    async def generate_as(self, player: str, prompt_ids: Sequence[int], sampling: SamplingOverrides | None) -> Turn:
        """Does as `generate`, for a player, or for none with ''."""
        prompt = as_prompt(prompt_ids)
        held = self._branches.rows_held(prompt)
        turn = await self.call(self._pool, prompt, sampling, routed_experts_start=held)
        turn = replace(turn, player=player) if player else turn
        self._branches.add(turn)
        if isinstance(sampling, CallOverrides) and sampling.json_schema:
            turn.leave_untrained()
        if sampling is not None and sampling.chat_template_kwargs is not None:
            self._template_kwargs[id(turn)] = sampling.chat_template_kwargs
        self._rollout.turns.append(turn)
        return turn

    async def parse(self, turn: Turn, tools: Sequence[Tool] = (), *, reasoning: bool = False) -> Reply:
        """See `environments.base.Model`."""
        kwargs = self._template_kwargs.get(id(turn), dict(self.chat.template_kwargs))
        with awaiting(f"the calls of tools in rollout {self._rollout.rollout_id}", "inference"):
            return await parsed_turn(self._pool, self.chat, turn, tools, kwargs, self._new_call_id, reasoning=reasoning)

    def _new_call_id(self) -> str:
        self._calls += 1
        return f"call_{self._calls}"

    def reward(self, value: float, turn: int | Turn | None = None) -> None:
        """See `environments.base.Model`."""
        self.reward_as("", value, turn)

    def reward_as(self, player: str, value: float, turn: int | Turn | None) -> None:
        """Does as `reward`, for a player, or for none with ''."""
        if self._has_ended:
            raise RuntimeError(f"rollout {self._rollout.rollout_id} has ended; its turns get no further reward")
        self.turn_rewards.give(value, turn, player)

    def player(self, name: str) -> Model:
        """See `environments.base.Model`."""
        return PlayerModel(self, name)

    def opponent(self, name: str) -> Model:
        """See `environments.base.Model`. Raises `ValueError` for a name that is not configured."""
        pool = self._opponents.get(name)
        if pool is None:
            known = ", ".join(sorted(self._opponents)) or "none"
            raise ValueError(f"there is no opponent {name!r}; [opponents] names {known}")
        return OpponentModel(self, name, pool)

    def note(self, opponent: str, turn: Turn) -> None:
        """Records a call of another policy, for people."""
        text = self.chat.decode(turn.completion_ids.tolist())
        prompt, completion = len(turn.prompt_ids), len(turn.completion_ids)
        self._rollout.opponent_turns.append(OpponentTurn(opponent, len(self._rollout.turns), text, prompt, completion))

    def close(self) -> None:
        """Ends the rollout's calls and sets its branches, so that they are built once.

        Later calls, and earlier calls that still wait for their answer, raise `RuntimeError` in the environment's task.
        """
        self._has_ended = True
        self._rollout.branches = self._branches.closed()

    def _check_open(self) -> None:
        if self._has_ended:
            raise RuntimeError(f"rollout {self._rollout.rollout_id} has ended; it takes no further turn")

    async def call(
        self,
        pool: GeneratingPool,
        prompt: Int32Array,
        overrides: SamplingOverrides | None,
        *,
        routed_experts_start: int,
    ) -> Turn:
        """Returns a pool's answer, recording nothing. A failure of inference is one of the rollout's."""
        self._check_open()
        began = time.monotonic()
        self._unanswered = False
        try:
            with awaiting(self._awaited, "inference"):
                answer = await pool.generate(
                    prompt,
                    _overridden(self._sampling, overrides),
                    affinity=self._rollout.rollout_id,
                    routed_experts_start=routed_experts_start,
                )
        except RequestRefused:
            raise
        except InferenceError:
            self._unanswered = True
            raise
        except asyncio.CancelledError:
            self._cancelled_after = max(self._cancelled_after, time.monotonic() - began)
            raise
        self._check_open()
        return answer

    def excuse(self) -> None:
        """Notes that the rollout fails for want of something elsewhere (`Unavailable`)."""
        self._unanswered = True

    def inference_failed(self, rollout_seconds: float) -> bool:
        """Whether a rollout with the deadline `rollout_seconds` failed because of inference.

        It did if its newest call got no answer after all retries, or if a call waited for one during more than half of that
        time. A refused request is the environment's failure.
        """
        return self._unanswered or self._cancelled_after >= _WAITED_SHARE * rollout_seconds


async def play(loaded: LoadedEnvironment, rollout: Rollout, model: PolicyModel) -> None:
    """Plays `rollout` to its end and scores it, unless its group is scored as one.

    An exception of the environment or a missed deadline becomes `rollout.error`. Sets `rollout.inference_failed`.
    """

    async def play_and_score() -> None:
        environment = loaded.environment
        example = environment.example(rollout.example_index)
        rollout.answer = answer_of(example)
        await environment.rollout(example, model, rollout.state)
        rollout.turn_rewards = model.turn_rewards.array()
        if not environment.group_scoring:
            shown = _shown(rollout)
            value = await environment.score(example, shown)
            rollout.turn_rewards = model.turn_rewards.array()  # a reward may come late
            _take_over(rollout, shown, loaded.checked(as_rewards(value, environment.score, rollout)))

    async def excused() -> None:
        try:
            await play_and_score()
        except Unavailable:
            model.excuse()
            raise

    rollout.sampling_args = model.sampling_args
    try:
        rollout.error = await _failure(loaded, excused)
    finally:
        model.close()
    if rollout.error is not None or loaded.environment.group_scoring:
        rollout.turn_rewards = model.turn_rewards.array()  # of all turns that it has; after an error, for people
    elif rollout.turn_rewards is not None:
        rollout.turn_rewards = with_zeros(rollout.turn_rewards, len(rollout.turns))
    seconds = loaded.config.rollout_timeout_seconds
    rollout.inference_failed = rollout.error is not None and model.inference_failed(seconds)


async def score_group(loaded: LoadedEnvironment, rollouts: Sequence[Rollout]) -> None:
    """Scores a group as one. A failure becomes the `error` of every rollout.

    Does nothing if a rollout of it failed, since the group will be dropped.
    """
    if any(rollout.error is not None for rollout in rollouts):
        return

    async def score() -> None:
        example = loaded.environment.example(rollouts[0].example_index)
        all_shown = [_shown(rollout) for rollout in rollouts]
        values = await loaded.environment.score_group(example, list(all_shown))
        rewards = as_group_rewards(values, rollouts, loaded.environment.score_group)
        for rollout, shown, reward in zip(rollouts, all_shown, map(loaded.checked, rewards), strict=True):
            _take_over(rollout, shown, reward)

    error = await _failure(loaded, score)
    for rollout in rollouts:
        rollout.error = error


def _shown(rollout: Rollout) -> Rollout:
    """Returns the copy that an environment scores. Only its `metrics` and `state` are taken over."""
    return rollout.with_turns(list(rollout.turns))


def _take_over(rollout: Rollout, shown: Rollout, rewards: Rewards) -> None:
    rollout.metrics, rollout.state = shown.metrics, shown.state
    rollout.reward, rollout.player_rewards, rollout.turn_rewards = rewards


async def _failure(loaded: LoadedEnvironment, work: Callable[[], Awaitable[None]]) -> str | None:
    """Awaits an environment's `work` within its deadline. Returns the failure, for a person, or None.

    The work has a separate task, which distinguishes our cancellation from the environment's, and which can be given up: a bare
    `except` in a loop that tries again swallows every cancellation. Raises `CancelledError` only when this task is cancelled
    from outside.
    """
    seconds = loaded.config.rollout_timeout_seconds
    ours = asyncio.current_task()
    assert ours is not None
    theirs = asyncio.create_task(_raised(work), name=ours.get_name())
    loop = asyncio.get_running_loop()
    over = loop.create_future()
    theirs.add_done_callback(partial(_note_end, over))
    try:
        # `asyncio.wait` with a timeout would cost a rollout of one turn as much as its two tasks.
        with suppress(TimeoutError), _deadlines.until(loop.time() + seconds):
            await over
    except asyncio.CancelledError:
        await _cancel(theirs, loaded)
        raise
    if not theirs.done():
        missed = f"missed its deadline of rollout_timeout_seconds = {seconds:g}"
        return missed if await _cancel(theirs, loaded) else f"{missed}, and ignores its cancellation"
    error = theirs.result()
    if isinstance(error, asyncio.CancelledError):
        return "the environment cancelled itself: CancelledError came out of its code"
    return None if error is None else describe_error(error)


def _note_end(over: asyncio.Future[None], theirs: asyncio.Task[BaseException | None]) -> None:
    if not over.done():  # nobody waits for it any more
        over.set_result(None)


async def _cancel(theirs: asyncio.Task[BaseException | None], loaded: LoadedEnvironment) -> bool:
    """Cancels an environment's task, and returns whether it has ended. One that does not is given up, and goes on by itself."""
    theirs.cancel()
    try:
        await asyncio.wait({theirs}, timeout=_CANCELLING_SECONDS)
    finally:
        if not theirs.done():
            _given_up.add(theirs)  # the loop itself keeps no reference
            theirs.add_done_callback(_given_up.discard)
            if (count := len(_given_up)).bit_count() == 1:  # 1, 2, 4, 8 and so on
                logger.warning(
                    "environment %s: a rollout ignores its cancellation, and goes on beside the run, as %d do now. Let its code "
                    "raise asyncio.CancelledError again",
                    loaded.config.name,
                    count,
                )
    return theirs.done()


async def _raised(work: Callable[[], Awaitable[None]]) -> BaseException | None:
    """Returns the exception of `work`, or None. Catches every exception: one task's `SystemExit` would end the loop."""
    try:
        await work()
    except BaseException as error:  # noqa: BLE001 - an environment may raise anything; it costs one rollout
        return error
    return None
