"""The refusal of a request, in the shape of OpenAI's API."""

from __future__ import annotations

from typing import Any


class GatewayRefused(Exception):
    """A request that is not served. Its text is for the agent's author."""

    def __init__(
        self, message: str, *, parameter: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.parameter = parameter
        """The field at fault."""
        self.status = status
        """The status of HTTP."""
        self.code = code
        """A word for programs."""

    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.parameter, "code": self.code}}
