"""A job's spec, written and read."""

from __future__ import annotations

import math

from cluster.job_files import JobFile
from cluster.spec import JobSpec, RoleSpec


def test_a_worker_without_a_deadline_is_the_same_after_its_job_was_written() -> None:
    role = RoleSpec(name="a", command=("true",), ready_timeout_seconds=math.inf)
    file = JobFile(spec=JobSpec(name="job", roles=(role,)))
    assert JobFile.model_validate_json(file.model_dump_json()) == file
