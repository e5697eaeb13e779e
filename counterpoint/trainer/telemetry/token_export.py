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

from counterpoint.trainer.packer import Part
from counterpoint.transport.files.atomic import write_atomically


class TokenExport:
    """The lines of one step on one rank."""

    def __init__(self) -> None:
        """Starts without lines."""
        self._lines: list[bytes] = []

    def add(self, part: Part, sample_P: Tensor, position_P: Tensor, columns: dict[str, Tensor]) -> None:
        """Adds the samples of one batch in a row.

        Args:
            part: the samples.
            sample_P: int64, ascending, the sample of each trained token, counted from 0 within `part`.
            position_P: int64, the place of each trained token in its sample.
            columns: name to tensor `[P]`, over the trained tokens.
        """
        batch = part.batch
        arrays = {name: tensor.detach().cpu().numpy() for name, tensor in columns.items()}
        samples, positions = sample_P.cpu().numpy(), position_P.cpu().numpy()
        for number, index in enumerate(part.samples):
            inside = slice(*np.searchsorted(samples, [number, number + 1]))
            sample = batch.samples[index]
            line: dict[str, Any] = {
                "run_id": batch.run_id,
                "step": batch.step,
                "sample": index,
                "rollout_id": sample.rollout_id,
                "environment": sample.environment,
                "policy_version": sample.policy_version,
                "reward": sample.reward,
                "position": np.ascontiguousarray(positions[inside]),
            }
            line |= {name: np.ascontiguousarray(array[inside]) for name, array in arrays.items()}
            self._lines.append(orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))

    def extend(self, other: TokenExport) -> None:
        """Adds the lines of another one."""
        self._lines += other._lines

    def write(self, directory: Path, step: int, rank: int) -> None:
        """Writes the added lines; replaces a file of the same step from before a resume. Raises `OSError`."""
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(directory / f"step_{step}.rank_{rank}.jsonl", *self._lines)
