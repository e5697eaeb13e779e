"""Learners with a sharded model on several real ranks, for `test_sharding.py`: what they compute, beside one plain rank, as JSON.

Run it as `torchrun --nproc-per-node=N -m tests.trainer.sharded_learner DIRECTORY DENSE MIXTURE`.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from counterpoint.inference.digest import digests_of
from counterpoint.run.config import RunConfig
from counterpoint.run.trainer_files import checkpoints_directory
from counterpoint.trainer import learner, ranks
from counterpoint.trainer.broadcast import own_memory
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.fair_share import FairShare
from counterpoint.trainer.learner import Learner
from counterpoint.trainer.metrics import MetricValue
from counterpoint.trainer.model.kernels import kept
from counterpoint.trainer.packer import InvalidBatch
from counterpoint.trainer.ranks import Ranks
from counterpoint.trainer.runs import checkpoint, shard_files
from counterpoint.trainer.runs.checkpoints import Checkpoints
from counterpoint.trainer.runs.manager import MultiRunManager
from counterpoint.trainer.runs.run import RunProgress
from counterpoint.trainer.updates import reference
from counterpoint.trainer.work import batch_parts
from counterpoint.transport.files.atomic import published_steps
from counterpoint.transport.telemetry.spans import SpanLog
from tests.support.polling import wait_until
from tests.trainer.conftest import EXPERTS, TOP_K, make_batch, make_run_config
from tests.trainer.lone_run import ALONE
from tests.trainer.orchestrator_end import write_run

STEPS = 7
"""Of the scenario that is resumed (`RESUMED`), by ranks of other numbers."""

FEW_STEPS = 3
"""Of the others: enough for a wrong gradient or optimizer state to show, since Adam makes a whole update of either."""

MARK = 77
"""A token that makes the row it is in fail."""

FITS = 18
"""Tokens of the longest row for which the last rank has memory."""

LORA = {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj", "experts"]}


class Bench:
    """Rank 0's end of a learner and its runs."""

    def __init__(
        self,
        directory: Path,
        model: Path,
        group: Ranks,
        runs: dict[str, dict[str, Any]],
        refused: tuple[str, ...] = (),
        **trainer: Any,
    ) -> None:
        self.directory, self.model = directory, model
        count = group.count
        given = {"threads": 1, "max_tokens": 24, "max_runs": len(runs), "processes": count, "sharding": count > 1}
        given["activation_checkpointing"] = 2 if count > 1 and "moe" in model.name else False  # all layers
        kept.LEAST_TOKENS = 1  # so that layers keep that of these few tokens, too
        self.config = TrainerConfig(output_dir=directory, model=str(model), **(given | trainer))
        self.manager = MultiRunManager(directory, self.config.max_runs, self.config.seed)
        self.learner = Learner(self.config, group, self.manager)
        self.names = list(runs)
        self.shares = FairShare(self.config.row_tokens, count // self.config.context_parallel)
        if group.index > 0:
            return
        resumed = (directory / "trainer").exists()
        for run_id, training in runs.items():
            config = make_run_config(directory, model, steps=STEPS, **training)
            write_run(RunConfig.model_validate(config.model_dump() | {"run_id": run_id}))
        assert self.manager.discover_runs()
        if resumed:
            newest = checkpoint.newest_step(directory, self.names[0])
            self.manager.registry.in_slot(0).progress = RunProgress(step=newest)
        self.learner.synchronize()
        self.failures = {name: self.manager.registry.in_slot(slot).failure for slot, name in enumerate(runs)}
        assert [name for name, failure in self.failures.items() if failure] == list(refused), self.failures

    def train(
        self, step: int, routed: bool, marked: str = "", lengths: dict[str, tuple[int, ...]] | None = None
    ) -> dict[str, dict[str, MetricValue] | str]:
        """One step of every run, side by side; a refused one gives its reason.

        `lengths`: of the samples of the runs that take it, which the last experts compute.
        """
        names = {slot: name for slot, name in enumerate(self.names) if lengths is None or name in lengths}
        for slot, run_id in names.items():
            given = {"lengths": lengths[run_id]} if lengths is not None else {}
            batch = make_batch(STEPS * slot + step, run_id=run_id, routed=routed, **given)
            for chunk in chain.from_iterable(batch.routed_experts if lengths is not None else ()):
                chunk[:] = range(EXPERTS - TOP_K, EXPERTS)
            batch = type(batch)(**{name: getattr(batch, name) for name in batch.__dataclass_fields__} | {"step": step})
            if run_id == marked:
                batch.token_ids_T[batch.sample_offsets[2]] = MARK
            elif marked or "failing" in self.directory.name:
                batch.token_ids_T[batch.token_ids_T == MARK] = 0
            opened = self.learner.open_step(slot, batch)
            self.shares.add(slot, 1.0, {sample: opened.length(sample) for sample in opened.samples})
        found: dict[str, dict[str, MetricValue] | str] = {}
        while any(map(self.shares.left, names)):
            self.learner.train_rows(self.shares.rows())
            for slot in [slot for slot in names if not self.shares.left(slot)]:
                opened_again = (
                    None if marked or lengths else self.learner.next_pass(slot, self.learner.runs[slot].scheduled())
                )
                if opened_again is not None:
                    self.shares.add(slot, 1.0, {each: opened_again.length(each) for each in opened_again.samples})
        for slot, run_id in names.items():
            try:
                found[run_id] = self.learner.finish_step(slot, self.learner.runs[slot].scheduled())
            except InvalidBatch as error:
                found[run_id] = str(error)
        return found

    def weights(self, slot: int) -> dict[str, list[float]]:
        """What is trained, whole."""
        run = self.learner.runs[slot]
        assembled = self.learner.assemble(slot)
        if assembled is None or run.torch.shards is None:
            return {name: each.detach().flatten().tolist() for name, each in run.torch.optimizer.parameters.items()}
        assert assembled.digests == digests_of(own_memory(assembled.weights), self.config.server_dtypes)
        names = run.torch.optimizer.parameters
        return {name: assembled.weights[name].flatten().tolist() for name in names}


SCENARIOS: dict[str, tuple[str, dict[str, dict[str, Any]], bool]] = {
    "dense-full": ("dense", {"one": {"learning_rate": 1e-4}}, False),
    "dense-lora": ("dense", {"one": {"lora": LORA}}, False),
    "moe-full": ("moe", {"one": {"learning_rate": 1e-4}}, True),
    "moe-lora-two": (
        "moe",
        {"one": {"lora": LORA}, "two": {"lora": LORA | {"rank": 2, "target_modules": ["q_proj"]}}},
        True,
    ),
    "dense-full-reference": (
        "dense",
        {
            "one": {
                "learning_rate": 1e-4,
                "reference": {"reward_coefficient": 0.1},
                "loss": {"kind": "grpo", "kl_coefficient": 0.1},
            }
        },
        False,
    ),
    "dense-lora-other-reference": (
        "dense",
        {
            "one": {
                "lora": LORA,
                "reference": {"reward_coefficient": 0.1, "model": "moe"},
                "loss": {"kind": "grpo", "kl_coefficient": 0.1},
            },
            "two": {"lora": LORA, "reference": {"model": "dense"}},
        },
        False,
    ),
    "moe-lora-measured": (
        "moe",
        {
            "one": {
                "learning_rate": 1e-2,
                "optimizer": "sgd",  # Adam would make an update of a gradient that is only rounding
                "lora": LORA,
                "reference": {"reward_coefficient": 0.1},
                "loss": {"kind": "grpo", "kl_coefficient": 0.1},
            },
            "two": {
                "learning_rate": 1e-2,
                "optimizer": "sgd",
                "lora": LORA | {"rank": 2, "target_modules": ["q_proj"]},
            },
        },
        True,
    ),
    "moe-lora-updates": ("moe", {"one": {"lora": LORA, "updates_per_step": 4, "epochs": 2}}, True),
}


def on_models(training: dict[str, Any], models: dict[str, Path]) -> dict[str, Any]:
    """Returns the settings of a run with the directory of the model that its reference names."""
    policy = training.get("reference", {})
    return training | ({"reference": policy | {"model": models[policy["model"]]}} if "model" in policy else {})


RESUMED = "moe-full"


GO = "the-others-may-write"
"""A file in a job's directory."""


@contextmanager
def held_disk() -> Iterator[None]:
    """Half of a follower's first slice is on its disk until `GO` is there; there is no room for rank 1's second one."""
    write_own, written = shard_files.write_own, list[str]()

    def write(tensors: Mapping[str, torch.Tensor], output_dir: Path, run_id: str, rank: int) -> None:
        written.append(run_id)
        if len(written) > 1 and rank == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        half = shard_files.staged(output_dir, run_id, rank)
        half.parent.mkdir(parents=True, exist_ok=True)
        half.write_bytes(b"half")
        wait_until((output_dir / GO).exists, "rank 0, which trains meanwhile")
        write_own(tensors, output_dir, run_id, rank)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shard_files, "write_own", write)
        yield


