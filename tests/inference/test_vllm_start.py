"""A real vLLM that cannot start: its supervisor is told why in one sentence, and whether the next start would end alike."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from counterpoint.inference import server
from counterpoint.inference.config import InferenceConfig
from counterpoint.models.build import make_model
from tests.support.notifications import notifications
from tests.support.ports import free_port

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.mark.parametrize(
    ("changes", "settings", "code", "reason"),
    [
        ({"architectures": ["NopeForCausalLM"]}, {}, 2, "Model architectures ['NopeForCausalLM'] are not supported"),
        ({}, {"extra_args": ["--nope"]}, 2, "unrecognized arguments: --nope"),
        ({}, {"kv_cache_gib": 100_000}, 1, "is less than requested memory for kv (100000.0 GiB)"),
    ],
)
def test_why_a_real_server_does_not_start_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    settings: dict[str, Any],
    code: int,
    reason: str,
) -> None:
    model = tmp_path / "model"
    shutil.copytree(make_model("tiny-dense"), model)
    config = model / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    given = {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 256,
        "port": free_port(),
        "log_file": tmp_path / "log",
    }
    started = InferenceConfig.model_validate(given | settings)
    with notifications(monkeypatch) as said:
        assert server.serve(started, lambda: pytest.fail("it was ready")) == code
    (failure,) = [message["X_FAILURE"] for message in said if "X_FAILURE" in message]
    assert failure.startswith(f"vLLM on port {started.port} did not start: ")
    assert reason in failure
