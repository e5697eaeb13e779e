"""Data-parallel training of a small model on any number of ranks, from its own checkpoint: the script of this example.

It is an ordinary torchrun script. Of the controller it knows one thing: each rank counts its samples, and the seconds in which it
waited, by which the role may be scaled (`scaling` in its `config`). Step `n` draws its global batch from a generator seeded
with `n`, and the ranks share its samples. Each computes the gradients of its samples one by one, in float64; added up in the
order of the samples, they do not depend on who computed which. So the run ends with the same bits whatever ranks it had, and
however often it was started again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from counterpoint.cluster import ProgressFile

GLOBAL_BATCH = 12
LEARNING_RATE = 0.05
MOMENTUM = 0.9


def make_model() -> nn.Module:
    """Returns the model as it begins: the same on every rank."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """Returns the inputs [GLOBAL_BATCH, 4] and targets [GLOBAL_BATCH, 1] of a step."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(GLOBAL_BATCH, 4, generator=generator, dtype=torch.float64)
    return inputs, inputs[:, :1] * inputs[:, 1:2] + inputs[:, 2:3].sin()


def gradient_and_loss(model: nn.Module, step: int) -> tuple[Tensor, float]:
    """Returns the mean gradient over the global batch, flat, and the mean loss."""
    inputs, targets = batch_of(step)
    size = sum(parameter.numel() for parameter in model.parameters())
    rows = torch.zeros(GLOBAL_BATCH, size + 1, dtype=torch.float64)
    for sample in range(dist.get_rank(), GLOBAL_BATCH, dist.get_world_size()):
        model.zero_grad()
        loss = nn.functional.mse_loss(model(inputs[sample]), targets[sample])
        loss.backward()
        gradients = [parameter.grad.reshape(-1) for parameter in model.parameters() if parameter.grad is not None]
        rows[sample] = torch.cat([*gradients, loss.detach().reshape(1)])
    dist.all_reduce(rows)  # each row is one rank's, and zero elsewhere: exact in any order
    mean = rows.sum(0) / GLOBAL_BATCH
    return mean[:-1], float(mean[-1])


def save(directory: Path, step: int, parameters: Tensor, momentum: Tensor) -> None:
    """Writes the checkpoint of a step, whole or not at all."""
    written = directory / f".step_{step:06d}.{os.getpid()}"
    with open(written, "wb") as file:
        torch.save({"step": step, "parameters": parameters, "momentum": momentum}, file)
        file.flush()
        os.fsync(file.fileno())
    written.rename(directory / f"step_{step:06d}.pt")
    for old in sorted(directory.glob("step_*.pt"))[:-2]:
        old.unlink(missing_ok=True)


def load(directory: Path, parameters: Tensor) -> tuple[int, Tensor, Tensor]:
    """Returns step, parameters and momentum of rank 0's newest checkpoint, on every rank."""
    step, momentum = torch.zeros(1, dtype=torch.int64), torch.zeros_like(parameters)
    if dist.get_rank() == 0 and (found := sorted(directory.glob("step_*.pt"))):
        state = torch.load(found[-1], weights_only=True)
        step.fill_(state["step"])
        parameters, momentum = state["parameters"], state["momentum"]
    for tensor in (step, parameters, momentum):
        dist.broadcast(tensor, src=0)
    return int(step), parameters, momentum


def main() -> None:
    """Trains from the newest checkpoint to the last step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--step-seconds",
        type=float,
        default=0.0,
        help="pause after each step, to leave time for disturbances, until there is a file `hurry` in the directory",
    )
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    model = make_model()
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    step, flat, momentum = load(options.directory, flat)
    loss, progress = float("nan"), ProgressFile()
    while step < options.steps:
        nn.utils.vector_to_parameters(flat, model.parameters())
        gradient, loss = gradient_and_loss(model, step)
        momentum = MOMENTUM * momentum + gradient
        flat = flat - LEARNING_RATE * momentum
        step += 1
        if dist.get_rank() == 0:
            save(options.directory, step, flat, momentum)
            with open(options.directory / "progress.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "loss": loss, "ranks": dist.get_world_size()}) + "\n")
        paused = 0.0 if (options.directory / "hurry").exists() else options.step_seconds
        time.sleep(paused)
        progress.add(len(range(dist.get_rank(), GLOBAL_BATCH, dist.get_world_size())), idle_seconds=paused)
    if dist.get_rank() == 0:
        result = {"step": step, "parameters": hashlib.sha256(flat.numpy().tobytes()).hexdigest()}
        (options.directory / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
