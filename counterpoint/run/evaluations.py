"""Configuration of the evaluations of a run: rollouts that measure a policy version and are never trained on.

`docs/evaluation.md` explains them. `counterpoint/run/config.py` has the rest of a run.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.sampling import SamplingOverrides
from counterpoint.transport.config import Config, Identifier

PassAt = Annotated[int, Field(ge=1)]


class EvaluationConfig(Config):
    """One evaluation: examples, how they are played and how often."""

    name: Identifier
    """Unique in the run; results, metrics and records carry it."""

    environments: list[EnvironmentConfig] = Field(min_length=1)
    """What is played, as in `[[environments]]`. `ratio` and `curriculum` have no meaning here: each plays `examples` examples."""

    interval: int = Field(default=10, ge=1)
    """Steps between two evaluations. The first and the last policy version are evaluated, too."""

    at_start: bool = True
    """Whether the first policy version is evaluated: that of no step, or of the step that a branch comes from."""

    examples: int | None = Field(default=None, ge=1)
    """Examples of each environment: a fixed choice, the same for every step, seed and run. Unset: all."""

    rollouts_per_example: int = Field(default=1, ge=1)
    """Attempts at each example."""

    pass_at: list[PassAt] = [1]
    """Each k of which pass@k is estimated: the probability that one of k attempts succeeds."""

    success: float = Field(default=1.0, allow_inf_nan=False)
    """An attempt succeeds if its reward is at least this."""

    sampling: SamplingOverrides = SamplingOverrides()
    """Keys of the run's `[sampling]` that this evaluation has otherwise. Those of an environment go before these."""

    share: float = Field(default=0.2, gt=0, le=1)
    """Most of the capacity that the evaluation takes while training has work, at least one rollout. Afterwards it takes all."""

    keep_best: str | None = None
    """The metric (`reward/mean`, `pass@1`, or `<environment>/pass@1`) by which the best version's weights are kept in `best/`.
    One evaluation of a run may keep them."""

    @model_validator(mode="after")
    def _fits(self) -> EvaluationConfig:
        names = [environment.name for environment in self.environments]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"evaluation {self.name!r}: the environments' names {repeated} are used more than once")
        if above := [k for k in self.pass_at if k > self.rollouts_per_example]:
            raise ValueError(
                f"evaluation {self.name!r}: pass_at = {above} needs as many attempts, but rollouts_per_example = "
                f"{self.rollouts_per_example}"
            )
        if self.keep_best is not None and self.keep_best not in (metrics := self.metrics_to_keep_by):
            raise ValueError(
                f"evaluation {self.name!r}: keep_best = {self.keep_best!r} is none of its metrics: {', '.join(metrics)}"
            )
        return self

    @property
    def own_metrics(self) -> list[str]:
        """The metrics over all its environments."""
        return ["reward/mean", *(f"pass@{k}" for k in self.pass_at)]

    @property
    def metrics_to_keep_by(self) -> list[str]:
        """The values that `keep_best` may have."""
        own = self.own_metrics
        return own + [f"{environment.name}/{metric}" for environment in self.environments for metric in own]


def check_evaluations(evaluations: list[EvaluationConfig]) -> None:
    """Raises `ValueError` for names that are used twice, and for two evaluations that keep the best version."""
    names = [evaluation.name for evaluation in evaluations]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"evaluations: the names {', '.join(repeated)} are used more than once; each needs its own")
    keeping = [evaluation.name for evaluation in evaluations if evaluation.keep_best is not None]
    if len(keeping) > 1:
        raise ValueError(f"evaluations: {', '.join(keeping)} have keep_best; one of a run's evaluations may have it")
