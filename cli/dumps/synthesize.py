"""`counterpoint synthesize OUT`: makes a synthetic dump of any size, for `replay` and `attribute`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from cli.display.dump_line import describe_dump
from cli.display.progress_bar import progress_bar
from job.replay.dump_directory import check_absent
from job.replay.synthesize import Shape, header_of, synthetic_rollouts
from orchestrator.rollouts.dump import write_dump
from transport.errors import UserError


def main(arguments: list[str]) -> int:
    """Runs the command. Raises `UserError` for an impossible shape."""
    given = vars(_parser().parse_args(arguments))
    out: Path = given.pop("out")
    try:
        shape = Shape(**given)
    except ValueError as error:
        raise UserError(f"synthesize: {error}") from None
    check_absent(out)
    started = time.monotonic()
    rollouts = progress_bar(synthetic_rollouts(shape), shape.rollouts, "rollouts")
    header = write_dump(out, header_of(shape), rollouts)
    print(describe_dump(out, header, time.monotonic() - started), flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    default = Shape()
    parser = argparse.ArgumentParser(
        prog="counterpoint synthesize",
        description="Makes up a step's rollouts and writes them as a dump: turns and lengths with a long tail, rewritten "
        "contexts, several agents in one rollout, failures, partial groups. The same arguments give the same dump.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    for name, meaning in (
        ("rollouts", "how many"),
        ("turns", "of the longest rollout"),
        ("tokens", "of the longest rollout"),
        ("layers", "of routed experts"),
        ("top-k", "experts a token and layer"),
        ("experts", "of each layer; uint8 up to 256, uint16 above"),
        ("group-size", "rollouts of one example"),
        ("seed", "of everything that is random"),
    ):
        parser.add_argument(f"--{name}", type=int, default=getattr(default, name.replace("-", "_")), help=meaning)
    parser.add_argument("--even", action="store_true", help="all rollouts alike, as benchmarks want them")
    parser.add_argument("out", type=Path, metavar="OUT", help="the dump's directory, which must not exist")
    return parser
