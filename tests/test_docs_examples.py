"""The examples of the documentation are valid: each block of TOML is a file or a part of one, each command exists, and the first
example of a page runs."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from pydantic import TypeAdapter

from counterpoint.cli.main import COMMANDS, main
from counterpoint.cluster.spec import JobSpec
from counterpoint.environments.rewards.rubric import AnyPart
from counterpoint.job.config import JobConfig
from counterpoint.job.configuration.load import merge
from counterpoint.job.sweep.targets import SweepConfig
from counterpoint.run.config import RunConfig
from counterpoint.trainer.sft.config import SftConfig
from counterpoint.transport.config import Config
from counterpoint.tune.config import TuneConfig
from tests.test_docs import PAGES, REPOSITORY, page_of

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


FIRST = {
    page_of(page): found
    for page in PAGES
    if (found := re.search(r"^```(\w*)\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE))
}
"""The first block of each page that has one."""

TAKER = {"roles": "submit", "grid": "sweep", "executor": "tune", "served_model": "orchestrator", "epochs": "sft"}
"""The command of a whole file, as in `FILES`. Any other is a job's."""

ELSEWHERE = {"docs/verifiers.md": "its taskset is another package's"}

DRY = ("run", "sft", "tune", "inference", "trainer", "orchestrator")
"""Commands that check a file alone."""


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in FIRST if page not in ELSEWHERE])
def test_the_first_example_of_a_page_runs_as_it_stands(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the directory of a checkout. Whatever would start a server or a trainer is checked by its `--dry-run`."""
    for folder in ("configs", "examples"):
        (tmp_path / folder).symlink_to(REPOSITORY / folder)
    (tmp_path / "my_tasks.py").write_text(FIRST["docs/environments.md"][2])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_tasks", raising=False)
    language, block = FIRST[page].groups()
    if language == "python":
        exec(compile(block, page, "exec"), {"__name__": "example"})
    elif language == "toml":
        table = tomllib.loads(block)
        command = next((taker for key, taker in TAKER.items() if key in table), "run")
        whole = table if command != "run" else merge(JOB, table)
        (tmp_path / "file.toml").write_text(tomli_w.dumps(whole))
        assert main([command, "file.toml", "--dry-run"]) == 0, capsys.readouterr().err
    for line in block.replace("\\\n", " ").splitlines() if language in ("", "bash") else ():
        called = re.match(r"\s*(?:\S*/)?counterpoint ([a-z-]+) (\S+\.toml)([^#]*)", line)
        if called and called[1] in DRY:
            flags = re.findall(r"--[a-z_]+(?:\.[a-z_]+)+ \S+", called[3])
            assert main([called[1], called[2], *" ".join(flags).split(), "--dry-run"]) == 0, capsys.readouterr().err
        elif called:
            assert (tmp_path / called[2]).is_file(), line
