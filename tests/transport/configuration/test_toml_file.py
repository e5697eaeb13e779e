"""Configuration files are read as editors write them."""

from __future__ import annotations

from pathlib import Path

from transport.configuration.toml_file import read_toml


def test_a_byte_order_mark_is_no_part_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('model = "tiny"\n', encoding="utf-8-sig")
    assert read_toml(path) == {"model": "tiny"}
