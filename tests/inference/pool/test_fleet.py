"""The choice of a server, and when one is taken out: the pure rules."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from counterpoint.inference.pool.fleet import FAILURES_IN_A_ROW, GROUP_LEAD, REMEMBERED_GROUPS, Fleet, State


def serving_fleet(count: int, limit: int = 2) -> Fleet:
    fleet = Fleet([f"http://{index}" for index in range(count)], limit)
    for server in fleet.servers:
        fleet.begin_serving(server, 0, "first")
    return fleet


def test_the_least_loaded_server_is_chosen() -> None:
    fleet = serving_fleet(3)
    chosen = [fleet.acquire(str(index)) for index in range(4)]
    assert chosen == [*fleet.servers, fleet.servers[0]]


def test_a_rollout_returns_to_the_server_that_holds_its_prefix() -> None:
    fleet = serving_fleet(2)
    first = fleet.acquire("a")
    other = fleet.acquire("b")
    assert first is not None
    assert other is not None
    fleet.release(other)
    assert fleet.acquire("a") is first, "though the other one is idle"


def test_a_full_server_is_not_chosen_for_affinity() -> None:
    fleet = serving_fleet(2, limit=1)
    assert fleet.acquire("a") is fleet.servers[0]
    assert fleet.acquire("a") is fleet.servers[1]
    assert fleet.acquire("a") is None


def test_the_rollouts_of_a_group_begin_at_one_server_and_groups_alternate() -> None:
    fleet = serving_fleet(2, limit=256)
    for group in range(4):
        chosen = {fleet.acquire(f"{group}-{index}") for index in range(8)}
        assert chosen == {fleet.servers[group % 2]}
    assert [server.in_flight for server in fleet.servers] == [16, 16]


def test_a_group_begins_elsewhere_where_its_server_is_full() -> None:
    fleet = serving_fleet(2, limit=4)
    chosen = [fleet.acquire(f"7-{index}") for index in range(9)]
    assert chosen == [fleet.servers[0]] * 4 + [fleet.servers[1]] * 4 + [None]


def test_a_large_group_leaves_no_server_idle() -> None:
    fleet = serving_fleet(4, limit=256)
    chosen = [fleet.acquire(f"7-{index}") for index in range(128)]
    in_flight = [server.in_flight for server in fleet.servers]
    assert sum(in_flight) == 128
    assert max(in_flight) - min(in_flight) <= GROUP_LEAD
    assert sum(a is not b for a, b in pairwise(chosen)) <= 128 / GROUP_LEAD, "few servers prefill"


def test_a_later_turn_stays_where_its_rollout_is_and_moves_no_group() -> None:
    fleet = serving_fleet(2, limit=2)
    assert fleet.acquire("7-0") is fleet.acquire("7-1") is fleet.servers[0]
    moved = fleet.acquire("7-0")
    assert moved is fleet.servers[1], "its own server is full"
    fleet.release(fleet.servers[0])
    assert fleet.acquire("7-2") is fleet.servers[0], "where the group's prompt was prefilled"
    fleet.release(moved)
    assert fleet.acquire("7-0") is moved


def test_nothing_is_remembered_of_a_group_that_has_ended() -> None:
    fleet = serving_fleet(2, limit=256)
    for index in (0, 1):
        held = [fleet.acquire("7-0"), fleet.acquire(f"8-{index}"), fleet.acquire("evening-3-0-1")]
        assert fleet.remembered == 3 + index
        for server in filter(None, held):
            fleet.release(server)
    fleet.forget_group("8-5")
    assert fleet.remembered == 2
    fleet.forget_group("evening-3-0-0")
    fleet.forget_group("7-0")
    fleet.forget_group("7-0")
    assert fleet.remembered == 0


def test_groups_whose_end_is_not_told_are_bounded() -> None:
    fleet = serving_fleet(1)
    for group in range(REMEMBERED_GROUPS + 10):
        chosen = fleet.acquire(f"{group}-0")
        assert chosen is not None
        fleet.release(chosen)
    assert fleet.remembered == REMEMBERED_GROUPS


def test_a_group_leaves_a_server_that_failed_it() -> None:
    fleet = serving_fleet(2, limit=256)
    failed = fleet.acquire("7-0")
    assert fleet.acquire("7-0", avoid=failed) is fleet.servers[1]
    assert failed is not None
    fleet.take_out(failed, "gone")
    assert fleet.acquire("7-1") is fleet.servers[1]
    fleet.begin_serving(failed, 0, "again")
    assert fleet.acquire("7-2") is fleet.servers[1]


def test_the_server_that_failed_is_avoided_where_another_has_room() -> None:
    fleet = serving_fleet(2)
    failed = fleet.servers[0]
    assert fleet.acquire("a", avoid=failed) is fleet.servers[1]
    fleet.take_out(fleet.servers[1], "gone")
    assert fleet.acquire("a", avoid=failed) is failed


def test_only_serving_servers_are_chosen() -> None:
    fleet = Fleet(["http://a", "http://b", "http://c"], 4)
    unknown, loading, out = fleet.servers
    fleet.begin_loading(loading)
    fleet.take_out(out, "gone")
    assert fleet.acquire("a") is None
    fleet.begin_serving(unknown, None, "x")
    assert fleet.acquire("a") is unknown


def test_a_server_that_loads_new_weights_keeps_its_capacity_and_one_that_comes_back_does_not() -> None:
    fleet = serving_fleet(2, limit=8)
    fleet.begin_loading(fleet.servers[0])
    assert fleet.capacity == 16
    fleet.take_out(fleet.servers[0], "failed its probe")
    assert fleet.capacity == 8
    fleet.begin_loading(fleet.servers[0])
    assert fleet.capacity == 8


def test_failures_in_a_row_are_one_too_many_and_a_success_forgives_them() -> None:
    fleet = serving_fleet(1)
    server = fleet.servers[0]
    assert [fleet.failed(server) for _ in range(FAILURES_IN_A_ROW - 1)] == [False] * (FAILURES_IN_A_ROW - 1)
    fleet.succeeded(server)
    assert not fleet.failed(server)
    assert [fleet.failed(server) for _ in range(FAILURES_IN_A_ROW - 1)][-1]


def test_patience_grows_with_setbacks_to_a_bound() -> None:
    fleet = serving_fleet(1)
    server = fleet.servers[0]
    waits = []
    for _ in range(8):
        fleet.take_out(server, "again")
        waits.append(fleet.intervals_out(server))
        fleet.begin_serving(server, 0, "first")
    assert waits == [0, 1, 3, 7, 15, 31, 31, 31]


def test_what_a_server_held_is_forgotten_when_it_is_taken_out() -> None:
    fleet = serving_fleet(1)
    fleet.take_out(fleet.servers[0], "gone")
    status = fleet.servers[0].status()
    assert (status.state, status.version, status.reason) == ("out", None, "gone")


@given(
    st.lists(st.tuples(st.sampled_from(["acquire", "release", "out", "serve", "load"]), st.integers(0, 4)), max_size=60)
)
def test_no_history_oversteps_a_limit_or_uses_a_server_that_does_not_serve(history: list[tuple[str, int]]) -> None:
    fleet = serving_fleet(3)
    held = []
    for action, index in history:
        server = fleet.servers[index % 3]
        if action == "acquire":
            room = any(s.state is State.SERVING and s.in_flight < 2 for s in fleet.servers)
            chosen = fleet.acquire(str(index), avoid=server)
            assert (chosen is not None) == room
            if chosen is not None:
                assert chosen.state is State.SERVING
                held.append(chosen)
        elif action == "release" and held:
            fleet.release(held.pop(index % len(held)))
        elif action == "out":
            fleet.take_out(server, "told to")
        elif action == "serve":
            fleet.begin_serving(server, index, "first")
        elif action == "load":
            fleet.begin_loading(server)
        assert all(s.in_flight == held.count(s) <= 2 for s in fleet.servers)