def train_on(directory: Path, model: Path, group: Ranks, steps: int, **trainer: Any) -> dict[str, Any]:
    """Trains on from the newest checkpoint, if there is one, for some steps, and writes another; the result is rank 0's."""
    _, runs, routed = SCENARIOS[RESUMED]
    place = directory / "resumed"
    if group.index == 0:
        place.mkdir(exist_ok=True)
        (place / GO).unlink(missing_ok=True)
    bench = Bench(place, model, group, runs, **trainer)
    if group.index > 0:
        with held_disk():
            bench.learner.follow()
        return {}
    run = bench.learner.runs[0]
    loaded = {"one": bench.weights(0)}
    lines = [bench.train(step, routed) for step in range(run.progress.step + 1, run.progress.step + steps + 1)]
    spans = SpanLog(place / "spans.jsonl", "trainer")
    with closing(Checkpoints(place, 9, bench.learner.kept_alive, str, spans)) as checkpoints:
        begin(checkpoints, bench)
        result = {"step": run.progress.step, "loaded": loaded, "lines": lines, "weights": {"one": bench.weights(0)}}
        if group.count > 1:
            result["meanwhile"] = go_on_while_others_write(checkpoints, bench, routed)
        checkpoints.complete()
    bench.learner.stop()
    return result


