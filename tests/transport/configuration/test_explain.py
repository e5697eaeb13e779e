"""Errors of a file that needs nothing of a job: they name file, line, column, key, value and the nearest key.

`tests/job/configuration/test_load.py` has the errors of a job's file, and of variables and flags.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import Field

from counterpoint.transport.config import Config
from counterpoint.transport.configuration.explain import Layer, locate, validate
from counterpoint.transport.configuration.toml_file import parse, read_text
from counterpoint.transport.errors import UserError


class Part(Config):
    """One entry of a list."""

    name: str
    """Its name."""
    count: int = Field(default=1, ge=1)
    """How many."""


class Whole(Config):
    """A file."""

    parts: tuple[Part, ...]
    """The parts."""


class Named(Config):
    """A file of named parts."""

    parts: dict[str, Part] = {}
    """The parts by name."""


def complaint(text: str, above: list[Layer] | None = None, directory: Path = Path("/nowhere")) -> str:
    values = parse(text, directory / "whole.toml")
    for layer in above or []:
        values |= layer.values
    with pytest.raises(UserError) as caught:
        validate(Whole, values, "whole.toml", above or [], text)
    return str(caught.value)


def test_a_value_is_quoted_with_its_place_and_its_meaning() -> None:
    assert complaint('[[parts]]\nname = "a"\n\n[[parts]]\nname = "b"\n  count = 0\n') == (
        "1 error in the configuration\n"
        "  whole.toml:6:3: parts[1].count = 0\n"
        "    6 |   count = 0\n"
        "    expected greater than or equal to 1\n"
        "    count: How many."
    )


def test_an_unknown_key_is_told_with_the_nearest() -> None:
    message = complaint('[[parts]]\nname = "a"\ncuont = 2\n')
    assert "whole.toml:3:1: parts[0].cuont = 2" in message
    assert "unknown key; the nearest is parts[0].count" in message


def test_a_key_of_another_name_is_not_told_as_the_nearest() -> None:
    """Its section is that of others, which makes their paths alike."""
    message = complaint('[[parts]]\nname = "a"\nclip_range = 2\n')
    assert "unknown key; valid: count, name" in message


def test_an_entry_of_a_table_with_arbitrary_keys_is_named() -> None:
    text = '[parts.old]\nname = "a"\ncount = 0\n'
    with pytest.raises(UserError) as caught:
        validate(Named, parse(text, Path("named.toml")), "named.toml", text=text)
    assert "named.toml:3:1: parts.old.count = 0" in str(caught.value)


def test_all_errors_come_at_once() -> None:
    message = complaint("[[parts]]\ncount = 0\n")
    assert message.startswith("2 errors in the configuration\n")
    assert "parts[0].name is required and not set: text. Its name." in message


def test_a_value_of_a_layer_above_is_named_as_written_there() -> None:
    flags = Layer({"parts": 3}, lambda path: f"--{path}")
    assert "--parts: parts = 3\n" in complaint("parts = 4\n", [flags])


def test_an_entry_lacks_what_the_layer_with_its_list_did_not_give() -> None:
    flags = Layer({"parts": [{"count": 2}]}, lambda path: f"--{path}")
    assert "  --parts: parts[0].name is required" in complaint('[[parts]]\nname = "a"\n', [flags])


def test_a_section_that_a_layer_fills_in_part_is_not_that_layers() -> None:
    values = {"parts": {"old": {"name": "", "count": 2}}}
    part = Layer({"parts": {"old": {"count": 2}}}, lambda path: f"--{path}")
    assert locate("parts.old: bad", values, "named.toml", [part]) == "named.toml: parts.old: bad"
    whole = Layer(values, lambda path: f"--{path}")
    assert locate("parts.old: bad", values, "named.toml", [whole]) == "--parts.old: parts.old: bad"


def test_what_is_no_toml_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("a = 1\nb = = 2\n")
    with pytest.raises(UserError, match=r"this is not TOML.*line 2.*\n  2 \| b = = 2"):
        parse(read_text(tmp_path / "bad.toml"), tmp_path / "bad.toml")
    with pytest.raises(UserError, match="no such file"):
        read_text(tmp_path / "nothing.toml")
