"""The mix: shares by ratio, every example once an epoch, and exactly the same stream after a resume."""

from __future__ import annotations

import json
from collections import Counter

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.mix import ExampleMix

Parts = dict[str, tuple[int, float]]

parts_strategy = st.dictionaries(
    st.sampled_from(["a", "b", "c", "d"]), st.tuples(st.integers(1, 7), st.floats(0.1, 10.0)), min_size=1
)


def make_mix(parts: Parts, seed: int = 0) -> ExampleMix:
    configs = [EnvironmentConfig(name=name, kind="reverse-text", ratio=ratio) for name, (_, ratio) in parts.items()]
    return ExampleMix(configs, {name: size for name, (size, _) in parts.items()}, seed)


def draw(mix: ExampleMix, count: int) -> list[tuple[str, int]]:
    return [mix.next() for _ in range(count)]


@given(parts=parts_strategy, seed=st.integers(0, 2**40), before=st.integers(0, 40), after=st.integers(0, 40))
def test_a_restored_mix_goes_on_exactly(parts: Parts, seed: int, before: int, after: int) -> None:
    mix = make_mix(parts, seed)
    draw(mix, before)
    carried = json.loads(json.dumps(msgpack.unpackb(msgpack.packb(mix.state()))))
    resumed = make_mix(parts, seed)
    resumed.restore(carried)
    assert draw(resumed, after) == draw(mix, after)


def test_a_vast_dataset_costs_no_more_than_a_small_one() -> None:
    """The mix is asked on the event loop: laying out a whole epoch would stall it, and would not fit here."""
    drawn = [index for _, index in draw(make_mix({"only": (10**15, 1.0)}), 1000)]
    assert len(set(drawn)) == 1000
    assert 0 <= min(drawn) < 10**15 / 10
    assert 10**15 * 9 / 10 < max(drawn) < 10**15


def test_every_example_comes_first_in_some_epoch() -> None:
    mix = make_mix({"only": (7, 1.0)})
    orders = [tuple(index for _, index in draw(mix, 7)) for _ in range(300)]
    assert len(set(orders)) > 200
    assert set(Counter(order[0] for order in orders)) == set(range(7))
    assert max(Counter(order[0] for order in orders).values()) < 2 * 300 / 7


@given(size=st.one_of(st.integers(1, 9), st.sampled_from([64, 65, 255, 1000])), epochs=st.integers(1, 3))
def test_each_epoch_holds_every_example_once(size: int, epochs: int) -> None:
    mix = make_mix({"only": (size, 1.0)})
    for _ in range(epochs):
        assert sorted(index for _, index in draw(mix, size)) == list(range(size))


@given(parts=parts_strategy, count=st.integers(1, 200))
def test_shares_hold_all_along(parts: Parts, count: int) -> None:
    drawn = Counter(name for name, _ in draw(make_mix(parts), count))
    total = sum(ratio for _, ratio in parts.values())
    for name, (_, ratio) in parts.items():
        assert abs(drawn[name] - count * ratio / total) < len(parts)


@pytest.mark.slow
@settings(max_examples=40)
@given(parts=parts_strategy, data=st.data())
def test_what_is_drawn_in_vain_is_made_up_for_and_starves_no_other(parts: Parts, data: st.DataObject) -> None:
    """Whatever is drawn in vain, and whenever: each environment has half of its share of all draws. Once nothing is drawn in vain
    any more, and of no environment more than half was, what is left has each one's share."""
    mix, total = make_mix(parts), sum(ratio for _, ratio in parts.values())
    drawn: Counter[str] = Counter()
    left: Counter[str] = Counter()
    for _ in range(data.draw(st.integers(1, 40))):
        if data.draw(st.booleans()) and +left:
            name = data.draw(st.sampled_from(sorted(+left)))
            for _ in range(data.draw(st.integers(1, left[name]))):
                mix.drawn_in_vain(name)
                left[name] -= 1
        for name, _ in draw(mix, data.draw(st.integers(1, 8))):
            drawn[name] += 1
            left[name] += 1
            for each, (_, ratio) in parts.items():
                assert drawn[each] > drawn.total() * ratio / total / 2 - len(parts)
    for name, _ in draw(mix, 4 * round(drawn.total() * total / min(ratio for _, ratio in parts.values()))):
        drawn[name] += 1
        left[name] += 1
    for name, (_, ratio) in parts.items():
        assert 2 * left[name] >= drawn[name], "by now"
        assert abs(left[name] - left.total() * ratio / total) < len(parts)


