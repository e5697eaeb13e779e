"""Imports large libraries in less time; for trainers it also sets the environment that torch reads."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import inspect
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from threading import RLock, current_thread, main_thread
from types import FrameType, ModuleType
from typing import Any, TypeVar

T = TypeVar("T")

UNUSED_BY_TRAINERS = ("scipy", "sklearn", "boto3")
"""Modules that transformers and accelerate import where they are installed, and that no trainer needs: scipy for losses of object
detection, sklearn for a way to generate, boto3 for jobs in a cloud. They are a fifth of the CPU of a trainer's imports."""


FRAME_SLOTS = 1 << 15
"""Values for which the frame of `with_room` has a place: 256 KiB, of which nothing is ever touched."""


def with_room(function: Callable[..., T], *arguments: object) -> T:
    """Returns `function(*arguments)`, which gets room for a thousand nested calls in one piece.

    CPython keeps a thread's frames in chunks of 16 KiB. Where a call needs the next one, it is mapped, and unmapped at the call's
    return: a loop that happens to be so deep does it each time. It is done 28,000 times while vLLM is imported, for a fifth of a
    second. A chunk is at least twice as large as the first frame in it, and this one's is large.
    """
    return function(*arguments)


with_room.__code__ = with_room.__code__.replace(co_stacksize=FRAME_SLOTS)


@contextmanager
def ended_by_interrupt() -> Iterator[None]:
    """Lets Ctrl-C end the process at once while the block imports, where nothing has begun.

    `KeyboardInterrupt` is lost where it is raised in a callback of an import, and is another library's error where that wraps it.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler or current_thread() is not main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


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
        quick_import_of_transformers(),
        quick_modules_of_frames(),
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


@contextmanager
def late_packages(*names: str) -> Iterator[None]:
    """Lets the block import modules of these packages without what the packages' own `__init__.py` import.

    Such a file runs when something of the package is asked for that is no module of its, as without the block. A package that is
    imported already stays.
    """
    finder = _LateFinder(frozenset(names))
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _LateFinder:
    """Finds the packages that are to run late, for a loader that leaves them unrun."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Called by each import (`importlib.abc.MetaPathFinder`)."""
        if name not in self._names or (spec := PathFinder.find_spec(name, path, target)) is None or spec.origin is None:
            return None
        spec.loader = _LateLoader(name, spec.origin)
        return spec


class _LateLoader(SourceFileLoader):
    """Gives a package a `__getattr__` that runs it."""

    def exec_module(self, module: ModuleType) -> None:
        running, has_run = RLock(), False

        def run(name: str) -> Any:
            nonlocal has_run
            with running:
                if not has_run:
                    has_run = True
                    super(_LateLoader, self).exec_module(module)
            if name in module.__dict__:
                return module.__dict__[name]
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}", name=name, obj=module)

        module.__dict__["__getattr__"] = run


_IMPORT_SYSTEM = {__name__, "importlib", "importlib.util", "importlib._bootstrap", "importlib._bootstrap_external"}


@contextmanager
def quick_import_of_transformers() -> Iterator[None]:
    """Lets transformers, if the block is the first to import it, search files and distributions less, and find the same.

    While transformers 5 is imported, it searches all of its models' files for `__all__`, and then once more: the results of 500
    folders do not fit into its cache of 128. It also divides each file into lines, of which it needs the last few. And it reads
    what each installed distribution consists of, to learn the version of torch. All three are half of its import.
    """
    finder = _TransformersFinder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


@contextmanager
def quick_modules_of_frames() -> Iterator[None]:
    """Lets `inspect.getmodule` tell a frame's module by the frame's own globals during the block.

    torch asks for it where an operator is registered. The stock function then resolves the path of each module that was imported
    since it was last called, by a system call for each directory: 25,000 of them in a server's start, a twentieth of its time.
    """
    stock = inspect.getmodule

    def module_of(object: object, _filename: str | None = None) -> ModuleType | None:
        if isinstance(object, FrameType):
            module = sys.modules.get(object.f_globals.get("__name__", ""))
            if module is not None and module.__dict__ is object.f_globals:
                return module
        return stock(object, _filename)

    inspect.getmodule = module_of
    try:
        yield
    finally:
        inspect.getmodule = stock


class _TransformersFinder:
    """Finds the module of transformers that searches, for a loader that changes it."""

    MODULE = "transformers.utils.import_utils"

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Called by each import (`importlib.abc.MetaPathFinder`)."""
        if name != cls.MODULE or (spec := PathFinder.find_spec(name, path, target)) is None or spec.origin is None:
            return None
        spec.loader = _TransformersLoader(name, spec.origin)
        return spec


class _TransformersLoader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        read_all = importlib.metadata.packages_distributions
        importlib.metadata.packages_distributions = lambda: _Distributions(read_all)
        try:
            super().exec_module(module)
        finally:
            importlib.metadata.packages_distributions = read_all
        _scan_once(vars(module))
        _ask_for_one_distribution(vars(module))


def _scan_once(stock: dict[str, Any]) -> None:
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


def _ask_for_one_distribution(stock: dict[str, Any]) -> None:
    if "_candidate_distribution_names" not in stock:
        return
    names_of_all = stock["_candidate_distribution_names"]

    def names(package: str) -> list[str]:
        """Returns the distributions that may have the version of a package: the one of its name, if it lies beside that one."""
        name = package.replace("_", "-")
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            pass
        else:
            if Path(str(distribution.locate_file(package))).is_dir():
                return [name, package]
        found: list[str] = names_of_all(package)
        return found

    stock["_candidate_distribution_names"] = names


class _Distributions(Mapping[str, list[str]]):
    """The names of the distributions that have a package, by its name. All distributions are read when one is asked for."""

    def __init__(self, read_all: Callable[[], Mapping[str, list[str]]]) -> None:
        self._read_all = read_all

    @cached_property
    def _all(self) -> Mapping[str, list[str]]:
        return self._read_all()

    def __getitem__(self, package: str) -> list[str]:
        return self._all[package]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)
