"""A program of a user of the Tinker SDK, in a process of its own: trains, samples, saves and resumes; says what it saw as JSON.

Before one of its updates it writes `pause` and waits for a line.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import anthropic
import numpy as np
import openai
import tinker
import torch
from tinker import types

PROMPT = [5, 6, 7]
TEXT = [5, 6, 7, 8, 9, 10, 11, 12]
VALUES = types.AdamParams(learning_rate=1e-2)


def likely(shift: int) -> types.Datum:
    """A text whose end is to become more likely."""
    tokens = [token + shift for token in TEXT]
    weights = np.array([0, 0, 1, 1, 1, 1, 1], np.float32)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": np.array(tokens[1:], np.int64), "weights": weights},
    )


def rewarded(tokens: list[int], logprobs: list[float], advantage: float) -> types.Datum:
    """A completion of the prompt that was sampled with these log-probabilities."""
    whole, prompt = PROMPT + tokens, [0.0] * (len(PROMPT) - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(whole[:-1]),
        loss_fn_inputs={
            "target_tokens": np.array(whole[1:], np.int64),
            "logprobs": np.array(prompt + logprobs, np.float32),
            "advantages": np.array(prompt + [advantage] * len(tokens), np.float32),
        },
    )


def train(client: tinker.TrainingClient, *, pauses: bool) -> list[float]:
    """Two steps, of which the second has two contributions; returns the losses."""
    first = client.forward_backward([likely(0), likely(1)], "cross_entropy")
    update = client.optim_step(VALUES)  # before either is awaited
    losses = [first.result().metrics["loss:sum"]]
    update.result()
    parts = [client.forward_backward([likely(shift)], "cross_entropy") for shift in (2, 3)]
    losses += [part.result().metrics["loss:sum"] for part in parts]
    if pauses:
        print("pause", flush=True)
        sys.stdin.readline()
    client.optim_step(VALUES).result()
    return [*losses, client.forward([likely(0)], "cross_entropy").result().metrics["loss:sum"]]


def preferred(logprobs: Any, weights: Any) -> Any:
    """A loss of one datum, which is traced."""
    mean = (logprobs * weights).sum() / weights.sum()
    return torch.nn.functional.softplus(-mean) * 3, {"custom/mean:mean": mean, "custom/places:sum": (weights > 0).sum()}


def both(data: list[types.Datum], logprobs: list[Any]) -> Any:
    """The same, of all data, computed by the client."""
    each = [
        preferred(own, datum.loss_fn_inputs["weights"].to_torch()) for datum, own in zip(data, logprobs, strict=True)
    ]
    means = [float(metrics["custom/mean:mean"].detach()) for _, metrics in each]
    return sum(loss for loss, _ in each), {"custom/mean:mean": sum(means) / len(each)}


def custom(client: tinker.TrainingClient, loss: Any) -> list[float]:
    """An update by a loss of one's own; returns the loss, its metric, and the loss of another text afterwards."""
    metrics = client.forward_backward_custom([likely(0), likely(2)], loss).result().metrics
    client.optim_step(VALUES).result()
    after = client.forward([likely(1)], "cross_entropy").result().metrics["loss:sum"]
    return [metrics["loss:sum"], metrics["custom/mean:mean"], after]


def sampled(sampler: tinker.SamplingClient, count: int) -> list[tuple[list[int], list[float]]]:
    """Completions and their log-probabilities."""
    response = sampler.sample(
        prompt=types.ModelInput.from_ints(PROMPT),
        sampling_params=types.SamplingParams(max_tokens=6, temperature=1.0),
        num_samples=count,
    ).result()
    return [(list(each.tokens), list(each.logprobs or [])) for each in response.sequences]


def chatted(url: str, model: str) -> list[tuple[str, str]]:
    """What two other APIs answer about a model, most probable tokens alone: the model's name, and the text."""
    words: Any = [{"role": "user", "content": "Good morning"}]
    key = "tml-the-key-of-a-test-0123456789"
    with openai.OpenAI(base_url=f"{url}/oai/api/v1", api_key=key) as client:
        made = client.chat.completions.create(model=model, messages=words, max_tokens=8, temperature=0)
    with anthropic.Anthropic(base_url=f"{url}/oai/api", api_key=key) as client:
        said = client.messages.create(model=model, messages=words, max_tokens=8, extra_body={"temperature": 0})
    text = "".join(block.text for block in said.content if block.type == "text")
    return [(made.model, made.choices[0].message.content or ""), (said.model, text)]


