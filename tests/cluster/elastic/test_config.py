"""The `config` of an elastic role: what its errors say, and that of `examples/elastic_training`, which `tests/examples` runs."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from counterpoint.cluster.elastic.config import elastic_config
from counterpoint.cluster.spec import JobSpec
from counterpoint.transport.errors import UserError


def test_every_wrong_key_is_named_with_its_value_and_what_is_allowed() -> None:
    with pytest.raises(UserError) as raised:
        elastic_config({"scrip": "train.py", "min_workers": 0})
    text = str(raised.value)
    assert "unknown key; the nearest is script" in text
    assert "min_workers = 0" in text
    assert "greater than or equal to 1" in text


def test_a_role_without_a_script_or_with_two_is_refused() -> None:
    for config in ({}, {"script": "train.py", "module": "train"}):
        with pytest.raises(UserError, match="expected exactly one of script and module"):
            elastic_config(config)


def test_arguments_are_added_once_ranks_may_have_run() -> None:
    config = elastic_config({"module": "train", "arguments": ["file"], "restart_arguments": ["--resume"]})
    assert config.command(again=False)[2:] == ("-m", "train", "file")
    assert config.command(again=True)[2:] == ("-m", "train", "file", "--resume")


def test_the_examples_job_is_valid() -> None:
    example = Path(__file__).parents[3] / "examples" / "elastic_training"
    role = JobSpec.model_validate(tomllib.loads((example / "job.toml").read_text())).role("trainer")
    config = elastic_config(role.config)
    assert Path(config.script).name == "train.py"
    assert config.limits(role.count) == (role.fewest, role.most)
