"""Spaces and the default generator beside what the differential test holds: what is refused, limits, and restarts."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.job.sweep.grid import expand
from counterpoint.tune.errors import TuneError
from counterpoint.tune.search.basic_variant import BasicVariantGenerator
from counterpoint.tune.search.spaces import (
    choice,
    grid_search,
    loguniform,
    qrandint,
    quniform,
    randint,
    randn,
    sample_from,
    uniform,
)
from counterpoint.tune.search.variants import variants
from tests.tune.search.experiment import SpaceOnly


def configs(generator: BasicVariantGenerator, count: int = 1000) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while len(found) < count and (trial := generator.next_trial()) is not None:
        found.append(trial.config)
    return found


def generator_of(space: dict[str, Any], num_samples: int = 1, **options: Any) -> BasicVariantGenerator:
    generator = BasicVariantGenerator(**{"random_state": 0} | options)
    generator.add_configurations([SpaceOnly(space, num_samples)])
    return generator


def test_a_function_sees_keys_attributes_and_what_is_nested() -> None:
    space = {
        "net": {"width": choice([8]), "depth": 2},
        "a": sample_from(lambda spec: spec.config.net.width * spec["net"]["depth"]),
        "b": sample_from(lambda spec: spec.get("missing", 5) + ("net" in spec)),
        "c": sample_from(lambda: 7),
        "d": sample_from(lambda spec: spec.config.e[1]),
        "e": [1, sample_from(lambda spec: spec.config.a + 1)],
    }
    assert configs(generator_of(space)) == [
        {"net": {"width": 8, "depth": 2}, "a": 16, "b": 6, "c": 7, "d": 17, "e": [1, 17]}
    ]


def test_a_function_may_wait_for_what_is_within_a_choice() -> None:
    space = {"opt": choice([{"lr": uniform(0, 1)}]), "half": sample_from(lambda spec: spec.config.opt.lr / 2)}
    ((config),) = configs(generator_of(space))
    assert config["half"] == config["opt"]["lr"] / 2


grids_of_names = st.dictionaries(
    st.text("abc", min_size=1, max_size=3),
    st.lists(st.integers(), min_size=1, max_size=3, unique=True),
    min_size=1,
    max_size=3,
)


@pytest.mark.slow
@given(grids_of_names)
def test_grids_are_those_of_a_sweep_in_rays_order(grids: dict[str, list[int]]) -> None:
    """A sweep varies its last key fastest; Ray, the first by name."""
    found = [
        config for _, config in variants({key: grid_search(grids[key]) for key in grids}, np.random.default_rng(0))
    ]
    swept = expand({key: grids[key] for key in sorted(grids, reverse=True)}, [], [], longest_id=64)
    assert found == [point.values for point in swept]


def test_a_grid_within_a_choice_is_gone_through() -> None:
    assert configs(generator_of({"opt": choice([{"lr": grid_search([1, 2])}])})) == [
        {"opt": {"lr": 1}},
        {"opt": {"lr": 2}},
    ]


@pytest.mark.parametrize(
    ("space", "said"),
    [
        (
            {"a": sample_from(lambda spec: spec.config.b), "b": sample_from(lambda spec: spec.config.a)},
            "a, b depend on",
        ),
        ({"a": sample_from(lambda spec: spec.config.missing)}, "config/a: .* has no 'missing'"),
        ({"a": sample_from(lambda spec: 1 / 0)}, "config/a: .*ZeroDivisionError"),
        ({"a": grid_search([])}, "config/a: .* has no value"),
        ({"a": choice([print])}, "config/a: .* is a builtins.builtin_function_or_method"),
        ({"a": {"b": [1, {2}]}}, r"config/a/b\[1\]: .* is a builtins.set"),
        ({"a": {1: 2}}, "config/a: the key 1 is of type int"),
        ({"a": float("inf")}, "config/a: inf is no JSON number"),
        ({"a": 2**70}, "config/a: .* more than 64 bits"),
    ],
)
def test_what_cannot_be_journalled_or_drawn_is_refused_with_the_reason(space: dict[str, Any], said: str) -> None:
    with pytest.raises(TuneError, match=said):
        configs(generator_of(space))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: loguniform(0, 1), "begins above 0"),
        (lambda: uniform(2, 1), "below the lower one"),
        (lambda: uniform(0, float("inf")), "must be finite"),
        (lambda: uniform(0, 10**400), "must be finite"),
        (lambda: randint(0, 2**70), "64 bits"),
        (lambda: loguniform(1e-5, True), "true and false are none"),
        (lambda: randint(False, 5), "true and false are none"),
        (lambda: quniform(0, 1, True), "true and false are none"),
        (lambda: quniform(0, 1, 0.3), "no multiple of q"),
        (lambda: quniform(0, 1, 0), "above 0"),
        (lambda: qrandint(4, 5, 3), "has no value"),
        (lambda: randint(3, 3), "has no value"),
        (lambda: randn(0, 0), "standard deviation"),
        (lambda: choice([]), "at least one"),
        (lambda: sample_from(lambda a, b: 1), "no argument, or one"),
        (lambda: BasicVariantGenerator(random_state=np.random.Generator(np.random.MT19937(0))), "MT19937"),
    ],
)
def test_a_domain_that_makes_no_sense_is_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(TuneError, match=said):
        make()


def test_numbers_of_numpy_and_tuples_become_json() -> None:
    space = {
        "a": sample_from(lambda: np.float32(0.5)),
        "b": (1, np.int64(2)),
        "c": sample_from(lambda: np.arange(2)),
        "d": np.bool_(True),
    }
    (config,) = configs(generator_of(space))
    assert config == {"a": 0.5, "b": [1, 2], "c": [0, 1], "d": True}
    assert json.loads(json.dumps(config)) == config


def test_trials_beyond_the_limit_wait() -> None:
    generator = generator_of({"a": grid_search([1, 2, 3])}, max_concurrent=2)
    first, second = generator.next_trial(), generator.next_trial()
    assert first is not None
    assert second is not None
    assert generator.next_trial() is None
    assert not generator.is_finished()
    restored = generator_of({"a": grid_search([1, 2, 3])}, max_concurrent=2)
    restored.restore_state(json.loads(json.dumps(generator.state())))
    assert restored.next_trial() is None
    restored.on_trial_complete(first.trial_id)
    third = restored.next_trial()
    assert third is not None
    assert third.trial_id == first.trial_id.replace("_00000", "_00002")
    restored.on_trial_complete(second.trial_id)
    assert restored.next_trial() is None
    assert restored.is_finished()


def test_experiments_come_one_after_the_other_and_one_may_have_no_end() -> None:
    generator = BasicVariantGenerator(random_state=0)
    generator.add_configurations([SpaceOnly({"a": 1}, 2), SpaceOnly({"a": randint(5, 9)}, -1)])
    assert configs(generator, 2) == [{"a": 1}, {"a": 1}]
    assert len(configs(generator, 50)) == 50
    assert not generator.is_finished()
    assert generator.total_samples == 2


def test_without_a_seed_the_state_has_one() -> None:
    space = {"a": uniform(0, 1)}
    generator = generator_of(space, 6, random_state=None)
    configs(generator, 3)
    restored = generator_of(space, 6, random_state=None)
    restored.restore_state(generator.state())
    assert configs(restored) == configs(generator)


def test_a_resume_with_another_space_is_refused() -> None:
    state = generator_of({"a": uniform(0, 1), "b": 1, "f": sample_from(lambda: 1)}).state()
    same = generator_of({"a": uniform(0, 1), "b": 1, "f": sample_from(lambda: 2)})
    same.restore_state(state)
    other = generator_of({"a": uniform(0, 2), "b": grid_search([1]), "f": sample_from(lambda: 1)})
    with pytest.raises(TuneError, match=r"a was Float\(lower=0, upper=1.*; b was .*grid_search"):
        other.restore_state(state)


def test_a_point_with_an_unknown_key_is_refused_and_one_outside_its_domain_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    generator = generator_of({"a": {"b": uniform(0, 1)}}, points_to_evaluate=[{"a": {"b": 3}}])
    assert configs(generator) == [{"a": {"b": 3}}]
    assert "points_to_evaluate/a/b: 3 is not in" in caplog.text
    with pytest.raises(TuneError, match="points_to_evaluate/a/c: the space has no such key"):
        generator_of({"a": {"b": uniform(0, 1)}}, points_to_evaluate=[{"a": {"c": 3}}])


def test_a_space_is_left_as_it_was() -> None:
    inner = {"x": uniform(0, 1)}
    space = {"a": choice([inner]), "b": grid_search([[1], [2]])}
    for _, config in variants(space, np.random.default_rng(0)):
        config["b"].append(3)
    assert set(inner) == {"x"}
    assert space["b"] == {"grid_search": [[1], [2]]}
    assert isinstance(inner["x"], type(uniform(0, 1)))