def test_a_resume_and_other_ratios_and_what_was_drawn_in_vain() -> None:
    mix = make_mix({"a": (5, 1.0), "b": (5, 1.0)})
    draw(mix, 20)
    for _ in range(5):
        mix.drawn_in_vain("a")
    resumed = make_mix({"a": (5, 1.0), "b": (5, 1.0)})
    resumed.restore(mix.state())
    assert [name for name, _ in draw(resumed, 5)] == ["a"] * 5
    mix.reweight({"a": 1.0, "b": 3.0})
    assert Counter(name for name, _ in draw(mix, 8)) == {"a": 2, "b": 6}, "not made up for after a change of ratios"


def test_epochs_and_seeds_shuffle_differently() -> None:
    mix = make_mix({"only": (50, 1.0)}, seed=1)
    first, second = draw(mix, 50), draw(mix, 50)
    assert first != second
    assert first != draw(make_mix({"only": (50, 1.0)}, seed=2), 50)


def test_a_state_is_not_changed_by_what_comes_after() -> None:
    mix = make_mix({"a": (3, 1.0), "b": (3, 1.0)})
    state = mix.state()
    draw(mix, 5)
    assert state == make_mix({"a": (3, 1.0), "b": (3, 1.0)}).state()


@pytest.mark.parametrize(
    "other", [{"seed": 7, "drawn": {"a": 1}}, {"seed": 0, "drawn": {"a": 1, "b": 1}}, {"seed": 0, "drawn": {}}]
)
def test_the_state_of_another_run_is_refused_and_changes_nothing(other: dict[str, object]) -> None:
    mix = make_mix({"a": (5, 1.0)})
    draw(mix, 3)
    before = mix.state()
    with pytest.raises(ValueError, match="resume with the configuration the run was started with"):
        mix.restore(other)
    assert mix.state() == before


def test_an_environment_without_examples_is_refused() -> None:
    with pytest.raises(ValueError, match="'a' has 0 examples"):
        make_mix({"a": (0, 1.0)})


def test_other_examples_than_those_of_the_state_are_refused() -> None:
    (config,) = [EnvironmentConfig(name="a", kind="reverse-text")]
    mix = ExampleMix([config], {"a": 5}, 0, {"a": "abc"})
    draw(mix, 3)
    state = mix.state()
    for size, fingerprint, said in ((5, "abd", "fingerprint was abc and is abd"), (6, "abc", "size was 5 and is 6")):
        other = ExampleMix([config], {"a": size}, 0, {"a": fingerprint})
        with pytest.raises(ValueError, match=rf"environment 'a' have changed .*: their {said}"):
            other.restore(state)
        assert other.state()["drawn"] == {"a": 0}
    older = {name: state[name] for name in ("seed", "drawn", "ratios", "before")}
    mix.restore(older)


def test_an_environment_that_is_always_drawn_in_vain_takes_two_thirds_and_not_all() -> None:
    """Half of its draws count: beside an equal one it is drawn twice as often."""
    mix = make_mix({"fast": (5, 1.0), "slow": (5, 1.0)})
    drawn: Counter[str] = Counter()
    for _ in range(300):
        name, _index = mix.next()
        drawn[name] += 1
        if name == "slow":
            mix.drawn_in_vain(name)
    assert drawn["fast"] == pytest.approx(100, abs=2)