def told(sampler: tinker.SamplingClient) -> dict[str, Any]:
    """What a sampler says of the places of a text."""
    targets = types.TensorData(data=TEXT[1:], dtype="int64", shape=[len(TEXT) - 1, 1])
    response = sampler.sample(
        types.ModelInput.from_ints(TEXT), 2, types.SamplingParams(max_tokens=6, seed=3), include_prompt_logprobs=True,
        topk_prompt_logprobs=5, target_prompt_logprobs=targets, prompt_alt_tokens_k=3,
    ).result()  # fmt: skip
    drawn, given = response.prompt_alt_tokens, response.target_prompt_logprobs
    assert drawn is not None
    assert given is not None
    places = zip(drawn.tokens.tolist(), drawn.logprobs.tolist(), strict=True)
    return {
        "samples": [list(each.tokens) for each in response.sequences],
        "own": (response.prompt_logprobs or [])[1:],
        "given": [value for (value,) in given.tolist()],
        "top": (response.topk_prompt_logprobs or [])[1:],
        "drawn": [list(zip(*each, strict=True)) for each in places],
    }


def main(url: str, model: str, adapter: str = "") -> None:
    """Does all, and prints it; `adapter` is the name of one that the job's `[tinker.adapters]` has."""
    found: dict[str, Any] = {}
    service = tinker.ServiceClient(base_url=url, api_key="tml-the-key-of-a-test-0123456789")
    client = service.create_lora_training_client(base_model=model, rank=4, seed=0).result()  # the job's
    found["rank"] = client.get_info().lora_rank
    found["disturbed"] = train(client, pauses=True)
    other = service.create_lora_training_client(base_model=model, rank=4).result()
    found["undisturbed"] = train(other, pauses=False)
    seeded = [service.create_lora_training_client(base_model=model, rank=4, seed=7).result() for _ in range(2)]
    found["seeded"] = [train(each, pauses=False) for each in seeded]

    handle = service.create_custom_loss(preferred, {"logprobs": 1, "weights": 1}).result()
    found["loss"] = handle.loss_id
    found["custom"] = [custom(client, handle), custom(other, both)]

    base = service.create_sampling_client(base_model=model).result()
    found["prompt_logprobs"] = base.compute_logprobs(types.ModelInput.from_ints(TEXT)).result()
    snapshot = client.save_weights_and_get_sampling_client()
    text = types.ModelInput.from_ints(TEXT)
    found["adapters_prompt"] = [
        snapshot.compute_logprobs(text).result()[1:],
        list(client.forward([likely(0)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data),
    ]
    found["told"] = [told(each) for each in (base, base, snapshot, snapshot)]
    samples = sampled(snapshot, 2)
    data = [rewarded(*sample, advantage) for sample, advantage in zip(samples, (1.0, -1.0), strict=True)]
    again = client.forward(data, "importance_sampling").result()
    found["sampled"] = [logprobs for _, logprobs in samples]
    found["trained"] = [list(each["logprobs"].data)[len(PROMPT) - 1 :] for each in again.loss_fn_outputs]
    for loss, config in (
        ("importance_sampling", None),
        ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
    ):
        client.forward_backward(data, loss, config).result()
        client.optim_step(types.AdamParams(learning_rate=1e-3)).result()

    try:
        snapshot.compute_logprobs(text).result()
    except tinker.RequestFailedError as error:
        found["old_prompt"] = str(error)
    path = client.save_state("middle").result().path
    named = client.save_weights_for_sampler("middle").result().path
    found["named"] = len(sampled(service.create_sampling_client(model_path=named).result(), 1))
    found["paths"] = [path, named]
    found["chats"] = [chatted(url, each) for each in (model, named)]
    found["external"] = client.save_weights_external("middle").result().path
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    fresh = service.create_training_client_from_state(path).result()
    if adapter:
        brought = service.create_training_client_from_state(f"tinker://import/weights/{adapter}").result()
        outputs = brought.forward([likely(0)], "cross_entropy").result().loss_fn_outputs
        found["brought"] = [list(outputs[0]["logprobs"].data), brought.save_weights_external("same").result().path]
    for each in (client, resumed, fresh):
        each.forward_backward([likely(4)], "cross_entropy").result()
        each.optim_step(VALUES).result()
    found["resumed"] = [
        each.forward([likely(5)], "cross_entropy").result().metrics["loss:sum"] for each in (client, resumed, fresh)
    ]
    try:
        fresh.forward_backward([likely(0)], "stable_reinforce").result()
    except tinker.RequestFailedError as error:
        found["refused"] = str(error)
    service.close("success").result()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(*sys.argv[1:])
