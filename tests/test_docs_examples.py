"""The examples of the documentation are valid: each block of TOML is a file or a part of one, and each command exists."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
from pydantic import TypeAdapter

from counterpoint.cli.main import COMMANDS
from counterpoint.cluster.spec import JobSpec
from counterpoint.environments.rewards.rubric import AnyPart
from counterpoint.job.config import JobConfig
from counterpoint.job.configuration.load import merge
from counterpoint.job.sweep.targets import SweepConfig
from counterpoint.run.config import RunConfig
from counterpoint.trainer.sft.config import SftConfig
from counterpoint.transport.config import Config
from counterpoint.tune.config import TuneConfig
from tests.test_docs import PAGES, page_of

FILES: dict[str, type[Config]] = {
    "roles": JobSpec,
    "grid": SweepConfig,
    "executor": TuneConfig,
    "served_model": RunConfig,
    "epochs": SftConfig,
}
"""A key at the top by which a whole file of each kind is known. Any other block is a job, or a part of one."""

JOB = {
    "output_dir": "outputs/job",
    "model": "tiny-dense",
    "orchestrator": {
        "steps": 10,
        "training": {"lora": {"rank": 8}},
        "environments": [{"name": "reverse", "kind": "reverse-text"}],
    },
}
"""The job into which a part is put: its tables are merged, its lists replace."""


RUBRIC: TypeAdapter[list[AnyPart]] = TypeAdapter(list[AnyPart])


def blocks(language: str) -> dict[str, str]:
    """The blocks of a language on all pages, by page and number."""
    return {
        f"{page_of(page)}, {language} {number}": block
        for page in PAGES
        for number, block in enumerate(
            re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE),
            1,
        )
    }


TOML = blocks("toml")


@pytest.mark.parametrize("place", TOML)
def test_an_example_in_toml_is_valid(place: str) -> None:
    table: dict[str, Any] = tomllib.loads(TOML[place])
    kind = next((kind for key, kind in FILES.items() if key in table), None)
    if kind is not None:
        kind.model_validate(table)
        return
    rubrics = [table.pop("rubric", None)]
    job = JobConfig.model_validate(merge(JOB, table))
    environments = [environment for run in job.every_run for environment in run.environments]
    rubrics += [environment.args.get("rubric") for environment in environments]
    for rubric in rubrics:
        if rubric is not None:
            RUBRIC.validate_python(rubric)


def commands() -> dict[str, list[str]]:
    """The words after `counterpoint` of each line in a block of the shell, by place."""
    found = {}
    for language in ("", "bash"):
        for place, block in blocks(language).items():
            for line in block.replace("\\\n", " ").splitlines():
                called = re.match(r"\s*(?:\w+=\S+ )*(?:\$ )?(?:\S*/)?counterpoint ([a-z][\w-]*)(.*)", line)
                if called:
                    found[f"{place}: {line.strip()}"] = [called[1], *called[2].split("#")[0].split()]
    return found


CALLS = commands()


@pytest.mark.parametrize("call", CALLS)
def test_the_command_of_an_example_exists(call: str) -> None:
    assert CALLS[call][0] in COMMANDS
