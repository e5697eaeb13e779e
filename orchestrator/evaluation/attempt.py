"""One evaluation in progress: plays its rollouts, by number, as the daemon or `counterpoint eval` says, and gives its result."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from counterpoint.orchestrator.evaluation.loading import LoadedEvaluation
from counterpoint.orchestrator.evaluation.result import EvaluationResult, result_of
from counterpoint.orchestrator.logging_setup import set_context
from counterpoint.orchestrator.rollouts.play import PolicyModel, play, score_group
from counterpoint.orchestrator.rollouts.players import GroupsPool
from counterpoint.run.loop_health.threads import in_thread
from counterpoint.transport.records import Rollout


class EvaluationAttempt:
    """The rollouts of one evaluation of a step. Rollout i is attempt i modulo `rollouts_per_example` at its example."""

    def __init__(
        self,
        loaded: LoadedEvaluation,
        step: int,
        pool: GroupsPool,
        opponents: Mapping[str, GroupsPool] | None = None,
    ) -> None:
        self._loaded = loaded
        self.name = loaded.config.name
        self._step = step
        self._pool = pool
        self._opponents = opponents or {}
        self._began, self._started_at = time.monotonic(), time.time()
        self._size = loaded.config.rollouts_per_example
        self.rollouts = [
            Rollout(f"{loaded.config.name}-{step}-{position}-{number}", position, environment, index)
            for position, (environment, index) in enumerate(loaded.examples)
            for number in range(self._size)
        ]
        self._to_play = [self._size] * len(loaded.examples)
        """Rollouts that have not ended, by example."""
        self.ended = 0
        """Rollouts that have ended, for a task that awaits the others."""

    async def play(self, index: int) -> None:
        """Plays rollout `index`, and scores its group if that is scored as one and this rollout is its last.

        A failure of the environment or of inference becomes the rollout's `error`.
        """
        rollout = self.rollouts[index]
        set_context(rollout=rollout.rollout_id)
        loaded = self._loaded.environments[rollout.environment]
        chat, sampling = self._loaded.calling[rollout.environment]
        await play(loaded, rollout, PolicyModel(rollout, chat, self._pool, sampling, self._opponents))
        self._to_play[rollout.group_id] -= 1
        self.ended += 1
        if not self._to_play[rollout.group_id]:
            for pool in (self._pool, *self._opponents.values()):
                pool.forget_group(rollout.rollout_id)
        if not loaded.environment.group_scoring:
            _drop_routing(rollout)
        elif not self._to_play[rollout.group_id]:
            first = rollout.group_id * self._size
            group = self.rollouts[first : first + self._size]
            # A failed rollout fails its group only: the others' rewards would be relative to it.
            if failed := next((each for each in group if each.error is not None), None):
                for each in group:
                    each.error = each.error or f"its group was not scored, since {failed.rollout_id} failed"
            else:
                await score_group(loaded, group)
            for each in group:
                _drop_routing(each)

    def in_words(self) -> str:
        """Says how many hundredths of its rollouts have ended."""
        total = len(self.rollouts)
        shown = self.ended - self.ended % max(1, total // 100) if self.ended < total else total
        return f"evaluation {self.name} of step {self._step}: {shown} of {total} rollouts have ended"

    async def result(self) -> EvaluationResult:
        """Returns the result, computed in a thread. All rollouts must have ended."""
        seconds = time.monotonic() - self._began
        return await in_thread(
            result_of,
            self._loaded.config,
            self._loaded.sampling,
            self._step,
            self.rollouts,
            self._started_at,
            seconds,
            {name: each.reward_bounds for name, each in self._loaded.environments.items()},
        )


def _drop_routing(rollout: Rollout) -> None:
    """Frees the answers' memory, mostly of routed experts: evaluations are not trained on."""
    rollout.branches = None
    rollout.turns = [
        replace(
            turn,
            completion_ids=turn.completion_ids.copy(),  # a view would hold the whole answer
            log_probabilities=turn.log_probabilities.copy(),
            routed_experts=None,
            routed_experts_start=0,
        )
        for turn in rollout.turns
    ]
