"""Has the layers that a job's trainer computes again chosen when the job starts, from the memory of its GPU.

`counterpoint/job/plan/choice.py` chooses, in a child process that sees no GPU (`python -m counterpoint.job.plan.at_start`): the
command itself carries no torch along. Whatever fails here stops no start.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from counterpoint.cluster.devices import DEVICES, ask_nvidia, visible_devices
from counterpoint.job.config import JobConfig
from counterpoint.job.directory import JOB_FILE, read_json
from counterpoint.job.plan.planned import Planned, planned_job
from counterpoint.transport.errors import UserError
from counterpoint.transport.process.child import ChildError, run
from counterpoint.transport.process.exit_codes import describe_exit

CHOOSE_SECONDS = 120.0
"""Time limit of the child."""

_KEY = "activation_checkpointing"

_CARD = re.compile(rb" *(\d+) *, *(?:(\d+)|\[N/A\]) *, *(.*?) *")
"""What `nvidia-smi` says of a GPU: the MiB of its memory, those of them that its driver keeps, and whether it is divided."""


def with_choice(job: JobConfig, say: Callable[[str], None], *, left_running: bool) -> JobConfig:
    """Returns the job with `trainer.activation_checkpointing`, and says what was chosen, where that is unset.

    It stays unset, which is off, where the trainer computes on no GPU of this machine, or the GPU's memory is not known. A value
    of the last start holds for the same trainer that it left running, whose lease would end meanwhile.
    """
    if getattr(job.trainer, _KEY) is not None or job.backend != "local" or job.trainer.device == "cpu":
        return job
    try:
        if left_running and _others(last := read_json(job.output_dir / JOB_FILE)["trainer"]) == _others(
            job.trainer.model_dump(mode="json")
        ):
            value = last.get(_KEY)
        else:
            value = _chosen(job, say)
    except (OSError, ValueError, LookupError, TypeError, ChildError, UserError) as error:
        reason = f"{error}".partition("\n")[0] or type(error).__name__
        say(f"trainer.{_KEY} is not chosen, and off: {reason}; `counterpoint plan` says how many layers suffice")
        return job
    return job if value is None else job.model_copy(update={"trainer": job.trainer.model_copy(update={_KEY: value})})


def _chosen(job: JobConfig, say: Callable[[str], None]) -> bool | int | None:
    """Chooses anew, and says so; returns None where the trainer finds no GPU. Raises as `_card_memory` and `_choose`."""
    memory = _card_memory(job)
    if memory is None:
        return None
    say(f"planning the trainer's memory on a GPU of {memory / 1e9:.1f} GB, for at most {CHOOSE_SECONDS:g} s")
    found = _choose(planned_job(job), Path(job.trainer.model), memory)
    if found is None:
        return None
    value: bool | int = found["value"]
    said = (
        f"trainer.{_KEY} = {json.dumps(value)} is chosen: {found['words']}; a rank is planned to take "
        f"{found['needed'] / 1e9:.1f} GB of the {found['room'] / 1e9:.1f} that it may"
    )
    does_fit = found["needed"] <= found["room"]
    say(said if does_fit else f"{said}, and will not fit: `counterpoint plan` says what to change")
    return value


def _others(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the other keys that tell a trainer from another one of the same model."""
    return {key: value for key, value in trainer.items() if key not in (_KEY, "model", "resume")}


def _card_memory(job: JobConfig) -> int | None:
    """Returns the bytes of the trainer's GPU that programs may use; None where there is none.

    Raises `ValueError` if they are not known.
    """
    seen = visible_devices() if job.gpus.trainer is None and DEVICES in os.environ else job.gpus.trainer
    if shutil.which("nvidia-smi") is None or (seen is not None and not seen):
        return None
    lines = ask_nvidia("gpu=memory.total,memory.reserved,mig.mode.current").splitlines()
    cards = [found for line in lines if (found := _CARD.fullmatch(line)) is not None]
    if not cards or len(cards) < len(lines):
        raise ValueError("nvidia-smi does not tell the memory of the GPUs")
    if any(card[3] == b"Enabled" for card in cards):
        raise ValueError("a GPU is divided (MIG), and nvidia-smi tells the memory of a whole one")
    if len({int(card[1]) for card in cards}) > 1:
        raise ValueError(
            "the GPUs of this machine differ in memory, and which of them is the trainer's is not known here"
        )
    return (int(cards[0][1]) - max(int(card[2] or 0) for card in cards)) * 2**20


def _choose(planned: Planned, directory: Path, memory: int) -> dict[str, Any] | None:
    """Returns a `LayerChoice` with its value; None if the trainer will find no GPU. Raises `ValueError`, `OSError` and others."""
    given = {"planned": _PLANNED.dump_python(planned, mode="json"), "directory": str(directory), "memory": memory}
    done = run(
        name := "the process that computes it",
        [sys.executable, "-P", "-m", "counterpoint.job.plan.at_start"],
        CHOOSE_SECONDS,
        given=json.dumps(given).encode(),
        environment={**os.environ, DEVICES: ""},
    )
    if done.code:
        lines = done.errors.strip().splitlines()
        raise ValueError(lines[-1] if lines else f"{name} {describe_exit(done.code)}")
    found: dict[str, Any] | None = json.loads(done.output.splitlines()[-1])
    return found


_PLANNED = TypeAdapter(Planned)


def main() -> None:
    """Runs the child: chooses for what standard input describes, and prints it."""
    import torch

    from counterpoint.job.plan.plan import choose_for

    given = json.loads(sys.stdin.buffer.read())
    planned = _PLANNED.validate_python(given["planned"])
    found = None
    if planned.trainer.device == "cuda" or torch.version.cuda is not None:
        choice = choose_for(planned, Path(given["directory"]), given["memory"])
        found = asdict(choice) | {"words": str(choice)}
    sys.stdout.write(f"{json.dumps(found)}\n")


if __name__ == "__main__":
    main()
