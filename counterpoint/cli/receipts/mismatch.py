"""`counterpoint mismatch --step N`: splits the mismatch KL of a recorded step among its causes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from counterpoint.cli.arguments.job import add_job
from counterpoint.cli.receipts.again import run_of, trainer_of, workplace
from counterpoint.job.reading.rollouts.rollout_records import read_records, whole_number
from counterpoint.transport.errors import UserError
from counterpoint.transport.printable import printable
from counterpoint.transport.process.imports import trainer_imports

if TYPE_CHECKING:
    from counterpoint.trainer.again.mismatch import PlayedStep
    from counterpoint.trainer.again.split import Split

TRUNCATING = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""Sampling parameters that cut tokens off, with the values that cut off none."""


def main(arguments: list[str]) -> int:
    """Runs the command. Raises `UserError` for a step that cannot be computed again."""
    given = _parser().parse_args(arguments)
    job, run_id = run_of(given)
    config = trainer_of(job)
    with trainer_imports():
        from counterpoint.trainer.again.mismatch import split_step
    with workplace(given.json) as directory:
        try:
            found = split_step(config, job, run_id, given.step, _played(job, run_id, given.step), directory)
        except (ValueError, OSError) as error:
            raise UserError(f"step {given.step} of run {run_id} cannot be computed again: {error}") from None
    print(json.dumps(found.values()) if given.json else _text(found))
    return 0


def _played(job: Path, run_id: str, step: int) -> PlayedStep:
    """Returns what the step's records say; nothing where these are gone."""
    from counterpoint.trainer.again.mismatch import PlayedStep, PlayedTurn

    played = PlayedStep()
    if not (job / f"run_{run_id}" / "rollouts" / f"step_{step}" / "rollouts.jsonl").exists():
        return played
    played.truncated = False
    for record in read_records(job, run_id, step):
        sampling = record.fields.get("sampling_args")
        given = sampling if isinstance(sampling, dict) else {}
        played.truncated |= any(given.get(name, default) != default for name, default in TRUNCATING.items())
        played.turns[record.rollout_id] = [
            PlayedTurn(
                str(turn.get("server", "")),
                str(turn.get("load", "")),
                _count(turn, "policy_version"),
                _count(turn, "prompt_tokens"),
                _count(turn, "completion_tokens"),
                _count(turn, "completion_tokens") - _count(turn, "untrained_tokens"),
            )
            for turn in record.turns
        ]
    return played


def _count(turn: dict[str, Any], name: str) -> int:
    return min(max(0, whole_number(turn.get(name)) or 0), 2**31 - 1)


def _text(found: Split) -> str:
    """Returns the result for a person."""
    from counterpoint.trainer.again.outliers import LEAST_TOKENS
    from counterpoint.trainer.again.split import table

    lines = [f"{name:<11}{value:>10}  {said}" for name, value, said in table(found)]
    for lag, value in sorted(found.by_lag.items()):
        lines.append(f"staleness of {lag}: {value:.3g} a token")
    if found.fault is None:
        compared = ", ".join(found.compared)
        few = f"nothing could be compared: no two groups have {LEAST_TOKENS} tokens that are uncertain and in different contexts"
        none = "none is accused" if found.untold else "none stands out"
        lines.append(f"compared by {compared}: {none}" if compared else few)
    if found.untold:
        lines.append(printable(found.untold))
    if (fault := found.fault) is not None:
        where = "all tokens" if fault.key == "all" else f"{fault.key} {printable(fault.group)}"
        others = "" if fault.key == "all" else f", all others {fault.others:.3g}"
        lines.append(f"fault: the {fault.tokens} tokens of {where} have {fault.mean:.3g} a token{others}")
        if not found.untried:
            lines.append(f"       {printable(fault.explanation) or 'nothing that was tried explains them'}")
    if found.untried:
        lines.append(f"what explains the rest was not looked for: {printable(found.untried)}")
    recorded = "not recorded" if found.recorded is None else f"{found.recorded:.3g} recorded"
    lines.append(
        f"run {found.run}, step {found.step}: mismatch KL {found.computed:.3g} nats a token computed, {recorded}"
    )
    if found.recorded is not None and not found.adds_up:
        why = (
            "the weights move between the step's updates"
            if found.several_updates
            else "rows were shared, or it ran elsewhere"
        )
        lines.append(f"the two are not the same: {why}")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="counterpoint mismatch",
        description="Splits the mismatch KL of a recorded step, between log-probabilities of servers and trainer: what "
        "staleness, the trainer's precision and kernels contribute, and which tokens stand out, such as those of one server. "
        "It loads the model, and trains again from a checkpoint of the trainer before the step. Exit code 4: the run is being "
        "written; 6: what it takes was not kept.",
        allow_abbrev=False,
    )
    add_job(parser, positional=True)
    parser.add_argument("--run", help="the run, if the job has several")
    parser.add_argument("--step", type=int, metavar="N", required=True, help="the step")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser
