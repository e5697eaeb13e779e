"""One training step of one run on every rank: forward and backward over its micro-batches, then one update of the weights.

All ranks call `train_step` with the same batch and get the same metrics. Nothing of a run changes before its whole step is
known to be finite, so that a step that is refused leaves the weights, the optimizer and the counters as they were.
"""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from trainer.loss import LossInputs
from trainer.metrics import MetricValue
from trainer.model import log_probabilities
from trainer.packer import InvalidBatch, MicroBatch, ModelLimits, environment_names, pack, plan
from trainer.ranks import Ranks
from trainer.router_replay import RouterReplay
from trainer.runs import Run
from trainer.token_export import TokenExport
from transport.records import Batch

_SUMS = ("loss", "entropy", "mismatch_kl", "importance_ratio/mean", "masked_share", "replayed_share", "tokens")
"""Columns of the metric sums, one row an environment; all but the last become means over trained tokens."""


def train_step(
    model: nn.Module,
    replay: RouterReplay | None,
    limits: ModelLimits,
    run: Run,
    batch: Batch,
    ranks: Ranks,
    export_directory: Path | None = None,
) -> dict[str, MetricValue]:
    """Trains `run` on `batch`, which `packer.check` has passed, and returns the step's metrics.

    A batch without any trained token leaves the weights as they are, and counts as a step. With `export_directory`, every
    trained token is written there (`trainer/token_export.py`).

    Raises:
        InvalidBatch: the loss or its gradient is not finite; the run is as before.
    """
    started = time.perf_counter()
    names = environment_names(batch)
    sums_EM = torch.zeros(len(names), len(_SUMS), dtype=torch.float64, device=ranks.device)
    highest_E = torch.zeros(len(names), dtype=torch.float64, device=ranks.device)
    trained_tokens = int(batch.loss_mask_T.sum())
    export = TokenExport() if export_directory is not None else None
    for samples in plan(batch, limits.max_tokens, ranks.count)[ranks.index]:
        micro = pack(batch, samples, limits, ranks.device)
        columns = _forward_backward(model, replay, run, micro, trained_tokens)
        _accumulate(sums_EM, highest_E, micro, columns)
        if export is not None:
            export.add(batch, micro, columns)
    metrics: dict[str, MetricValue] = {"learning_rate": 0.0, "grad_norm": 0.0}
    if trained_tokens:
        try:
            metrics = _update(run, batch, ranks, sums_EM, highest_E)
        except InvalidBatch:
            run.optimizer.zero_grad()
            raise
    if export is not None and export_directory is not None:
        export.write(export_directory, batch.step, ranks.index)
    run.progress.step = batch.step
    run.progress.total_tokens += len(batch.token_ids_T)
    run.progress.total_samples += len(batch.samples)
    seconds = time.perf_counter() - started
    return {
        **metrics,
        **_means(sums_EM.cpu(), highest_E.cpu(), names),
        "tokens": len(batch.token_ids_T),
        "samples": len(batch.samples),
        "tokens_per_second": len(batch.token_ids_T) / seconds,
        "phase/train": seconds,
    }


def _forward_backward(
    model: nn.Module, replay: RouterReplay | None, run: Run, micro: MicroBatch, trained_tokens: int
) -> dict[str, Tensor]:
    """Accumulates the gradient of one micro-batch; what the trained tokens came to, `[P]` each, without gradient."""
    replaying = (
        replay.replaying(micro.routed_experts_TLK, micro.has_record_T)
        if replay is not None and micro.routed_experts_TLK is not None
        else nullcontext()
    )
    with replaying:
        trainer_P, entropy_P = log_probabilities(
            model,
            micro.token_ids_T,
            micro.position_ids_T,
            micro.sample_lengths,
            micro.predicting_P,
            micro.targets_P,
            run.config.sampling.temperature,
        )
        outputs = run.loss(LossInputs(trainer_P, micro.inference_log_probabilities_P, micro.advantages_P))
        (outputs.loss_P.sum() / trained_tokens).backward()
    return {
        "loss": outputs.loss_P.detach(),
        "entropy": entropy_P,
        "trainer_log_probability": trainer_P.detach(),
        "inference_log_probability": micro.inference_log_probabilities_P,
        "advantage": micro.advantages_P,
        "masked": outputs.masked_P,
    }


def _accumulate(sums_EM: Tensor, highest_E: Tensor, micro: MicroBatch, columns: dict[str, Tensor]) -> None:
    """Adds a micro-batch's tokens to the sums of their environments.

    The mismatch is the estimator k3 of KL(inference || trainer) from samples of inference: exp(d) - 1 - d with
    d = log p_trainer - log p_inference, unbiased and never negative (Schulman, "Approximating KL Divergence", 2020).
    """
    difference_P = (columns["trainer_log_probability"] - columns["inference_log_probability"]).double()
    ratio_P = difference_P.exp()
    rows_PM = torch.stack(
        [
            columns["loss"].double(),
            columns["entropy"].double(),
            ratio_P - 1 - difference_P,
            ratio_P,
            columns["masked"].double(),
            micro.has_record_T[micro.predicting_P].double(),
            torch.ones_like(ratio_P),
        ],
        dim=1,
    )
    sums_EM.index_add_(0, micro.environments_P, rows_PM)
    highest_E.scatter_reduce_(0, micro.environments_P, ratio_P, "amax")


def _update(run: Run, batch: Batch, ranks: Ranks, sums_EM: Tensor, highest_E: Tensor) -> dict[str, MetricValue]:
    """Adds gradients and sums over the ranks, and updates the weights if both are finite."""
    ranks.add(run.optimizer.gradients())
    ranks.add([sums_EM])
    ranks.maximum(highest_E)
    norm = run.optimizer.gradient_norm()
    if not bool(sums_EM[:, 0].isfinite().all()):
        raise InvalidBatch(
            f"the loss of step {batch.step} is not finite; its weights, or its log-probabilities, are broken"
        )
    if not math.isfinite(float(norm)):
        raise InvalidBatch(
            f"the gradient of step {batch.step} is not finite (norm {float(norm)}); the step is not taken"
        )
    rate = run.optimizer.step(batch.step, norm)
    return {"learning_rate": rate, "grad_norm": float(norm)}


def _means(sums_EM: Tensor, highest_E: Tensor, names: list[str]) -> dict[str, MetricValue]:
    """The metrics of the whole step under their plain names, and of each environment under `<name>/<environment>`."""
    metrics: dict[str, MetricValue] = {}
    rows = [("", sums_EM.sum(0), highest_E.max() if names else torch.zeros(()))]
    rows += [(f"/{name}", sums_EM[index], highest_E[index]) for index, name in enumerate(names)]
    for suffix, sums_M, highest in rows:
        tokens = max(float(sums_M[-1]), 1.0)
        for name, value in zip(_SUMS[:-1], sums_M[:-1].tolist(), strict=True):
            base, slash, statistic = name.partition("/")
            metrics[f"{base}{suffix}{slash}{statistic}"] = value / tokens
        metrics[f"importance_ratio{suffix}/max"] = float(highest)
        metrics[f"tokens/trained{suffix}"] = int(sums_M[-1])
    return metrics
