"""Measures contributions through the service for the Tinker SDK, beside the same over the trainer's own wire.

A trainer takes 32 samples of up to 96 tokens with a PPO loss, and an update, again and again: from a `DrivenRun` in this process,
and from the unmodified SDK by way of the service, in turns. CPU is that of the trainer and of the process that drives it, the
`DrivenRun` or the service. GSPO as a loss of the service, which is one pass, stands beside the same loss computed by the
client, which the SDK makes of two.

    python -m perf.bench.contributions [--quick | --full]
"""

from __future__ import annotations

import asyncio
import math
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tinker
import tomli_w
import torch

from counterpoint.job.evaluation.server import free_port
from counterpoint.run.items import AdamW, Objective
from counterpoint.service.runs import DrivenRun
from counterpoint.trainer.config import TrainerConfig
from counterpoint.transport.process.launch import descendants
from counterpoint.transport.wires.open import open_connection
from perf.bench.command import Size, show
from perf.bench.servers import load_server
from perf.commands import Command, until
from perf.driven_clients import client
from perf.figures import Case, Figure
from perf.noise import cpu_seconds
from perf.step_speed import Settings, random_batch, write_model

KEY = "tml-benchmark-of-contributions"
RANK = 8
SETTINGS = Settings("small", "cpu", 4, 32, 64, 0, 1024)
LOSS = Objective({"kind": "ppo", "ratio_to": "inference"}, divisor=1.0, returns=True)
RATE = 1e-5

GSPO_LOW, GSPO_HIGH = 1 - 3e-4, 1 + 4e-4


@dataclass(frozen=True, slots=True)
class Took:
    """The seconds of some contributions and updates."""

    wall: float
    cpu: float
    """That of the trainer and of what drives it."""
    of_client: float = 0.0
    """CPU seconds of the SDK, in this process."""


def measure(size: Size) -> list[Case]:
    """Measures both ways, and both ways to have a loss."""
    rounds, steps = size.pick((2, 2), (5, 4), (9, 8))
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        model = write_model(Path(directory) / "model", SETTINGS)
        native = stack.enter_context(_native(Path(directory) / "native", model))
        serviced = stack.enter_context(_serviced(Path(directory) / "service", model))
        found = [(native(steps), serviced("ppo", steps)) for _ in range(rounds)]
        losses = [(serviced("gspo", steps), serviced("custom", steps)) for _ in range(rounds)]
    return [_beside_the_wire(steps, found), _losses(steps, losses)]


def _beside_the_wire(steps: int, found: Sequence[tuple[Took, Took]]) -> Case:
    walls = sorted(service.wall / native.wall for native, service in found)
    cpus = sorted(service.cpu / native.cpu for native, service in found)
    return Case(
        "contributions, through the service",
        [
            Figure("over the wire: wall", median(native.wall for native, _ in found) / steps, "s"),
            Figure("over the wire: CPU", median(native.cpu for native, _ in found) / steps, "s"),
            Figure("of the SDK itself: CPU", median(service.of_client for _, service in found) / steps, "s"),
            Figure("through the service: CPU over that", median(cpus), "x", 1.15, rounds=tuple(cpus)),
            Figure("through the service: wall over that", median(walls), "x", rounds=tuple(walls)),
        ],
    )


def _losses(steps: int, found: Sequence[tuple[Took, Took]]) -> Case:
    saved = sorted(1 - one.wall / two.wall for one, two in found)
    return Case(
        "contributions, a loss of one pass",
        [
            Figure("GSPO: wall", median(one.wall for one, _ in found) / steps, "s"),
            Figure("the same computed by the client: wall", median(two.wall for _, two in found) / steps, "s"),
            Figure("what one pass saves of it", median(saved), "", 0.3, "at least", rounds=tuple(saved)),
        ],
    )


@contextmanager
def _trainer(directory: Path, model: Path) -> Iterator[tuple[TrainerConfig, Command]]:
    config = TrainerConfig(
        output_dir=directory, model=str(model), device="cpu", threads=1, max_tokens=SETTINGS.row_tokens, stay=True
    )
    directory.mkdir()
    file = directory / "trainer.toml"
    file.write_text(tomli_w.dumps(config.model_dump(mode="json", exclude_none=True, exclude_defaults=True)))
    with Command(directory / "trainer.log", "trainer", str(file)) as trainer:
        yield config, trainer


