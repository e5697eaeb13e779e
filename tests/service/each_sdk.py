"""A program of a user of any version of the Tinker SDK: creates, trains, saves, samples, resumes; says what it saw as JSON."""

from __future__ import annotations

import json
import sys
import warnings
from importlib.metadata import version
from typing import Any

import tinker

from tests.service.sdk_client import PROMPT, VALUES, likely, sampled, train

FUTURES_OF_CLIENTS = (0, 38)
"""The first version that creates clients by futures, and models by loading."""


def done(found: Any) -> Any:
    """A client, which newer versions give by a future."""
    return found.result() if hasattr(found, "result") else found


def refused(asked: Any) -> str:
    """What a refusal said, of a request or of its result."""
    try:
        asked().result()
    except (tinker.APIStatusError, tinker.RequestFailedError) as error:
        return f"{getattr(error, 'status_code', '')} {error}"
    return ""


def unload(client: Any, request: Any) -> None:
    """Ends a model as 0.25 does."""

    async def unloaded() -> None:
        with client.holder.aclient(tinker.lib.client_connection_pool_type.ClientConnectionPoolType.TRAIN) as made:
            await made.models.unload(request=request)

    client.holder.run_coroutine_threadsafe(unloaded()).result()


def main(url: str, model: str) -> None:
    """Does all, and prints it."""
    found: dict[str, Any] = {"version": version("tinker")}
    number = tuple(int(part) for part in found["version"].split(".")[:2])
    service = tinker.ServiceClient(base_url=url, api_key="tml-the-key-of-a-test-0123456789")

    def created() -> Any:
        return done(service.create_lora_training_client(base_model=model, rank=4, user_metadata={"made_by": "a test"}))

    client = created()
    found["losses"] = train(client, pauses=False)
    path = client.save_state("state", ttl_seconds=7200).result().path
    named = client.save_weights_for_sampler("sampler").result().path
    found["sampled"] = sampled(done(service.create_sampling_client(model_path=named)), 2)
    if number < FUTURES_OF_CLIENTS:
        again = created()
        again.load_state_with_optimizer(path).result()
    else:
        again = done(service.create_training_client_from_state_with_optimizer(path))
        moving = done(client.save_weights_and_get_sampling_client(kind="inflight"))
        found["in flight"] = len(sampled(moving, 2))
        whole = tinker.types.SamplingParams(max_tokens=6, stop=[])
        prompt = tinker.types.ModelInput.from_ints(PROMPT)
        (each,) = moving.sample(prompt, 1, whole, topk_sample_logprobs=2).result().sequences
        found["whole"] = [len(each.tokens), each.stop_reason, [len(row) for row in each.topk_logprobs]]
    for each in (client, again):
        each.forward_backward([likely(4)], "cross_entropy").result()
        each.optim_step(VALUES).result()
    found["resumed"] = [
        each.forward([likely(5)], "cross_entropy").result().metrics["loss:sum"] for each in (client, again)
    ]
    found["late"] = refused(lambda: again.load_state(path))
    rest = service.create_rest_client()
    run = rest.get_training_run_by_tinker_path(path).result()
    found["metadata"] = run.user_metadata
    found["listed"] = [each.checkpoint_id for each in rest.list_checkpoints(run.training_run_id).result().checkpoints]
    rest.delete_checkpoint_from_tinker_path(path).result()
    found["deleted"] = refused(lambda: rest.delete_checkpoint_from_tinker_path(path))
    if hasattr(service, "close"):
        service.close("success").result()
    else:
        unload(client, tinker.types.UnloadModelRequest(model_id=client.model_id))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(*sys.argv[1:])
