"""Optuna's samplers as a searcher (extra `optuna`): TPE, CMA-ES, a Gaussian process, NSGA-II and random; one metric or several.

Each suggestion is drawn by a new sampler whose seed is made of the searcher's and the suggestion's number. Optuna's samplers keep
what they learn in the study, not in themselves, so a suggestion depends on the seed and on what was suggested and told before, in
order. That is the state, as JSON; the study itself is never saved (some samplers pickle into it). A sampler that a user's
function makes is made once, since the seed of some is that of all they suggest, such as the order of a grid; a restore has it
suggest everything again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from counterpoint.tune.errors import TuneError
from counterpoint.tune.result import Result
from counterpoint.tune.search.searcher import Searcher, objectives, values_in
from counterpoint.tune.search.spaces import Categorical, Domain, Float, Function, Integer
from counterpoint.tune.search.variants import Path, copied, flat_name, unresolved, value_at, with_point

SAMPLERS = {
    "tpe": "TPESampler",
    "cmaes": "CmaEsSampler",
    "gp": "GPSampler",
    "nsgaii": "NSGAIISampler",
    "random": "RandomSampler",
}

_LEARN_FROM_VALUES = {"tpe", "gp", "random"}
"""Samplers that read only parameters and values of the study, and what they noted in trials that still run (a constant liar
notes what it drew for branches that were not chosen): at a restore they need not suggest everything again."""


class OptunaSearch(Searcher):
    """Suggests with a sampler of Optuna.

    Args:
        space: A space of its own; by default that of the experiment. Grids have no place in it.
        metric: The metric, or several.
        mode: `min` or `max` for each.
        sampler: A key of `SAMPLERS`, or a function that makes a sampler of Optuna from a seed.
        sampler_options: More arguments for a sampler that is given by its key.
        seed: The search's seed; with the same results it suggests the same again.
        points_to_evaluate: Configurations, or parts of such, that are suggested first, as they are: a number outside its domain
            is evaluated, with a warning. Keys may be nested or flat (`"net/width"`).

    Raises:
        TuneError: Optuna is not installed, or there is no such sampler.
    """

    def __init__(
        self,
        space: dict[str, Any] | None = None,
        metric: str | list[str] | None = None,
        mode: str | list[str] | None = None,
        sampler: str | Callable[[int], Any] = "tpe",
        sampler_options: dict[str, Any] | None = None,
        seed: int = 0,
        points_to_evaluate: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        super().__init__(metric, mode)
        try:
            import optuna
        except ImportError as error:
            raise TuneError("OptunaSearch needs the extra `optuna`: pip install 'counterpoint[optuna]'") from error
        if isinstance(sampler, str) and sampler not in SAMPLERS:
            raise TuneError(f"sampler is {sampler!r}; expected one of {', '.join(SAMPLERS)}, or a function of a seed")
        self._optuna = optuna
        self._own_space = space is not None
        self._space: dict[str, Any] | None = None
        self._sampler, self._options, self._seed = sampler, dict(sampler_options or {}), seed
        self._points = list(points_to_evaluate or [])
        self._names: dict[tuple[Path, int, tuple[Any, ...]], str] = {}
        """The names of domains in the study: by path, how many were drawn there before in the same trial, and kind."""
        self._fixed: list[dict[str, Any]] = []
        self._study: Any = None
        self._open: dict[str, Any] = {}  # trials of the study that are not told yet
        self._asked = 0
        self._is_over = False
        self._made: Any = None
        """What a user's function made."""
        self._history: list[list[Any]] = []
        if space is not None:
            self._take_space(space)

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict[str, Any]) -> bool:
        """Takes what it has not: metric and mode, and the space."""
        if not self._own_space and unresolved(config)[0]:
            self._take_space(config)
        return super().set_search_properties(metric, mode, config)

    def suggest(self, trial_id: str) -> Any:
        """The next configuration: values for the domains of the space, and for those within what is chosen.

        `FINISHED` once the sampler has stopped the study, as that of a grid does at its end.
        """
        self._begin()
        if self._is_over:
            return self.FINISHED
        fixed = self._fixed[self._asked] if self._asked < len(self._fixed) else None
        return self._ask(trial_id, self._new_sampler(self._asked), fixed)

    def on_trial_complete(self, trial_id: str, result: Result | None = None, error: bool = False) -> None:
        """Tells the study; a trial that failed or has no finite number as failed."""
        if trial_id not in self._open:
            return
        values = None if error else values_in(self, result)
        self._history.append(["tell", trial_id, values])
        self._tell(trial_id, values)

    def state(self) -> dict[str, Any]:
        """What was suggested and told, in order."""
        return {"seed": self._seed, "history": [list(one) for one in self._history]}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Does the same again, in a new study. Raises `TuneError` if seed, space or sampler are others."""
        if state["seed"] != self._seed:
            raise TuneError(
                f"the experiment was begun with seed={state['seed']}, OptunaSearch has seed={self._seed}; give the same"
            )
        self._study, self._open, self._history, self._asked = None, {}, [], 0
        self._is_over, self._made = False, None
        for kind, trial_id, value, *notes in state["history"]:
            if kind == "tell":
                self._history.append([kind, trial_id, value])
                self._tell(trial_id, value)
                continue
            try:
                if self._sampler in _LEARN_FROM_VALUES:
                    self._begin()
                    self._ask(trial_id, self._optuna.samplers.RandomSampler(seed=0), value, *notes)
                else:
                    self.suggest(trial_id)
                now = self._history[-1][2]
            except (TypeError, ValueError) as error:  # Optuna's, of a value that another kind of domain has
                now = error
            if now != value:
                raise TuneError(
                    f"OptunaSearch suggests {now} for trial {trial_id}, where it had suggested {value}: the space, "
                    "the sampler, its options or Optuna's version are not those of the experiment that is resumed"
                )

    def _ask(
        self, trial_id: str, sampler: Any, fixed: dict[str, Any] | None, notes: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Asks for values, with those of `fixed`; `notes` are what the sampler of that suggestion had noted in the trial."""
        self._study.sampler = sampler
        if fixed is not None:
            self._study.enqueue_trial(fixed)
        trial = self._study.ask()
        given = fixed or {}
        by_value = callable(self._sampler)
        config = self._drawn(lambda _, name, domain: _suggested(trial, name, domain, given, by_value=by_value))
        self._open[trial_id] = trial
        self._asked += 1
        for name, note in (notes or {}).items():
            trial.storage.set_trial_system_attr(trial._trial_id, name, note)
        asked = ["ask", trial_id, dict(trial.params)]
        if self._sampler in _LEARN_FROM_VALUES:
            noted = trial.storage.get_trial_system_attrs(trial._trial_id)
            asked.append({name: note for name, note in noted.items() if name != "fixed_params"})
        self._history.append(asked)
        return config

    def _begin(self) -> None:
        if self._study is not None:
            return
        if self._space is None:
            raise TuneError(
                "OptunaSearch has no space: the configuration of the experiment contains no domain, such as uniform(0, 1)"
            )
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)  # else it prints each trial
        directions = [{"min": "minimize", "max": "maximize"}[mode] for _, mode in objectives(self)]
        self._study = self._optuna.create_study(directions=directions, sampler=self._new_sampler(0))
        self._study.stop = self._stop  # its own works in `optimize` alone

    def _stop(self) -> None:
        self._is_over = True

    def _new_sampler(self, number: int) -> Any:
        seed = int(np.random.SeedSequence([self._seed, number]).generate_state(1)[0])
        if callable(self._sampler):
            self._made = self._sampler(seed) if self._made is None else self._made
            return self._made
        return getattr(self._optuna.samplers, SAMPLERS[self._sampler])(seed=seed, **self._options)

    def _tell(self, trial_id: str, values: list[float] | None) -> None:
        trial = self._open.pop(trial_id)
        if values is None:
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(trial, values)

    def _take_space(self, space: dict[str, Any]) -> None:
        self._space, self._names = space, {}
        self._name_all(space, ())
        self._fixed = [self._as_params(point) for point in self._points]

    def _name_all(self, part: Any, within: Path, level: int = 0) -> None:
        """Gives each domain of a part of the space a name in the study, also those within choices.

        One name has one kind of values there. So what else stands at a path has a name of its own, such as the domains of
        `choice([uniform(0, 1), randint(1, 9)])`, or those of two choices by one key.
        """
        domains, grids = unresolved({"": part})
        if grids:
            names = ", ".join(flat_name((*within, *path[1:])) for path in grids)
            raise TuneError(
                f"OptunaSearch cannot search the grid {names}: a grid is exhausted, not sampled. Use choice, or "
                "BasicVariantGenerator"
            )
        for (_, *inside), domain in domains.items():
            path, depth = (*within, *inside), 0 if inside else level
            kind = _kind(domain, by_value=callable(self._sampler))
            if isinstance(domain, Function) or (path, depth, kind) in self._names:
                continue
            name = flat_name(path)
            if isinstance(domain, Float) and domain.distribution == "normal":
                raise TuneError(
                    f"{name}: Optuna has nothing for {domain}; use uniform or loguniform, or BasicVariantGenerator"
                )
            others = (f"{name} ({number})" for number in itertools.count(2))
            taken = self._names.values()
            self._names[path, depth, kind] = next(each for each in itertools.chain([name], others) if each not in taken)
        for (_, *inside), domain in domains.items():
            for category in domain.categories if isinstance(domain, Categorical) else ():
                self._name_all(category, (*within, *inside), 1 if inside else level + 1)

    def _drawn(self, draw: Callable[[Path, str, Domain], Any]) -> dict[str, Any]:
        """The searched part of the space, with a value for each domain, in their order; then those within values, and so on."""
        assert self._space is not None
        config: dict[str, Any] = copied(self._space)
        drawn: list[Path] = []
        while domains := {path: d for path, d in unresolved(config)[0].items() if not isinstance(d, Function)}:
            for path, domain in domains.items():
                kind = _kind(domain, by_value=callable(self._sampler))
                name = self._names[path, drawn.count(path), kind]
                value_at(config, path[:-1])[path[-1]] = copied(draw(path, name, domain))
                drawn.append(path)
        return _part(config, drawn)

    def _as_params(self, point: dict[str, Any]) -> dict[str, Any]:
        """A point as the study names it: choices by their number. What it leaves out is suggested."""
        assert self._space is not None
        filled = with_point(self._space, point)
        for path, domain in unresolved(self._space)[0].items():
            if isinstance(domain, Function) and value_at(filled, path) is not domain:
                raise TuneError(f"points_to_evaluate/{flat_name(path)}: nothing is searched there: {domain} fills it")
        params: dict[str, Any] = {}
        by_value = callable(self._sampler)

        def take(path: Path, name: str, domain: Domain) -> Any:
            value = value_at(filled, path)
            if isinstance(value, Domain):
                return None
            if isinstance(domain, Categorical):
                index = domain.index(value)
                assert index is not None
                params[name] = domain.categories[index] if by_value and _are_scalars(domain) else index
                return domain.categories[index]
            params[name] = value
            if isinstance(domain, Integer) and not (by_value and domain.distribution == "uniform"):
                params[name] = value // (domain.q or 1)
            return value

        self._drawn(take)
        return params


