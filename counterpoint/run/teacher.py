"""Configuration of a teacher: a served model whose log-probabilities the loss uses (docs/sft.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from counterpoint.inference.config import check_url
from counterpoint.transport.config import Config


class TeacherConfig(Config):
    """A served model that is asked for the log-probabilities of the tokens that the policy wrote.

    They are those of its whole distribution at temperature 1, whatever the policy's sampling. It must have the run's tokenizer.
    """

    model: str | None = None
    """Name of the model in requests: a base model or an adapter that the servers hold. Unset: the run's base model."""

    urls: list[str] = []
    """Servers of its own. Empty: the run's own servers."""

    protocol: Literal["binary", "openai"] = "openai"
    """What `urls` speak: `openai` for a stock vLLM, `binary` for `counterpoint inference`."""

    api_key_file: Path | None = None
    """A file holding the bearer token to send to `urls`."""

    max_concurrent_requests: int = Field(default=32, ge=1)
    """Most requests of this run to it at once, at each server. One asks for all tokens of a branch of a rollout."""

    @model_validator(mode="after")
    def _names_servers(self) -> TeacherConfig:
        for url in self.urls:
            check_url(url)
        if not self.urls and (self.protocol, self.api_key_file) != ("openai", None):
            raise ValueError(
                "protocol and api_key_file are of urls, and urls is empty: the run's own servers are asked"
            )
        return self


def check_teacher(
    teacher: TeacherConfig | None, run_id: str, loss: str, *, trains_adapter: bool, is_built_in: bool
) -> None:
    """Raises `ValueError` for a teacher that is the run's own policy, or that the loss does not use, or that it lacks."""
    if teacher is None:
        if loss == "distillation":
            raise ValueError(
                'training.loss.kind = "distillation" needs a teacher; add [teacher] with model, or urls (docs/sft.md)'
            )
        return
    if is_built_in and loss != "distillation":
        raise ValueError(
            f'[teacher] is asked for every token, and training.loss.kind = "{loss}" does not use its answers; set '
            'kind = "distillation", or remove [teacher]'
        )
    if not teacher.urls and teacher.model in (None, run_id) and not (teacher.model is None and trains_adapter):
        asked = f"teacher.model = {teacher.model!r}" if teacher.model else "[teacher] without model and urls"
        raise ValueError(
            f"{asked} names what this run trains: a policy cannot be its own teacher; name another model, or add urls"
        )
