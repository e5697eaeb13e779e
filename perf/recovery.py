"""Measures how long a killed process holds up those who need it: a server its group, and the trainer its training.

    python -m perf.recovery [server] [trainer] [--rounds N]

`server`: a group of rollouts asks one of two vLLM servers, which is killed by SIGKILL: its worker, its API server and its engine
in turns. What counts is the time until an answer of the other one to a request that had been at the killed one, beside the time
that an answer takes otherwise. `trainer`: the trainer of a small job is killed, and what counts is the time until the trainer's
next step, in parts. A round of the server takes as long as vLLM to start.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import tomli_w
import uvloop

from counterpoint.inference.base import SamplingParameters
from counterpoint.inference.config import PoolConfig
from counterpoint.inference.pool.pool import InferencePool, Served
from counterpoint.job.evaluation.server import free_port
from counterpoint.job.processes_file import read_workers
from counterpoint.models.build import make_model
from counterpoint.transport.process.launch import descendants
from perf.chaos.disk import json_lines
from perf.chaos.job import part_of_vllm, settings
from perf.chaos.report import kill
from perf.commands import PATIENCE_SECONDS, Command, PerfError, say, until

GROUP = 8
TOKENS = 32
VICTIMS = ("worker", "API server", "engine core")
STEPS_BETWEEN = 3
LOOK_SECONDS = 0.01


# --- a server ---


@dataclass
class Answers:
    """What the rollouts of the group have asked and got."""

    asked: dict[int, float] = field(default_factory=dict)
    """When each rollout asked what is not answered yet."""
    server: dict[int, str] = field(default_factory=dict)
    """The server of each rollout's last answer."""
    got: list[tuple[float, float, str]] = field(default_factory=list)
    """When each answer was asked for and came, and its server."""


def server_command(directory: Path, model: str, port: int) -> Command:
    """Starts a server, as a job does."""
    file = directory / f"server-{port}.toml"
    values = {"model": model, "port": port, "dtype": "float32", "max_model_len": 256, "max_num_seqs": 2 * GROUP}
    file.write_text(tomli_w.dumps(values))
    return Command(directory / f"server-{port}.log", "inference", str(file))


def process_of(command: Command, victim: str) -> int:
    """Returns the process of a running server that is to be killed."""
    found = {part_of_vllm(pid) or "": pid for pid in descendants(command.pid)}
    return found[victim] if victim in found else descendants(command.pid)[0]


async def play(served: Served, index: int, answers: Answers, group: int) -> None:
    """Asks for one turn after the other."""
    sampling = SamplingParameters(temperature=1.0, max_tokens=TOKENS)
    while True:
        answers.asked[index] = asked = time.monotonic()
        turn = await served.generate([5 + index, 7, 9], sampling, affinity=f"{group}-{index}")
        answers.got.append((asked, time.monotonic(), turn.server))
        answers.server[index] = turn.server


async def measure_server(rounds: int, directory: Path) -> None:
    """Kills a server in each round, and starts it again."""
    model, ports = str(make_model("tiny-dense")), [free_port("127.0.0.1", 0) for _ in range(2)]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    commands = {url: server_command(directory, model, port) for url, port in zip(urls, ports, strict=True)}
    try:
        served = InferencePool(PoolConfig(urls=urls)).model(model)
        await served.start()
        for number in range(rounds):
            await _until_all_serve(served, commands)
            killed = await _kill_one(served, commands, VICTIMS[number % len(VICTIMS)], number)
            commands[killed].stop()
            commands[killed] = server_command(directory, model, int(killed.rpartition(":")[2]))
        await served.release()
    finally:
        for command in commands.values():
            command.stop()


