"""What every HTTP server of ours asks of a request's head: its bearer token, and that its body is plain."""

from __future__ import annotations

from collections.abc import Iterable


def bearer_token(authorization: str | None) -> str:
    """Returns the token of an `Authorization` header; empty without one. The name of the scheme may be in any case (RFC 9110)."""
    scheme, _, token = (authorization or "").strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def refused_coding(headers: Iterable[tuple[str, str]]) -> str | None:
    """Returns why the body of a request with these headers is not taken: it is compressed. None for a plain one.

    A body of some KB may become one of any size, and decompressing holds the event loop.
    """
    for name, value in headers:
        plain = {"content-encoding": "identity", "transfer-encoding": "chunked"}.get(name.lower())
        codings = [each.strip().lower() for each in value.split(",") if each.strip()]
        if plain is not None and any(each != plain for each in codings):
            return f"{name}: {value[:80]}: compressed bodies are not taken; send it as it is, without {name}"
    return None
