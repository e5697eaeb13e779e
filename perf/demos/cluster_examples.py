"""What `make demo-cluster` does with each of `examples/`: it starts the job, kills its processes, and says what does not hold."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean

import msgpack
import numpy as np
from numpy.typing import NDArray

from counterpoint.cluster import JobSpec, load_spec
from perf.chaos.disk import json_lines
from perf.demos.disturbed_job import DisturbedJob, Kill, Place
from perf.demos.paced_trainer import ALLOWED, PacedTrainer

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Result:
    """What one example has shown."""

    kills: list[Kill]
    claim: str
    """What was compared, with its figures."""
    flaws: list[str]


# --- a trainer that drives the others ---

ITERATIONS_BETWEEN = 2
GROWTH = 2.5
"""The least growth of an episode's length, from the first two iterations to the last five."""


def ppo(directory: Path, place: Place, say: Say) -> Result:
    """Kills every role of the PPO example twice, and the master once."""
    fields = load_spec(EXAMPLES / "ppo" / "job.toml").model_dump(mode="json")
    fields["roles"][-1]["worker"] = f"{PacedTrainer.__module__}:{PacedTrainer.__name__}"
    spec = JobSpec.model_validate(fields)
    progress = directory / "progress.jsonl"
    with DisturbedJob(spec, directory, place, say) as job:
        victims = ["actor-0", "rollout-0", "critic-0", "trainer-0", "actor-0", "rollout-1", "critic-0", "trainer-0"]
        for number, victim in enumerate(victims, start=1):
            (directory / ALLOWED).write_text(str(ITERATIONS_BETWEEN * number))
            job.kill(victim)
            if number == len(victims) // 2:
                job.kill_master()
            iteration = ITERATIONS_BETWEEN * number
            job.until(f"iteration {iteration}", partial(has_lines, progress, iteration))
        (directory / ALLOWED).write_text(str(spec.role("trainer").config["iterations"]))
        flaws = [job.end()]
    done = json_lines(progress)
    if [line["iteration"] for line in done] != list(range(1, spec.role("trainer").config["iterations"] + 1)):
        flaws.append(f"iterations are missing or repeated: {[line['iteration'] for line in done]}")
    first, last = (mean(line["length"] for line in part) for part in (done[:2], done[-5:]))
    if last < GROWTH * first:
        flaws.append(f"the pole is held for {last:.0f} steps; expected at least {GROWTH:g} times {first:.0f}")
    return Result(
        job.kills, f"{len(done)} iterations, none twice; the pole is held for {first:.0f} → {last:.0f} steps", flaws
    )


# --- a SubMaster that drives its workers ---

STEPS = 300
STEP_SECONDS = 2.0
"""The pause in each step: with it, all steps take longer than all disturbances; without it, a few seconds."""


def elastic_training(directory: Path, place: Place, say: Say) -> Result:
    """Kills one of three trainers, stops another, lets a fourth join; compares with a run that nobody disturbs."""
    training, calm = directory / "training", directory.with_name(f"{directory.name}-undisturbed")
    with DisturbedJob(training_of(training), directory, place, say) as job:

        def steps_by(ranks: int) -> None:
            before = len(json_lines(training / "progress.jsonl"))
            job.until(
                f"a step of {ranks} workers",
                lambda: any(line["ranks"] == ranks for line in json_lines(training / "progress.jsonl")[before:]),
            )
            say(f"{ranks} workers train, from step {json_lines(training / 'progress.jsonl')[-1]['step']}")

        steps_by(3)
        job.kill("trainer-1")
        steps_by(3)
        job.kill("trainer-0", signal.SIGSTOP)
        steps_by(3)
        job.kill_master()
        job.handle.scale("trainer", 4)
        steps_by(4)
        (training / "hurry").touch()
        flaws = [job.end()]
    say("the same once more, with a job that nobody disturbs")
    (calm / "training").mkdir(parents=True)
    (calm / "training" / "hurry").touch()
    with DisturbedJob(training_of(calm / "training"), calm, Place("local"), say) as undisturbed:
        flaws.append(undisturbed.end())
    results = [json.loads((folder / "result.json").read_text()) for folder in (training, calm / "training")]
    if results[0] != results[1]:
        flaws.append(f"the run ended with {results[0]}, the undisturbed one with {results[1]}")
    steps = [line["step"] for line in json_lines(training / "progress.jsonl")]
    if steps != list(range(1, STEPS + 1)):
        flaws.append(f"{len(steps)} steps were made; expected {STEPS}, each once")
    return Result(job.kills, f"3 → 4 workers, {STEPS} steps, the same bits as those of an undisturbed run", flaws)


def training_of(training: Path) -> JobSpec:
    """Returns the job of elastic training, in that directory."""
    fields = load_spec(EXAMPLES / "elastic_training" / "job.toml").model_dump(mode="json")
    (role,) = fields["roles"]
    arguments = [str(training), "--steps", str(STEPS), "--step-seconds", str(STEP_SECONDS)]
    role["config"] |= {"script": str(EXAMPLES / "elastic_training" / "train.py"), "arguments": arguments}
    return JobSpec.model_validate(fields)


# --- workers that run their own loops ---

LINES_PER_KILL = 200
ROUNDS = 2


def pipeline(directory: Path, place: Place, say: Say) -> Result:
    """Kills a worker of every role of the pipeline at random, twice, and the master; compares with a job that nobody disturbs."""
    spec = load_spec(EXAMPLES / "pipeline" / "job.toml")
    chance, lines_left = random.Random(), text_lines()
    directory.mkdir(parents=True)
    with (directory / "text.txt").open("w", buffering=1) as text, DisturbedJob(spec, directory, place, say) as job:
        for number in range(ROUNDS):
            victims = [chance.choice(role.worker_names) for role in spec.roles]
            chance.shuffle(victims)
            for victim in victims:
                before = len(committed(directory)[0])
                text.writelines(next(lines_left) for _ in range(LINES_PER_KILL))
                text.flush()
                job.until("records to pass", partial(has_committed, directory, before + 1))
                job.kill(victim)
            if number == 0:
                job.kill_master()
        text.write(".\n")
        text.flush()
        flaws = [job.end()]
    say("the same text once more, with a job that nobody disturbs")
    calm = directory.with_name(f"{directory.name}-undisturbed")
    calm.mkdir()
    (calm / "text.txt").write_text((directory / "text.txt").read_text())
    with DisturbedJob(spec, calm, Place("local"), say) as undisturbed:
        flaws.append(undisturbed.end())
    (names, table), (expected_names, expected_table) = committed(directory), committed(calm)
    if repeated := len(names) - len(set(names)):
        flaws.append(f"{repeated} records were committed more than once")
    if lost := set(expected_names) - set(names):
        flaws.append(f"{len(lost)} records are lost, such as {min(lost)}")
    if (table != expected_table).any():
        flaws.append("the trained tables differ from those of the undisturbed job")
    return Result(
        job.kills, f"{len(names)} records committed, each once; the same table as that of an undisturbed job", flaws
    )


def text_lines() -> Iterator[str]:
    """Yields the lines of our documentation, again and again."""
    pages = sorted((REPOSITORY / "docs").glob("*.md"))
    while True:
        for page in pages:
            for line in page.read_text(encoding="utf-8").splitlines():
                if line != ".":
                    yield f"{line}\n"


def committed(directory: Path) -> tuple[list[tuple[str, int]], NDArray[np.int64]]:
    """Returns the names of all records that the trainers have committed, and the sum of their tables."""
    names: list[tuple[str, int]] = []
    table = np.zeros(1, dtype=np.int64)
    for file in sorted(directory.glob("trainer-?.commit")):
        state = msgpack.unpackb(file.read_bytes())["state"]
        names += [(origin, position) for origin, position in state["records"]]
        table = table + np.frombuffer(state["table"], dtype=np.int64)
    return sorted(names), table


def has_committed(directory: Path, count: int) -> bool:
    """Whether the trainers have committed so many records."""
    return len(committed(directory)[0]) >= count


def has_lines(file: Path, count: int) -> bool:
    """Whether a file has so many of them."""
    return len(json_lines(file)) >= count
