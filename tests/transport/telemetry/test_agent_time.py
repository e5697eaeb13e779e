"""Whose time an agent's rollout takes: intervals of requests, and what is said of them."""

from __future__ import annotations

from counterpoint.transport.telemetry.agent_time import (
    OWN,
    SECONDS,
    START,
    AgentTimes,
    agent_times,
    agents_in_words,
    programs_share,
)


def times_of(*events: tuple[float, str], end: float) -> dict[str, float]:
    moments = iter([*(at for at, _ in events), end])
    times = AgentTimes(lambda: next(moments))
    for _, event in events:
        (times.request_began if event == "began" else times.request_ended)()
    return times.metrics(1.0)


def test_requests_at_once_count_their_time_once() -> None:
    events = [(3.0, "began"), (4.0, "began"), (5.0, "ended"), (6.0, "ended"), (8.0, "began"), (9.0, "ended")]
    assert times_of(*events, end=11.0) == {SECONDS: 10.0, START: 2.0, OWN: 6.0}


def test_a_request_may_be_in_progress_at_the_end_or_there_is_none() -> None:
    assert times_of((3.0, "began"), end=5.0) == {SECONDS: 4.0, START: 2.0, OWN: 2.0}
    assert times_of(end=5.0) == {SECONDS: 4.0, START: 4.0, OWN: 4.0}


def test_steps_are_averaged_and_environments_without_agents_left_out() -> None:
    lines = [
        {"step": step, "environment/a/b/turns/mean": 3.0}
        | {
            f"environment/code/x/{name}/mean": value * step
            for name, value in ((SECONDS, 4.0), (START, 2.0), (OWN, 3.0))
        }
        for step in (1, 2)
    ]
    times = agent_times([*lines, {"step": 3}])
    assert times == {"code/x": {SECONDS: 6.0, START: 3.0, OWN: 4.5}}
    assert programs_share(lines[0]) == 0.75
    assert programs_share({"step": 3}) == 0.0
    words = agents_in_words(times)
    assert words.startswith("code/x: ")
    assert all(each in words for each in ("6.0 s", "4.5 s", "3.0 s"))
    assert agents_in_words(agent_times([{"environment/toy/agent/own_seconds/mean": 1.0}])) == ""
