"""Who gets a slot: by examples for each rule, and by random histories for what must hold in all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from counterpoint.trainer.runs.slot_plan import SlotChanges, plan

ids = st.sampled_from("abcdefgh")


def test_slots_are_taken_lowest_first_by_those_that_have_waited_longest() -> None:
    assert plan({1: "x"}, {"x": 9, "late": 5, "early": 2, "next": 3}, max_runs=3) == SlotChanges(
        {}, {0: "early", 2: "next"}, ["late"]
    )
    assert plan({}, {"b": 1, "a": 1}, max_runs=1) == SlotChanges({}, {0: "a"}, ["b"])


def test_a_run_without_a_valid_configuration_leaves_and_its_slot_is_taken_at_once() -> None:
    assert plan({0: "x", 1: "gone"}, {"x": 1, "new": 2}, max_runs=2) == SlotChanges({1: "gone"}, {1: "new"}, [])


def test_a_renewed_run_comes_back_to_its_slot_before_all_others() -> None:
    assert plan({0: "x", 1: "y"}, {"x": 1, "y": 9, "z": 2}, max_runs=2, renewed={"y"}) == SlotChanges(
        {1: "y"}, {1: "y"}, ["z"]
    )


def test_only_those_present_get_a_slot_and_those_away_yield_theirs_when_needed() -> None:
    slots, since = {0: "x", 1: "y", 2: "w"}, {"x": 3, "y": 2, "w": 1, "new": 4, "asleep": 0}
    assert plan(slots, since, max_runs=3, present={"x"}) == SlotChanges({}, {}, [])
    assert plan(slots, since, max_runs=3, present={"w", "new"}) == SlotChanges({1: "y"}, {1: "new"}, [])
    assert plan(slots, since, max_runs=3, present={"x", "y", "w", "new"}) == SlotChanges({}, {}, ["new"])


@given(
    st.lists(
        st.tuples(st.dictionaries(ids, st.integers(0, 5)), st.sets(ids), st.none() | st.sets(ids)),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 4),
)
def test_in_every_history_slots_are_held_once_and_given_fairly(
    history: list[tuple[dict[str, int], set[str], set[str] | None]], max_runs: int
) -> None:
    slots: dict[int, str] = {}
    for since, renewed, present in history:
        changes = plan(slots, since, max_runs=max_runs, renewed=renewed, present=present)
        before = dict(slots)
        for slot, run_id in changes.leaving.items():
            assert slots.pop(slot) == run_id
        for slot, run_id in changes.admitted.items():
            assert slot not in slots
            slots[slot] = run_id
        held = list(slots.values())
        assert len(set(held)) == len(held) <= max_runs
        assert all(0 <= slot < max_runs for slot in slots)
        assert set(held) <= set(since)
        assert not set(held) & set(changes.waiting)
        for slot, run_id in before.items():
            if run_id in since and run_id not in renewed and (present is None or run_id in present):
                assert slots[slot] == run_id, "one that is there keeps its slot"
        if present is not None:
            newcomers = set(held) - set(before.values())
            assert newcomers | set(changes.waiting) <= present
            if changes.waiting:
                assert all(run_id in present or run_id in renewed for run_id in held), "one away yields"
        order = [(since[run_id], run_id) for run_id in changes.waiting]
        assert order == sorted(order)
        if changes.waiting:
            assert len(slots) == max_runs
            newest = [(since[run_id], run_id) for run_id in held if run_id not in before.values()]
            assert not newest or max(newest) <= min(order)
