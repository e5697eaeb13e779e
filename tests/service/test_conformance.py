"""The table of `docs/tinker.md` has every method of the newest SDK's clients, as the table of endpoints has what it asks for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tinker

from counterpoint.service.tinker.app import ENDPOINTS, UNSERVED

ON_THE_CLIENT = ""
CREATE, CHECKPOINT = "create_model", "training_runs/{model}/checkpoints/{kind}/{name}"
RUN, SAMPLE = "training_runs/{model}", "asample"

ASKS: dict[type[Any], dict[str, str]] = {
    tinker.ServiceClient: {
        "close": "sessions/{session}/finish",
        "copy_weights": "copy_weights",
        "create_custom_loss": "create_custom_loss",
        "create_lora_training_client": CREATE,
        "create_rest_client": ON_THE_CLIENT,
        "create_sampling_client": "create_sampling_session",
        "create_training_client_from_state": "load_weights",
        "create_training_client_from_state_with_optimizer": "load_weights",
        "get_console_url": ON_THE_CLIENT,
        "get_server_capabilities": "get_server_capabilities",
        "get_telemetry": ON_THE_CLIENT,
    },
    tinker.TrainingClient: {
        "create_sampling_client": "create_sampling_session",
        "forward": "forward_backward",
        "forward_backward": "forward_backward",
        "forward_backward_custom": "forward_backward",
        "get_console_url": ON_THE_CLIENT,
        "get_info": "get_info",
        "get_telemetry": ON_THE_CLIENT,
        "get_tokenizer": ON_THE_CLIENT,
        "load_state": "load_weights",
        "load_state_with_optimizer": "load_weights",
        "optim_step": "optim_step",
        "save_state": "save_weights",
        "save_weights_and_get_sampling_client": "save_weights_for_sampler",
        "save_weights_external": "save_weights_external",
        "save_weights_for_sampler": "save_weights_for_sampler",
    },
    tinker.SamplingClient: {
        "compute_logprobs": SAMPLE,
        "create": "create_sampling_session",
        "from_sampler_handle": "join_sampling_session",
        "get_base_model": "samplers/{sampler}",
        "get_sampler_handle": ON_THE_CLIENT,
        "get_telemetry": ON_THE_CLIENT,
        "get_tokenizer": ON_THE_CLIENT,
        "on_queue_state_change": ON_THE_CLIENT,
        "sample": SAMPLE,
    },
    tinker.RestClient: {
        "assign_session_project": "sessions/{session}/project",
        "copy_weights": "copy_weights",
        "delete_checkpoint": CHECKPOINT,
        "delete_checkpoint_from_tinker_path": CHECKPOINT,
        "export_session_trace": "sessions/{session}/trace_export",
        "get_audit_log": "audit",
        "get_billing_usage": "billing/usage/events",
        "get_current_checkpoint_storage_usage": "billing/usage/checkpoints/current",
        "get_external_weights_urls": f"{CHECKPOINT}/external_weights_urls",
        "get_sampler": "samplers/{sampler}",
        "get_server_capabilities": "get_server_capabilities",
        "get_session": "sessions/{session}",
        "get_telemetry": ON_THE_CLIENT,
        "get_training_run": RUN,
        "get_training_run_by_tinker_path": RUN,
        "get_weights_info_by_tinker_path": "weights_info",
        "list_checkpoints": f"{RUN}/checkpoints",
        "list_sessions": "sessions",
        "list_training_runs": "training_runs",
        "list_user_checkpoints": "checkpoints",
        "publish_checkpoint_from_tinker_path": f"{CHECKPOINT}/publish",
        "search_sessions": "sessions/search",
        "set_checkpoint_ttl_from_tinker_path": f"{CHECKPOINT}/ttl",
        "unpublish_checkpoint_from_tinker_path": f"{CHECKPOINT}/publish",
        "whoami": "auth/token",
    },
}
"""What each method asks the service for; the deprecated `_async` ones ask as those without."""

TABLE = re.compile(r"\| client \| served \| refused \| on the client \|\n\|---\|---\|---\|---\|\n((?:\|.*\n)+)")


def row(client: type[Any]) -> str:
    """The line of one client."""
    refused, served = ({path.lstrip("/") for _, path, *_ in table} for table in (UNSERVED, ENDPOINTS))
    columns: list[list[str]] = [[], [], []]
    for method, asked in ASKS[client].items():
        assert asked in served | {ON_THE_CLIENT}, f"{asked} is no endpoint"
        columns[2 if asked == ON_THE_CLIENT else 1 if asked in refused else 0].append(f"`{method}`")
    return f"| `{client.__name__}` | {' | '.join(', '.join(column) for column in columns)} |\n"


@pytest.mark.parametrize("client", ASKS)
def test_every_method_is_known(client: type[Any]) -> None:
    public = {name for name in dir(client) if not name.startswith("_") and callable(getattr(client, name))}
    assert ASKS[client].keys() == {name for name in public if not name.endswith("_async")}


def test_no_endpoint_is_there_twice() -> None:
    assert len({(method, path) for method, path, _ in ENDPOINTS}) == len(ENDPOINTS)


def test_the_table_is_true() -> None:
    found = TABLE.search((Path(__file__).parents[2] / "docs" / "tinker.md").read_text())
    assert found is not None
    assert found[1] == "".join(map(row, ASKS)), "the table in docs/tinker.md is to be:\n" + "".join(map(row, ASKS))
