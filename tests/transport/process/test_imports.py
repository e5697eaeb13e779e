"""Imports without the garbage collector."""

from __future__ import annotations

import gc

from transport.process.imports import without_gc


def test_the_collector_rests_during_the_block_and_leaves_out_what_was_made() -> None:
    before = gc.get_freeze_count()
    try:
        with without_gc():
            assert not gc.isenabled()
            made: list[list[int]] = [[]]
        assert gc.isenabled()
        assert gc.get_freeze_count() > before
        assert not any(each is made for each in gc.get_objects(generation=0))
    finally:
        gc.unfreeze()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with without_gc():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()
