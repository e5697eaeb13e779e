"""Imports of large libraries in less time."""

from __future__ import annotations

import gc
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from transport.process.imports import without_gc, without_modules


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
    monkeypatch.syspath_prepend(tmp_path)
    with without_modules("imported_later", "json"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("imported_later")
        assert importlib.util.find_spec("imported_later") is None
        assert importlib.import_module("json") is json, "it was imported already"
    importlib.import_module("imported_later")
    del sys.modules["imported_later"]
    assert sys.modules["json"] is json


SCAN = """
import importlib.util
from transport.process.imports import one_scan_of_transformers, trainer_imports

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
print(scans.misses == scans.currsize > stock.create_import_structure_from_path.cache_info().currsize)
"""


@pytest.mark.slow
def test_transformers_finds_the_same_models_in_one_scan() -> None:
    done = subprocess.run([sys.executable, "-c", SCAN], capture_output=True, text=True, timeout=120.0, check=False)
    assert done.stdout == "True\n", done.stderr
