"""Tokens that stand out, by made-up noise of logits: a fault is named by the group that has it, and healthy steps name none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from counterpoint.trainer.again.outliers import FACTOR, KEYS, LEAST_TOKENS, SERVERS, TokenGroups, noise, stands_out
from counterpoint.trainer.again.split import divergence

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
        assert stands_out(rest_P, noise_P, groups_of(given), KEYS) is None


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
    found = stands_out(rest_P, noise_P, groups_of(given), KEYS)
    assert found is not None
    assert found[:2] == FAULTS[case][1:]
    assert (found[2] == faulty_P).all()


def test_repeated_tokens_count_once() -> None:
    """All tokens of a server are of a few contexts, as where rollouts begin alike: chance moves them together."""
    random = np.random.default_rng(4)
    given = labels(random)
    few_P = given["server"] == "s2"
    given["context"] = np.where(few_P, given["position"] % 8, given["context"])
    scale_P = np.where(few_P, 0.3, 0.01)
    rest_P, noise_P = played(random, given, scale_P, 3.0)
    assert np.count_nonzero(np.isfinite(noise_P[few_P])) <= 16
    assert stands_out(rest_P, noise_P, groups_of(given), KEYS) is None


def test_tokens_of_unknown_servers_are_no_group() -> None:
    random = np.random.default_rng(2)
    given = labels(random)
    faulty_P = given["server"] == "s2"
    rest_P, noise_P = played(random, given, np.where(faulty_P, 0.3, 0.01), 3.0)
    for name in SERVERS:
        given[name] = np.where(faulty_P, "", given[name])
    assert stands_out(rest_P, noise_P, groups_of(given), SERVERS) is None


@pytest.mark.slow
def test_two_groups_of_the_same_noise_are_rarely_so_far_apart() -> None:
    random = np.random.default_rng(0)
    for tails in (100.0, 2.0):
        medians = np.median(random.standard_t(tails, (2, 60_000, LEAST_TOKENS)) ** 2, axis=2)
        assert np.mean(medians.max(axis=0) > FACTOR * medians.min(axis=0)) < 1 / 10_000
