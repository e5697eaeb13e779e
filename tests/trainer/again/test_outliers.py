"""Tokens that stand out, by made-up noise of logits: a fault is named by the group that has it, and healthy steps name none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from counterpoint.trainer.again.outliers import (
    FACTOR,
    LEAST_TOKENS,
    SERVERS,
    TokenGroups,
    differs_within_content,
    noise,
    stands_out,
)
from counterpoint.trainer.again.split import Computed, Split, divergence, split

TOKENS = 4096

Table = dict[str, npt.NDArray[Any]]


def labels(random: np.random.Generator) -> Table:
    """Four servers with two loads each; 64 rollouts of up to 64 tokens; two environments; three temperatures."""
    rollout_P = np.repeat(np.arange(64), 64)
    server_P = (rollout_P % 4).astype(str)
    version_P = 3 + (random.random(64) < 0.5)[rollout_P]
    return {
        "server": np.char.add("s", server_P),
        "load": np.char.add(np.char.add(version_P.astype(str), ":1 of server s"), server_P),
        "version": version_P,
        "position": np.tile(np.arange(64), 64),
        "temperature": np.array(["0.3", "0.7", "1"])[rollout_P % 3],
        "environment": np.array(["sure", "open"])[rollout_P // 4 % 2],
        "rollout": rollout_P.astype(str),
        "context": np.arange(TOKENS),
    }


def groups_of(given: Table) -> TokenGroups:
    """The table with its texts numbered; an empty one is unknown."""
    codes, names = dict[str, npt.NDArray[np.int64]](), dict[str, list[str]]()
    for key, column_P in given.items():
        codes[key] = column_P
        if column_P.dtype.kind == "U":
            texts, numbers_P = np.unique(column_P, return_inverse=True)
            names[key], codes[key] = texts.tolist(), np.where(column_P == "", -1, numbers_P)
    return TokenGroups(codes, names)


def played(random: np.random.Generator, given: Table, scale_P: npt.NDArray[Any], tails: float) -> tuple[Any, ...]:
    """Parts and noise of tokens with logits disturbed by `scale_P`, nearly certain ones in the environment `sure`.

    `tails` are the degrees of freedom of Student's t, by which the disturbance is distributed.
    """
    temperature_P = given["temperature"].astype(np.float64)
    sure_P = given["environment"] == "sure"
    probability_P = 1 - np.where(sure_P, 0.05, 0.9) * random.random(TOKENS)
    exact_P = np.log(np.maximum(probability_P, 1e-3))
    sensitivity_P = (1 - np.exp(exact_P)) / temperature_P
    inference_P = np.minimum(exact_P + scale_P * sensitivity_P * random.standard_t(tails, TOKENS), 0)
    rest_P = divergence(exact_P, inference_P)
    return rest_P, noise(rest_P, exact_P, inference_P, temperature_P, groups_of(given))


@pytest.mark.slow
@pytest.mark.parametrize("tails", [100.0, 3.0, 2.0])
@pytest.mark.parametrize("scale", [1e-5, 1e-2])
@pytest.mark.parametrize("flipped", [0.0, 0.1, 0.5])
def test_a_healthy_step_names_none(tails: float, scale: float, flipped: float) -> None:
    """Also where a share of the tokens, anywhere, has a hundred times the noise, as where another expert was chosen."""
    random = np.random.default_rng(7)
    for _ in range(10):
        given = labels(random)
        scale_P = scale * np.where(random.random(TOKENS) < flipped, 100.0, 1.0)
        rest_P, noise_P = played(random, given, scale_P, tails)
        assert stands_out(rest_P, noise_P, groups_of(given)) is None


FAULTS: dict[str, tuple[Callable[[Table], npt.NDArray[np.bool_]], str, str]] = {
    "server": (lambda given: given["server"] == "s2", "server", "s2"),
    "two servers": (lambda given: np.isin(given["server"], ["s1", "s3"]), "server", "s1, s3"),
    "load": (lambda given: given["load"] == "4:1 of server s0", "load", "4:1 of server s0"),
    "version": (lambda given: given["version"] == 4, "version", "4"),
    "position": (lambda given: given["position"] == 0, "position", "0"),
    "later positions": (lambda given: given["position"] >= 32, "position", "32 and later"),
    "temperature": (lambda given: given["temperature"] == "0.7", "temperature", "0.7"),
    "environment": (lambda given: given["environment"] == "open", "environment", "open"),
    "rollout": (lambda given: given["rollout"] == "13", "rollout", "13"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_is_named_by_the_group_that_has_it(case: str) -> None:
    random = np.random.default_rng(1)
    given = labels(random)
    faulty_P = FAULTS[case][0](given)
    rest_P, noise_P = played(random, given, np.where(faulty_P, 0.3, 0.01), 3.0)
    found = stands_out(rest_P, noise_P, groups_of(given))
    assert found is not None
    assert (found.key, found.group, found.content) == (*FAULTS[case][1:], "")
    assert (found.tokens_P == faulty_P).all()


OTHERS_OF_CONTENT: dict[str, Callable[[npt.NDArray[Any]], npt.NDArray[np.bool_]]] = {
    "an environment on each server": lambda rollout_P: rollout_P >= 32,
    "one rollout alone on a server": lambda rollout_P: rollout_P == 63,
    "some rollouts, on any server": lambda rollout_P: np.random.default_rng(5).permutation(64)[rollout_P] < 20,
    "half of the examples, each on one server": lambda rollout_P: (
        np.random.default_rng(5).permutation(8)[rollout_P // 8] < 4
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("times", [8.0, 14.0, 20.0, 1000.0])
@pytest.mark.parametrize("case", OTHERS_OF_CONTENT)
def test_noise_that_goes_with_content_accuses_no_server(case: str, times: float) -> None:
    """In the first two cases one of two healthy servers has all noisy tokens; in the others, as chance deals."""
    random, untold = np.random.default_rng(3), 0
    for _ in range(100):
        given = labels(random)
        rollout_P = given["rollout"].astype(np.int64)
        noisy_P = OTHERS_OF_CONTENT[case](rollout_P)
        given["environment"] = np.where(rollout_P >= 32, "open", "sure")
        given["rollout"] = np.char.add(np.char.add((rollout_P // 8).astype(str), "-"), (rollout_P % 8).astype(str))
        dealt_P = {"some": random.random(64)[rollout_P], "half": random.random(8)[rollout_P // 8]}
        of_b_P = dealt_P[case[:4]] < 0.5 if case[:4] in dealt_P else noisy_P
        given["server"] = np.where(of_b_P, "b", "a")
        given["load"] = np.char.add("1:1-1 of server ", given["server"])
        rest_P, noise_P = played(random, given, 0.01 * np.where(noisy_P, times**0.5, 1.0), 100.0)
        found = stands_out(rest_P, noise_P, groups_of(given), truncated=times > 100)
        if found is not None:
            untold += 1
            assert found.content == {"an e": "environment open", "one ": "rollout 7-7"}.get(case[:4], found.content)
            assert found.content, found
    if times == 20 and case[:4] in ("an e", "one "):
        assert untold > 50


def test_the_report_says_what_cannot_be_told_from_its_content() -> None:
    random = np.random.default_rng(3)
    given = labels(random)
    noisy_P = given["rollout"].astype(np.int64) >= 32
    given["environment"] = np.where(noisy_P, "open", "sure")
    given["server"] = np.where(noisy_P, "b", "a")
    given["load"], given["lag"] = np.char.add("1:1-1 of server ", given["server"]), given["version"]
    exact_P = np.log(random.uniform(0.1, 0.9, TOKENS))
    sensitivity_P = (1 - np.exp(exact_P)) / given["temperature"].astype(np.float64)
    moved_P = random.standard_normal(TOKENS) * np.where(noisy_P, 0.05, 0.01) * sensitivity_P
    temperature_P = given["temperature"].astype(np.float64)
    result = Split("default", 5, TOKENS, None, 0.0)
    split(result, Computed(exact_P + moved_P, exact_P, exact_P, exact_P, temperature_P, groups_of(given)))
    assert (result.fault, result.parts["fault"]) == (None, 0)
    assert "version, position, temperature, environment, rollout: none is accused" in result.text()
    assert "server b has more noise, which cannot be told from environment open" in result.text()
    assert result.values()["untold"] == result.untold


@pytest.mark.parametrize("case", ["server", "two servers", "load", "version"])
def test_a_fault_as_small_as_content_is_named_where_others_wrote_such_content(case: str) -> None:
    random = np.random.default_rng(1)
    given = labels(random)
    faulty_P = FAULTS[case][0](given)
    rest_P, noise_P = played(random, given, np.where(faulty_P, 0.05, 0.01), 100.0)
    for truncated in (False, True)[: 2 - (case == "version")]:  # by which truncated ones are not compared
        found = stands_out(rest_P, noise_P, groups_of(given), truncated)
        assert found is not None
        assert (found.key, found.group, found.content) == (*FAULTS[case][1:], "")


@pytest.mark.parametrize(("rollouts", "differs"), [(6, False), (24, True)])
def test_rollouts_of_the_same_example_are_compared(rollouts: int, differs: bool) -> None:
    """Half of the rollouts of an example have more noise. Of few rollouts this may be by chance."""
    rollout_P = np.repeat(np.arange(rollouts), 64)
    group_P, names = rollout_P % 2 == 1, [f"1-{index}" for index in range(rollouts)]
    groups = TokenGroups({"environment": 0 * rollout_P, "rollout": rollout_P}, {"rollout": names})
    noise_P = np.random.default_rng(2).standard_normal(len(rollout_P)) ** 2 * np.where(group_P, 50.0, 1.0)
    assert differs_within_content(noise_P, group_P, groups) == differs
    assert not differs_within_content(np.where(group_P, noise_P / 10, noise_P), group_P, groups)


def test_repeated_tokens_count_once() -> None:
    """All tokens of a server are of a few contexts, as where rollouts begin alike: chance moves them together."""
    random = np.random.default_rng(4)
    given = labels(random)
    few_P = given["server"] == "s2"
    given["context"] = np.where(few_P, given["position"] % 8, given["context"])
    scale_P = np.where(few_P, 0.3, 0.01)
    rest_P, noise_P = played(random, given, scale_P, 3.0)
    assert np.count_nonzero(np.isfinite(noise_P[few_P])) <= 16
    assert stands_out(rest_P, noise_P, groups_of(given)) is None


def test_tokens_of_unknown_servers_are_no_group() -> None:
    random = np.random.default_rng(2)
    given = labels(random)
    faulty_P = given["server"] == "s2"
    rest_P, noise_P = played(random, given, np.where(faulty_P, 0.3, 0.01), 3.0)
    for name in SERVERS:
        given[name] = np.where(faulty_P, "", given[name])
    assert stands_out(rest_P, noise_P, groups_of(given), truncated=True) is None


@pytest.mark.slow
def test_two_groups_of_the_same_noise_are_rarely_so_far_apart() -> None:
    random = np.random.default_rng(0)
    for tails in (100.0, 2.0):
        medians = np.median(random.standard_t(tails, (2, 60_000, LEAST_TOKENS)) ** 2, axis=2)
        assert np.mean(medians.max(axis=0) > FACTOR * medians.min(axis=0)) < 1 / 10_000
