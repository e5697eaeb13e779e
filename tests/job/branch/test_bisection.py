"""How a bisection goes on, of a metric that one rollout has spoiled, or several, or none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.job.branch.bisection import Bisection, Narrowed, branches_for, fall_of
from counterpoint.transport.errors import UserError


def result(bisection: Bisection, guilty: set[str], most: int) -> tuple[str, ...]:
    """What comes of it where a branch is good only without any of `guilty`."""
    for _ in range(most):
        if isinstance(asked := bisection.next(), Narrowed):
            return asked.rollouts
        bisection.measured(guilty <= {*asked.rollouts})
    ended = bisection.next()
    assert isinstance(ended, Narrowed), "it takes no further branch"
    return ended.rollouts


@given(st.integers(1, 512), st.data())
def test_one_of_512_is_found_in_ten_branches(count: int, data: st.DataObject) -> None:
    suspects = [f"{index // 8}-{index % 8}" for index in range(count)]
    guilty = data.draw(st.sampled_from(suspects))
    assert branches_for(count, 10) <= 10
    assert result(Bisection(suspects, 10), {guilty}, branches_for(count, 10)) == (guilty,)


@given(st.integers(1, 5000), st.integers(1, 10), st.data())
def test_with_too_few_branches_the_rest_has_the_one(count: int, most: int, data: st.DataObject) -> None:
    suspects = list(map(str, range(count)))
    guilty = data.draw(st.sampled_from(suspects))
    found = result(Bisection(suspects, most), {guilty}, most)
    assert guilty in found
    assert len(found) <= max(1, -(-count // 2 ** (most - 1)))


@pytest.mark.parametrize("guilty", [{"0", "15"}, {"7", "8"}, {"elsewhere"}])
def test_several_together_and_none_of_them_accuse_no_one(guilty: set[str]) -> None:
    assert result(Bisection(list(map(str, range(16))), 10), guilty, 10) == ()


def test_a_fall_begins_where_all_values_since_are_bad() -> None:
    values = {1: 0.9, 2: 0.2, 3: 0.8, 4: 0.3, 6: 0.1, 7: 0.2, 8: 0.9}
    fall = fall_of("reward/mean", values, 1, 7)
    assert (fall.step, fall.good, fall.bad) == (4, 0.9, 0.2)
    assert fall_of("entropy", {1: 0.2, 2: 0.2, 3: 5.0}, 1, 3).step == 3


@pytest.mark.parametrize(
    ("good", "bad", "words"), [(3, 2, "is the earlier one"), (1, 9, "of step 9"), (1, 3, "nothing went bad")]
)
def test_steps_that_show_no_fall_are_refused(good: int, bad: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        fall_of("reward/mean", {1: 0.5, 2: 0.1, 3: 0.5}, good, bad)
