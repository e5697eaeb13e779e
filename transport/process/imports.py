"""Imports large libraries in less time; for trainers it also sets the environment that torch reads."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

UNUSED_BY_TRAINERS = ("scipy", "boto3")
"""Modules that transformers imports where they are installed, and that no trainer needs: scipy for its losses of object
detection, boto3 by accelerate for jobs in a cloud. They are a fifth of the CPU of a trainer's imports."""


@contextmanager
def trainer_imports() -> Iterator[None]:
    """Lets the block import torch and transformers in the least time that a trainer needs for it.

    It also sets how torch divides a GPU's memory, unless the environment does. Rows differ in length; without segments that grow
    the memory is cut into pieces of every length there was: a row may find no room in memory that is free. vLLM must not have it,
    since it shares its memory between processes.
    """
    if not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    with without_gc(), without_modules(*UNUSED_BY_TRAINERS), one_scan_of_transformers():
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
def without_modules(*names: str) -> Iterator[None]:
    """Makes imports of these modules fail during the block, as if they were not installed; afterwards they work again.

    A library imports what it can do without if it is there, for features that a process may not have. A module that is imported
    already stays.
    """
    absent = [name for name in names if name not in sys.modules]
    for name in absent:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in absent:
            sys.modules.pop(name, None)  # an import that failed may have removed it


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
