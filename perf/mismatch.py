"""Measures how much of the mismatch between inference and trainer is due to precision, routing and staleness.

    python -m perf.mismatch [--model tiny-moe] [--rollouts 64] [--json]

For float32 and for bfloat16 inference it starts a real vLLM, plays the demo's environments, and puts the same rollouts through
the trainer's forward pass (float32) with and without router replay. Then it trains on them, with the demo's own training
settings, and measures again after each update: the mismatch of the same tokens one and two steps later is staleness. The
mismatch is the trainer's own metric, `mismatch_kl` (`trainer/step.py`); the share of routing choices that differ counts the
token and layer pairs whose set of experts would be another without replay.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from rich.console import Console
from rich.table import Table

from environments.chat import Chat
from environments.mix import ExampleMix
from environments.registry import load_here
from inference.config import PoolConfig
from inference.pool.pool import InferencePool
from job.evaluation.server import free_port
from models.make_model import resolve_model
from orchestrator.rollouts.play import LoadedEnvironment, PolicyModel, play, sampling_parameters
from orchestrator.rollouts.trajectories import assemble_batch, merge_rollout
from orchestrator.run_directory import write_config
from orchestrator.step.finalize import find_fault
from run.config import RunConfig
from trainer.config import TrainerConfig
from trainer.fair_share import FairShare
from trainer.learner import Learner
from trainer.model.load import log_probabilities
from trainer.packer import pack, trained_tokens
from trainer.ranks import Ranks
from trainer.runs.manager import MultiRunManager
from transport.process.launch import guarded
from transport.records import Batch, Rollout

DEMO = Path(__file__).parent.parent / "configs" / "demo.toml"
UPDATES = 2


def measure(model: Path, run: RunConfig, dtype: str, rollouts: int, directory: Path) -> list[dict[str, Any]]:
    """Measures the rows of one inference precision: without replay, with replay, and with replay after each update."""
    with _server(model, dtype, directory) as url:
        batch = asyncio.run(_sample(model, run, url, rollouts))
    config = TrainerConfig(output_dir=directory, model=str(model), device="cpu")
    ranks = Ranks(0, 1, torch.device("cpu"), None)
    (run.run_dir / "control").mkdir(parents=True, exist_ok=True)
    write_config(run)
    plain = _learner(config.model_copy(update={"router_replay": False}), ranks)
    replaying = _learner(config, ranks)
    rows = [_row(dtype, "off", 1, _mismatch(plain, batch), _differing_routing(replaying, batch))]
    # The metrics of a step are those of the weights before its update: the first is on-policy, each later one a step older.
    rows += [_row(dtype, "on", 1 + update, _mismatch(replaying, batch), 0.0) for update in range(UPDATES + 1)]
    return rows


def _row(dtype: str, replay: str, staleness: int, mismatch: float, differing: float) -> dict[str, Any]:
    return {
        "inference": dtype,
        "router_replay": replay,
        "staleness": staleness,
        "mismatch_kl": mismatch,
        "routing_differs": differing,
    }


def _learner(config: TrainerConfig, ranks: Ranks) -> Learner:
    """Returns a learner with the run in its first slot, from the model as given."""
    manager = MultiRunManager(config.output_dir, config.max_runs, config.seed)
    learner = Learner(config, ranks, manager)
    manager.discover_runs()
    learner.synchronize()
    return learner


def _mismatch(learner: Learner, batch: Batch) -> float:
    learner.open_step(0, replace(batch, step=1))
    for samples in _rows(batch, learner.loaded.limits.max_tokens):
        learner.train_rows([[(0, samples)]])
    return float(learner.finish_step(0)["mismatch_kl"])


def _rows(batch: Batch, max_tokens: int) -> Iterator[list[int]]:
    """Yields the samples of a batch, a row at a time."""
    shares = FairShare(max_tokens, ranks=1)
    lengths = np.diff(batch.sample_offsets)
    shares.add(0, 1.0, {sample: int(lengths[sample]) for sample in trained_tokens(batch)})
    while shares.left(0):
        for row in shares.rows():
            yield from (samples for _, samples in row)


def _differing_routing(learner: Learner, batch: Batch) -> float:
    """Returns the share of token and layer pairs whose recorded set of experts is not the one the trainer's own gate chooses."""
    replay, limits = learner.loaded.replay, learner.loaded.limits
    assert replay is not None
    differing = pairs = 0
    for samples in _rows(batch, limits.max_tokens):
        micro = pack([(batch, samples)], limits, torch.device("cpu"))
        if micro.routed_experts_TLK is None:
            raise ValueError("the server returned no routed experts: is this a mixture of experts?")
        with torch.no_grad(), replay.observing() as probabilities_by_layer:
            log_probabilities(
                learner.loaded.model,
                micro.token_ids_T,
                micro.position_ids_T,
                micro.sample_lengths,
                micro.predicting_P,
                micro.targets_P,
                1.0,
            )
        for layer, probabilities_TE in probabilities_by_layer.items():
            own_TK = probabilities_TE.topk(limits.top_k, dim=-1).indices.sort(dim=-1).values
            recorded_TK = micro.routed_experts_TLK[:, layer].long().sort(dim=-1).values
            differs_T = (own_TK != recorded_TK).any(dim=-1)[micro.has_record_T]
            differing += int(differs_T.sum())
            pairs += len(differs_T)
    return differing / pairs


