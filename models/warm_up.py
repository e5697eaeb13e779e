"""The warm-up of a built-in model: a minute of supervised learning after which RL has something to sharpen.

Two phases. First every demonstration is able play, until the model has the skill: learned from a mixture it would take three
times as long. Then most are not, until the model samples able and poor play in the demonstrated shares; that sets the
reward at which RL starts, and leaves the rest of the way to RL.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from environments.chat import Chat
from models.demonstrations import Demonstration, Demonstrator

SKILL_STEPS = 220
MIXTURE_STEPS = 200
REVERSALS_A_STEP = 64
GAMES_A_STEP = 16
"""Games are learned in a tenth of the time, and are twice as long."""

# The shares of able play give a reward of about 0.45 in each task; poor play earns something, too.
REVERSING_SHARE = 0.38
HALVING_SHARE = 0.38

LEARNING_RATE = 3e-3
_PROGRESS_SECONDS = 5.0


def warm_up(model: Any, directory: Path, seed: int, on_progress: Callable[[str], None]) -> None:
    """Trains `model` (a Hugging Face causal LM, float32, CPU) in place on demonstrations rendered by the chat template in
    `directory`. On one thread, so that the result does not depend on the machine's number of cores."""
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
            reversals = demonstrator.reverse_text(REVERSALS_A_STEP, 1.0 if skilled else REVERSING_SHARE)
            games = demonstrator.guess_number(GAMES_A_STEP, 1.0 if skilled else HALVING_SHARE)
            # Apart, since padding the one to the length of the other would double the work.
            loss = sum(_learn(model, demonstrations) for demonstrations in (reversals, games))
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
    """20 steps up, then level, then down to a fiftieth over the second half of the mixture."""
    left = SKILL_STEPS + MIXTURE_STEPS - step
    return min((step + 1) / 20, 1.0, 0.02 + left / (MIXTURE_STEPS / 2))


def _learn(model: Any, demonstrations: Sequence[Demonstration]) -> float:
    """Adds the gradient of these demonstrations: mean cross-entropy over what the players wrote (returned), and, for a mixture of
    experts, the load-balancing term of its configuration, without which a few experts would do all the work."""
    token_ids_BT, written_BT = _pad(demonstrations, model.config.pad_token_id)
    is_moe = hasattr(model.config, "num_experts")
    # Causal attention alone keeps padding on the right from what comes before it: no mask is needed.
    output = model(input_ids=token_ids_BT, use_cache=False, **({"output_router_logits": True} if is_moe else {}))
    targets = token_ids_BT[:, 1:].masked_fill(~written_BT[:, 1:], -100)
    cross_entropy = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), targets.flatten())
    loss = cross_entropy
    if is_moe:
        loss = loss + model.config.router_aux_loss_coef * output.aux_loss
    loss.backward()
    return float(cross_entropy.detach())


def _pad(demonstrations: Sequence[Demonstration], padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids int64 `[B, T]`, and where the players wrote them, bool `[B, T]`; shorter conversations end in padding."""
    longest = max(len(each.token_ids) for each in demonstrations)
    token_ids = [each.token_ids + [padding] * (longest - len(each.token_ids)) for each in demonstrations]
    written = [each.written + [False] * (longest - len(each.written)) for each in demonstrations]
    return torch.tensor(token_ids), torch.tensor(written)
