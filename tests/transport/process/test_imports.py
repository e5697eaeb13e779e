"""Imports of large libraries in less time."""

from __future__ import annotations

import gc
import importlib.util
import inspect
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from counterpoint.transport.process.imports import (
    late_packages,
    quick_modules_of_frames,
    with_room,
    without_gc,
    without_modules,
)


def test_the_collector_rests_during_the_block_and_leaves_out_what_was_made() -> None:
    before = gc.get_freeze_count()
    with without_gc():
        assert not gc.isenabled()
        made: list[list[int]] = [[]]
    assert gc.isenabled()
    assert gc.get_freeze_count() > before
    assert not any(each is made for each in gc.get_objects(generation=0))


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with without_gc():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_modules_are_absent_during_the_block_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_later.py").write_text("")
    (tmp_path / "needs_it.py").write_text("import imported_later")
    can_do_without = tmp_path / "can_do_without"
    can_do_without.mkdir()
    (can_do_without / "__init__.py").write_text(
        "import importlib.util\n"
        "has_it = importlib.util.find_spec('imported_later') is not None\n"
        "import json\n"
        "try:\n    import imported_later as it\nexcept ModuleNotFoundError as error:\n    it = error.name\n"
    )
    (can_do_without / "later.py").write_text("import needs_it, imported_later")
    monkeypatch.syspath_prepend(tmp_path)
    with without_modules("imported_later", "json", to=("can_do_without",)):
        package = importlib.import_module("can_do_without")
        assert (package.has_it, package.it) == (False, "imported_later")
        assert package.json is json, "it was imported already"
        assert importlib.util.find_spec("imported_later") is not None, "for others it is there"
        importlib.import_module("can_do_without.later")
    for name in ("imported_later", "needs_it", "can_do_without"):
        del sys.modules[name]
    assert importlib.import_module("can_do_without").has_it
    for name in ("imported_later", "can_do_without", "can_do_without.later"):
        del sys.modules[name]


def test_a_late_package_runs_when_something_of_its_own_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "late_package"
    package.mkdir()
    (package / "__init__.py").write_text("from .heavy import number as number\n__version__ = '1'\n")
    (package / "heavy.py").write_text("from . import light\nnumber = light.number\n")
    (package / "light.py").write_text("number = 5\n")
    monkeypatch.syspath_prepend(tmp_path)
    names = ["late_package", "late_package.light", "late_package.heavy"]
    with late_packages("late_package", "json"):
        from late_package.light import number  # type: ignore[import-not-found]

        assert number == 5
        assert importlib.import_module("json") is json, "it was imported already"
    assert [name in sys.modules for name in names] == [True, True, False]
    try:
        from late_package import __version__, light  # type: ignore[import-not-found]

        assert (__version__, light.number) == ("1", 5)
        assert all(name in sys.modules for name in names)
        assert sys.modules["late_package"].number == 5
        with pytest.raises(ImportError, match="cannot import name 'missing'"):
            from late_package import missing  # noqa: F401
    finally:
        for name in names:
            sys.modules.pop(name, None)


def faults_of_calls(depth: int) -> int:
    """The pages that the kernel mapped for this process while a loop, as many calls deep, made 100 calls."""
    if depth:
        return faults_of_calls(depth - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(100):
        ten_places()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def ten_places(a: int = 0, b: int = 0, c: int = 0, d: int = 0, e: int = 0, f: int = 0, g: int = 0) -> None:
    """A call whose frame is larger than those above it, so that one of them has no room for it in its chunk."""


def most_faults() -> int:
    return max(map(faults_of_calls, range(300)))


def test_with_room_a_loop_maps_no_memory_however_deep_it_is() -> None:
    assert with_room(most_faults) < 50


def test_the_module_of_a_frame_is_that_of_the_stock_function(monkeypatch: pytest.MonkeyPatch) -> None:
    foreign: dict[str, object] = {"__name__": "json", "sys": sys}
    exec("frame = sys._getframe()", foreign)  # claims another module's name
    frames = [sys._getframe(), foreign["frame"], faults_of_calls, os, most_faults.__code__]
    expected = [inspect.getmodule(each) for each in frames]
    assert expected[0] is sys.modules[__name__]
    stock = inspect.getmodule
    with quick_modules_of_frames():
        assert [inspect.getmodule(each) for each in frames] == expected
        monkeypatch.setattr(os.path, "realpath", lambda _: pytest.fail("a path is resolved"))
        monkeypatch.setattr(inspect, "modulesbyfile", {})
        monkeypatch.setattr(inspect, "_filesbymodname", {})
        assert inspect.getmodule(sys._getframe(), __file__) is sys.modules[__name__]
    assert inspect.getmodule is stock


WITH_ANOTHER_PACKAGE = """
import sys
from counterpoint.transport.process.imports import trainer_imports

with trainer_imports():
    from counterpoint.trainer.train import train
assert "scipy" not in sys.modules
with trainer_imports():
    import sklearn.metrics
print(sklearn.metrics.scipy.__name__)
"""


@pytest.mark.slow
def test_a_trainer_starts_where_a_package_is_installed_that_needs_what_it_leaves_out(tmp_path: Path) -> None:
    """As scikit-learn needs scipy; transformers imports it where it is installed."""
    (tmp_path / "sklearn").mkdir()
    (tmp_path / "sklearn" / "__init__.py").write_text('__version__ = "1.9.1"\n')
    (tmp_path / "sklearn" / "metrics.py").write_text("import scipy\n\nroc_curve = None\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path.cwd()}"}
    done = subprocess.run(
        [sys.executable, "-c", WITH_ANOTHER_PACKAGE],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120.0,
        check=False,
    )
    assert done.stdout == "scipy\n", done.stderr


SCAN = """
import importlib.metadata
import importlib.util
from counterpoint.transport.process.imports import trainer_imports

with trainer_imports():
    import transformers, transformers.models
from transformers.utils import import_utils as changed

spec = importlib.util.find_spec(changed.__name__)
stock = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stock)
assert changed.fetch__all__ is not stock.fetch__all__
folder = transformers.models.__path__[0]
assert changed.create_import_structure_from_path(folder) == stock.create_import_structure_from_path(folder)
scans = changed.create_import_structure_from_path.cache_info()
assert "_all" not in vars(changed.PACKAGE_DISTRIBUTION_MAPPING), "the distributions were read, and none was asked for"
for package in ("torch", "transformers", "numpy", "PIL", "huggingface_hub", "yaml", "absent"):
    assert changed._is_package_available(package, True) == stock._is_package_available(package, True)
assert changed.PACKAGE_DISTRIBUTION_MAPPING == importlib.metadata.packages_distributions()
print(scans.misses == scans.currsize > stock.create_import_structure_from_path.cache_info().currsize)
"""


@pytest.mark.slow
def test_transformers_finds_the_same_models_and_versions_with_less_reading() -> None:
    done = subprocess.run([sys.executable, "-c", SCAN], capture_output=True, text=True, timeout=120.0, check=False)
    assert done.stdout == "True\n", done.stderr
