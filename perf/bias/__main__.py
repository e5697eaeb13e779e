"""Says whether what a run trains with is, in expectation, the policy gradient (docs/algorithms.md, Bias).

python -m perf.bias                       every advantage, loss, staleness and selection of rollouts: a line each
python -m perf.bias my_module:function    those of an advantage or a loss of your own
python -m perf.bias --markdown            the tables of docs/algorithms.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence

import torch

from counterpoint.orchestrator.step.advantages import load_advantage, try_advantage
from counterpoint.run.config import AdvantageConfig
from counterpoint.trainer.losses.load import load_loss
from perf.bias.rows import ADVANTAGES, LOSSES, UNBIASED_ADVANTAGE, UNBIASED_LOSS, LossRow
from perf.bias.table import lines, markdown


def own(path: str) -> tuple[Iterable[str], Iterable[LossRow]]:
    """Returns the advantages and the losses of the rows for a function of a user's: it is one, the other adds no bias.

    Raises `ValueError`, with both reasons, if it can be loaded as neither.
    """
    loss = LossRow({"kind": path, "normalisation": "sample", "normalisation_length": 1})
    try:
        load_loss(loss.config)
        return [UNBIASED_ADVANTAGE], [loss]
    except ValueError as as_loss:
        try:
            try_advantage(load_advantage(AdvantageConfig(kind=path)), 2)
        except ValueError as as_advantage:
            raise ValueError(f"it is no advantage ({as_advantage}), and no loss ({as_loss})") from None
        return [path], [UNBIASED_LOSS]


def main(arguments: Sequence[str]) -> int:
    """Prints the table. The exit code is 2 for a function that cannot be loaded, or fails."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.bias", description="Enumerates the bias of what a run trains with."
    )
    parser.add_argument("function", nargs="?", help="an advantage or a loss of your own, as module:function")
    parser.add_argument("--markdown", action="store_true", help="print the tables of docs/algorithms.md")
    given = parser.parse_args(arguments)
    try:
        advantages, losses = own(given.function) if given.function else (ADVANTAGES, LOSSES)
        for line in markdown() if given.markdown else lines(advantages, losses):
            print(line, flush=True)
    except ValueError as error:
        parser.error(f"{given.function}: {error}")
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)  # each case is tiny
    sys.exit(main(sys.argv[1:]))
