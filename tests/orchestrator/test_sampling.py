"""Keys of `[sampling]`: an environment's own come before the run's, also after a file was written and read."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from pydantic import ValidationError

from counterpoint.environments.sampling import SamplingConfig, SamplingOverrides
from counterpoint.run.config import RunConfig

OWN: dict[str, Any] = {
    "temperature": 0.5,
    "max_tokens": 64,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.1,
    "stop": ["</answer>"],
    "chat_template_kwargs": {"enable_thinking": False},
}


def configured(run_wide: dict[str, Any], own: dict[str, Any]) -> RunConfig:
    values = {
        "output_dir": "out",
        "model": "m",
        "environments": [{"name": "a", "kind": "reverse-text", "sampling": own}],
        "sampling": run_wide,
    }
    return RunConfig.model_validate(values)


def resolved(config: RunConfig) -> dict[str, Any]:
    return config.sampling_of(config.environments[0]).model_dump()


@pytest.mark.parametrize("key", OWN)
def test_a_key_of_an_environment_replaces_the_runs_and_leaves_the_others(key: str) -> None:
    run_wide = OWN | {"stop": ["."], "chat_template_kwargs": {"a": 1}, "temperature": 0.7}
    run_wide[key] = SamplingConfig.model_fields[key].default
    assert resolved(configured(run_wide, {key: OWN[key]})) == run_wide | {key: OWN[key]}


@pytest.mark.parametrize(
    ("key", "value"),
    [("temperature", 8.0), ("temperature", 0.0), ("top_p", 0.0), ("min_p", 1.1), ("top_k", 2**31), ("stop", [""])],
)
def test_what_vllm_refuses_for_every_request_is_refused_in_the_file(key: str, value: Any) -> None:
    for run_wide, own in (({key: value}, {}), ({}, {key: value})):
        with pytest.raises(ValidationError, match=key):
            configured(run_wide, own)


def test_every_key_can_be_an_environments_own() -> None:
    assert list(SamplingOverrides.model_fields) == list(SamplingConfig.model_fields) == list(OWN)


def test_a_resolved_file_means_the_same(tmp_path: Path) -> None:
    """A role's file holds every value, and an environment's unset keys stay unset in it."""
    config = configured({"temperature": 0.7, "stop": ["."]}, {"max_tokens": 64, "stop": []})
    path = tmp_path / "orchestrator.toml"
    path.write_text(tomli_w.dumps(config.model_dump(mode="json", exclude_none=True)))
    again = RunConfig.model_validate(tomllib.loads(path.read_text()))
    assert resolved(again) == resolved(config) == SamplingConfig(temperature=0.7, max_tokens=64, stop=[]).model_dump()


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("temperature", 0.005, "greater than or equal to 0.01"),
        ("temperature", float("inf"), "finite"),
        ("top_p", 0, "greater than 0"),
        ("top_p", 1.1, "less than or equal to 1"),
        ("top_k", -1, "greater than or equal to 0"),
        ("min_p", -0.1, "greater than or equal to 0"),
        ("stop", [""], "at least 1 character"),
        ("stop", ["x"] * 33, "at most 32 items"),
        ("chat_template_kwargs", {"messages": []}, "messages: set by the conversation itself"),
    ],
)
@pytest.mark.parametrize("kind", [SamplingConfig, SamplingOverrides])
def test_what_makes_no_sense_is_refused(
    kind: type[SamplingConfig | SamplingOverrides], key: str, value: object, said: str
) -> None:
    with pytest.raises(ValidationError, match=said):
        kind.model_validate({key: value})
