"""Loads an environment in a process of its own, and prints what it is like (`found.py`), or what is wrong with it.

python -P -m counterpoint.environments.workers.check < CONFIG
"""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import asdict
from typing import Any

from counterpoint.environments.base import Environment
from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.registry import load_here
from counterpoint.environments.reward import own_bounds
from counterpoint.environments.workers.found import Found


def _found(environment: Environment) -> Found:
    fingerprint, weights = getattr(environment, "fingerprint", None), getattr(environment, "weights", None)
    return Found(
        len(environment),
        environment.group_scoring,
        None if fingerprint is None else str(fingerprint),
        None if weights is None else [float(weight) for weight in weights],
        own_bounds(environment),
        bool(getattr(environment, "needs_tool_parser", False)),
    )


def main() -> int:
    """Prints the result as JSON, as the last line."""
    config = EnvironmentConfig.model_validate_json(sys.stdin.buffer.read())
    try:
        with contextlib.redirect_stdout(sys.stderr):
            environment = load_here(config)
            found: dict[str, Any] = asdict(_found(environment))
    except ValueError as error:
        found = {"error": str(error)}
    print(f"\n{json.dumps(found)}", end="", flush=True)  # noqa: T201 - what its parent reads
    return 0


if __name__ == "__main__":
    sys.exit(main())
