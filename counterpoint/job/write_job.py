"""Writes the files that describe a job into its directory: as given, as resolved, and one for each role.

`counterpoint/job/directory.py` reads them.
"""

from __future__ import annotations

import json
from pathlib import Path

from counterpoint.inference import identity
from counterpoint.job.config import JobConfig
from counterpoint.job.configuration.load import to_toml
from counterpoint.job.directory import JOB_FILE
from counterpoint.job.workers import sections_of
from counterpoint.transport.files.atomic import write_atomically

ROLES = "roles"
"""The folder of the roles' files."""


def write_job(config: JobConfig, given: bytes) -> dict[str, Path]:
    """Writes the job as given and as resolved, and a file for each worker; returns these files by the workers' names.

    `job.json`, which marks a job's directory, comes first. So a directory whose writing was interrupted can be resumed or moved
    aside. Raises `OSError`.
    """
    directory = config.output_dir
    write_atomically(directory / JOB_FILE, json.dumps(config.model_dump(mode="json"), indent=2).encode())
    write_atomically(directory / "job.toml", given)
    if config.inference.replicas and config.inference.identity_file is not None:
        identity.make(config.inference.identity_file)
    (directory / ROLES).mkdir(exist_ok=True)
    (directory / "trainer").mkdir(exist_ok=True)
    files: dict[str, Path] = {}
    for name, section in sections_of(config).items():
        files[name] = directory / ROLES / f"{name}.toml"
        write_atomically(files[name], to_toml(section).encode())
    return files
