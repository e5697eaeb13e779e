"""The rows by name, and the process of one: `python -m perf.gpu.rows ROW DEVICE DIRECTORY RESULT` writes its figures as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perf.gpu.steps import Figures
    from perf.step_speed import Settings

Run = Callable[[str, Path], "Figures"]
"""Runs a row on a device, `cuda` or `cpu`, in an empty directory."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table."""

    shows: str
    run: Run


def _alone(settings: Callable[[], Settings]) -> Run:
    def run(device: str, directory: Path) -> Figures:
        from perf.gpu.steps import small, trainer_alone

        return trainer_alone(settings() if device == "cuda" else small(settings()), directory)

    return run


def _full(tokens: int, samples: int, *, compiled: bool | None = None, checkpointing: bool = False) -> Run:
    def settings() -> Settings:
        from perf.gpu.steps import full

        return full(tokens, samples, compiled=compiled, checkpointing=checkpointing)

    return _alone(settings)


def _lora(shape: str, samples: int, *, compiled: bool | None = None) -> Run:
    def settings() -> Settings:
        from perf.gpu.steps import lora

        return lora(shape, 16_384, samples, compiled=compiled)

    return _alone(settings)


def _profile(*, compiled: bool | None) -> Run:
    def run(device: str, directory: Path) -> Figures:
        from perf.gpu.profile import profile
        from perf.gpu.steps import lora, small

        settings = lora("0.6b", 16_384, 1, compiled=compiled)
        return profile(settings if device == "cuda" else small(settings), directory)

    return run


def _beside_trl(device: str, _directory: Path) -> Figures:
    from perf.gpu.steps import beside_trl

    return beside_trl(device)


def _generation(*, eager: bool) -> Run:
    def run(device: str, directory: Path) -> Figures:
        from perf.gpu.servers import generation

        return generation(device, directory, eager=eager)

    return run


def _publishing(trainer: dict[str, object], pool: dict[str, object]) -> Run:
    def run(device: str, directory: Path) -> Figures:
        from perf.gpu.jobs import publishing

        return publishing(device, directory, trainer, pool)

    return run


def _staleness(device: str, directory: Path) -> Figures:
    from perf.gpu.jobs import staleness

    return staleness(device, directory)


def _real_model(device: str, directory: Path) -> Figures:
    from perf.gpu.jobs import real_model

    return real_model(device, directory)


def _mixture(device: str, directory: Path) -> Figures:
    from perf.gpu.jobs import mixture

    return mixture(device, directory)


ROWS: dict[str, Row] = {
    "lora-16k": Row("trainer alone, Qwen3-0.6B, adapter of rank 16, samples of 16,384 tokens", _lora("0.6b", 4)),
    "lora-16k-eager": Row("the same, layers that are not compiled", _lora("0.6b", 4, compiled=False)),
    "full-16k": Row("the same, all weights", _full(16_384, 4)),
    "full-16k-eager": Row("the same, layers that are not compiled", _full(16_384, 4, compiled=False)),
    "profile": Row("where a step of the adapter spends its time", _profile(compiled=None)),
    "profile-eager": Row("the same, layers that are not compiled", _profile(compiled=False)),
    "full-64k": Row("the same, samples of 65,536 tokens, checkpointing", _full(65_536, 1, checkpointing=True)),
    "lora-4b": Row("trainer alone, Qwen3-4B, adapter of rank 16, samples of 16,384 tokens", _lora("4b", 2)),
    "trl": Row("a step beside TRL's, Qwen3-0.6B, all weights, 64 short samples", _beside_trl),
    "vllm": Row("vLLM alone, compiled: its start, tokens a second", _generation(eager=False)),
    "vllm-eager": Row("the same, eager", _generation(eager=True)),
    "staleness": Row("a job with an adapter that stays as it is: mismatch by staleness", _staleness),
    "mixture": Row("a job with 64 experts in 16 layers, 8 of them used, with replay", _mixture),
    "real": Row("a job that teaches SmolLM2-135M-Instruct sums, float32, all weights", _real_model),
    "files": Row("a job with full weights, published as files", _publishing({}, {})),
    "memory": Row("the same, in shared memory", _publishing({"broadcast": "memory"}, {})),
    "deltas": Row("the same, as what changed", _publishing({"whole_broadcast_every": 4}, {})),
    "sent": Row("the same, sent over HTTP", _publishing({}, {"send_weights": True})),
}


def main(name: str, device: str, directory: str, result: str) -> None:
    """Runs one row."""
    Path(result).write_text(json.dumps(ROWS[name].run(device, Path(directory))))


if __name__ == "__main__":
    main(*sys.argv[1:])
