"""Measures a row: log-probabilities of its samples by the policy before the step and the reference policy, without gradient.

The policy's forward pass is that of training, with adapters and recorded routing. Each reference has a forward pass over the
samples of its runs alone, at the temperature of their generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import nn

from counterpoint.trainer.lora.multi_lora import adapter_spans
from counterpoint.trainer.model.load import log_probabilities
from counterpoint.trainer.model.packing_proof import can_pack, can_share_prompts
from counterpoint.trainer.model.router_replay import RouterReplay
from counterpoint.trainer.packer import ModelLimits, pack
from counterpoint.trainer.updates.passes import OLD, REFERENCE, VALUES
from counterpoint.trainer.work.contribution import Contribution
from counterpoint.trainer.work.step import forward, put_targets

StepRow = Sequence[tuple[Contribution, Sequence[int]]]


@torch.no_grad()
def measure_row(model: nn.Module, replay: RouterReplay | None, limits: ModelLimits, row: StepRow) -> None:
    """Fills in the columns of one row's samples, of steps in their pass of measurement."""
    row = sorted((part for part in row if part[0].fault is None), key=lambda part: part[0].run.slot)
    if by_policy := [part for part in row if {OLD, VALUES} & set(part[0].columns.names)]:
        _measure_policy(model, replay, limits, by_policy)
    by_reference: dict[tuple[nn.Module, bool], list[tuple[Contribution, Sequence[int]]]] = {}
    for step, samples in row:
        if REFERENCE in step.columns.names:
            key = step.run.torch.reference or model, step.run.torch.reference_slot is not None
            by_reference.setdefault(key, []).append((step, samples))
    for (reference, _), parts in by_reference.items():
        together = can_pack(reference) or reference is model  # rows of a model that cannot pack have one sample
        for piece in [parts] if together else [[(step, [each])] for step, samples in parts for each in samples]:
            _measure_reference(reference, limits, piece)


def _measure_policy(model: nn.Module, replay: RouterReplay | None, limits: ModelLimits, row: StepRow) -> None:
    steps = [step for step, _ in row]
    micro = pack([(step.batch, samples) for step, samples in row], limits, steps[0].sums_EM.device)
    put_targets(steps, micro)
    old_P, _, values_P = forward(model, replay, steps, micro)
    first_P = 0
    for step, part in zip(steps, micro.parts, strict=True):
        own = slice(first_P, first_P := first_P + part.predictions)
        if OLD in step.columns.names:
            step.columns.put(OLD, part.samples, old_P[own])
        if VALUES in step.columns.names:
            assert values_P is not None
            step.columns.put(VALUES, part.samples, values_P[own])


def _measure_reference(reference: nn.Module, limits: ModelLimits, row: StepRow) -> None:
    """All runs of the row have a reference with an adapter, or none has.

    Without one, a model with adapters is the bare base.
    """
    unrouted = replace(limits, layers=0, shares_prompts=limits.shares_prompts and can_share_prompts(reference))
    micro = pack([(step.batch, samples) for step, samples in row], unrouted, row[0][0].sums_EM.device)
    put_targets([step for step, _ in row], micro)
    spans = [
        (step.run.torch.reference_slot, part.tokens)
        for (step, _), part in zip(row, micro.parts, strict=True)
        if step.run.torch.reference_slot is not None
    ]
    with adapter_spans(reference, spans) if spans else nullcontext():
        reference_P, _ = log_probabilities(
            reference,
            micro.token_ids_T,
            micro.position_ids_T,
            micro.sample_lengths,
            micro.predicting_P,
            micro.targets_P,
            micro.temperatures_P,
            families=micro.families,
        )
    first_P = 0
    for (step, _), part in zip(row, micro.parts, strict=True):
        step.columns.put(REFERENCE, part.samples, reference_P[first_P : first_P + part.predictions])
        first_P += part.predictions
