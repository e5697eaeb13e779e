"""A loop of one's own: contributions and updates of a driven run, a publication, and samples from it.

counterpoint tinker configs/demo-tinker.toml          # a trainer and a server, until they are stopped
python -m examples.driven.loop outputs/demo-tinker MODEL_DIRECTORY http://127.0.0.1:8000    # as the job says

Next in the reading order of `docs/architecture.md`: `counterpoint/service/runs.py`.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy as np

from counterpoint.environments import Chat
from counterpoint.service import (
    AdamW,
    Batch,
    LiveJob,
    LoraConfig,
    Objective,
    SampleInfo,
    SamplingParameters,
    TrainedRun,
    TrainingConfig,
)

NAME = "mine"
TEXT = "The answer is forty-two."
PROMPT_TOKENS = 2
LIKELY = Objective({"kind": "sft"}, divisor=1.0, returns=True)
"""The sum of the tokens' cross-entropies, with their log-probabilities in the answer."""


def batch_of(tokens: list[int]) -> Batch:
    """A text of which all but the first tokens are to become more likely."""
    count = len(tokens)
    return Batch(
        NAME, 1, (SampleInfo("text", "mine", 0, 0.0, 1.0),),
        {
            "token_ids_T": np.array(tokens, np.int32),
            "loss_mask_T": (np.arange(count) >= PROMPT_TOKENS).astype(np.uint8),
            "log_probabilities_T": np.zeros(count, np.float32),
            "advantages_T": np.zeros(count, np.float32),
            "sample_offsets": np.array([0, count], np.int64),
        },
    )  # fmt: skip


async def train(job: LiveJob, tokens: list[int]) -> Path:
    """Makes ten updates, and publishes the adapter; a second start goes on where the first one was."""
    run = job.run(TrainedRun(run_id=NAME, training=TrainingConfig(lora=LoraConfig(rank=8)), driven=True))
    await run.start()
    try:
        await run.admitted()
        for _ in range(10):
            # Neither waits for the other: both are on the disk, and are carried out in this order.
            contributed, updated = await asyncio.gather(
                run.forward_backward(batch_of(tokens), LIKELY), run.update(AdamW(1e-3))
            )
            print(f"step {updated.step}: loss {-contributed.columns['log_probabilities'].sum():.2f}", flush=True)  # noqa: T201
        return await run.publish(f"version-{updated.step}")
    finally:
        await run.close()


async def sample(job: LiveJob, adapter: Path, prompt: list[int]) -> list[int]:
    """Returns the most probable completion by a published adapter, once the servers have proven it."""
    samplers = job.samplers()
    await samplers.start()
    try:
        sampling = SamplingParameters(temperature=0.01, max_tokens=8)
        name = f"{NAME}.{adapter.name}"
        turn = await samplers.sample((name, adapter), np.array(prompt, np.int32), sampling, "a-session")
        found: list[int] = turn.completion_ids.tolist()
        return found
    finally:
        await samplers.close()


async def main(directory: str) -> None:
    """Trains, and prints what the adapter makes of the text's beginning."""
    job = LiveJob(directory)
    chat = Chat(job.model)
    tokens = chat.encode(TEXT)
    completion = await sample(job, await train(job, tokens), tokens[:PROMPT_TOKENS])
    print(f"{chat.decode(tokens[:PROMPT_TOKENS])!r} goes on with {chat.decode(completion)!r}", flush=True)  # noqa: T201


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
