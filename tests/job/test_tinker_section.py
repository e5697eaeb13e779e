"""What `[tinker]` of a job implies: a job that stays, adapters at trainer and servers, and the service's own file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from counterpoint.job.config import JobConfig
from counterpoint.job.workers import sections_of, specification
from counterpoint.run.config import RunConfig
from counterpoint.service.config import ServiceConfig


def job(directory: Path, **keys: Any) -> JobConfig:
    given = {"output_dir": str(directory), "model": "tiny-dense", "inference": {"port": 9000, "max_model_len": 64}}
    return JobConfig.model_validate(given | keys)


def test_the_service_gets_what_the_job_knows(tmp_path: Path) -> None:
    config = job(tmp_path, tinker={"max_rank": 8, "port": 9100}, trainer={"max_runs": 3})
    section = sections_of(config)["service"]
    assert isinstance(section, ServiceConfig)
    assert (section.port, section.max_rank, section.max_tokens) == (9100, 8, 64)
    assert section.inference.urls == ["http://127.0.0.1:9000"]
    assert config.inference.lora is not None
    assert config.inference.lora.max_rank == 8
    assert section.max_samplers == config.inference.lora.max_adapters
    files = dict.fromkeys(sections_of(config), tmp_path / "file")
    names = [role.name for role in specification(config, files).roles]
    assert names == ["inference_0", "trainer", "service"]
    assert specification(config, files).stay
    servers, trainer, service = (role.nice for role in specification(config, files).roles)
    assert service < servers < trainer, "a client waits for each sample"


def test_with_keys_no_call_waits_within_a_server_of_the_job(tmp_path: Path) -> None:
    inference = {"port": 9000, "max_model_len": 64, "max_num_seqs": 16}
    for section, most in (({}, 256), ({"keys_file": "keys.txt"}, 16)):
        service = sections_of(job(tmp_path, tinker=section, inference=inference))["service"]
        assert isinstance(service, ServiceConfig)
        assert service.inference.max_concurrent_requests_per_server == most


def test_a_job_without_the_section_is_as_before(tmp_path: Path) -> None:
    environments = [{"name": "one", "kind": "reverse-text"}]
    sampling = {"max_tokens": 8}
    config = job(tmp_path, orchestrator={"environments": environments, "sampling": sampling})
    assert not config.stay
    assert config.orchestrator.training.lora is None
    assert "service" not in sections_of(config)


def test_runs_with_orchestrators_stand_beside_the_service(tmp_path: Path) -> None:
    environments = [{"name": "one", "kind": "reverse-text"}]
    run: dict[str, Any] = {"environments": environments, "sampling": {"max_tokens": 8}, "steps": 2}
    with pytest.raises(ValidationError, match=r"training\.lora"):
        job(tmp_path, tinker=True, orchestrator=run)
    config = job(tmp_path, tinker=True, orchestrator=run | {"training": {"lora": {"rank": 4}}})
    assert config.orchestrator.training.lora is not None
    assert config.orchestrator.training.lora.rank == 4
    assert config.inference.lora is not None
    assert config.inference.lora.max_rank == 32
    assert [*sections_of(config)] == ["inference_0", "trainer", "service", "orchestrator"]
    assert config.trainer.max_runs > 1


def test_ports_and_drivers_that_exclude_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"tinker\.port"):
        job(tmp_path, tinker={"port": 9000})
    with pytest.raises(ValidationError, match=r"tinker\.max_rank"):
        job(tmp_path, tinker={"max_rank": 65}, trainer={"max_lora_rank": 64})
    with pytest.raises(ValidationError, match="driven"):
        RunConfig.model_validate({"output_dir": str(tmp_path), "model": "m", "driven": True})


def test_strict_replay_needs_routing_at_both_ends(tmp_path: Path) -> None:
    section, routed = {"strict_replay": True}, {"return_routed_experts": True}
    assert job(tmp_path, tinker=section, inference=routed).inference.return_routed_experts
    cases: list[dict[str, Any]] = [{}, {"inference": routed, "trainer": {"router_replay": False}}]
    for lacking in cases:
        with pytest.raises(ValidationError, match=r"tinker\.strict_replay"):
            job(tmp_path, tinker=section, **lacking)
