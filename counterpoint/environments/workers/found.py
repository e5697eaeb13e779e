"""What the orchestrator knows of an environment that runs in workers: a process loads it once, before they start (`check.py`)."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.reward import RewardBounds, as_bounds
from counterpoint.transport.process.child import ChildError, run

CHECK_SECONDS = 240.0
_LAST_LINES = 2000


@dataclass(frozen=True, slots=True)
class Found:
    """What the orchestrator has to know about an environment."""

    examples: int
    group_scoring: bool
    fingerprint: str | None = None
    """The fingerprint of its data, if it has one (`environments.mix.mix_of`)."""
    weights: list[float] | None = None
    """The weights of its examples, if it has them."""
    reward_bounds: RewardBounds | None = None
    """The least and the greatest reward, if it says them."""
    needs_tool_parser: bool = False
    """Whether it has tools."""


def check_in_process(config: EnvironmentConfig) -> Found:
    """Returns what a process found that loaded the environment. Raises `ValueError` as loading it here would."""
    where = f"environment {config.name!r}"
    command = [sys.executable, "-P", "-m", "counterpoint.environments.workers.check"]
    try:
        done = run("the process that loads it", command, CHECK_SECONDS, given=config.model_dump_json().encode())
    except TimeoutError:
        raise ValueError(f"{where}: kind = {config.kind!r} was not loaded within {CHECK_SECONDS:g} s") from None
    except ChildError as problem:
        raise ValueError(f"{where}: kind = {config.kind!r}: {problem}") from None
    try:
        match json.loads(done.output.rpartition(b"\n")[2]):
            case {"error": str(error)}:
                raise ValueError(error)
            case {
                "examples": int(),
                "group_scoring": bool(),
                "fingerprint": _,
                "weights": _,
                "reward_bounds": bounds,
                "needs_tool_parser": bool(),
            } as found:
                return Found(**found | {"reward_bounds": None if bounds is None else as_bounds(bounds)})
    except json.JSONDecodeError:
        pass
    raise ValueError(
        f"{where}: kind = {config.kind!r}: the process that loaded it ended with {done.code}; last output: "
        f"{done.errors[-_LAST_LINES:].strip()!r}"
    )
