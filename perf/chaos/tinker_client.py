"""Kills the processes of `counterpoint tinker FILE` by SIGKILL while a client of the unmodified SDK trains, round after round.

A round contributes twice, kills the service, the trainer or the server before the update or right after it is asked for, and
takes a sampler now and then. Afterwards a second model takes the same rounds undisturbed. Every loss and the adapters must be
the same, bit for bit, no call of the client may fail, and the ledger must have each trained token once.

With `--beside MINUTES` nothing is killed: four other keys ask for all they may (`perf/chaos/tenants.py`).
"""

from __future__ import annotations

import argparse
import random
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tinker
import tomli_w

from counterpoint.job.evaluation.server import free_port
from counterpoint.job.processes_file import read_workers
from counterpoint.service.records.database import open_to_read
from counterpoint.service.records.ledger import used_by_day
from perf.chaos import tenants
from perf.chaos.report import Findings, Report, kill, say
from perf.commands import Command, is_ready, until
from perf.figures import Case, Figure

ROLES = ("service", "trainer", "inference")

LOSSES = "losses unlike those of the undisturbed run"
ADAPTERS = "adapters unlike it"
TOKENS = "tokens trained that the ledger lacks, or has twice"

MANY = 1_000_000

ROUNDS_A_SAMPLER = 5

TEXT_TOKENS, VOCABULARY = 24, 90
"""The tokens of a text, and the ids that it has: the model knows more."""

DATA = 2
"""The texts of a contribution."""

CALL_SECONDS = 400.0
"""The longest that a call of the client may take, in seconds: a server is started again within a minute or two."""


@dataclass
class Seen:
    """What a client saw."""

    losses: list[float] = field(default_factory=list)
    adapter: bytes = b""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds those of this kind."""
    parser.add_argument("--beside", type=float, metavar="MINUTES", help="play beside four keys under load instead")


def measure(given: argparse.Namespace, directory: Path) -> Case:
    """Runs the chaos in a directory."""
    port, output = free_port("127.0.0.1", 0), directory / "job"
    table = settings(output, port)
    if given.beside:
        table["tinker"]["keys_file"] = str(keys := directory / "keys.txt")
        keys.write_text("".join(f"{key} {name}\n" for name, key in tenants.KEYS.items()))
    (directory / "job.toml").write_text(tomli_w.dumps(table))
    with Command(directory / "job.log", "tinker", str(directory / "job.toml")) as job:
        until("the job", lambda: is_ready(output), [job])
        url = f"http://127.0.0.1:{port}"
        if given.beside:
            return Case("four keys under load", _beside(given, url, directory))
        report = Report("chaos of the service", Findings((LOSSES, ADAPTERS, TOKENS)))
        _killed(given, url, output, report)
        return report.case()


def _beside(given: argparse.Namespace, url: str, directory: Path) -> list[Figure]:
    def rounds(client: tinker.ServiceClient, each: Callable[[], None]) -> list[float]:
        return play(client, tenants.ROUNDS, directory / "job", each).losses

    return tenants.beside(tenants.Fifth(url, rounds), url, given.beside, directory)


def _killed(given: argparse.Namespace, url: str, output: Path, report: Report) -> None:
    warnings.simplefilter("ignore")
    chance, found = random.Random(given.seed), Findings(report.findings.faults)
    report.rounds, report.done = given.rounds, Counter({f"{role}: killed": 0 for role in ROLES})
    client = tinker.ServiceClient(base_url=url, api_key="tml-the-key-of-the-chaos")
    disturbed = play(client, given.rounds, output, lambda: disturb(output, chance, report))
    undisturbed = play(client, given.rounds, output, lambda: None)
    found.counts["workers started again"] = sum(worker["restarts"] for worker in read_workers(output))
    found.counts["losses"] = len(disturbed.losses)
    for number, (one, other) in enumerate(zip(disturbed.losses, undisturbed.losses, strict=True), start=1):
        if one != other:
            found.faults[LOSSES].append(f"loss {number} is {one}, and was {other} undisturbed")
    if disturbed.adapter != undisturbed.adapter:
        found.faults[ADAPTERS].append("the last adapters differ")
    ledger = used_by_day(open_to_read(output / "service" / "records.db").execute).values()
    counted = sum(used.trained for accounts in ledger for used in accounts.values())
    trained = len(disturbed.losses + undisturbed.losses) * DATA * (TEXT_TOKENS - 1)
    if counted != trained:
        found.faults[TOKENS].append(f"the ledger has {counted} trained tokens, expected {trained}")
    report.add(found, output)


def settings(output: Path, port: int) -> dict[str, Any]:
    """Returns the job's configuration."""
    return {
        "output_dir": str(output),
        "model": "tiny-dense",
        "max_restarts": MANY,
        "inference": {"port": free_port("127.0.0.1", 0), "dtype": "float32", "max_model_len": 256},
        "trainer": {"device": "cpu", "max_tokens": 1024, "threads": 1},
        "tinker": {"port": port},
    }


def play(client: tinker.ServiceClient, rounds: int, output: Path, disturb: Callable[[], None]) -> Seen:
    """Trains a model for so many rounds; `disturb` is called once a round."""
    seen = Seen()
    model = client.create_lora_training_client(base_model="tiny-dense", rank=4).result(CALL_SECONDS)
    texts = random.Random(0)
    for number in range(1, rounds + 1):
        began = time.monotonic()
        parts = [model.forward_backward([datum(texts) for _ in range(DATA)], "cross_entropy") for _ in range(2)]
        before = texts.random() < 0.5
        if before:
            disturb()
        update = model.optim_step(tinker.AdamParams(learning_rate=1e-3))
        if not before:
            disturb()
        seen.losses += [part.result(CALL_SECONDS).metrics["loss:sum"] for part in parts]
        update.result(CALL_SECONDS)
        if number % ROUNDS_A_SAMPLER == 0:
            sampler = model.save_weights_and_get_sampling_client()
            prompt = tinker.ModelInput.from_ints([5, 6, 7])
            sampler.sample(prompt, 1, tinker.SamplingParams(max_tokens=4)).result(CALL_SECONDS)
        say(f"  round {number} of {rounds}: {time.monotonic() - began:.0f} s")
    path = model.save_weights_for_sampler("last").result(CALL_SECONDS).path
    run = output / f"run_{path.removeprefix('tinker://').partition('/')[0].replace(':', '_')}"
    newest = max(run.rglob("adapter_model.safetensors"), key=lambda file: file.stat().st_mtime_ns)
    seen.adapter = newest.read_bytes()
    return seen


def datum(texts: random.Random) -> tinker.Datum:
    """Returns a text of random tokens, each of which is to become more likely."""
    tokens = [texts.randrange(5, VOCABULARY) for _ in range(TEXT_TOKENS)]
    weights = np.ones(TEXT_TOKENS - 1, np.float32)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": np.array(tokens[1:], np.int64), "weights": weights},
    )


def disturb(output: Path, chance: random.Random, report: Report) -> None:
    """Kills a worker of the job that runs, at a random moment."""
    time.sleep(chance.uniform(0.0, 0.3))
    running = [worker for worker in read_workers(output) if worker["pid"]]
    if running and kill((victim := chance.choice(running))["pid"]):
        report.done[f"{victim['name'].partition('_')[0]}: killed"] += 1
        say(f"  killed {victim['name']}")
