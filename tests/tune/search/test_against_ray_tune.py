"""The same spaces given to `ray.tune` and to ours: the same variants in the same order, and the same distributions.

Only the generator of variants is imported of Ray, which starts nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray import tune as ray_tune
from ray.tune.search import variant_generator as rays
from ray.tune.search.basic_variant import _TrialIterator
from scipy import stats

from counterpoint.tune.search import spaces
from counterpoint.tune.search.basic_variant import BasicVariantGenerator
from counterpoint.tune.search.variants import flat_name, format_vars, variants
from tests.tune.search.experiment import SpaceOnly

DRAWS = 4000


def of_rays(space: dict[str, Any], seed: int, **options: Any) -> list[tuple[dict[str, Any], str, dict[str, Any]]]:
    """Ray's variants: what was chosen by flat name, the tag, and the configuration."""
    found = rays.generate_variants({"config": space}, random_state=np.random.default_rng(seed), **options)
    return [(rays._flatten_resolved_vars(chosen), rays.format_vars(chosen), spec["config"]) for chosen, spec in found]


def of_ours(space: dict[str, Any], seed: int, **options: Any) -> list[tuple[dict[str, Any], str, dict[str, Any]]]:
    found = variants(space, np.random.default_rng(seed), **options)
    return [
        ({flat_name(path): value for path, value in chosen.items()}, format_vars(chosen), config)
        for chosen, config in found
    ]


def make(module: Any) -> dict[str, Any]:
    """A space with every domain, in nested dicts and lists."""
    return {
        "grid_b": module.grid_search([1, 2, 3]),
        "grid_a": module.grid_search(["x", "y"]),
        "constant": [1, {"deep": True}],
        "nested": {
            "grid": module.grid_search([0.5, None]),
            "uniform": module.uniform(-1, 1),
            "list": [module.randint(0, 100), {"choice": module.choice(["a", "b", "c"])}],
        },
        "quniform": module.quniform(0, 10, 0.5),
        "loguniform": module.loguniform(1e-5, 1e-1),
        "qloguniform": module.qloguniform(1e-4, 1e-1, 1e-4),
        "randn": module.randn(3, 2),
        "qrandn": module.qrandn(3, 2, 0.25),
        "lograndint": module.lograndint(1, 1000),
        "qrandint": module.qrandint(2, 20, 3),
        "qlograndint": module.qlograndint(2, 200, 4),
        "one": module.qrandint(2, 20, 1),
        "dependent": module.sample_from(lambda spec: spec.config.quniform * 2),
        "early": module.sample_from(lambda spec: spec.config.nested.uniform + spec.config.last),
        "last": module.choice([1, 2]),
        "conditional": module.choice([{"kind": "sgd", "momentum": module.uniform(0, 1)}, {"kind": "adam"}]),
    }


@pytest.mark.parametrize("constant_grid_search", [False, True])
@pytest.mark.parametrize("seed", [0, 7])
def test_a_seed_gives_the_same_variants(seed: int, constant_grid_search: bool) -> None:
    theirs = of_rays(make(ray_tune), seed, constant_grid_search=constant_grid_search)
    ours = of_ours(make(spaces), seed, constant_grid_search=constant_grid_search)
    assert len(ours) == 12
    assert [config for _, _, config in ours] == [config for _, _, config in theirs]


def without_conditional(module: Any) -> dict[str, Any]:
    """Where a chosen value contains a domain, Ray names the domain itself among the chosen values, and we what is drawn."""
    return {key: value for key, value in make(module).items() if key != "conditional"}


def test_names_and_tags_are_the_same() -> None:
    theirs, ours = of_rays(without_conditional(ray_tune), 3), of_ours(without_conditional(spaces), 3)
    assert [chosen for chosen, _, _ in ours] == [chosen for chosen, _, _ in theirs]
    assert [tag for _, tag, _ in ours] == [tag for _, tag, _ in theirs]


def test_trials_and_points_to_evaluate_come_in_the_same_order() -> None:
    points: list[dict[str, Any]] = [
        {"grid_a": "y", "randn": 0.5},
        {"grid_a": "x", "grid_b": 3, "nested": {"grid": None}},
        {"last": 2},
    ]
    space = without_conditional(spaces)
    theirs = _TrialIterator(
        "id_", 5, {"run": "a", "config": without_conditional(ray_tune)}, points_to_evaluate=list(points)
    )
    theirs.random_state = np.random.default_rng(11)
    theirs.create_trial = lambda chosen, spec: (rays._flatten_resolved_vars(chosen), spec["config"])
    generator = BasicVariantGenerator(points_to_evaluate=points, random_state=11)
    generator.add_configurations([SpaceOnly(space, 5)])
    ours = []
    while (trial := generator.next_trial()) is not None:
        ours.append((trial.evaluated_params, trial.config))
    assert ours == list(theirs)
    assert generator.total_samples == len(ours) == 6 + 1 + 12 + 2 * 12


