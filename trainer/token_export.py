"""Exports every trained token with its probabilities as JSON Lines, for debugging (`training.token_export`).

`trainer/tokens/<run_id>/step_N.rank_R.jsonl` has one object a sample: its identity, and a list per quantity over its trained
tokens. Each rank writes the samples that it trained.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson
from torch import Tensor

from trainer.packer import Part
from transport.files.atomic import write_atomically


class TokenExport:
    """The lines of one step on one rank."""

    def __init__(self) -> None:
        """Starts without lines."""
        self._lines: list[bytes] = []

    def add(self, part: Part, predicting_P: Tensor, columns: dict[str, Tensor]) -> None:
        """Adds the samples of one batch in a row.

        Args:
            part: the samples.
            predicting_P: int64, the positions whose next token is trained, counted from the first token of `part`.
            columns: name to tensor `[P]`, over the trained tokens.
        """
        batch = part.batch
        arrays = {name: tensor.detach().cpu().numpy() for name, tensor in columns.items()}
        positions = predicting_P.cpu().numpy() + 1
        start = 0
        for index, length in zip(part.samples, part.sample_lengths, strict=True):
            inside = slice(*np.searchsorted(positions, [start, start + length]))
            sample = batch.samples[index]
            line: dict[str, Any] = {
                "run_id": batch.run_id,
                "step": batch.step,
                "sample": index,
                "rollout_id": sample.rollout_id,
                "environment": sample.environment,
                "policy_version": sample.policy_version,
                "reward": sample.reward,
                "position": positions[inside] - start,
            }
            line |= {name: np.ascontiguousarray(array[inside]) for name, array in arrays.items()}
            self._lines.append(orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))
            start += length

    def extend(self, other: TokenExport) -> None:
        """Adds the lines of another one."""
        self._lines += other._lines

    def write(self, directory: Path, step: int, rank: int) -> None:
        """Writes the added lines; replaces a file of the same step from before a resume. Raises `OSError`."""
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(directory / f"step_{step}.rank_{rank}.jsonl", *self._lines)
