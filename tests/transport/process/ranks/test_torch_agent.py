"""What torch's agent says of ranks that failed."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

from counterpoint.transport.process.ranks.torch_agent import first_failure


def failed(exitcode: int, timestamp: int) -> Any:
    return SimpleNamespace(exitcode=exitcode, timestamp=timestamp, error_file_data="<NONE>")


def test_a_killed_rank_is_named_before_those_that_lost_it() -> None:
    """The agent looks once a second, and its times are whole seconds."""
    assert first_failure({0: failed(1, 50), 1: failed(-signal.SIGKILL, 50)}) == "rank 1 was ended by SIGKILL"


def test_a_rank_that_fails_earlier_is_named_and_those_that_the_agent_ends_are_not() -> None:
    failures = {0: failed(-signal.SIGTERM, 49), 1: failed(-signal.SIGKILL, 51), 2: failed(3, 50)}
    assert first_failure(failures) == "rank 2 ended with exit code 3"
