"""Searchers and what wraps them: what they suggest and hear, and that a restored one suggests what the original would have."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from typing import Any

import cmaes
import numpy as np
import optuna
import pytest

from counterpoint.tune.errors import TuneError
from counterpoint.tune.result import Result
from counterpoint.tune.search.ask_tell import AskTellSearch
from counterpoint.tune.search.basic_variant import BasicVariantGenerator
from counterpoint.tune.search.creation import as_search_alg, create_searcher
from counterpoint.tune.search.generator import SearchGenerator
from counterpoint.tune.search.optuna_search import OptunaSearch
from counterpoint.tune.search.search_alg import SearchAlg
from counterpoint.tune.search.searcher import FINISHED, Searcher
from counterpoint.tune.search.spaces import (
    Categorical,
    choice,
    grid_search,
    loguniform,
    qloguniform,
    qrandint,
    quniform,
    randint,
    randn,
    sample_from,
    uniform,
)
from counterpoint.tune.search.wrappers import TRIAL_INDEX, ConcurrencyLimiter, Repeater
from tests.tune.search.experiment import SpaceOnly


class Counting(Searcher):
    """Suggests 0, 1, 2, ... and keeps what it hears."""

    def __init__(self, last: int = 100) -> None:
        super().__init__("loss", "min")
        self.last, self.next = last, 0
        self.heard: list[Any] = []

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        if self.next >= self.last:
            return FINISHED
        self.next += 1
        return {"x": self.next - 1}

    def on_trial_result(self, trial_id: str, result: Result) -> None:
        self.heard.append(["result", trial_id, result])

    def on_trial_complete(self, trial_id: str, result: Result | None = None, error: bool = False) -> None:
        self.heard.append(["complete", trial_id, result, error])

    def state(self) -> dict[str, Any]:
        return {"next": self.next, "heard": self.heard}

    def restore_state(self, state: dict[str, Any]) -> None:
        self.next, self.heard = state["next"], list(state["heard"])


def restarted(old: Any, new: Any) -> Any:
    new.restore_state(json.loads(json.dumps(old.state())))
    return new


def test_a_limiter_waits_and_goes_on_after_a_restart() -> None:
    def make() -> ConcurrencyLimiter:
        return ConcurrencyLimiter(Counting(), 2)

    limiter = make()
    assert [limiter.suggest(trial_id) for trial_id in "abc"] == [{"x": 0}, {"x": 1}, None]
    limiter = restarted(limiter, make())
    assert limiter.suggest("c") is None
    limiter.on_trial_complete("b", {"loss": 1})
    limiter.on_trial_complete("unknown", {"loss": 1})
    assert [limiter.suggest("c"), limiter.suggest("d")] == [{"x": 2}, None]
    assert limiter.searcher.state()["heard"] == [["complete", "b", {"loss": 1}, False]]


def test_a_searcher_of_a_users_may_have_no_limit() -> None:
    searcher = Counting()
    searcher.max_concurrent = None  # type: ignore[attr-defined]
    assert SearchGenerator(searcher).max_concurrent == 0
    assert SearchGenerator(ConcurrencyLimiter(searcher, 2)).max_concurrent == 2


def test_a_limiter_of_batches_tells_at_the_end_of_a_batch() -> None:
    def make() -> ConcurrencyLimiter:
        return ConcurrencyLimiter(Counting(), 2, batch=True)

    limiter = make()
    limiter.suggest("a")
    limiter.suggest("b")
    limiter.on_trial_complete("b", {"loss": 2})
    limiter = restarted(limiter, make())
    assert limiter.suggest("c") is None
    assert limiter.searcher.state()["heard"] == []
    limiter.on_trial_complete("a", None, error=True)
    assert limiter.searcher.state()["heard"] == [["complete", "b", {"loss": 2}, False], ["complete", "a", None, True]]
    assert limiter.suggest("c") == {"x": 2}


def test_a_repeater_tells_the_mean_of_those_that_succeed() -> None:
    def make() -> Repeater:
        return Repeater(Counting(), repeat=3)

    repeater = make()
    assert [repeater.suggest(trial_id) for trial_id in "abcd"] == [
        {"x": 0, TRIAL_INDEX: 0},
        {"x": 0, TRIAL_INDEX: 1},
        {"x": 0, TRIAL_INDEX: 2},
        {"x": 1, TRIAL_INDEX: 0},
    ]
    repeater.on_trial_complete("b", {"loss": 1})
    repeater = restarted(repeater, make())
    repeater.on_trial_result("a", {"loss": 9})
    repeater.on_trial_result("b", {"loss": 9})
    repeater.on_trial_complete("c", {"loss": 2})
    repeater.on_trial_complete("c", {"loss": 5})
    repeater.on_trial_complete("a", None, error=True)
    assert repeater.searcher.state()["heard"] == [["result", "a", {"loss": 9}], ["complete", "a", {"loss": 1.5}, False]]
    assert repeater.suggest("e") == {"x": 1, TRIAL_INDEX: 1}
    for trial_id in "def":
        repeater.suggest(trial_id) if trial_id == "f" else None
        repeater.on_trial_complete(trial_id, {"loss": float("nan")})
    assert repeater.searcher.state()["heard"][-1] == ["complete", "d", None, True]


def test_a_repeater_without_index_repeats_the_same() -> None:
    repeater = Repeater(Counting(last=1), repeat=2, set_index=False)
    assert [repeater.suggest(trial_id) for trial_id in "abc"] == [{"x": 0}, {"x": 0}, FINISHED]


def test_suggestions_go_into_the_experiments_configuration() -> None:
    experiment = SpaceOnly(
        {"x": uniform(0, 9), "fixed": {"a": 1}, "twice": sample_from(lambda spec: spec.config.x * 2)}, 3
    )
    generator = SearchGenerator(Counting(last=2))
    generator.add_configurations([experiment])
    first, second = generator.next_trial(), generator.next_trial()
    assert first is not None
    assert second is not None
    assert second.config == {"x": 1, "fixed": {"a": 1}, "twice": 2}
    assert second.evaluated_params == {"x": 1}
    assert (first.experiment_tag, second.experiment_tag) == ("1_x=0", "2_x=1")
    assert not generator.is_finished()
    assert generator.next_trial() is None
    assert generator.is_finished()
    generator.on_trial_result(first.trial_id, {"loss": 1})
    generator.on_trial_complete(first.trial_id, {"loss": 1})
    assert [kind for kind, *_ in generator.searcher.state()["heard"]] == ["result", "complete"]
    again = SearchGenerator(Counting(last=2))
    again.add_configurations([experiment])
    assert restarted(generator, again).is_finished()


def test_what_nobody_suggests_is_refused() -> None:
    generator = SearchGenerator(Counting())
    generator.add_configurations([SpaceOnly({"x": 0, "y": grid_search([1]), "z": {"w": uniform(0, 1)}}, 3)])
    with pytest.raises(TuneError, match="suggested nothing for y, z/w"):
        generator.next_trial()


def test_the_metrics_modes_and_kinds_that_are_no_use_are_refused() -> None:
    with pytest.raises(TuneError, match="use its max_concurrent"):
        ConcurrencyLimiter(BasicVariantGenerator(), 2)  # type: ignore[arg-type]
    with pytest.raises(TuneError, match="'min' or 'max' for each"):
        OptunaSearch({"x": uniform(0, 1)}, metric="loss", mode="low").suggest("a")
    with pytest.raises(TuneError, match="has no space"):
        OptunaSearch(metric="loss", mode="min").suggest("a")
    with pytest.raises(TuneError, match="expected one of tpe"):
        OptunaSearch(sampler="tea")
    with pytest.raises(TuneError, match="cannot search the grid a/b"):
        OptunaSearch({"a": {"b": grid_search([1])}})
    with pytest.raises(TuneError, match="cannot search the grid a/b"):
        OptunaSearch({"a": choice([1, {"b": grid_search([1])}])})
    with pytest.raises(TuneError, match="Optuna has nothing for"):
        OptunaSearch({"x": choice([1, randn(0, 1)])}, "loss", "min")
    with pytest.raises(TuneError, match="no ask"):
        AskTellSearch(object())
    with pytest.raises(TuneError, match="it must be a SearchAlg"):
        as_search_alg(3)
    with pytest.raises(TuneError, match="expected one of random"):
        create_searcher("bohb")


@pytest.mark.parametrize(
    "call", ["suggest", "state", "restore_state", "next_trial", "is_finished", "add_configurations"]
)
def test_a_search_that_lacks_a_method_is_told_which(call: str) -> None:
    class Mine(Searcher):
        """Suggests nothing."""

    class MyAlg(SearchAlg):
        """Proposes nothing."""

    for kind in (Mine, MyAlg):
        if hasattr(kind, call):
            arguments: list[Any] = [] if call in ("state", "next_trial", "is_finished") else [{}]
            with pytest.raises(TuneError, match=rf"{kind.__name__} defines no {call}\("):
                getattr(kind(), call)(*arguments)


def test_what_is_given_as_search_becomes_a_search_algorithm() -> None:
    assert isinstance(as_search_alg(None), BasicVariantGenerator)
    assert isinstance(as_search_alg("random"), BasicVariantGenerator)
    for given in ("optuna", Counting(), cmaes.CMA(mean=np.zeros(2), sigma=1.0)):
        assert isinstance(as_search_alg(given), SearchGenerator)
    algorithm: SearchAlg = BasicVariantGenerator()
    assert as_search_alg(algorithm) is algorithm


# --- Optuna and objects with ask and tell ---


def nested() -> dict[str, Any]:
    return {
        "lr": loguniform(1e-4, 1),
        "batch": randint(1, 9),
        "q": quniform(0, 1, 0.25),
        "steps": qrandint(0, 20, 5),
        "scale": qloguniform(0.01, 1, 0.01),
        "opt": {
            "kind": choice(["sgd", {"momentum": uniform(0, 1)}]),
            "fixed": 3,
            "half": sample_from(lambda spec: spec.config.lr / 2),
        },
    }


def flat() -> dict[str, Any]:
    return {"lr": uniform(0, 1), "w": uniform(-2, 2)}


def branches() -> dict[str, Any]:
    """A constant liar of Optuna 5 notes values for all branches in a trial that runs."""
    return {"lr": uniform(0, 1), "opt": choice([{"momentum": uniform(0, 1)}, {"beta": uniform(0, 1)}])}


def of_kinds() -> dict[str, Any]:
    """Domains of several kinds at one place, of which Optuna takes one kind by a name."""
    return {
        "lr": uniform(0, 1),
        "w": choice([uniform(-2, 2), 1, loguniform(0.1, 1), choice([0.5, uniform(0, 1)])]),
        "net": choice([{"size": randint(1, 9)}, {"size": uniform(0, 1)}, {"size": choice(["s", "l"])}, {"size": "m"}]),
        "net/size": choice(["x", "y", "z"]),
    }


def loss_of(config: dict[str, Any]) -> dict[str, Any]:
    return {"loss": (config["lr"] - 0.3) ** 2 + config.get("w", 0.0) ** 2, "size": config.get("w", 1.0) ** 2}


def cma_search() -> AskTellSearch:
    optimizer = cmaes.CMA(mean=np.full(2, 0.5), sigma=0.5, population_size=4, seed=5)
    return AskTellSearch(
        optimizer, "loss", "min", config_of=lambda asked: {"lr": float(asked[0]), "w": float(asked[1])}, batch=4
    )


SEARCHES: dict[str, Callable[[], Searcher]] = {
    "tpe": lambda: OptunaSearch(nested(), "loss", "min", seed=1),
    "tpe, max": lambda: OptunaSearch(
        flat(), "loss", "max", seed=1, sampler_options={"multivariate": True, "n_startup_trials": 4}
    ),
    "tpe of two": lambda: OptunaSearch(
        flat(), ["loss", "size"], ["min", "max"], seed=1, sampler_options={"n_startup_trials": 4}
    ),
    "tpe of branches": lambda: OptunaSearch(
        branches(), "loss", "min", seed=1, sampler_options={"multivariate": True, "group": True, "n_startup_trials": 4}
    ),
    "tpe of a seldom branch": lambda: OptunaSearch(
        branches(), "loss", "min", seed=4, sampler_options={"multivariate": True, "n_startup_trials": 2}
    ),
    "tpe of kinds": lambda: OptunaSearch(of_kinds(), "loss", "min", seed=3, sampler_options={"n_startup_trials": 6}),
    "tpe of groups of kinds": lambda: OptunaSearch(
        of_kinds(), "loss", "min", seed=3, sampler_options={"multivariate": True, "group": True, "n_startup_trials": 6}
    ),
    "nsgaii of kinds": lambda: OptunaSearch(
        of_kinds(), "loss", "min", sampler="nsgaii", sampler_options={"population_size": 4}, seed=2
    ),
    "cmaes": lambda: OptunaSearch(flat(), "loss", "min", sampler="cmaes", seed=2),
    "nsgaii of two": lambda: OptunaSearch(
        nested(), ["loss", "size"], ["min", "min"], sampler="nsgaii", sampler_options={"population_size": 4}, seed=2
    ),
    "random": lambda: OptunaSearch(nested(), "loss", "min", sampler="random"),
    "points": lambda: OptunaSearch(
        nested(),
        "loss",
        "min",
        points_to_evaluate=[{"lr": 0.5, "opt": {"kind": {"momentum": 0.25}}}, {"steps": 10}],
    ),
    "limited": lambda: ConcurrencyLimiter(OptunaSearch(flat(), "loss", "min"), 3, batch=True),
    "repeated": lambda: Repeater(OptunaSearch(flat(), "loss", "min", sampler="cmaes"), 2),
    "ask and tell": cma_search,
}


def searched(make: Callable[[], Searcher], trials: int, restart_at: int | None = None) -> list[Any]:
    """What is suggested while four trials at a time run; one in seven fails, one in nine reports nothing."""
    searcher = make()
    suggested: list[Any] = []
    running: list[tuple[str, dict[str, Any]]] = []
    for number in range(trials):
        if number == restart_at:
            searcher = restarted(searcher, make())
        trial_id = str(number)
        suggestion = searcher.suggest(trial_id)
        suggested.append(repr(suggestion))
        if isinstance(suggestion, dict):
            running.append((trial_id, suggestion))
        if len(running) > 3 or suggestion is None:
            ended, config = running.pop(0)
            if int(ended) % 7 == 6:
                searcher.on_trial_complete(ended, None, error=True)
            else:
                searcher.on_trial_result(ended, loss_of(config))
                searcher.on_trial_complete(ended, {} if int(ended) % 9 == 8 else loss_of(config))
    return [text.partition(" at 0x")[0] for text in suggested]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Argument ``group``")
@pytest.mark.parametrize("name", SEARCHES)
def test_a_restored_search_suggests_what_the_original_would_have(name: str) -> None:
    plain = searched(SEARCHES[name], 24)
    for restart_at in (0, 1, 8, 13, 20):
        assert searched(SEARCHES[name], 24, restart_at) == plain


GRID = {"c": [1, 2], "n": [2, 6]}


@pytest.mark.parametrize(
    ("space", "make", "wanted"),
    [
        (
            {"c": choice([4, 2, 1]), "n": qrandint(2, 6, 2)},
            lambda seed: optuna.samplers.GridSampler(GRID, seed=seed),
            [{"c": c, "n": n} for c in (1, 2) for n in (2, 6)],
        ),
        (
            {"c": choice([None, "a", True]), "n": randint(0, 2)},
            lambda seed: optuna.samplers.BruteForceSampler(seed=seed),
            [{"c": c, "n": n} for c in (None, "a", True) for n in (0, 1)],
        ),
        (
            {"c": choice([[4], [2]]), "n": randint(0, 2)},
            lambda seed: optuna.samplers.GridSampler({"c": [0, 1], "n": [1]}, seed=seed),
            [{"c": [4], "n": 1}, {"c": [2], "n": 1}],
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize("restarts", [False, True])
def test_a_users_sampler_goes_through_its_grid_once_and_ends(
    space: dict[str, Any], make: Callable[[int], Any], wanted: list[dict[str, Any]], restarts: bool
) -> None:
    def search() -> Searcher:
        return OptunaSearch(dict(space), "loss", "min", sampler=make, seed=3)

    searcher = search()
    found: list[dict[str, Any]] = []
    while isinstance(suggestion := searcher.suggest(str(len(found))), dict):
        searcher.on_trial_complete(str(len(found)), {"loss": float(len(found))})
        found.append(suggestion)
        searcher = restarted(searcher, search()) if restarts else searcher
    assert suggestion == FINISHED
    assert sorted(map(repr, found)) == sorted(map(repr, wanted))


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_a_users_sampler_names_values_that_are_numbers_of_others() -> None:
    def fixed(seed: int) -> Any:
        return optuna.samplers.PartialFixedSampler({"c": 1, "n": 4}, optuna.samplers.TPESampler(seed=seed))

    points = [{"c": 2, "n": 6}]
    search = OptunaSearch(
        {"c": choice([2, 1]), "n": qrandint(2, 8, 2)}, "loss", "min", sampler=fixed, points_to_evaluate=points
    )
    assert [search.suggest(name) for name in "ab"] == [points[0], {"c": 1, "n": 4}]


@pytest.mark.slow
def test_the_gaussian_process_is_restored_too() -> None:
    def make() -> Searcher:
        return OptunaSearch({"lr": uniform(0, 1)}, "loss", "min", sampler="gp", sampler_options={"n_startup_trials": 3})

    def values(suggested: list[str]) -> list[float]:
        return [ast.literal_eval(text)["lr"] for text in suggested]

    assert values(searched(make, 6, 5)) == pytest.approx(values(searched(make, 6)), rel=1e-6)


def test_values_are_in_the_space_and_choices_open_what_is_in_them() -> None:
    search = OptunaSearch(nested(), "loss", "min", sampler="random", seed=4)
    kinds = set()
    for number in range(30):
        config = search.suggest(str(number))
        assert set(config) == {"lr", "batch", "q", "steps", "scale", "opt"}
        assert set(config["opt"]) == {"kind"}
        assert 1e-4 <= config["lr"] <= 1
        assert config["batch"] in range(1, 9)
        assert config["q"] in (0, 0.25, 0.5, 0.75, 1)
        assert config["steps"] in (0, 5, 10, 15, 20)
        assert config["scale"] == pytest.approx(round(config["scale"], 2))
        kind = config["opt"]["kind"]
        kinds.add(kind if isinstance(kind, str) else "momentum")
        assert kind == "sgd" or 0 <= kind["momentum"] <= 1
    assert kinds == {"sgd", "momentum"}


def test_each_domain_is_searched_by_itself_whatever_else_stands_at_its_place() -> None:
    space = of_kinds() | {"pair": choice([choice(["a", "b"]), choice(["c", "d"])])}
    search = OptunaSearch(space, "loss", "min", sampler="random", seed=4)
    drawn = [search.suggest(str(number)) for number in range(200)]
    assert {each["pair"] for each in drawn} == {"a", "b", "c", "d"}, "the inner choice is one of its own"
    assert {each["net/size"] for each in drawn} == {"x", "y", "z"}
    assert {type(each["net"]["size"]) for each in drawn} == {int, float, str}
    assert all(each["net"]["size"] in ("s", "m", "l") or 0 <= each["net"]["size"] <= 9 for each in drawn)
    assert {each["w"] for each in drawn} >= {1, 0.5}
    points: list[dict[str, Any]] = [
        {"w": -1.5, "net": {"size": "l"}, "pair": "d"},
        {"net": {"size": 7}, "pair": "b", "net/size": "y"},
    ]
    search = OptunaSearch(space, "loss", "min", points_to_evaluate=points)
    first, second = search.suggest("a"), search.suggest("b")
    assert (first["w"], first["net"], first["pair"]) == (-1.5, {"size": "l"}, "d")
    assert (second["net"], second["pair"]) == ({"size": 7}, "b")


@pytest.mark.parametrize("now", [choice(["a", "b"]), choice([1, 2, 3])])
@pytest.mark.parametrize("sampler", ["tpe", "nsgaii"])
def test_a_resume_with_another_kind_of_domain_is_refused(sampler: str, now: Any) -> None:
    first = OptunaSearch({"x": uniform(0.1, 0.9)}, "loss", "min", sampler=sampler, seed=1)
    for number in range(6):
        first.suggest(str(number))
    with pytest.raises(TuneError, match="not those of the experiment"):
        restarted(first, OptunaSearch({"x": now}, "loss", "min", sampler=sampler, seed=1))


def test_points_come_first_and_what_they_leave_out_is_suggested() -> None:
    search = OptunaSearch(
        nested(), "loss", "min", points_to_evaluate=[{"lr": 0.5, "opt": {"kind": "sgd"}}, {"steps": 10}]
    )
    first, second = search.suggest("a"), search.suggest("b")
    assert first["lr"] == 0.5
    assert first["opt"] == {"kind": "sgd"}
    assert second["steps"] == 10
    assert 1e-4 <= second["lr"] <= 1
    with pytest.raises(TuneError, match=r"points_to_evaluate/lr: 'x' is not in"):
        OptunaSearch(nested(), "loss", "min", points_to_evaluate=[{"lr": "x"}]).suggest("a")


@pytest.mark.filterwarnings("ignore:Fixed parameter:UserWarning")
def test_a_point_beyond_its_domain_is_evaluated_as_it_is_also_after_a_restart() -> None:
    space = {"a": uniform(0, 1), "net": {"w": randint(1, 9), "q": quniform(0, 1, 0.25)}}
    point = {"a": 3.0, "net/w": 20, "net": {"q": 0.3}}
    search, again = (OptunaSearch(space, "loss", "min", points_to_evaluate=[point]) for _ in range(2))
    assert search.suggest("t") == {"a": 3.0, "net": {"w": 20, "q": 0.3}}
    search.on_trial_complete("t", {"loss": 1.0})
    again.restore_state(search.state())
    assert again.suggest("u") == search.suggest("u")
    with pytest.raises(TuneError, match=r"points_to_evaluate/net/w: 2\.5 is not in"):
        OptunaSearch(space, "loss", "min", points_to_evaluate=[{"net/w": 2.5}]).suggest("t")


def test_a_point_is_taken_as_it_is_written() -> None:
    """None is a value, 1 is not True, and a key that is not searched is an error."""
    space = {"kind": choice(["a", None]), "flag": choice([1, True]), "x": uniform(0, 1), "fixed": 3}
    search = OptunaSearch(
        space, "loss", "min", points_to_evaluate=[{"kind": None, "flag": True}, {"flag": 1, "x": 0.5, "fixed": 3}]
    )
    first, second = search.suggest("a"), search.suggest("b")
    assert first["kind"] is None
    assert first["flag"] is True
    assert (second["flag"], type(second["flag"]), second["x"]) == (1, int, 0.5)
    wrong_points: list[dict[str, Any]] = [{"y": 1}, {"fixed": 4}, {"x": None}, {"kind": {"z": 1}}]
    for point in wrong_points:
        [key] = point
        with pytest.raises(TuneError, match=f"points_to_evaluate/{key}"):
            OptunaSearch(space, "loss", "min", points_to_evaluate=[point]).suggest("a")
    for switch in (choice([True, False]), randint(0, 2)):
        wrong = 1 if isinstance(switch, Categorical) else True
        with pytest.raises(TuneError, match="points_to_evaluate/s"):
            OptunaSearch({"s": switch}, "loss", "min", points_to_evaluate=[{"s": wrong}]).suggest("a")
    with pytest.raises(TuneError, match="points_to_evaluate/opt/momentum"):
        OptunaSearch(nested(), "loss", "min", points_to_evaluate=[{"opt": {"momentum": 1}}]).suggest("a")


@pytest.mark.filterwarnings("ignore:Fixed parameter:UserWarning")
@pytest.mark.parametrize(
    ("domain", "given", "taken"),
    [
        (choice([1, 2]), 1.0, 1),
        (choice([(0.9, 0.95), 1]), [0.9, 0.95], [0.9, 0.95]),
        (choice([{"a": 1, "b": randint(0, 5)}]), {"a": 1.0, "b": 3.0}, {"a": 1, "b": 3}),
        (choice([True, None]), 1, TuneError),
        (choice([1, 2]), 3, TuneError),
        (choice([{"a": uniform(0, 1)}]), {"a": None}, TuneError),
        (randint(0, 9), 4.0, 4),
        (randint(0, 9), 40, 40),
        (randint(0, 9), 4.5, TuneError),
        (randint(0, 9), True, TuneError),
        (qrandint(0, 20, 5), 7, TuneError),
        (uniform(0, 3), 2, 2.0),
        (uniform(0, 3), None, TuneError),
        (uniform(0, 3), "1", TuneError),
        (uniform(0, 3), float("nan"), TuneError),
        (uniform(0, 3), 10**400, TuneError),
        (loguniform(1e-4, 1), 0, TuneError),
        (loguniform(1e-4, 1), 2, 2.0),
        (7, 7, 7),
        (7, 8, TuneError),
        (True, 1, TuneError),
        ([7, "x"], [7], [7, "x"]),
        ([7, "x"], [7, "x", 1], TuneError),
    ],
)
@pytest.mark.parametrize("is_flat", [False, True])
def test_both_searchers_read_a_point_alike(domain: Any, given: Any, taken: Any, is_flat: bool) -> None:
    space = {"net": {"a/b": domain, "other": uniform(0, 1)}, "fixed": 3}
    point = {"net/a/b": given} if is_flat else {"net": {"a/b": given}}

    def read(search: SearchAlg | Searcher) -> Any:
        algorithm = as_search_alg(search)
        algorithm.set_search_properties("loss", "min", space)
        algorithm.add_configurations([SpaceOnly(space, 1)])
        trial = algorithm.next_trial()
        assert trial is not None
        return trial.config["net"]["a/b"]

    for search in (BasicVariantGenerator, OptunaSearch):
        if taken is TuneError:
            with pytest.raises(TuneError, match="points_to_evaluate/net/a/b"):
                read(search(points_to_evaluate=[point]))
        else:
            value = read(search(points_to_evaluate=[point]))
            assert (value, repr(value)) == (taken, repr(taken))
    for wrong in ({"net/c": 1}, {"net": 3}, {"net": {"other": 0.5}, "net/other": 0.25}, {"fixed/x": 1}, "net"):
        for search in (BasicVariantGenerator, OptunaSearch):
            with pytest.raises(TuneError, match="points_to_evaluate"):
                read(search(points_to_evaluate=[wrong]))  # type: ignore[list-item]


def test_a_point_has_lists_where_the_space_has_them() -> None:
    space = {"layers": [uniform(0, 1), {"width": randint(1, 9)}, 7]}
    whole: dict[str, Any] = {"layers": [0.25, {"width": 4}, 7]}
    first = OptunaSearch(space, "loss", "min", points_to_evaluate=[whole]).suggest("a")
    assert first["layers"] == whole["layers"]
    for wrong in ([0.25, {"width": 4}, 8], [0.25, {"depth": 4}]):
        with pytest.raises(TuneError, match=r"points_to_evaluate/layers/[12]"):
            OptunaSearch(space, "loss", "min", points_to_evaluate=[{"layers": wrong}]).suggest("a")


@pytest.mark.parametrize("sampler", ["tpe", "cmaes"])
def test_a_sampler_finds_better_than_random_values(sampler: str) -> None:
    def best(name: str) -> float:
        search = OptunaSearch(flat(), "loss", "min", sampler=name, seed=0)
        losses = []
        for number in range(40):
            losses.append(loss_of(search.suggest(str(number)))["loss"])
            search.on_trial_complete(str(number), {"loss": losses[-1]})
        return float(np.mean(sorted(losses)[:10]))

    assert best(sampler) < best("random")


def test_the_space_of_the_experiment_is_searched_if_there_is_no_other() -> None:
    generator = as_search_alg(OptunaSearch(seed=1))
    assert generator.set_search_properties("loss", "min", nested())
    assert not generator.set_search_properties("other", "min", nested())
    generator.add_configurations([SpaceOnly(nested(), 2)])
    trial = generator.next_trial()
    assert trial is not None
    assert set(trial.config["opt"]) == {"kind", "fixed", "half"}
    assert trial.config["opt"]["half"] == trial.config["lr"] / 2
    assert "opt/half" not in trial.evaluated_params
    restored = as_search_alg(OptunaSearch(seed=1))
    restored.set_search_properties("loss", "min", nested())
    restored.add_configurations([SpaceOnly(nested(), 2)])
    restored = restarted(generator, restored)
    after, would_have = restored.next_trial(), generator.next_trial()
    assert after is not None
    assert would_have is not None
    assert (after.trial_id, after.config) == (would_have.trial_id, would_have.config)


def test_another_optimizer_or_seed_at_a_resume_is_refused() -> None:
    search = cma_search()
    search.suggest("a")
    other = AskTellSearch(
        cmaes.CMA(mean=np.zeros(2), sigma=1.0, seed=9), "loss", "min", config_of=lambda asked: {"x": list(asked)}
    )
    with pytest.raises(TuneError, match="not the optimizer of the experiment"):
        restarted(search, other)
    with pytest.raises(TuneError, match="begun with seed=1"):
        restarted(OptunaSearch(flat(), "loss", "min", seed=1), OptunaSearch(flat(), "loss", "min", seed=2))
    first = OptunaSearch(flat(), "loss", "min", sampler="cmaes", seed=1)
    first.suggest("a")
    with pytest.raises(TuneError, match="not those of the experiment"):
        restarted(
            first, OptunaSearch({"lr": uniform(5, 6), "w": uniform(-2, 2)}, "loss", "min", sampler="cmaes", seed=1)
        )


class Asked:
    def __init__(self, params: dict[str, Any]) -> None:
        self.params = params


class Maximizer:
    def __init__(self, wrap: Callable[[dict[str, Any]], Any] = Asked) -> None:
        self.wrap, self.told = wrap, []  # type: ignore[var-annotated]

    def ask(self) -> Any:
        return self.wrap({"x": len(self.told)})

    def tell(self, asked: Any, value: Any) -> None:
        self.told.append(value)


def test_values_have_the_sign_that_the_optimizer_wants() -> None:
    optimizer = Maximizer()
    search = AskTellSearch(optimizer, ["loss", "reward"], ["min", "max"], optimizer_mode="max")
    assert search.suggest("a") == {"x": 0}
    search.on_trial_complete("a", {"loss": 2, "reward": 3})
    search.on_trial_complete("a", {"loss": 2, "reward": 3})
    assert search.suggest("b") == {"x": 1}
    search.on_trial_complete("b", {"loss": 2})
    assert optimizer.told == [[-2.0, 3.0]]
    assert AskTellSearch(Maximizer(dict), "loss", "min").suggest("a") == {"x": 0}
    with pytest.raises(TuneError, match="pass config_of"):
        AskTellSearch(Maximizer(str), "loss", "min").suggest("a")
