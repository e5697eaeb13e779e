"""The job of `examples/elastic_training` as it is written. `tests/examples` runs it."""

from __future__ import annotations

import tomllib
from pathlib import Path

from counterpoint.cluster.elastic.config import elastic_config
from counterpoint.cluster.spec import JobSpec

EXAMPLE = Path(__file__).parents[3] / "examples" / "elastic_training"


def test_the_examples_job_is_valid() -> None:
    job = JobSpec.model_validate(tomllib.loads((EXAMPLE / "job.toml").read_text()))
    config = elastic_config(job.role("trainer").config)
    assert Path(config.script).name == "train.py"
    assert config.limits(job.role("trainer").count) == (job.role("trainer").fewest, job.role("trainer").most)
