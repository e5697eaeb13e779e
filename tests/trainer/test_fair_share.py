"""Deficit round-robin: what it serves is all there is, fits the rows, and is shared by weight whatever the samples' lengths."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from counterpoint.trainer.fair_share import FairShare, Row

CAPACITY = 64

lengths = st.lists(st.integers(1, CAPACITY), min_size=1, max_size=40)


def tokens(row: Row, steps: dict[int, dict[int, int]]) -> int:
    return sum(steps[slot][sample] for slot, samples in row for sample in samples)


@given(st.lists(lengths, min_size=1, max_size=5), st.integers(1, 4))
def test_every_sample_is_served_once_in_rows_that_fit(steps_as_lists: list[list[int]], ranks: int) -> None:
    steps = {slot: dict(enumerate(step)) for slot, step in enumerate(steps_as_lists)}
    shares = FairShare(CAPACITY, ranks)
    for slot, step in steps.items():
        shares.add(slot, 1.0 + slot, step)
    served: list[tuple[int, int]] = []
    while any(shares.left(slot) for slot in steps):
        rows = shares.rows()
        assert len(rows) == ranks
        assert any(rows), "nothing was served though something is left"
        for row in rows:
            assert tokens(row, steps) <= CAPACITY
            assert [slot for slot, _ in row] == sorted({slot for slot, _ in row})
            served += [(slot, sample) for slot, samples in row for sample in samples]
    assert sorted(served) == [(slot, sample) for slot, step in steps.items() for sample in step]
    assert not any(shares.rows())


@given(lengths)
def test_one_run_alone_is_packed_first_fit_decreasing(step: list[int]) -> None:
    shares = FairShare(CAPACITY, 1)
    shares.add(3, 0.5, dict(enumerate(step)))
    bins: list[list[int]] = []
    for length in sorted(step, reverse=True):
        fitting = next((held for held in bins if sum(held) + length <= CAPACITY), None)
        if fitting is None:
            bins.append([length])
        else:
            fitting.append(length)
    rows = []
    while shares.left(3):
        ((_, samples),) = shares.rows()[0]
        rows.append([step[sample] for sample in samples])
    assert rows == bins


def test_one_runs_samples_are_spread_over_the_ranks() -> None:
    shares = FairShare(CAPACITY, 2)
    shares.add(0, 1.0, dict(enumerate([5, 4, 3, 3, 3])))
    first, second = shares.rows()
    assert first == [(0, [0, 3])]
    assert second == [(0, [1, 2, 4])]


def served_by_call(
    sizes: dict[int, list[int]],
    weights: dict[int, float],
    ranks: int,
    calls: int,
    share_of: Callable[[int], str | None] = lambda slot: None,
) -> list[dict[int, int]]:
    """Tokens that each slot has got before each call and after the last, while all of them always have work: each repeats its
    `sizes` step after step, as long as it takes."""
    steps = {slot: dict(enumerate(size * (1 + calls * ranks * CAPACITY // sum(size)))) for slot, size in sizes.items()}
    shares = FairShare(CAPACITY, ranks)
    for slot, step in steps.items():
        shares.add(slot, weights[slot], step, share_of(slot))
    served = [dict.fromkeys(sizes, 0)]
    for _ in range(calls):
        served.append(dict(served[-1]))
        for row in shares.rows():
            for slot, samples in row:
                served[-1][slot] += sum(steps[slot][sample] for sample in samples)
    assert all(shares.left(slot) for slot in sizes)
    return served


@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, CAPACITY), min_size=1, max_size=4), st.floats(0.05, 20)),
        min_size=2,
        max_size=4,
    ),
    st.integers(1, 3),
)
def test_over_any_interval_no_run_gets_ahead_by_more_than_a_quantum_and_two_samples(
    flows: list[tuple[list[int], float]], ranks: int
) -> None:
    sizes = {slot: flow[0] for slot, flow in enumerate(flows)}
    weights = {slot: flow[1] for slot, flow in enumerate(flows)}
    served = served_by_call(sizes, weights, ranks, 12)
    quantum = CAPACITY / max(weights.values())
    for start, end in combinations(range(len(served)), 2):
        got = {slot: (served[end][slot] - served[start][slot]) / weights[slot] for slot in sizes}
        for one, other in combinations(sizes, 2):
            samples = 2 * CAPACITY / weights[one] + 2 * CAPACITY / weights[other]
            assert abs(got[one] - got[other]) <= quantum + samples


def test_a_run_with_long_samples_does_not_starve_one_with_short_ones() -> None:
    """100 to 1: while both have work they get half of the tokens each; alone, all of them."""
    shares = FairShare(1000, 1)
    steps = {0: dict.fromkeys(range(60), 1000), 1: dict.fromkeys(range(600), 10)}
    for slot, step in steps.items():
        shares.add(slot, 1.0, step)
    got = {0: 0, 1: 0}
    while shares.left(1):
        for slot, samples in shares.rows()[0]:
            got[slot] += sum(steps[slot][sample] for sample in samples)
        assert abs(got[0] - got[1]) <= 2000
    assert got[1] == 6000


def test_a_short_step_beside_an_endless_one_takes_two_rows_at_most() -> None:
    """However many samples the other has open, and step after step."""
    shares = FairShare(1000, 1)
    shares.add(0, 1.0, dict.fromkeys(range(300), 1000))
    for _ in range(40):
        shares.add(1, 1.0, dict.fromkeys(range(5), 10))
        calls = 0
        while shares.left(1):
            shares.rows()
            calls += 1
        assert calls <= 2


def test_weights_share_in_their_proportion() -> None:
    served = served_by_call({0: [8], 1: [8], 2: [8]}, {0: 1.0, 1: 2.0, 2: 5.0}, 1, 800)[-1]
    whole = sum(served.values())
    assert [round(8 * served[slot] / whole, 1) for slot in (0, 1, 2)] == [1.0, 2.0, 5.0]


def test_a_run_that_is_removed_is_served_no_more() -> None:
    shares = FairShare(CAPACITY, 1)
    shares.add(0, 1.0, {0: 60, 1: 60})
    shares.add(1, 1.0, {0: 60})
    assert shares.rows() == [[(0, [0])]]
    shares.remove(0)
    assert shares.rows() == [[(1, [0])]]
    assert shares.rows() == [[]]


@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.integers(1, 3), st.data())
def test_a_share_gets_no_more_rows_by_more_runs(counts: list[int], ranks: int, data: st.DataObject) -> None:
    """Each share has so many runs, with samples of any lengths; all always have work."""
    owners = [share for share, count in enumerate(counts) for _ in range(count)]
    one = st.lists(st.integers(1, CAPACITY), min_size=1, max_size=4)
    sizes = {slot: data.draw(one) for slot in range(len(owners))}
    served = served_by_call(sizes, dict.fromkeys(sizes, 1.0), ranks, 12, lambda slot: str(owners[slot]))
    for start, end in combinations(range(len(served)), 2):
        got = [0.0] * len(counts)
        for slot in sizes:
            got[owners[slot]] += served[end][slot] - served[start][slot]
        for first, second in combinations(range(len(counts)), 2):
            bound = CAPACITY * (1 + 2 * counts[first] + 2 * counts[second])
            assert abs(got[first] - got[second]) <= bound


def test_four_models_of_one_key_beside_one_of_another_get_half() -> None:
    sizes, owners = {slot: [8] for slot in range(5)}, ["a", "a", "a", "a", "b"]
    served = served_by_call(sizes, dict.fromkeys(sizes, 1.0), 1, 400, lambda slot: owners[slot])[-1]
    whole = sum(served.values())
    assert [round(8 * served[slot] / whole, 1) for slot in sizes] == [1.0, 1.0, 1.0, 1.0, 4.0]


def test_runs_without_a_share_weigh_as_ever_beside_one_with_two() -> None:
    sizes, weights = {slot: [8] for slot in range(4)}, {0: 2.0, 1: 1.0, 2: 1.0, 3: 1.0}
    served = served_by_call(sizes, weights, 1, 800, lambda slot: "a" if slot > 1 else None)[-1]
    whole = sum(served.values())
    assert [round(8 * served[slot] / whole, 1) for slot in sizes] == [4.0, 2.0, 1.0, 1.0]
