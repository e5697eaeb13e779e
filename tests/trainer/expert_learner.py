"""Learners on real ranks that divide a mixture's experts, for `test_experts.py`: what they compute, beside a plain rank, as JSON.

Run it as `torchrun --nproc-per-node=N -m tests.trainer.expert_learner DIRECTORY MIXTURE [DEVICE [SCENARIO ...]]`. Two ranks
divide the experts; with four ranks there are two such groups. On other devices nothing fails and nothing is resumed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from counterpoint.trainer import ranks
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.faults import LacksMemory
from counterpoint.trainer.model.experts import form_groups
from counterpoint.trainer.model.load import choose_device
from counterpoint.trainer.ranks import Ranks
from tests.trainer.conftest import TOP_K
from tests.trainer.lone_run import ALONE
from tests.trainer.sharded_learner import MARK, SCENARIOS, Bench, train_all, train_on

FULL, LORA, MEASURED = "moe-full", "moe-lora-two", "moe-lora-measured"

WAYS: dict[int, dict[str, tuple[dict[str, Any], list[str]]]] = {
    2: {
        "alone": ({}, [FULL, LORA, MEASURED]),
        "sharded": ({"sharding": True}, [FULL, LORA]),
        "context": ({"context_parallel": 2}, [LORA]),
    },
    4: {
        "alone": ({}, [FULL, LORA]),
        "sharded and context": ({"sharding": True, "context_parallel": 2}, [FULL, LORA]),
    },
}
"""By number of ranks: what the division is combined with, and what is trained."""

FITS = 36
"""Pairs of a token and an expert for which the last rank has memory, whichever rank they come from."""

LONGEST = FITS // TOP_K + 2
"""Tokens of a sample that does not fit there, whose experts are all at the last rank."""


def fail_at_the_owner(model: nn.Module, rank: int, forward: bool, failures: list[int]) -> None:
    """Lets passes fail in the second layer between both transfers of its tokens.

    The last rank lacks memory for many pairs, and any rank raises for rows with a marked token.
    """
    experts: Any = model.get_submodule("model.layers.1.mlp.experts")
    experts = getattr(experts, "base", experts)
    ids: list[Tensor] = []
    activate: Callable[[Tensor], Tensor] = experts._apply_gate

    def note(_: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        ids[:] = [keywords["input_ids"][0]]

    def lack_memory(pairs: int, _gradient: Tensor | None = None) -> None:
        failures.append(pairs)
        torch.empty(2**58)

    def fail(gate_up: Tensor) -> Tensor:
        output = activate(gate_up)
        if torch.is_grad_enabled():  # not the probe
            if bool((ids[0] == MARK).any()):
                failures.append(0)
                raise ValueError("cannot be computed")
            if rank == 1 and len(gate_up) > FITS:
                if forward:
                    lack_memory(len(gate_up))
                output.register_hook(partial(lack_memory, len(gate_up)))
        return output

    model.register_forward_pre_hook(note, with_kwargs=True)
    experts._apply_gate = fail


def train_failing(directory: Path, model: Path, group: Ranks, **trainer: Any) -> dict[str, Any]:
    """Steps of which passes fail on one rank."""
    results: dict[str, Any] = {}
    for name in (FULL, LORA):
        _, runs, routed = SCENARIOS[name]
        place = directory / f"failing-{name}-{group.count}"
        if group.index == 0:
            place.mkdir()
        bench, failures = Bench(place, model, group, runs, **trainer), list[int]()
        if group.count > 1:
            fail_at_the_owner(bench.learner.loaded.model, group.index, name == FULL, failures)
        if group.index > 0:
            bench.learner.follow()
            assert failures, "no pass of the last rank has failed"
            continue
        lines = [bench.train(step, routed) for step in range(1, 4)]
        several, two = group.count > 1, "two" in runs
        lengths = {"one": (LONGEST,)} if several else {}  # not for the last rank, which has no part of it
        lines.append(bench.train(4, routed, lengths=lengths | ({"two": (5, 6)} if two else {})))
        lines.append(bench.train(5, routed, marked="two" if several and two else ""))
        results[name] = {"lines": lines, "weights": {run_id: bench.weights(slot) for slot, run_id in enumerate(runs)}}
        bench.learner.stop()
    return results


def train_without_memory(directory: Path, model: Path, group: Ranks) -> str:
    """Trains a step in which the last rank lacks memory for any token. Returns what all ranks raise, or why it is refused."""
    _, runs, routed = SCENARIOS[FULL]
    place = directory / "without-memory"
    if group.index == 0:
        place.mkdir()
    bench = Bench(place, model, group, runs, sharding=False, expert_parallel=2)
    passes: Any = bench.learner.loaded.passes

    def lack_memory(*_: Any) -> None:
        if (bench.learner.loaded.model, True) in passes._scripts:  # the ranks have agreed on what a pass calls
            torch.empty(2**58)

    if group.index > 0:
        bench.learner.loaded.model.get_submodule("model.layers.1.mlp.experts").register_forward_pre_hook(lack_memory)
    try:
        if group.index == 0:
            refused = str(bench.train(1, routed)["one"])
            bench.learner.stop()
            return refused
        bench.learner.follow()
    except LacksMemory as error:
        return str(error)
    return "it goes on"


def on_several_ranks(directory: Path, mixture: Path, group: Ranks, scenarios: list[str]) -> dict[str, Any]:
    """Everything on these ranks, of these scenarios; the results are rank 0's."""
    found: dict[str, Any] = {}
    for way, (trainer, names) in WAYS[group.count].items():
        place = directory / way
        if group.index == 0:
            place.mkdir(exist_ok=True)
        given = {"sharding": False, "expert_parallel": 2, "dtype": "float32"} | trainer
        own = replace(group, context=group.context if "context_parallel" in given else None)
        found[way] = train_all(place, {"moe": mixture}, own, [each for each in names if each in scenarios], **given)
    group = replace(group, context=None)
    if group.device.type != "cpu":
        return found
    if group.count == 2:
        found["failing"] = train_failing(directory, mixture, group, sharding=False, expert_parallel=2)
        found["without memory"] = train_without_memory(directory, mixture, group)
        found["resumed"] = [train_on(directory, mixture, group, 2, sharding=False, expert_parallel=2)]
    else:
        found["resumed"] = [train_on(directory, mixture, group, 2, sharding=True, expert_parallel=2)]
        group = replace(group, experts=form_groups(4, group.device, timedelta(minutes=5)))
        found["resumed"].append(train_on(directory, mixture, group, 1, sharding=True, expert_parallel=4))
    return found


def main(directory: Path, mixture: Path, device: str = "cpu", *only: str) -> None:
    count, scenarios = int(os.environ["WORLD_SIZE"]), [*only] or [FULL, LORA, MEASURED]
    config = TrainerConfig(
        output_dir=directory,
        model=str(mixture),
        processes=count,
        threads=1,
        expert_parallel=2,
        context_parallel=2,
        rank_silence_seconds=300,
    )
    with ranks.join(config, choose_device(device)) as group:
        found = on_several_ranks(directory, mixture, group, scenarios)
        index = group.index
    if index == 0:
        if count == 2:
            found["plain"] = train_all(directory, {"moe": mixture}, ALONE, scenarios)
        if "failing" in found:
            found["failing-plain"] = train_failing(directory, mixture, ALONE)
            found["resumed"].append(train_on(directory, mixture, ALONE, 2))
        (directory / f"found_{count}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
