"""The curriculum: the band comes up more often, nothing starves, and the same rewards in the same order give the same stream."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from counterpoint.environments.config import CurriculumConfig, EnvironmentConfig
from counterpoint.environments.curriculum import MOST_EXAMPLES
from counterpoint.environments.mix import ExampleMix, mix_of


def make_mix(size: int = 40, seed: int = 0, **curriculum: Any) -> ExampleMix:
    config = EnvironmentConfig(name="a", kind="reverse-text", curriculum=CurriculumConfig(**curriculum))
    return ExampleMix([config], {"a": size}, seed)


def play(mix: ExampleMix, draws: int, passes: Callable[[int], float], delay: int = 3) -> list[int]:
    """Draws, and observes each group of four `delay` draws later: the example passes in that share of its rollouts."""
    drawn: list[int] = []
    under_way: deque[int] = deque()
    for _ in range(draws):
        drawn.append(mix.next()[1])
        under_way.append(drawn[-1])
        if len(under_way) > delay:
            index = under_way.popleft()
            passed = round(4 * passes(index))
            mix.observe("a", index, [1.0] * passed + [0.0] * (4 - passed))
    return drawn


def thirds(index: int) -> float:
    """A third is hopeless, a third solved, and a third between."""
    return (0.0, 0.5, 1.0)[index % 3]


@pytest.mark.slow
def test_the_band_comes_up_more_often_and_nothing_starves() -> None:
    drawn = Counter(play(make_mix(300, rest=10, explore=0.25), 12_000, thirds))
    assert set(drawn) == set(range(300))
    shares = [sum(count for index, count in drawn.items() if index % 3 == third) / 12_000 for third in range(3)]
    assert shares[1] == pytest.approx(0.75 + 0.25 / 3, abs=0.03)
    assert shares[0] == pytest.approx(0.25 / 3, abs=0.02)
    assert shares[2] == pytest.approx(0.25 / 3, abs=0.02)
    assert min(drawn.values()) >= 12_000 * 0.25 / 300 / 2


def test_a_few_examples_in_the_band_are_not_drawn_over_and_over() -> None:
    drawn = play(make_mix(10_000, rest=50), 3000, lambda index: 0.5 if index % 500 == 0 else 0.0)
    band = Counter(index for index in drawn if index % 500 == 0)
    assert 0 < band.total() < 3000 / 50 * len(band)


def test_what_the_model_has_learned_leaves_the_band() -> None:
    mix = make_mix(100, rest=1, explore=0.2)
    play(mix, 500, lambda index: 0.5)
    learned = play(mix, 3000, lambda index: 1.0)
    assert max(Counter(learned[-500:]).values()) <= 5 + 1  # epochs alone
    mix.take_metrics()
    play(mix, 100, lambda index: 1.0)
    assert mix.take_metrics()["examples/a/easy"] == 1.0


rewards = st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=4)


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 12), rewards), max_size=60), st.integers(0, 60), st.integers(1, 20))
def test_a_restored_curriculum_goes_on_exactly(events: list[tuple[int, list[float]]], cut: int, rest: int) -> None:
    def follow(mix: ExampleMix, some: list[tuple[int, list[float]]]) -> list[tuple[str, int]]:
        drawn = []
        for index, observed in some:
            mix.observe("a", index, observed)
            drawn.append(mix.next())
        return drawn

    undisturbed, killed, resumed = (make_mix(13, rest=rest) for _ in range(3))
    expected = follow(undisturbed, events)
    follow(killed, events[:cut])
    state = msgpack.unpackb(msgpack.packb(killed.state()))
    follow(killed, events[cut:])  # What comes after a state does not change it.
    resumed.restore(state)
    assert follow(resumed, events[cut:]) == expected[cut:]
    assert resumed.state() == undisturbed.state()


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 2999), rewards), max_size=40))
def test_the_band_is_that_of_a_plain_average(events: list[tuple[int, list[float]]]) -> None:
    """Over several blocks of examples; the rate is kept in 255 parts."""
    mix = make_mix(3000, rest=1, explore=1e-9, low=0.3, high=0.7)
    rates: dict[int, float] = {}
    for index, observed in events:
        mix.observe("a", index, observed)
        passed = sum(reward >= 1 for reward in observed) / len(observed)
        rate = rates[index] + 0.5 * (passed - rates[index]) if index in rates else passed
        rates[index] = round(rate * 255) / 255
    band = {index for index, rate in rates.items() if round(0.3 * 255) <= rate * 255 <= round(0.7 * 255)}
    drawn = [mix.next()[1] for _ in range(20 * len(band))]
    assert set(drawn) <= band
    if band:
        assert len(set(drawn)) > len(band) / 2


def test_metrics_are_of_the_draws_since_the_last_call() -> None:
    mix = make_mix(8, explore=1.0)
    play(mix, 8, thirds, delay=0)
    first = mix.take_metrics()
    assert (first["examples/a/unseen"], first["examples/a/epoch"]) == (1.0, 1.0)
    assert first["examples/a/pass_rate"] == pytest.approx((3 * 0 + 3 * 0.5 + 2 * 1.0) / 8)
    play(mix, 8, thirds, delay=0)
    second = mix.take_metrics()
    assert [second[f"examples/a/{band}"] for band in ("unseen", "hard", "band", "easy")] == [0, 3 / 8, 3 / 8, 2 / 8]
    assert mix.take_metrics() == {"examples/a/epoch": 2.0, "examples/a/share": 1.0}


def test_epochs_are_reported_without_a_curriculum() -> None:
    mix = ExampleMix([EnvironmentConfig(name="a", kind="reverse-text")], {"a": 4}, 0)
    for _ in range(6):
        mix.next()
    mix.observe("a", 0, [1.0])
    assert mix.take_metrics() == {"examples/a/epoch": 1.5, "examples/a/share": 1.0}
    assert "curricula" in mix.state()


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"low = 0\.8 is above high = 0\.2"):
        CurriculumConfig(low=0.8, high=0.2)
    with pytest.raises(ValueError, match=rf"environment 'a': .*{MOST_EXAMPLES} examples"):
        make_mix(MOST_EXAMPLES + 1)
    state = make_mix(5).state()
    del state["sizes"]  # as if an older version had not checked it
    with pytest.raises(ValueError, match="the saved rates are of 5 examples; there are 6"):
        make_mix(6).restore(state)


class Weighted:
    """An environment of which only the examples are asked for."""

    def __init__(self, weights: list[float], fingerprint: str | None = None) -> None:
        self.weights = weights
        if fingerprint is not None:
            self.fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self.weights)


def weighted(weights: list[float], seed: int = 0, fingerprint: str | None = None) -> ExampleMix:
    environment: Any = Weighted(weights, fingerprint)
    return mix_of([EnvironmentConfig(name="a", kind="reverse-text")], {"a": environment}, seed)


@settings(max_examples=25)
@given(st.lists(st.integers(0, 9) | st.floats(0, 5), min_size=1, max_size=12).filter(any), st.integers(0, 100))
def test_every_epoch_has_each_example_as_often_as_its_weight_says(weights: list[float], seed: int) -> None:
    mix, size, total = weighted(weights, seed), len(weights), sum(weights)
    for _ in range(3):
        drawn = Counter(mix.next()[1] for _ in range(size))
        for index, weight in enumerate(weights):
            assert abs(drawn[index] - size * weight / total) < 1 + 1e-6
            assert weight or not drawn[index]


def test_weights_are_exact_over_many_epochs_and_the_rare_come_up() -> None:
    weights = [100.0, 1.0, 1.0, 2.0]
    mix = weighted(weights)
    drawn = Counter(mix.next()[1] for _ in range(20_000))
    for index, weight in enumerate(weights):
        assert drawn[index] / 20_000 == pytest.approx(weight / 104, rel=0.15)


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ([1.0, -1.0], "the weight of example 1 is -1.0; expected a finite number, 0 or more"),
        ([1.0, float("nan")], "the weight of example 1 is nan"),
        ([0.0, 0.0], r"the weights add up to 0\.0"),
        ([[1.0], [2.0]], r"weights of shape \(2, 1\) for 2 examples"),
    ],
)
def test_weights_that_are_none_are_refused(weights: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"environment 'a': .*{said}"):
        weighted(weights)


def test_other_weights_are_other_data() -> None:
    state = weighted([1.0, 2.0], fingerprint="abc").state()
    weighted([1.0, 2.0], fingerprint="abc").restore(state)
    for other in (
        weighted([1.0, 3.0], fingerprint="abc"),
        weighted([1.0, 2.0], fingerprint="abd"),
        weighted([1.0, 2.0]),
    ):
        with pytest.raises(ValueError, match="their fingerprint was abc, weights "):
            other.restore(state)


def test_a_reward_that_rounds_to_enough_passes() -> None:
    mix = make_mix(3)
    for index, reward in enumerate((0.6 + 0.3 + 0.1, 1.0, 0.999)):
        mix.observe("a", index, [reward])
    assert mix.take_metrics()["examples/a/pass_rate"] == pytest.approx(2 / 3)


def test_the_first_groups_count_alike_however_slow_the_average_is() -> None:
    """Passed, failed, failed, failed: a quarter, which is in this band, and not 0.9 ** 3."""
    mix = make_mix(1, rest=1, explore=1e-9, smoothing=0.1, low=0.2, high=0.3)
    for reward in (1.0, 0.0, 0.0, 0.0):
        mix.observe("a", 0, [reward])
    mix.next()
    assert mix.take_metrics()["examples/a/band"] == 1.0
