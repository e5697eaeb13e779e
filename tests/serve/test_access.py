"""The files of the tokens: made privately, refused if others may know them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from counterpoint.serve.access import load_tokens
from counterpoint.transport.errors import UserError


def both(directory: Path) -> tuple[Path, Path]:
    return directory / "state" / "admin.token", directory / "state" / "read.token"


def bearer(path: Path) -> str:
    return f"Bearer {path.read_text().strip()}"


def test_tokens_are_made_once_and_only_their_owner_may_read_them(tmp_path: Path) -> None:
    admin, read = both(tmp_path)
    tokens = load_tokens(admin, read)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (admin, read, admin.parent)] == [0o600, 0o600, 0o700]
    assert (tokens.access_of(bearer(admin)), tokens.access_of(bearer(read))) == ("change", "read")
    assert load_tokens(admin, read) == tokens
    assert sorted(path.name for path in admin.parent.iterdir()) == ["admin.token", "read.token"]
    assert admin.read_text().strip() not in repr(tokens)


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Basic {}", "{}", "Bearer {}x", "Bearer\x00{}"])
def test_a_wrong_header_gives_nothing(tmp_path: Path, header: str | None) -> None:
    admin, read = both(tmp_path)
    tokens = load_tokens(admin, read)
    token = admin.read_text().strip()
    assert tokens.access_of(header.format(token) if header else header) is None


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660])
def test_a_token_that_others_may_know_is_refused(tmp_path: Path, mode: int) -> None:
    admin, read = both(tmp_path)
    load_tokens(admin, read)
    read.chmod(mode)
    with pytest.raises(UserError, match=f"has the mode {mode:04o}.*expected 0600"):
        load_tokens(admin, read)


@pytest.mark.parametrize("content", ["", "short", "with a space in it and long enough", "x" * 600, "y" * 5000])
def test_what_is_no_token_is_refused(tmp_path: Path, content: str) -> None:
    admin, read = both(tmp_path)
    load_tokens(admin, read)
    admin.write_text(content)
    with pytest.raises(UserError, match="holds no token"):
        load_tokens(admin, read)


def test_links_fifos_and_one_token_for_both_are_refused(tmp_path: Path) -> None:
    admin, read = both(tmp_path)
    load_tokens(admin, read)
    content = admin.read_bytes()
    read.write_bytes(content)
    with pytest.raises(UserError, match="hold the same token"):
        load_tokens(admin, read)
    with pytest.raises(UserError, match="hold the same token"):
        load_tokens(admin, admin)
    read.unlink()
    read.symlink_to(admin)
    with pytest.raises(UserError, match="symbolic link"):
        load_tokens(admin, read)
    read.unlink()
    os.mkfifo(read)
    with pytest.raises(UserError, match="a FIFO"):
        load_tokens(admin, read)