@pytest.mark.parametrize(
    "domain",
    [
        lambda module: module.uniform(-2, 3),
        lambda module: module.quniform(0, 10, 0.5),
        lambda module: module.loguniform(1e-5, 1e-1),
        lambda module: module.qloguniform(1e-2, 1, 1e-2),
        lambda module: module.randn(3, 2),
        lambda module: module.qrandn(3, 2, 0.25),
        lambda module: module.randint(0, 50),
        lambda module: module.qrandint(0, 60, 5),
        lambda module: module.lograndint(1, 1000),
        lambda module: module.qlograndint(2, 200, 4),
        lambda module: module.choice(list(range(20))),
        lambda module: module.sample_from(lambda spec: spec.config.other**2),
    ],
)
def test_other_seeds_give_the_same_distribution(domain: Callable[[Any], Any]) -> None:
    def draws(module: Any, generate: Callable[..., Any], seed: int) -> list[float]:
        space = {"other": module.uniform(0, 1), "value": domain(module)}
        rng = np.random.default_rng(seed)
        return [config["value"] for _ in range(DRAWS) for config in generate(space, rng)]

    ours = draws(spaces, lambda space, rng: [config for _, config in variants(space, rng)], 1)
    theirs = draws(
        ray_tune,
        lambda space, rng: [spec["config"] for _, spec in rays.generate_variants({"config": space}, random_state=rng)],
        2,
    )
    assert stats.ks_2samp(ours, theirs).pvalue > 0.01
    if len({*ours, *theirs}) < 100:
        values = sorted({*ours, *theirs})
        table = [[sample.count(value) for value in values] for sample in (ours, theirs)]
        assert stats.chi2_contingency(table).pvalue > 0.01


LEAVES = st.one_of(
    st.integers(-3, 3),
    st.booleans(),
    st.sampled_from(["a", "b c", ""]),
    st.none(),
    st.builds(lambda values: ("grid_search", values), st.lists(st.integers(0, 9), min_size=1, max_size=3)),
    st.builds(lambda low, width: ("uniform", low, low + width), st.floats(-5, 5), st.floats(0.5, 5)),
    st.builds(lambda low, width: ("randint", low, low + width), st.integers(-5, 5), st.integers(1, 9)),
    st.builds(lambda values: ("choice", values), st.lists(st.integers(0, 9), min_size=1, max_size=4)),
)
TREES = st.dictionaries(
    st.sampled_from("abcdef"),
    st.recursive(
        LEAVES,
        lambda inner: st.one_of(
            st.dictionaries(st.sampled_from("xyz"), inner, max_size=3), st.lists(inner, max_size=3)
        ),
        max_leaves=6,
    ),
    max_size=4,
)


def built(tree: Any, module: Any) -> Any:
    if isinstance(tree, tuple):
        name, *arguments = tree
        return getattr(module, name)(*arguments)
    if isinstance(tree, dict):
        return {key: built(value, module) for key, value in tree.items()}
    if isinstance(tree, list):
        return [built(value, module) for value in tree]
    return tree


@settings(max_examples=60)
@given(tree=TREES, seed=st.integers(0, 5), stop=st.integers(0, 6))
def test_any_nested_space_gives_the_same_variants_also_when_restored(
    tree: dict[str, Any], seed: int, stop: int
) -> None:
    theirs = of_rays(built(tree, ray_tune), seed)[:20]
    generator = BasicVariantGenerator(random_state=seed)
    generator.add_configurations([SpaceOnly(built(tree, spaces), 1)])
    ours = []
    for number in range(len(theirs)):
        if number == stop:  # killed and restored here
            state = json.loads(json.dumps(generator.state()))
            generator = BasicVariantGenerator(random_state=seed + 1)
            generator.add_configurations([SpaceOnly(built(tree, spaces), 1)])
            generator.restore_state(state)
        trial = generator.next_trial()
        assert trial is not None
        ours.append((trial.evaluated_params, trial.experiment_tag.partition("_")[2], trial.config))
    assert ours == theirs
