"""What is asked of a request's head."""

from __future__ import annotations

import pytest

from counterpoint.transport.http.requests import bearer_token, refused_coding


@pytest.mark.parametrize(
    ("header", "token"),
    [
        ("Bearer abc", "abc"),
        ("bearer abc", "abc"),
        ("BEARER   abc ", "abc"),
        (" Bearer abc", "abc"),
        ("Basic abc", ""),
        ("Bearerabc", ""),
        ("abc", ""),
        ("Bearer", ""),
        ("", ""),
        (None, ""),
    ],
)
def test_the_scheme_of_a_token_may_be_in_any_case(header: str | None, token: str) -> None:
    assert bearer_token(header) == token


@pytest.mark.parametrize(
    ("headers", "refused"),
    [
        ([], False),
        ([("Content-Encoding", "identity"), ("content-encoding", "Identity")], False),
        ([("Content-Encoding", "")], False),
        ([("Transfer-Encoding", "chunked"), ("Accept-Encoding", "gzip")], False),
        ([("Content-Encoding", "gzip")], True),
        ([("content-encoding", "x-unknown")], True),
        ([("Content-Encoding", "identity, br")], True),
        ([("Content-Encoding", "identity"), ("Content-Encoding", "deflate")], True),
        ([("Transfer-Encoding", "gzip, chunked")], True),
    ],
)
def test_a_compressed_body_is_refused_whichever_header_says_so(headers: list[tuple[str, str]], refused: bool) -> None:
    why = refused_coding(headers)
    assert (why is not None) == refused
    assert why is None or "compressed bodies are not taken" in why