def begin(checkpoints: Checkpoints, bench: Bench) -> None:
    """Begins the checkpoint of the newest step, as if its weights were published."""
    published = bench.directory / "run_one" / "broadcast" / f"step_{bench.learner.runs[0].progress.step}"
    published.mkdir(parents=True, exist_ok=True)
    (published / "STABLE").touch()
    assert checkpoints.begin(bench.learner.runs[0])


def go_on_while_others_write(checkpoints: Checkpoints, bench: Bench, routed: bool) -> dict[str, Any]:
    """A step while the others' disks are slow, and a checkpoint for which rank 1 has no room: what is published of both."""
    run, parent = bench.learner.runs[0], checkpoints_directory(bench.directory, "one")
    staged = shard_files.staged(bench.directory, "one", 1)
    wait_until(lambda: staged.exists() and staged.read_bytes() == b"half", "the half of a slice")
    bench.train(run.progress.step + 1, routed)
    checkpoints.settle()
    found: dict[str, Any] = {"trained": run.progress.step, "half": published_steps(parent)}
    (bench.directory / GO).touch()
    checkpoints.complete()
    found["whole"] = published_steps(parent)
    begin(checkpoints, bench)
    with pytest.raises(OSError, match="rank 1") as caught:
        checkpoints.complete()
    return found | {"fault": str(caught.value), "left": sorted(path.name for path in parent.iterdir())}


