"""The choice of a server for a name: the pure rules."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from counterpoint.inference.clients.client import ServerIdentity
from counterpoint.inference.loads import LoadClaim
from counterpoint.inference.pool.fleet import GROUP_LEAD, REMEMBERED_GROUPS, Fleet, FleetMember, Name
from counterpoint.inference.pool.held import Held
from tests.support.fake_inference import weight_update

NAME = Name("a-model", LoadClaim.of_process())
OTHER = Name("another", LoadClaim.of_process(), limit=1)


def fleet_of(count: int, limit: int) -> Fleet:
    fleet = Fleet(limit)
    for index in range(count):
        server = fleet.add(f"http://{index}")
        for name in (NAME, OTHER):
            server.names[name] = Held(server.url, name.model, follows=False, interval=2.0)
    return fleet


def serve(server: FleetMember, name: Name = NAME) -> None:
    held = server.names[name]
    held.checked(ServerIdentity("first", weights=0), held.turn, float("inf"))


def load(server: FleetMember) -> None:
    held = server.names[NAME]
    held.want(weight_update(1))
    serve(server)


def take_out(server: FleetMember) -> None:
    server.names[NAME].unfit("gone", 0.0)


def serving_fleet(count: int, limit: int = 2) -> Fleet:
    fleet = fleet_of(count, limit)
    for server in fleet.servers:
        serve(server)
        serve(server, OTHER)
    return fleet


def test_the_least_loaded_server_is_chosen() -> None:
    fleet = serving_fleet(3)
    chosen = [fleet.acquire(NAME, str(index)) for index in range(4)]
    assert chosen == [*fleet.servers, fleet.servers[0]]


def test_a_rollout_returns_to_the_server_that_holds_its_prefix() -> None:
    fleet = serving_fleet(2)
    first = fleet.acquire(NAME, "a")
    other = fleet.acquire(NAME, "b")
    assert first is not None
    assert other is not None
    fleet.release(NAME, other)
    assert fleet.acquire(NAME, "a") is first, "though the other one is idle"


def test_a_full_server_is_not_chosen_for_affinity() -> None:
    fleet = serving_fleet(2, limit=1)
    assert fleet.acquire(NAME, "a") is fleet.servers[0]
    assert fleet.acquire(NAME, "a") is fleet.servers[1]
    assert fleet.acquire(NAME, "a") is None


def test_the_rollouts_of_a_group_begin_at_one_server_and_groups_alternate() -> None:
    fleet = serving_fleet(2, limit=256)
    for group in range(4):
        chosen = {fleet.acquire(NAME, f"{group}-{index}") for index in range(8)}
        assert chosen == {fleet.servers[group % 2]}
    assert [server.in_flight for server in fleet.servers] == [16, 16]


def test_a_group_begins_elsewhere_where_its_server_is_full() -> None:
    fleet = serving_fleet(2, limit=4)
    chosen = [fleet.acquire(NAME, f"7-{index}") for index in range(9)]
    assert chosen == [fleet.servers[0]] * 4 + [fleet.servers[1]] * 4 + [None]


def test_a_large_group_leaves_no_server_idle() -> None:
    fleet = serving_fleet(4, limit=256)
    chosen = [fleet.acquire(NAME, f"7-{index}") for index in range(128)]
    in_flight = [server.in_flight for server in fleet.servers]
    assert sum(in_flight) == 128
    assert max(in_flight) - min(in_flight) <= GROUP_LEAD
    assert sum(a is not b for a, b in pairwise(chosen)) <= 128 / GROUP_LEAD, "few servers prefill"


def test_a_later_turn_stays_where_its_rollout_is_and_moves_no_group() -> None:
    fleet = serving_fleet(2, limit=2)
    assert fleet.acquire(NAME, "7-0") is fleet.acquire(NAME, "7-1") is fleet.servers[0]
    moved = fleet.acquire(NAME, "7-0")
    assert moved is fleet.servers[1], "its own server is full"
    fleet.release(NAME, fleet.servers[0])
    assert fleet.acquire(NAME, "7-2") is fleet.servers[0], "where the group's prompt was prefilled"
    fleet.release(NAME, moved)
    assert fleet.acquire(NAME, "7-0") is moved


def test_nothing_is_remembered_of_a_group_that_has_ended() -> None:
    fleet = serving_fleet(2, limit=256)
    for index in (0, 1):
        held = [fleet.acquire(NAME, "7-0"), fleet.acquire(NAME, f"8-{index}"), fleet.acquire(NAME, "evening-3-0-1")]
        assert fleet.remembered == 3 + index
        for server in filter(None, held):
            fleet.release(NAME, server)
    fleet.forget_group(NAME, "8-5")
    assert fleet.remembered == 2
    fleet.forget_group(NAME, "evening-3-0-0")
    fleet.forget_group(NAME, "7-0")
    fleet.forget_group(NAME, "7-0")
    assert fleet.remembered == 0


def test_groups_whose_end_is_not_told_are_bounded() -> None:
    fleet = serving_fleet(1)
    for group in range(REMEMBERED_GROUPS + 10):
        chosen = fleet.acquire(NAME, f"{group}-0")
        assert chosen is not None
        fleet.release(NAME, chosen)
    assert fleet.remembered == REMEMBERED_GROUPS


def test_a_group_leaves_a_server_that_failed_it() -> None:
    fleet = serving_fleet(2, limit=256)
    failed = fleet.acquire(NAME, "7-0")
    assert fleet.acquire(NAME, "7-0", avoid=failed) is fleet.servers[1]
    assert failed is not None
    take_out(failed)
    assert fleet.acquire(NAME, "7-1") is fleet.servers[1]
    serve(failed)
    assert fleet.acquire(NAME, "7-2") is fleet.servers[1]


def test_the_server_that_failed_is_avoided_where_another_has_room() -> None:
    fleet = serving_fleet(2)
    failed = fleet.servers[0]
    assert fleet.acquire(NAME, "a", avoid=failed) is fleet.servers[1]
    take_out(fleet.servers[1])
    assert fleet.acquire(NAME, "a", avoid=failed) is failed


def test_only_serving_servers_are_chosen() -> None:
    fleet = fleet_of(3, 4)
    unknown, loading, out = fleet.servers
    load(loading)
    take_out(out)
    assert fleet.acquire(NAME, "a") is None
    serve(unknown)
    assert fleet.acquire(NAME, "a") is unknown


def test_a_server_that_loads_new_weights_keeps_its_capacity_and_one_that_comes_back_does_not() -> None:
    fleet = serving_fleet(2, limit=8)
    load(fleet.servers[0])
    assert fleet.capacity(NAME) == 16
    take_out(fleet.servers[0])
    assert fleet.capacity(NAME) == 8
    load(fleet.servers[0])
    assert fleet.capacity(NAME) == 8


def test_all_names_share_a_servers_cap_and_one_may_have_a_limit_of_its_own_below_it() -> None:
    fleet = serving_fleet(2, limit=2)
    first, second = fleet.servers
    assert (fleet.capacity(NAME), fleet.capacity(OTHER)) == (4, 2)
    assert fleet.acquire(OTHER, "a") is first
    assert fleet.acquire(OTHER, "a") is second, "one at each server"
    assert fleet.acquire(OTHER, "a") is None
    assert [fleet.acquire(NAME, str(index)) for index in range(3)] == [first, second, None]
    assert not fleet.has_room
    fleet.release(OTHER, first)
    assert fleet.acquire(NAME, "b") is first, "whichever name gave the place back"


def test_a_name_is_served_where_another_is_out_and_groups_of_names_are_apart() -> None:
    fleet = serving_fleet(2, limit=8)
    first, second = fleet.servers
    take_out(first)
    assert fleet.serving(NAME) == [second]
    assert fleet.serving(OTHER) == [first, second]
    assert fleet.acquire(NAME, "7-0") is second
    assert fleet.acquire(OTHER, "7-0") is first
    assert fleet.remembered == 2
    fleet.drop(OTHER)
    assert fleet.remembered == 1
    fleet.release(OTHER, first)
    assert [server.in_flight for server in fleet.servers] == [0, 1]


def test_what_a_server_held_is_forgotten_when_it_is_taken_out() -> None:
    fleet = serving_fleet(1)
    (server,) = fleet.servers
    take_out(server)
    status = server.status(server.names[NAME])
    assert (status.state, status.version, status.reason) == ("out", None, "gone")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["acquire", "release", "out", "serve", "load"]),
            st.integers(0, 4),
            st.sampled_from([NAME, OTHER]),
        ),
        max_size=60,
    )
)
def test_no_history_oversteps_a_limit_or_uses_a_server_that_does_not_serve(
    history: list[tuple[str, int, Name]],
) -> None:
    fleet = serving_fleet(3)
    taken: list[tuple[Name, FleetMember]] = []
    for action, index, name in history:
        server = fleet.servers[index % 3]
        if action == "acquire":
            limit = name.limit or 2
            room = any(
                each.names[name].takes_requests and each.in_flight < 2 and taken.count((name, each)) < limit
                for each in fleet.servers
            )
            chosen = fleet.acquire(name, str(index), avoid=server)
            assert (chosen is not None) == room
            if chosen is not None:
                assert chosen.names[name].takes_requests
                taken.append((name, chosen))
        elif action == "release" and taken:
            fleet.release(*taken.pop(index % len(taken)))
        elif action == "out":
            take_out(server)
        elif action == "serve":
            serve(server)
        elif action == "load":
            load(server)
        for each in fleet.servers:
            assert each.in_flight == sum(server is each for _, server in taken) <= 2
            assert all(held.in_flight == taken.count((name, each)) for name, held in each.names.items())