async def _until_all_serve(served: Served, commands: dict[str, Command]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not all(each.state == "serving" for each in served.status()):
        for command in commands.values():
            if command.ended or time.monotonic() > deadline:
                raise PerfError(f"{command} does not serve{command.last_output()}")
        await asyncio.sleep(LOOK_SECONDS)


async def _kill_one(served: Served, commands: dict[str, Command], victim: str, group: int) -> str:
    """Kills the server that most of the group ask; prints the times. Returns its URL."""
    answers = Answers()
    playing = [asyncio.create_task(play(served, index, answers, group)) for index in range(GROUP)]
    await asyncio.sleep(2.0)
    url = statistics.mode(answers.server.values())
    pid = process_of(commands[url], victim)
    await asyncio.sleep(LOOK_SECONDS)  # answers that came while the process was looked for
    waiting = [answers.asked[index] for index, server in answers.server.items() if server == url]
    usual = statistics.median(came - asked for asked, came, _ in answers.got)
    at = time.monotonic()
    kill(pid)
    while len(found := {asked: (came, by) for asked, came, by in answers.got if asked in waiting}) < len(waiting):
        if time.monotonic() - at > PATIENCE_SECONDS:
            raise PerfError(f"{len(waiting) - len(found)} requests of the killed {victim} were never answered")
        await asyncio.sleep(LOOK_SECONDS)
    if not (after := [came - at for came, by in found.values() if by != url]):
        raise PerfError(f"the killed {victim} had answered all requests just before")
    for task in playing:
        task.cancel()
    await asyncio.gather(*playing, return_exceptions=True)
    say(
        f"server: {victim} killed: the next answer after {min(after):.3f} s, all {len(after)} after {max(after):.3f} s; "
        f"an answer otherwise takes {usual:.3f} s; {_load()}"
    )
    return url


# --- the trainer ---


@contextmanager
def _job(directory: Path) -> Iterator[tuple[Command, Path]]:
    """Yields a small job of one run, and its directory."""
    job = settings(directory / "job", directory / "notes")
    job["runs"] = [{"run_id": "first"}]
    job["orchestrator"]["environments"] = [{"name": "reverse", "kind": "reverse-text"}]
    (directory / "job.toml").write_text(tomli_w.dumps(job))
    with Command(directory / "job.log", "run", str(directory / "job.toml")) as command:
        yield command, directory / "job"


def measure_trainer(rounds: int, directory: Path) -> None:
    """Kills the trainer in each round."""
    with _job(directory) as (command, job):
        for _ in range(rounds):
            _kill_trainer(command, job)


def _steps(job: Path) -> list[float]:
    return [line["time"] for line in json_lines(job / "trainer" / "metrics.jsonl")]


def _kill_trainer(command: Command, job: Path) -> None:
    before = len(_steps(job))
    until("steps", lambda: len(_steps(job)) >= before + STEPS_BETWEEN, [command])
    (pid,) = (worker["pid"] for worker in read_workers(job) if worker["name"] == "trainer")
    at, marks = time.time(), dict[str, float]()
    kill(pid)

    def trains_again() -> bool:
        for worker in read_workers(job):
            if worker["name"] == "trainer" and worker["pid"] not in (None, 0, pid):
                marks.setdefault("started", time.time() - at)
                if worker["state"] == "ready":
                    marks.setdefault("ready", time.time() - at)
        return any(done > at for done in _steps(job)[before:])

    until("the trainer to train again", trains_again, [command], seconds=PATIENCE_SECONDS)
    marks["trained a step"] = next(done for done in _steps(job)[before:] if done > at) - at
    say("trainer killed: " + ", ".join(f"{what} after {took:.2f} s" for what, took in marks.items()) + f"; {_load()}")


def _load() -> str:
    return f"load {os.getloadavg()[0]:.1f}"


def main(words: Sequence[str] | None = None) -> None:
    """Measures what is asked for, both without names."""
    parser = argparse.ArgumentParser(prog="python -m perf.recovery", description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="*", choices=["server", "trainer", []], help="default: both")
    parser.add_argument("--rounds", type=int, default=len(VICTIMS), help="kills of each (default: %(default)s)")
    given = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="recovery-", dir="/tmp") as directory:
        if "server" in given.what or not given.what:
            uvloop.run(measure_server(given.rounds, Path(directory)))
        if "trainer" in given.what or not given.what:
            measure_trainer(given.rounds, Path(directory))


if __name__ == "__main__":
    main()