def fail_half_way(model: nn.Module, rank: int, forward: bool, failures: list[int], marked_fits: bool) -> None:
    """Lets rows fail in the second layer: on the last rank those of many tokens, and on any rank those with a marked token.

    Those raise, or lack memory unless `marked_fits`.
    """
    ids: list[torch.Tensor] = []

    def note(_: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        ids[:] = [keywords["input_ids"][0]]

    def lack_memory(_gradient: torch.Tensor | None = None) -> None:
        failures.append(len(ids[0]))
        torch.empty(2**58)

    def fail(_: Any, arguments: tuple[Any, ...], output: torch.Tensor) -> None:
        if not torch.is_grad_enabled():
            return  # the probe
        if bool((ids[0] == MARK).any()):
            if not marked_fits:
                lack_memory()
            failures.append(0)
            raise ValueError("cannot be computed")
        if rank == 1 and len(ids[0]) > FITS:
            if forward:
                lack_memory()
            output.register_hook(lack_memory)

    model.register_forward_pre_hook(note, with_kwargs=True)
    model.get_submodule("model.layers.1.mlp").register_forward_hook(fail)


def train_failing(
    directory: Path, models: dict[str, Path], group: Ranks, marked_fits: bool = True, **trainer: Any
) -> dict[str, Any]:
    """Steps of which rows fail on one rank: what does not fit is tried in pieces, and a run whose row raises is refused."""
    results: dict[str, Any] = {}
    for name in ("dense-full", "moe-lora-two"):
        model, runs, routed = SCENARIOS[name]
        place = directory / f"failing-{name}-{group.count}"
        if group.index == 0:
            place.mkdir()
        bench, failures = Bench(place, models[model], group, runs, **trainer), list[int]()
        if group.count > 1:
            forward = name == "dense-full"
            fail_half_way(bench.learner.loaded.model, group.index, forward, failures, marked_fits or forward)
        if group.index > 0:
            bench.learner.follow()
            assert failures, "no row of the last rank has failed"
            continue
        lines = [bench.train(step, routed) for step in range(1, 4)]
        if group.count > 1:
            lines.append(bench.train(4, routed, marked="two" if "two" in runs else "one"))
        elif "two" in runs:
            lines.append(bench.train(4, routed))
        weights = {run_id: bench.weights(slot) for slot, run_id in enumerate(runs)}
        results[name] = {"lines": lines, "weights": weights}
        bench.learner.stop()
    return results


def train_all(
    directory: Path, models: dict[str, Path], group: Ranks, only: list[str], **trainer: Any
) -> dict[str, Any]:
    """Every scenario on this group of ranks, or `only` some; the result is rank 0's."""
    results: dict[str, Any] = {}
    for name, (model, runs, routed) in SCENARIOS.items():
        if only and name not in only:
            continue
        place = directory / f"{name}-{group.count}"
        if group.index == 0:
            place.mkdir()
        given = {run_id: on_models(training, models) for run_id, training in runs.items()}
        bench = Bench(place, models[model], group, given, **trainer)
        if group.index > 0:
            bench.learner.follow()
            continue
        steps = STEPS if name == RESUMED else FEW_STEPS
        lines = [bench.train(step, routed) for step in range(1, steps + 1)]
        results[name] = {
            "lines": lines,
            "weights": {run_id: bench.weights(slot) for slot, run_id in enumerate(runs)},
            "elements": elements_of(bench.learner.loaded.model),
            "reference_elements": [elements_of(each) for each in bench.learner._references.models],
        }
        bench.learner.stop()
    return results


def refuse_reference(directory: Path, models: dict[str, Path], group: Ranks) -> dict[str, Any]:
    """Steps of two runs, for the reference of one of which the last rank lacks memory; the result is rank 0's."""
    place = directory / f"refused-reference-{group.count}"
    if group.index == 0:
        place.mkdir()

    def lack_memory(*_: Any) -> None:
        raise MemoryError("no room")

    runs: dict[str, dict[str, Any]] = {
        "one": {"lora": LORA, "reference": {"model": models["moe"]}},
        "two": {"lora": LORA},
    }
    with pytest.MonkeyPatch.context() as patched:
        if group.index == group.count - 1:
            patched.setattr(reference, "load_model", lack_memory)
        bench = Bench(place, models["dense"], group, runs, refused=("one",))
        if group.index > 0:
            bench.learner.follow()
            return {}
    lines = [bench.train(step, False, lengths={"two": (7, 9, 5)}) for step in (1, 2)]
    result = {"failure": bench.failures["one"], "lines": lines}
    bench.learner.stop()
    return result


def refuse_opening(directory: Path, models: dict[str, Path], group: Ranks) -> dict[str, Any]:
    """Steps of two runs, for one of which a rank lacks memory before any row is trained; the result is rank 0's.

    First rank 0 for what it sends of the batch, then the last one for what it keeps of it, and for what it measures.
    """
    place = directory / f"refused-opening-{group.count}"
    if group.index == 0:
        place.mkdir()
    runs: dict[str, dict[str, Any]] = {"one": {"lora": LORA, "value_head": {}}, "two": {"lora": LORA}}
    lacking = {group.count - 1: [(learner, "Contribution"), (batch_parts, "unfilled")], 0: [(batch_parts, "outline")]}
    faults: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        for module, name in lacking[group.index]:
            patched.setattr(module, name, _lacking_memory_once(getattr(module, name)))
        bench = Bench(place, models["dense"], group, runs)
        if group.index > 0:
            bench.learner.follow()
            return {}
        for _ in range(3):
            with pytest.raises(InvalidBatch) as caught:
                bench.learner.open_step(0, make_batch(1, run_id="one"))
            faults.append(str(caught.value))
        lines = [bench.train(step, False, lengths={"two": (7, 9, 5)}) for step in (1, 2)]
    bench.learner.stop()
    return {"faults": faults, "lines": lines}


def _lacking_memory_once(function: Callable[..., Any]) -> Callable[..., Any]:
    calls: list[int] = []

    def call(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise MemoryError("no room")
        return function(*arguments)

    return call


def elements_of(model: nn.Module) -> int:
    """Returns how many elements of the weights this rank stores."""
    return sum(_local(each).numel() for each in model.parameters())


def _local(parameter: Any) -> torch.Tensor:
    local: torch.Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local


def main(directory: Path, dense: Path, mixture: Path, *only: str) -> None:
    models = {"dense": dense, "moe": mixture}
    count = int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    config = TrainerConfig(output_dir=directory, model=str(dense), processes=count, threads=1, rank_silence_seconds=300)
    with ranks.join(config, device) as group:
        found = {"sharded": train_all(directory, models, group, list(only))}
        if not only or "failing" in only:
            found["failing"] = {"sharded": train_failing(directory, models, group)}
        if not only:
            found["refused"] = refuse_reference(directory, models, group)
            found["not opened"] = refuse_opening(directory, models, group)
        if not only or "resumed" in only:
            found[f"resumed-{count}"] = train_on(directory, mixture, group, 2)
        index = group.index
    if index == 0:
        if not only:
            found["failing"]["plain"] = train_failing(directory, models, ALONE)
            found["resumed-1"] = train_on(directory, mixture, ALONE, 2)
        if count == 2:
            found["plain"] = train_all(directory, models, ALONE, list(only))
        (directory / f"found_{count}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
