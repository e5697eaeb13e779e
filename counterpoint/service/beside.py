"""A user's loop beside a live job: driven runs and samplers as the job's service has them, in the user's process."""

from __future__ import annotations

import tomllib
from pathlib import Path

from counterpoint.inference.loads import LoadClaim
from counterpoint.inference.model_facts import read_bounds
from counterpoint.inference.pool.pool import InferencePool
from counterpoint.run.trained import TrainedRun
from counterpoint.service.config import ServiceConfig
from counterpoint.service.journal import Journal
from counterpoint.service.runs import DrivenRun
from counterpoint.service.samplers import Samplers
from counterpoint.transport.errors import UserError
from counterpoint.transport.wires.open import open_connection


class LiveJob:
    """A job with `[tinker]`, by its directory."""

    def __init__(self, directory: Path | str) -> None:
        """Reads the files that the job has written for its service. Raises `UserError` if there are none."""
        file = Path(directory) / "roles" / "service.toml"
        try:
            self._config = ServiceConfig.model_validate(tomllib.loads(file.read_text()))
        except (OSError, ValueError) as error:
            raise UserError(f"{file} cannot be read: {error}; expected the directory of a job with [tinker]") from error
        self.model = Path(self._config.model)
        """The model's directory."""
        self._connection = open_connection(self._config.transport, self._config.output_dir)

    def run(self, described: TrainedRun) -> DrivenRun:
        """Returns a run of the job's trainer, new or as it was left. One process at a time has it.

        Its items are journalled in `loops/RUN/` of the job's directory. Blocks. Raises `OSError` and `CodecError`.
        """
        directory = self._config.output_dir / "loops" / described.run_id
        journal = Journal(directory, described.run_id, self._config.transport.largest_batch)
        return DrivenRun(described, self._config.output_dir, self._connection, journal)

    def samplers(self, most: int = 1) -> Samplers:
        """Returns samplers at the job's servers, with at most `most` adapters at once. Blocks. Raises `UserError`."""
        pool, bounds = InferencePool(self._config.inference), read_bounds(self.model)
        return Samplers(pool, self._config.model, bounds, most, LoadClaim.of_process())
