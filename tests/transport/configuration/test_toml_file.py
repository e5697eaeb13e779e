"""Configuration files are read as editors write them, and the keys that lie beside them are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from counterpoint.cluster.channel.config import ChannelConfig
from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.rewards.judge.config import JudgeConfig
from counterpoint.environments.tools.mcp_server import McpConfig
from counterpoint.environments.tools.toolbox import PythonConfig
from counterpoint.inference.config import InferenceConfig
from counterpoint.job.config import JobConfig
from counterpoint.job.serving.config import ServeConfig
from counterpoint.job.sweep.targets import SweepConfig
from counterpoint.run.config import RunConfig
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.sft.config import SftConfig
from counterpoint.transport.config import Config
from counterpoint.transport.configuration.schema import keys_of
from counterpoint.transport.configuration.toml_file import (
    BESIDE_THE_FILE,
    read_portable_text,
    read_toml,
    without_places,
)
from counterpoint.tune.config import TuneConfig


def test_a_byte_order_mark_is_no_part_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('model = "tiny"\n', encoding="utf-8-sig")
    assert read_toml(path) == {"model": "tiny"}


FILE = """
output_dir = "outputs/job"
[transport]
secret_key_file = "keys/trainer.key_secret"
server_public_key_file = "/etc/keys/trainer.key"
[[environments]]
args = { rubric = { parts = [{ kind = "judge", api_key_file = "judge.token" }] }, data = { path = "rows.jsonl" } }
"""


def test_a_relative_path_of_a_key_counts_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "run.toml").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    table = read_toml(Path("etc/run.toml"))
    assert table["transport"] == {
        "secret_key_file": f"{tmp_path}/etc/keys/trainer.key_secret",
        "server_public_key_file": "/etc/keys/trainer.key",
    }
    args = table["environments"][0]["args"]
    assert args["rubric"]["parts"][0]["api_key_file"] == f"{tmp_path}/etc/judge.token"
    assert (table["output_dir"], args["data"]["path"]) == ("outputs/job", "rows.jsonl")
    assert without_places(table)["transport"] == {}
    assert without_places(args)["rubric"] == {"parts": [{"kind": "judge"}]}


def test_a_text_that_goes_elsewhere_keeps_its_keys(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(FILE)
    (tmp_path / "elsewhere").mkdir()
    copied = tmp_path / "elsewhere" / "run.toml"
    copied.write_text(read_portable_text(tmp_path / "run.toml"))
    assert read_toml(copied) == read_toml(tmp_path / "run.toml")
    plain = "steps = 3 # as it is\n"
    copied.write_text(plain)
    assert read_portable_text(copied) == plain


MODELS: list[type[Config]] = [
    ChannelConfig, EnvironmentConfig, InferenceConfig, JobConfig, JudgeConfig, McpConfig, PythonConfig,
    RunConfig, ServeConfig, SftConfig, SweepConfig, TrainerConfig, TuneConfig,
]  # fmt: skip
FROM_THE_WORKING_DIRECTORY = {
    "adapters", "cache_directory", "directory", "file", "join", "local_dir", "log_file", "model", "output_dir", "packages",
    "start_from", "state_directory",
}  # fmt: skip


def _mentions_path(annotation: Any) -> bool:
    return annotation is Path or any(_mentions_path(argument) for argument in get_args(annotation))


def test_of_every_path_it_is_decided_from_where_it_counts() -> None:
    """A new key with a path goes into one of the two sets."""
    paths = {
        name
        for model in MODELS
        for key in keys_of(model).values()
        if _mentions_path(key.model.model_fields[name := key.path.rpartition(".")[2]].annotation)
    }
    assert paths == BESIDE_THE_FILE | FROM_THE_WORKING_DIRECTORY
