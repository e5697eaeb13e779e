"""Configuration of one environment in a run's mix. `counterpoint/environments/sampling.py` has the keys of its `sampling`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from counterpoint.environments.reward import RewardBounds, as_bounds
from counterpoint.environments.sampling import SamplingOverrides
from counterpoint.transport.config import Config, Identifier

ALL = "all"
"""What stands for all environments together, and is no environment's name."""


class CurriculumConfig(Config):
    """Draws examples more often whose pass rate is within a band (docs/data.md)."""

    passes_at: float = Field(default=1.0, allow_inf_nan=False)
    """A rollout passes if its reward is at least this. An example's pass rate is the share of its rollouts that pass."""

    low: float = Field(default=0.1, ge=0, le=1)
    """An example with a lower pass rate is hard."""

    high: float = Field(default=0.9, ge=0, le=1)
    """An example with a higher pass rate is easy. Between `low` and `high` it is in the band."""

    explore: float = Field(default=0.25, gt=0, le=1)
    """The least share of draws that go through all examples in shuffled epochs, so that unseen, easy and hard ones have their
    turn. 1: the curriculum has no effect on the order."""

    rest: int = Field(default=64, ge=1)
    """The band is drawn from so seldom that an example of it comes up once in this many draws, or less often, on average: few
    examples in the band are not drawn over and over."""

    smoothing: float = Field(default=0.5, gt=0, le=1)
    """Weight of an example's newest group in its pass rate, an exponential moving average; of the first groups, their mean."""

    @model_validator(mode="after")
    def _is_a_band(self) -> CurriculumConfig:
        if self.low > self.high:
            raise ValueError(f"low = {self.low} is above high = {self.high}: no example would be in the band")
        return self


def _is_no_aggregate(name: str) -> str:
    if name.lower() == ALL:
        raise ValueError(f"{name!r} stands for all environments together, in what sums over them; choose another name")
    return name


ALWAYS_SAVED = frozenset({"trajectory", "sampling_args"})
"""Names that elsewhere are columns, and that every record has: as its `turns`, and as its `sampling_args`."""


def _columns(names: list[str]) -> list[str]:
    return [name for name in dict.fromkeys(names) if name not in ALWAYS_SAVED]


class EnvironmentConfig(Config):
    """One environment of the mix."""

    name: Annotated[Identifier, AfterValidator(_is_no_aggregate)]
    """Unique in the run; metrics and records carry it. Not `all`."""

    kind: str
    """A built-in (`reverse-text`, `guess-number`, `closest-number`, `arithmetic`, `single-turn`, `tools`, `verifiers`,
    `agent`) or an import path, `package.module:Class`."""

    args: dict[str, Any] = {}
    """Keyword arguments of the environment's constructor."""

    ratio: float = Field(default=1.0, gt=0)
    """Share of the groups that are trained, relative to the other environments' ratios (docs/scheduling.md)."""

    rollout_timeout_seconds: float = Field(default=300.0, gt=0)
    """Deadline of one rollout, scoring included. One that misses it fails; the rest go on."""

    reward_bounds: Annotated[RewardBounds, AfterValidator(as_bounds)] | None = None
    """The least and the greatest reward, such as `[0, 1]`; one outside fails its rollout. The interval of an evaluation's mean
    reward lies within them. Unset: those that the environment has; a rubric derives its own (docs/rewards.md)."""

    state_columns: Annotated[list[str], AfterValidator(_columns)] = []
    """Keys of a rollout's `state` that its saved record has whole, however long; of the others it has at most 16 KiB. Unknown
    ones are refused where the environment says its keys (`state_keys`); else the log names, once, one that a state lacks."""

    sampling: SamplingOverrides = SamplingOverrides()
    """Keys of `[sampling]` that this environment has otherwise than the run."""

    curriculum: CurriculumConfig | None = None
    """Draw examples by their running pass rates. Unset: in shuffled epochs."""

    workers: int = Field(default=0, ge=0, le=1024)
    """Processes of its own that play its rollouts, so that its crash, leak or blocked loop costs only what they play
    (docs/environments.md). 0: it runs in the orchestrator's process."""

    worker_sessions: int = Field(default=1024, ge=1)
    """Most rollouts that one worker plays at once; others wait, within their deadline."""

    worker_memory_bytes: int | None = Field(default=None, ge=2**26)
    """Resident memory of a worker and the processes below it. Above it, the worker is killed; above three quarters of it, it is
    started anew once its rollouts have ended. Unset: half of the machine's memory, divided by `workers`."""

    worker_processes: int = Field(default=64, ge=0)
    """Most processes that a worker may have below it. A worker with more is killed, with all of them."""
