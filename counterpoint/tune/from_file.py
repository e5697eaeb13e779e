"""Makes the parts of an experiment from its file: space, search, scheduler, stopper, and with `executor = "runs"` the run.

Errors name the file and the key, as everywhere (`transport/configuration/explain.py`).
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from counterpoint.environments.import_path import import_module
from counterpoint.transport.configuration.toml_file import Table
from counterpoint.transport.errors import UserError
from counterpoint.tune.config import PbtConfig, TuneConfig
from counterpoint.tune.errors import TuneError
from counterpoint.tune.runs.varied_run import problem_of
from counterpoint.tune.schedulers.scheduler import TrialScheduler
from counterpoint.tune.search import spaces
from counterpoint.tune.search.creation import as_search_alg
from counterpoint.tune.search.search_alg import SearchAlg
from counterpoint.tune.stoppers.stopper import Stopper

DOMAINS = (
    "uniform", "quniform", "loguniform", "qloguniform", "randn", "qrandn", "randint", "qrandint", "lograndint", "qlograndint",
)  # fmt: skip
LISTS = ("choice", "grid_search")
FUNCTION = "sample_from"

_SCHEDULERS = {
    "fifo": "FIFOScheduler",
    "asha": "AsyncHyperBandScheduler",
    "hyperband": "HyperBandScheduler",
    "median": "MedianStoppingRule",
    "pbt": "PopulationBasedTraining",
}


def space_of(table: Table, where: str, above: str = "") -> dict[str, Any]:
    """Returns a space from a file's table. Raises `UserError` with the key for arguments that the domain refuses."""
    space: dict[str, Any] = {}
    for key, value in table.items():
        path = f"{above}{key}"
        if not isinstance(value, dict):
            space[key] = value
        elif _domain_of(value) is None:
            _check_spelling(value, f"{where}: {path}")
            space[key] = space_of(value, where, f"{path}.")
        else:
            space[key] = _domain(value, f"{where}: {path}")
    return space


