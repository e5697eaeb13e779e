"""The rows by name, and the process of one: `python -m perf.gpu.rows ROW DEVICE DIRECTORY RESULT` writes its figures as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
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
    seconds: float = 120.0
    """Its deadline."""


def _trains(settings: str, *given: object, by: str = "steps:trainer_alone", **more: object) -> Run:
    """Returns what trains settings that `perf.gpu.steps` makes, by a function of `perf.gpu`; on a CPU, the small ones."""

    def run(device: str, directory: Path) -> Figures:
        from perf.gpu import steps

        made: Settings = getattr(steps, settings)(*given, **more)
        found: Figures = resolve_name(f"perf.gpu.{by}")(made if device == "cuda" else steps.small(made), directory)
        return found

    return run


def _calls(name: str, **given: object) -> Run:
    """Returns what calls a function of `perf.gpu`, whose module only the row's own process imports."""

    def run(device: str, directory: Path) -> Figures:
        found: Figures = resolve_name(f"perf.gpu.{name}")(device, directory, **given)
        return found

    return run


SERVED = 300.0
"""Deadline of a row with a server, in seconds: the first start of vLLM on a card takes more than a minute."""


def _served(shows: str, name: str, **given: object) -> Row:
    return Row(shows, _calls(name, **given), SERVED)


ROWS: dict[str, Row] = {
    "lora-16k": Row(
        "trainer alone, Qwen3-0.6B, adapter of rank 16, samples of 16,384 tokens", _trains("lora", "0.6b", 16_384, 4)
    ),
    "lora-16k-eager": Row("the same, layers that are not compiled", _trains("lora", "0.6b", 16_384, 4, compiled=False)),
    "full-16k": Row("the same, all weights", _trains("full", 16_384, 4)),
    "full-16k-eager": Row("the same, layers that are not compiled", _trains("full", 16_384, 4, compiled=False)),
    "deterministic": Row(
        "the same adapter, trainer.deterministic beside without, the same bits or not",
        _trains("lora", "0.6b", 16_384, 1, by="steps:deterministic"),
        SERVED,
    ),
    "profile": Row(
        "where a step of the adapter spends its time", _trains("lora", "0.6b", 16_384, 1, by="profile:profile")
    ),
    "profile-eager": Row(
        "the same, layers that are not compiled",
        _trains("lora", "0.6b", 16_384, 1, by="profile:profile", compiled=False),
    ),
    "full-64k": Row(
        "the same, samples of 65,536 tokens, in 70 GB: 14 of 28 layers are computed again",
        _trains("full", 65_536, 1, checkpointing=14),
    ),
    "lora-4b": Row(
        "trainer alone, Qwen3-4B, adapter of rank 16, samples of 16,384 tokens", _trains("lora", "4b", 16_384, 2)
    ),
    "lora-4b-40": Row(
        "the same in 40 GB: 28 of 36 layers are computed again", _trains("lora", "4b", 16_384, 2, checkpointing=28)
    ),
    "attention": Row(
        "attention alone, forward and backward: the kernel for long samples beside torch's", _calls("kernels:speeds")
    ),
    "adapters": Row(
        "one layer of Qwen3-0.6B with 1, 2, 8 and 32 adapters of rank 16, forward and backward",
        _calls("adapters:one_layer"),
    ),
    "many-adapters": Row(
        "a trainer with 256, then 1,024 adapters of rank 8 on Qwen3-0.6B, 128 tokens each, beside one with all tokens",
        _calls("adapters:whole_trainer"),
        900.0,
    ),
    "clients": _served("1, 2, 4 and 8 clients at once, adapters of ranks 4 to 32", "steps:clients_at_once"),
    "trl": Row("a step beside TRL's, Qwen3-0.6B, all weights, 64 short samples", _calls("steps:beside_trl")),
    "vllm": _served("vLLM alone, compiled: its start, tokens a second", "servers:generation", eager=False),
    "vllm-eager": _served("the same, eager", "servers:generation", eager=True),
    "staleness": _served("a job with an adapter that stays as it is: mismatch by staleness", "jobs:staleness"),
    "mixture": _served("a job with 64 experts in 16 layers, 8 of them used, with replay", "jobs:mixture"),
    "real": _served("a job that teaches SmolLM2-135M-Instruct sums, float32, all weights", "jobs:real_model"),
    "files": _served("a job with full weights, published as files", "jobs:publishing", trainer={}, pool={}),
    "deltas": _served("the same, as what changed", "jobs:publishing", trainer={"whole_broadcast_every": 4}, pool={}),
    "sent": _served("the same, sent over HTTP", "jobs:publishing", trainer={}, pool={"send_weights": True}),
}


def main(name: str, device: str, directory: str, result: str) -> None:
    """Runs one row."""
    Path(result).write_text(json.dumps(ROWS[name].run(device, Path(directory))))


if __name__ == "__main__":
    main(*sys.argv[1:])