@contextmanager
def _native(directory: Path, model: Path) -> Iterator[Callable[[int], Took]]:
    """Yields what makes so many contributions and updates over the trainer's wire."""
    with _trainer(directory, model) as (config, trainer), asyncio.Runner() as runner:

        async def begin() -> DrivenRun:
            return await client(config, open_connection(config.transport, directory), RANK, SETTINGS)

        async def play(steps: int) -> None:
            for step in range(steps):
                await asyncio.gather(run.forward_backward(random_batch(SETTINGS, step), LOSS), run.update(AdamW(RATE)))

        run = runner.run(begin())
        runner.run(play(1))
        yield lambda steps: _took([trainer], lambda: runner.run(play(steps)), drives=True)
        runner.run(run.close())


@contextmanager
def _serviced(directory: Path, model: Path) -> Iterator[Callable[[str, int], Took]]:
    """Yields what makes so many contributions by a loss, and updates, by the SDK."""
    with _trainer(directory, model) as (_, trainer), load_server() as server:
        port, file = free_port("127.0.0.1", 0), directory / "service.toml"
        values = {"output_dir": str(directory), "model": str(model), "name": "small", "port": port}
        file.write_text(tomli_w.dumps({**values, "inference": {"urls": [server]}}))
        with Command(log := directory / "service.log", "service", str(file)) as service:
            until("the service to start", lambda: "answers at" in log.read_text(), [service, trainer])
            training = _training_client(f"http://127.0.0.1:{port}")

            def play(loss: str, steps: int) -> None:
                for step in range(steps):
                    data = _data(step, loss)
                    asked = (
                        training.forward_backward_custom(data, gspo)
                        if loss == "custom"
                        else training.forward_backward(data, loss)
                    )
                    training.optim_step(tinker.AdamParams(learning_rate=RATE)).result()
                    asked.result()

            _check_same_loss(training)
            play("ppo", 1)
            yield lambda loss, steps: _took([trainer, service], lambda: play(loss, steps), drives=False)


def _check_same_loss(training: Any) -> None:
    """Raises `AssertionError` unless both ways to have GSPO, which both have been played then, give the same loss."""
    one = training.forward_backward(_data(0, "gspo"), "gspo").result().metrics["loss:sum"]
    two = training.forward_backward_custom(_data(0, "custom"), gspo).result().metrics["loss:sum"]
    assert math.isclose(one, two, rel_tol=1e-4), (one, two)


def _training_client(url: str) -> Any:
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = tinker.ServiceClient(base_url=url, api_key=KEY)
        return made.create_lora_training_client(base_model="small", rank=RANK).result()


def _took(commands: Sequence[Command], play: Callable[[], None], *, drives: bool) -> Took:
    """Measures a call. `drives`: this process has the part of the service."""

    def cpu() -> float:
        return sum(cpu_seconds(pid) for command in commands for pid in (command.pid, *descendants(command.pid)))

    others, own, began = cpu(), time.process_time(), time.perf_counter()
    play()
    wall, own, others = time.perf_counter() - began, time.process_time() - own, cpu() - others
    return Took(wall, others + own * drives, own * (not drives))


def _data(step: int, loss: str) -> list[tinker.Datum]:
    """Returns the batch of a step as data of the SDK."""
    batch, found = random_batch(SETTINGS, step), []
    columns = {
        name: batch.columns[f"{name}_T"] for name in ("token_ids", "loss_mask", "log_probabilities", "advantages")
    }
    bounds = batch.columns["sample_offsets"].tolist()
    for start, stop in pairwise(bounds):
        tokens, mask, log_probabilities, advantages = (column[start:stop] for column in columns.values())
        inputs = {
            "target_tokens": tokens[1:].astype(np.int64),
            "logprobs": log_probabilities[1:],
            "advantages": advantages[1:],
        }
        if loss in ("gspo", "custom"):
            inputs["sequence_ratio_mask"] = mask[1:].astype(np.float32)
        if loss == "custom":
            inputs["weights"] = mask[1:].astype(np.float32)
        found.append(tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs))
    return found


def gspo(
    data: Sequence[tinker.Datum], log_probabilities: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    """Returns the loss of arXiv:2507.18071, summed over tokens, as a client computes it."""
    losses = []
    for datum, own in zip(data, log_probabilities, strict=True):
        given = {name: value.to_torch() for name, value in datum.loss_fn_inputs.items()}
        mask, advantages = given["sequence_ratio_mask"], given["advantages"]
        mean = ((own - given["logprobs"]) * mask).sum() / mask.sum()
        ratio = torch.exp(mean.detach() + own - own.detach())
        clipped = ratio.clamp(GSPO_LOW, GSPO_HIGH)
        losses.append((-torch.minimum(ratio * advantages, clipped * advantages) * mask).sum())
    return torch.stack(losses).sum(), {}


if __name__ == "__main__":
    show(measure)
