"""Imports large libraries in less time; for trainers it also sets the environment that torch reads."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

UNUSED_BY_TRAINERS = ("scipy", "sklearn", "boto3")
"""Modules that transformers and accelerate import where they are installed, and that no trainer needs: scipy for losses of object
detection, sklearn for a way to generate, boto3 for jobs in a cloud. They are a fifth of the CPU of a trainer's imports."""


@contextmanager
def trainer_imports() -> Iterator[None]:
    """Lets the block import torch and transformers in the least time that a trainer needs for it.

    It also sets how torch divides a GPU's memory, unless the environment does. Rows differ in length; without segments that grow
    the memory is cut into pieces of every length there was: a row may find no room in memory that is free. vLLM must not have it,
    since it shares its memory between processes.
    """
    if not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    with (
        without_gc(),
        without_modules(*UNUSED_BY_TRAINERS, to=("transformers", "accelerate")),
        one_scan_of_transformers(),
    ):
        yield


@contextmanager
def without_gc() -> Iterator[None]:
    """Keeps the garbage collector from running during the block, and what there is at its end from ever being visited.

    torch and transformers make a million objects while they are imported, and no garbage. Collections visit them again and again,
    which is a fifth of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


@contextmanager
def without_modules(*names: str, to: Collection[str]) -> Iterator[None]:
    """Makes these modules absent to the packages `to` during the block, as if not installed; afterwards they work again.

    A library imports what it can do without if it is there, for features that a process may not have. Whatever else imports such
    a module, because it cannot do without, gets it. A module that is imported already stays.
    """
    finder = _AbsenceFinder(frozenset(names), frozenset(to))
    find_spec = importlib.util.find_spec

    def find_spec_if_present(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if finder.hides(name) and name not in sys.modules else find_spec(name, package)

    sys.meta_path.insert(0, finder)
    importlib.util.find_spec = find_spec_if_present
    try:
        yield
    finally:
        importlib.util.find_spec = find_spec
        sys.meta_path.remove(finder)


class _AbsenceFinder:
    """Fails to find modules for the code of some packages, and leaves all else to the finders after it."""

    def __init__(self, names: frozenset[str], packages: frozenset[str]) -> None:
        self._names = names
        self._packages = packages

    def hides(self, name: str) -> bool:
        """Returns whether `name` is absent to the code that asks for it now: the nearest caller outside of the import system."""
        if name not in self._names:
            return False
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__") in _IMPORT_SYSTEM:
            frame = frame.f_back
        return str(frame.f_globals.get("__name__")).partition(".")[0] in self._packages

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Called by each import (`importlib.abc.MetaPathFinder`). Raises `ModuleNotFoundError` for one that is absent."""
        if self.hides(name):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


_IMPORT_SYSTEM = {__name__, "importlib", "importlib.util", "importlib._bootstrap", "importlib._bootstrap_external"}


@contextmanager
def one_scan_of_transformers() -> Iterator[None]:
    """Lets transformers, if the block is the first to import it, read the files of its models once, and faster.

    While transformers 5 is imported, it searches all of its models' files for `__all__`, and then once more: the results of 500
    folders do not fit into its cache of 128. It also divides each file into lines, of which it needs the last few. Both are
    an eighth of the CPU of a trainer's imports. What it finds stays the same.
    """
    finder = _ScanFinder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _ScanFinder:
    """Finds the module of transformers that has the scan, for a loader that changes it."""

    MODULE = "transformers.utils.import_utils"

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Called by each import (`importlib.abc.MetaPathFinder`)."""
        if name != cls.MODULE or (spec := PathFinder.find_spec(name, path, target)) is None or spec.origin is None:
            return None
        spec.loader = _ScanLoader(name, spec.origin)
        return spec


class _ScanLoader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        stock = vars(module)
        if "fetch__all__" not in stock or not hasattr(stock.get("create_import_structure_from_path"), "__wrapped__"):
            return  # another version, which finds its models in another way
        names_in = stock["fetch__all__"]

        def names_at_the_end(text: str) -> list[str]:
            """Returns `names_in(text)`, which looks for the last line that begins with `__all__`."""
            found: list[str] = names_in(text[text.rfind("\n__all__") + 1 :])
            return found

        stock["fetch__all__"] = names_at_the_end
        scan_folder = stock["create_import_structure_from_path"].__wrapped__
        stock["create_import_structure_from_path"] = lru_cache(maxsize=None)(scan_folder)
