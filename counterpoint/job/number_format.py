"""How numbers are printed for people. A dash stands for what was not measured."""

from __future__ import annotations


def number(value: float | None, digits: int = 3) -> str:
    """Formats a number with a fixed count of decimals: `0.912`."""
    return "-" if value is None else f"{value:,.{digits}f}"


def scientific(value: float | None) -> str:
    """Formats a number with an exponent: `1.2e-05`."""
    return "-" if value is None else f"{value:.1e}"


def milliseconds(seconds: float | None) -> str:
    """Formats seconds as milliseconds: `3.1 ms`."""
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"


def duration(seconds: float) -> str:
    """Formats seconds as minutes and seconds: `4 min 05 s`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