async def _sample(model: Path, run: RunConfig, url: str, rollouts: int) -> Batch:
    """Plays the run's environments on the server, with the orchestrator's own code, into one batch."""
    environments = {e.name: LoadedEnvironment(e, load_here(e)) for e in run.environments}
    mix = ExampleMix(run.environments, {name: len(e.environment) for name, e in environments.items()}, run.seed)
    chat = Chat(str(model))
    calling = {
        e.name: (
            own := chat.with_template_kwargs(run.sampling_of(e).chat_template_kwargs),
            sampling_parameters(run.sampling_of(e), own),
        )
        for e in run.environments
    }
    pool = InferencePool(PoolConfig(urls=[url]), str(model))
    played: list[Rollout] = []
    await pool.start()
    try:
        async with asyncio.TaskGroup() as tasks:
            for index in range(rollouts):
                name, example_index = mix.next()
                rollout = Rollout(f"{index}-0", index, name, example_index)
                played.append(rollout)
                own_chat, sampling = calling[name]
                tasks.create_task(play(environments[name], rollout, PolicyModel(rollout, own_chat, pool, sampling)))
    finally:
        await pool.close()
    for rollout in played:
        if (fault := rollout.error or find_fault(rollout)) is not None:
            raise RuntimeError(f"rollout {rollout.rollout_id} of {rollout.environment} failed: {fault}")
        # Any sign will do: what is measured is how far an update of the usual size moves the policy.
        rollout.advantage = 1.0 if int(rollout.rollout_id.split("-")[0]) % 2 else -1.0
    return assemble_batch(run.run_id, 1, [sample for rollout in played for sample in merge_rollout(rollout)])


@contextmanager
def _server(model: Path, dtype: str, directory: Path) -> Iterator[str]:
    """Starts a real vLLM of that precision, as `counterpoint inference` starts it."""
    port = free_port("127.0.0.1", 0)
    file = directory / f"inference_{dtype}.toml"
    settings = {
        "model": str(model),
        "port": port,
        "dtype": dtype,
        "max_model_len": 512,
        "max_num_batched_tokens": 16384,
        "return_routed_experts": True,
        "log_file": str(directory / f"inference_{dtype}.log"),
    }
    file.write_text(tomli_w.dumps(settings))
    process = subprocess.Popen(guarded([sys.executable, "-P", "-m", "cli.main", "inference", str(file)]))
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        finally:
            process.kill()  # and vLLM with it; a no-op once it has ended


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-moe", help="a mixture of experts: a directory or a built-in name")
    parser.add_argument("--rollouts", type=int, default=64, help="rollouts a precision")
    parser.add_argument("--json", action="store_true", help="rows as JSON on standard output")
    arguments = parser.parse_args()
    model = resolve_model(arguments.model)
    with tempfile.TemporaryDirectory() as scratch:
        run = _demo_run(model, Path(scratch))
        rows = [
            row
            for dtype in ("float32", "bfloat16")
            for row in measure(model, run, dtype, arguments.rollouts, Path(scratch))
        ]
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    table = Table(
        title=f"Mismatch between inference and a float32 trainer, {arguments.rollouts} rollouts of {arguments.model}"
    )
    for heading in ("inference", "router replay", "staleness", "mismatch KL", "routing choices that differ"):
        table.add_column(heading, justify="right")
    for row in rows:
        differs = f"{row['routing_differs']:.2%}" if row["router_replay"] == "off" else "replayed"
        table.add_row(
            row["inference"], row["router_replay"], str(row["staleness"]), f"{row['mismatch_kl']:.2e}", differs
        )
    Console().print(table)


def _demo_run(model: Path, output_dir: Path) -> RunConfig:
    demo = tomllib.loads(DEMO.read_text())
    return RunConfig.model_validate(demo["orchestrator"] | {"output_dir": output_dir, "model": str(model)})


if __name__ == "__main__":
    main()