def _part(config: dict[str, Any], paths: Sequence[Path]) -> dict[str, Any]:
    """What stands at the paths, and nothing beside it; of a list the whole."""
    part: dict[str, Any] = {}
    for path in paths:
        names = list(itertools.takewhile(lambda key: isinstance(key, str), path))
        inside: Any = part
        for name in names[:-1]:
            inside = inside.setdefault(name, {})
        inside[names[-1]] = value_at(config, tuple(names))
    return part


def _suggested(trial: Any, name: str, domain: Domain, given: dict[str, Any], *, by_value: bool = False) -> Any:
    """Asks a trial of Optuna for a value of the domain. One that a point gives stays as it is.

    `by_value`: for a sampler that a user made, which may name values, as that of a grid does.
    """
    if isinstance(domain, Categorical):
        if by_value and _are_scalars(domain):
            return trial.suggest_categorical(name, list(domain.categories))
        # By number, since Optuna's own choices are scalars.
        return domain.categories[trial.suggest_categorical(name, list(range(len(domain.categories))))]
    if isinstance(domain, Integer):
        if by_value and domain.distribution == "uniform":
            return trial.suggest_int(name, *domain.ends, step=domain.q or 1)
        first, end = domain.indices
        return trial.suggest_int(name, first, end - 1, log=domain.distribution == "loguniform") * (domain.q or 1)
    assert isinstance(domain, Float), domain
    log = domain.distribution == "loguniform"
    step = None if log else domain.q
    value = trial.suggest_float(name, domain.lower, domain.upper, log=log, step=step)
    return value if name in given else domain.rounded(value)


def _kind(domain: Domain, *, by_value: bool) -> tuple[Any, ...]:
    """What two domains must have in common for Optuna to take both by one name."""
    count: object = len(domain.categories) if isinstance(domain, Categorical) else 0
    if by_value and isinstance(domain, Categorical) and _are_scalars(domain):
        count = repr(list(domain.categories))
    return type(domain).__name__, count, getattr(domain, "distribution", "") == "loguniform"


def _are_scalars(domain: Categorical) -> bool:
    """Whether Optuna can name the categories by themselves: scalars of which no two are equal, as 1 and true are."""
    is_scalar = all(each is None or isinstance(each, bool | int | float | str) for each in domain.categories)
    return is_scalar and len(set(domain.categories)) == len(domain.categories)
