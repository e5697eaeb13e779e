"""Configuration of opponents: other policies than the run's, which its rollouts may ask (docs/gateway.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from counterpoint.inference.config import check_url
from counterpoint.transport.config import IDENTIFIER_PATTERN, Config


class OpponentConfig(Config):
    """Another policy that rollouts may ask, by `model.opponent(NAME)`. It must have the run's tokenizer."""

    model: str
    """`base`: the base model under the run's adapter. `run:ID`: the adapter of another run, as the servers hold it at the time.
    A URL: a server of its own."""

    served_model: str | None = None
    """The name of the model in requests to a URL. Unset: as the run's base model."""

    protocol: Literal["binary", "openai"] = "openai"
    """What a URL speaks: `openai` for a stock vLLM, `binary` for `counterpoint inference`."""

    api_key_file: Path | None = None
    """A file holding the bearer token to send to a URL."""

    max_concurrent_requests: int = Field(default=64, ge=1)
    """Most requests of this run to it at once, at each server. Servers that the run itself uses have these on top of its own."""

    @model_validator(mode="after")
    def _names_a_model(self) -> OpponentConfig:
        kind, _, rest = self.model.partition(":")
        if kind in ("http", "https"):
            check_url(self.model)
        elif self.model != "base" and (kind != "run" or not re.fullmatch(IDENTIFIER_PATTERN, rest)):
            raise ValueError(f"model = {self.model!r}: expected 'base', 'run:ID' or http://HOST:PORT")
        elif (self.served_model, self.protocol, self.api_key_file) != (None, "openai", None):
            raise ValueError(f"model = {self.model!r}: served_model, protocol and api_key_file are of a URL")
        return self


def check_opponents(opponents: Mapping[str, OpponentConfig], run_id: str, *, trains_adapter: bool) -> None:
    """Raises `ValueError` for an opponent that is the run's own policy."""
    for name, opponent in opponents.items():
        if opponent.model == "base" and not trains_adapter:
            raise ValueError(
                f"opponents.{name}: model = 'base' needs [training.lora]: without an adapter the run trains the base model itself"
            )
        if opponent.model == f"run:{run_id}":
            raise ValueError(
                f"opponents.{name}: model = {opponent.model!r} is this run; use model.player for self-play"
            )
