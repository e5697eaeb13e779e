"""The warm-up of a built-in model: a minute of supervised learning before RL.

It has two phases. First every demonstration is able play, until the model has the skill; from a mixture this would take three
times as long. Then most demonstrations are poor play, until the model samples both in the demonstrated shares; that sets the
reward at which RL starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from counterpoint.environments.chat import Chat
from counterpoint.models.demonstrations import Demonstrator, TokenizedConversation

SKILL_STEPS = 220
MIXTURE_STEPS = 200


@dataclass(frozen=True, slots=True)
class Lesson:
    """One task of a warm-up."""

    demonstrate: Callable[[Demonstrator, int, float], list[TokenizedConversation]]
    """Returns a number of conversations, of which a share is able play."""
    a_step: int
    """Conversations in each step."""
    able_share: float
    """Its share of the mixture, which gives a reward of about 0.45. Poor play has some reward, too."""


LESSONS = {
    # Fewer games than reversals: they are learned in a tenth of the time, and are twice as long.
    "tiny-moe": (Lesson(Demonstrator.reverse_text, 64, 0.38), Lesson(Demonstrator.guess_number, 16, 0.38)),
    "tiny-dense": (Lesson(Demonstrator.reverse_text, 64, 0.38), Lesson(Demonstrator.guess_number, 16, 0.38)),
    "tiny-math": (Lesson(Demonstrator.arithmetic, 16, 0.4),),
}
"""The lessons of each model."""

LEARNING_RATE = 3e-3
_PROGRESS_SECONDS = 5.0


def warm_up(
    model: Any, lessons: Sequence[Lesson], directory: Path, seed: int, on_progress: Callable[[str], None]
) -> None:
    """Trains a model in place on demonstrations, on one thread, so that the result does not depend on the number of cores.

    Args:
        model: a Hugging Face causal LM, float32, on the CPU.
        lessons: what it learns.
        directory: with the tokenizer and the chat template.
        seed: of the demonstrations.
        on_progress: called with a line every few seconds.
    """
    demonstrator = Demonstrator(Chat(directory), seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _learning_rate_factor)
    steps = SKILL_STEPS + MIXTURE_STEPS
    threads, reported = torch.get_num_threads(), time.monotonic()
    torch.set_num_threads(1)
    model.train()
    try:
        for step in range(steps):
            skilled = step < SKILL_STEPS
            # Separately, since padding one to the length of the other would double the work.
            loss = 0.0
            for lesson in lessons:
                share = 1.0 if skilled else lesson.able_share
                loss += _learn(model, lesson.demonstrate(demonstrator, lesson.a_step, share))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if time.monotonic() - reported > _PROGRESS_SECONDS:
                reported = time.monotonic()
                on_progress(f"warm-up step {step + 1} of {steps}, loss {loss:.3f}")
    finally:
        torch.set_num_threads(threads)
    model.eval()


def _learning_rate_factor(step: int) -> float:
    """Returns the factor: 20 steps up, then level, then down to a fiftieth over the second half of the mixture."""
    left = SKILL_STEPS + MIXTURE_STEPS - step
    return min((step + 1) / 20, 1.0, 0.02 + left / (MIXTURE_STEPS / 2))


def _learn(model: Any, demonstrations: Sequence[TokenizedConversation]) -> float:
    """Adds the gradient of these demonstrations, and returns the mean cross-entropy over the players' tokens, in nats.

    For a mixture of experts the loss also has the load-balancing term of its configuration, without which a few experts would do
    all the work.
    """
    token_ids_BT, written_BT = _pad(demonstrations, model.config.pad_token_id)
    is_moe = hasattr(model.config, "num_experts")
    # Padding on the right needs no mask: with causal attention it does not affect the tokens before it.
    output = model(input_ids=token_ids_BT, use_cache=False, **({"output_router_logits": True} if is_moe else {}))
    targets = token_ids_BT[:, 1:].masked_fill(~written_BT[:, 1:], -100)
    cross_entropy = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), targets.flatten())
    loss = cross_entropy
    if is_moe:
        loss = loss + model.config.router_aux_loss_coef * output.aux_loss
    loss.backward()
    return float(cross_entropy.detach())


def _pad(demonstrations: Sequence[TokenizedConversation], padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns token ids int64 `[B, T]`, and where the players wrote them, bool `[B, T]`; padded on the right."""
    longest = max(len(each.token_ids) for each in demonstrations)
    token_ids = [each.token_ids + [padding] * (longest - len(each.token_ids)) for each in demonstrations]
    written = [each.written + [False] * (longest - len(each.written)) for each in demonstrations]
    return torch.tensor(token_ids), torch.tensor(written)
