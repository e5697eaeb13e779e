"""Measures what a version of full weights costs as a whole and as what changed since the version before: bytes and seconds.

    python -m perf.weight_delivery [--elements 30] [--full [--layers 28]]

Tensors in the shapes of Qwen3-0.6B take AdamW steps on random gradients, from float32 masters, as the trainer's. The share of
elements whose bits change is measured after one step and after eight. With `--full`, all 596 million elements are written and
read in bfloat16: whole, and as what changed, by way of a disk and of shared memory in turns. It shows no proof and no server;
`perf.weight_proof` and `tests/inference` do.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from inference import delta
from inference.plugin.checkpoint import BASE, DELTA, read_through
from inference.plugin.digest import digests_of
from transport.files.shared_memory import SHARED_MEMORY

RATES = (1e-6, 1e-5, 1e-4)
STEPS = (1, 8)
TURNS = 3
LAYERS, LAYER = 28, {"q": (2048, 1024), "k": (1024, 1024), "v": (1024, 1024), "o": (1024, 2048), "gate": (3072, 1024),
                     "up": (3072, 1024), "down": (1024, 3072), "norm": (1024,)}  # fmt: skip
EMBEDDING = (151_936, 1024)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--elements", type=int, default=30, help="millions of elements whose changes are counted")
    parser.add_argument(
        "--full", action="store_true", help="also write and read all weights (3 GB on disk, 6 GB of memory)"
    )
    parser.add_argument("--layers", type=int, default=LAYERS, help="layers of the model of --full")
    arguments = parser.parse_args()
    console = Console(width=140)
    table = Table("weights", "rate", *(f"changed after {steps} steps" for steps in STEPS), "bytes of the whole")
    for dtype in (torch.bfloat16, torch.float32):
        for rate in RATES:
            shares = changed_shares(dtype, rate, arguments.elements * 1_000_000)
            size = (2 + dtype.itemsize) / dtype.itemsize
            table.add_row(
                str(dtype).removeprefix("torch."),
                f"{rate:g}",
                *(f"{share:.1%}" for share in shares),
                f"{shares[0] * size:.1%}",
            )
    console.print(table)
    if arguments.full:
        with tempfile.TemporaryDirectory() as disk, tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as memory:
            console.print(seconds(Path(disk), Path(memory), arguments.layers))


def changed_shares(dtype: torch.dtype, rate: float, elements: int) -> list[float]:
    """Returns the share of elements with other bits after each of `STEPS` steps at this learning rate."""
    generator = torch.Generator().manual_seed(0)
    given = (torch.randn(elements, generator=generator) * 0.02).to(dtype)
    master = given.float().clone().requires_grad_()
    optimizer = torch.optim.AdamW([master], lr=rate, weight_decay=0.0, fused=True)
    shares = []
    for step in range(1, max(STEPS) + 1):
        master.grad = torch.randn(elements, generator=generator)
        optimizer.step()
        if step in STEPS:
            shares.append(float((delta.bits_of(master.detach().to(dtype)) != delta.bits_of(given)).mean()))
    return shares


def shapes(layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields name and shape of each tensor."""
    yield "model.embed_tokens.weight", EMBEDDING
    for layer in range(layers):
        for name, shape in LAYER.items():
            yield f"model.layers.{layer}.{name}.weight", shape


def seconds(disk: Path, memory: Path, layers: int) -> Table:
    """Returns the table of the seconds that each part takes, for one step at 1e-6; of several turns the least."""
    generator = torch.Generator().manual_seed(0)
    before = {name: (torch.randn(shape, generator=generator) * 0.02).bfloat16() for name, shape in shapes(layers)}
    after = {name: one_step(tensor, 1e-6) for name, tensor in before.items()}
    source, target = disk / "step_0", disk / "step_1"
    source.mkdir()
    target.mkdir()
    table = Table("part", "seconds", "CPU seconds", "MB")
    whole, in_memory = source / "model.safetensors", memory / "model.safetensors"
    save_file(before, whole)

    def write_changes() -> None:
        delta.link_base(source, target)
        base = delta.open_bits(target / BASE / "model.safetensors")
        assert delta.write_delta(
            target / DELTA, base, ((name, delta.bits_of(each)) for name, each in after.items()), 1 << 40
        )

    again = disk / "again.safetensors"
    row(table, "write whole, to a disk", lambda: save_file(after, again), again, turns=TURNS)
    row(table, "write whole, to shared memory", lambda: save_file(after, in_memory), in_memory, turns=TURNS)
    row(table, "copy from there to the disk, with a checkpoint", lambda: copy_durably(in_memory, again), again)
    row(table, "write what changed", write_changes, target / DELTA)
    row(table, "digests, of all precisions", lambda: digests_of(after))
    row(table, "server: check what changed", lambda: delta.check(target))
    row(table, "server: read a disk's files ahead", lambda: read_through(source), turns=TURNS)
    row(table, "server: read shared memory ahead", lambda: read_through(memory), turns=TURNS)
    for what, path in (("files", whole), ("shared memory", in_memory)):
        row(table, f"server: copy into the parameters from {what}", partial(fill, before, path), turns=TURNS)
    row(table, "make whole", lambda: delta.make_whole(target))
    return table


def row(table: Table, what: str, action: Callable[[], object], *sized: Path, turns: int = 1) -> None:
    """Adds a row of what an action takes."""
    taken = []
    for _ in range(turns):
        began, cpu = time.perf_counter(), time.process_time()
        action()
        taken.append((time.perf_counter() - began, time.process_time() - cpu))
    size = sum(path.stat().st_size for path in sized) / 1e6
    elapsed, cpu = (min(each) for each in zip(*taken, strict=True))
    table.add_row(what, f"{elapsed:.2f}", f"{cpu:.2f}", f"{size:.0f}" if sized else "")


def copy_durably(source: Path, target: Path) -> None:
    """Copies a file and waits for the disk."""
    shutil.copyfile(source, target)
    with target.open("rb") as file:
        os.fsync(file.fileno())


def fill(parameters: dict[str, Tensor], path: Path) -> None:
    """Copies the tensors of a file, which is mapped, into memory that is there already."""
    with safe_open(path, framework="pt") as file:
        for name, parameter in parameters.items():
            parameter.copy_(file.get_tensor(name))


def one_step(tensor: Tensor, rate: float) -> Tensor:
    """Returns the weights after a first AdamW step, which moves each element by the rate."""
    signs = torch.randint(0, 2, tensor.shape, dtype=torch.int8) * 2 - 1
    return tensor.float().add_(signs, alpha=rate).bfloat16()


if __name__ == "__main__":
    main()