def leaves(table: Table, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values and the domains of a space's table by dotted path."""
    for key, value in table.items():
        path = f"{above}{key}"
        if isinstance(value, dict) and value and _domain_of(value) is None:
            yield from leaves(value, f"{path}.")
        else:
            yield path, value


def listed_values(tables: Iterable[Table]) -> Iterator[tuple[str, Any]]:
    """Yields by dotted path each value of a `choice`, a grid or a list of mutations; none where a function draws a value, too."""
    given = [leaf for table in tables for leaf in leaves(table)]
    if any(isinstance(value, dict) and FUNCTION in value for _, value in given):
        return
    for path, value in given:
        listed = next(iter(value.values())) if isinstance(value, dict) and _domain_of(value) in LISTS else value
        if isinstance(listed, list):
            yield from ((path, each) for each in listed)


def check_keys(config: TuneConfig, file: Path) -> None:
    """Raises `UserError` for keys that a run does not have, with the nearest; only with `executor = "runs"`."""
    if config.executor != "runs":
        return
    tables = {"run": config.run, "space": config.space}
    if isinstance(config.scheduler, PbtConfig):
        tables["scheduler.mutations"] = config.scheduler.mutations
    for section, table in tables.items():
        for path, value in leaves(table):
            if (problem := problem_of(path)) is not None:
                above, _, name = path.rpartition(".")
                if above and section != "run":
                    _check_spelling({name: value}, f"{file}: {section}.{above}")
                raise UserError(f"{file}: {section}.{path} = {value!r}\n    {problem}")


def scheduler_of(config: TuneConfig, file: Path) -> TrialScheduler:
    """Returns the scheduler; the runner gives it the metric and mode. Raises `UserError`."""
    of = config.scheduler
    given = of.model_dump(exclude={"kind", "mutations"})
    try:
        if isinstance(of, PbtConfig):
            mutations = space_of(of.mutations or _drawn(config.space), f"{file}: scheduler.mutations")
            given |= {"hyperparam_mutations": mutations, "seed": config.seed}
        scheduler: TrialScheduler = _of(_SCHEDULERS[of.kind], **given)
    except (TuneError, ValueError, TypeError) as error:
        raise UserError(f"{file}: scheduler.kind = {of.kind!r}: {error}") from None
    return scheduler


def search_of(config: TuneConfig, file: Path) -> SearchAlg:
    """Returns the search algorithm. Raises `UserError`."""
    of, seed = config.search, config.seed if config.search.seed is None else config.search.seed
    search: SearchAlg
    try:
        if of.kind == "random":
            search = _of("BasicVariantGenerator", max_concurrent=config.max_concurrent or 0, random_state=seed)
        else:
            searcher = _of("OptunaSearch", sampler=of.sampler, seed=seed)
            searcher = searcher if of.repeat == 1 else _of("Repeater", searcher, of.repeat)
            limit = config.max_concurrent
            search = as_search_alg(searcher if limit is None else _of("ConcurrencyLimiter", searcher, limit))
    except ImportError as error:
        raise UserError(f"{file}: search.kind = {of.kind!r}: {error}; install the extra 'optuna'") from None
    except (TuneError, ValueError, TypeError) as error:
        raise UserError(f"{file}: search.kind = {of.kind!r}: {error}") from None
    return search


def stopper_of(config: TuneConfig) -> Stopper | None:
    """Returns what stops trials or the experiment, besides the metrics' values; None for nothing."""
    of = config.stop
    parts: list[Stopper] = []
    if of.training_iteration is not None:
        parts.append(_of("MaximumIterationStopper", of.training_iteration))
    if of.timeout_seconds is not None:
        parts.append(_of("TimeoutStopper", of.timeout_seconds))
    if of.plateau is not None:
        plateau = of.plateau
        parts.append(_of("ExperimentPlateauStopper", config.metric, mode=config.mode, **plateau.model_dump()))
    if len(parts) < 2:
        return parts[0] if parts else None
    combined: Stopper = _of("CombinedStopper", *parts)
    return combined


def _of(name: str, *arguments: Any, **given: Any) -> Any:
    """Makes an object of the public API; what is not needed is not imported."""
    return getattr(importlib.import_module("counterpoint.tune"), name)(*arguments, **given)


def _domain_of(table: Table) -> str | None:
    """The name of the domain that a table is; None for a table of further keys."""
    if len(table) == 1:
        name = next(iter(table))
        if name in (*DOMAINS, *LISTS, FUNCTION):
            return str(name)
    return None


def _check_spelling(table: Table, where: str) -> None:
    """Raises `UserError` for a table that is almost a domain: taken for a plain value, it would reach each trial as a dict."""
    name, given = next(iter(table.items())) if len(table) == 1 else ("", None)
    if isinstance(given, list) and (near := difflib.get_close_matches(name, (*DOMAINS, *LISTS), n=1, cutoff=0.8)):
        raise UserError(
            f"{where}.{name} = {given!r}: there is no domain {name!r}; the nearest is {near[0]}. What is meant as it is "
            "belongs in [run]"
        )


def _domain(table: Table, where: str) -> Any:
    name, given = next(iter(table.items()))
    try:
        if name == FUNCTION:
            module, _, attribute = str(given).partition(":")
            return spaces.sample_from(getattr(import_module(module), attribute))
        if not isinstance(given, list):
            raise UserError(f"{where}.{name} = {given!r}: expected a list, such as {name} = [1, 2]")
        if name in LISTS:
            return getattr(spaces, name)(given)
        return getattr(spaces, name)(*given)
    except (TuneError, TypeError, ValueError, ImportError, AttributeError) as error:
        raise UserError(f"{where}.{name} = {given!r}: {error}") from None


def _drawn(space: Table) -> Table:
    """The part of a space's table that is drawn: without fixed values and grids, which no mutation may change."""
    drawn: Table = {}
    for key, value in space.items():
        if isinstance(value, dict):
            if (name := _domain_of(value)) is None:
                if inner := _drawn(value):
                    drawn[key] = inner
            elif name != "grid_search":
                drawn[key] = value
    return drawn
