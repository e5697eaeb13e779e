"""Output of a job whose reader pauses."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

from counterpoint.cli.display import console as module
from counterpoint.cli.display.console import console_for, printed_beside


class PausedReader(io.StringIO):
    """Takes nothing until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def write(self, text: str) -> int:
        assert self.released.wait(60)
        return super().write(text)


def test_a_reader_that_pauses_holds_up_nobody_and_misses_nothing() -> None:
    reader = PausedReader()
    console = Console(file=reader, width=80)
    with printed_beside(console):
        for number in range(100):
            console.print(f"line {number}")
        assert reader.getvalue() == ""
        reader.released.set()
    assert reader.getvalue().splitlines() == [f"line {number}" for number in range(100)]
    console.print("after it")
    assert reader.getvalue().endswith("after it\n")


def test_what_waits_for_a_reader_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 20)
    reader = PausedReader()
    console = Console(file=reader, width=80)
    with printed_beside(console):
        for number in range(100):
            console.print(f"line {number}")
        reader.released.set()
    assert reader.getvalue().splitlines() == ["line 0", "line 1"]


def test_a_model_s_name_is_printed_as_it_is() -> None:
    text = io.StringIO()
    console_for(text, pipe_width=80).print("s0:train:0")
    assert text.getvalue() == "s0:train:0\n"
