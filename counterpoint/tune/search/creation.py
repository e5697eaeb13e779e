"""Makes a search algorithm of what a user gives: one by name, a searcher, or any object with `ask()` and `tell()`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from counterpoint.tune.errors import TuneError
from counterpoint.tune.search.ask_tell import AskTellSearch
from counterpoint.tune.search.basic_variant import BasicVariantGenerator
from counterpoint.tune.search.generator import SearchGenerator
from counterpoint.tune.search.search_alg import SearchAlg
from counterpoint.tune.search.searcher import Searcher


def create_searcher(name: str, **options: Any) -> SearchAlg | Searcher:
    """The search algorithm or searcher of a name (`random`, `optuna`), with its arguments.

    `random` also searches grids; `variant_generator` is another name for it. Raises `TuneError` for another name, or wrong
    arguments.
    """
    makers: dict[str, Callable[..., SearchAlg | Searcher]] = {
        "random": BasicVariantGenerator,
        "variant_generator": BasicVariantGenerator,
        "optuna": _optuna,
    }
    if name not in makers:
        raise TuneError(f"search_alg is {name!r}; expected one of {', '.join(makers)}")
    try:
        return makers[name](**options)
    except TypeError as error:
        raise TuneError(f"search_alg {name!r} with {options}: {error}") from error


def as_search_alg(search: Any) -> SearchAlg:
    """The search algorithm that a user's `search_alg` means; None means `BasicVariantGenerator`."""
    if search is None:
        return BasicVariantGenerator()
    if isinstance(search, str):
        search = create_searcher(search)
    if isinstance(search, SearchAlg):
        return search
    if isinstance(search, Searcher):
        return SearchGenerator(search)
    if callable(getattr(search, "ask", None)) and callable(getattr(search, "tell", None)):
        return SearchGenerator(AskTellSearch(search))
    raise TuneError(
        f"search_alg is {search!r}; it must be a SearchAlg, a Searcher, a name, or an object with ask() and tell()"
    )


def _optuna(**options: Any) -> Searcher:
    from counterpoint.tune.search.optuna_search import OptunaSearch

    return OptunaSearch(**options)
