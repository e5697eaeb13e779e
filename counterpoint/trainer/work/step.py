"""Trains the steps of several runs side by side: opens a step, trains its samples in rows, and finishes it.

A row may hold samples of several runs: one forward and one backward pass of the frozen model for all of them, with each run's
adapter and loss over its tokens, at the temperature of each sample's generation. Steps are finished one by one, when their last
sample is trained. A run changes only after its whole step is known to be finite, so a refused step leaves its weights,
optimizer and counters as they were, and a broken run does not affect the others. All ranks open the same steps, train their
shares of the samples, and finish in the same order with the same metrics.

Next in the reading order of `docs/architecture.md`: `counterpoint/trainer/losses/objectives.py`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from counterpoint.environments.config import ALL
from counterpoint.environments.describe_error import describe_error
from counterpoint.run.items import UpdateValues
from counterpoint.trainer.faults import is_fatal, is_out_of_memory
from counterpoint.trainer.lora.multi_lora import adapter_spans
from counterpoint.trainer.losses.contract import Gradients, LossInputs, LossOutputs
from counterpoint.trainer.losses.objectives import token_weights
from counterpoint.trainer.metrics import MetricValue
from counterpoint.trainer.model.deterministic import advice_on
from counterpoint.trainer.model.head import token_outputs
from counterpoint.trainer.model.router_replay import RouterReplay
from counterpoint.trainer.model.without_waiting import on_device
from counterpoint.trainer.packer import InvalidBatch, MicroBatch, ModelLimits, pack
from counterpoint.trainer.ranks import Ranks
from counterpoint.trainer.runs.run import Run
from counterpoint.trainer.updates.passes import OLD, REFERENCE
from counterpoint.trainer.updates.value_head import differentiate, row_values
from counterpoint.trainer.work.contribution import TARGETS, WEIGHTS, WITH_AGGREGATE, Contribution, StepOutcome, read

logger = logging.getLogger(__name__)

MOST_LOG_WEIGHT = 300.0
"""Nats. A larger logarithm of an importance weight counts as this in the effective sample size: a float64 holds its square."""


def train_row(
    model: nn.Module,
    replay: RouterReplay | None,
    limits: ModelLimits,
    row: Sequence[tuple[Contribution, Sequence[int]]],
) -> None:
    """Adds the gradients and metrics of one micro-batch, samples of one or more steps, each of another run.

    A loss that raises gives its step a fault, which `finish` raises. The other steps of the row are not affected.
    """
    row = sorted((part for part in row if part[0].fault is None), key=lambda part: part[0].run.slot)
    if not row:
        return
    steps = [step for step, _ in row]
    began = time.perf_counter()
    micro = pack([(step.batch, samples) for step, samples in row], limits, steps[0].sums_EM.device)
    several = put_targets(steps, micro)
    trainer_R, entropy_R, values_P = forward(model, replay, steps, micro, several)
    forwarded = time.perf_counter()
    gradients: list[Gradients] = []
    first_P = first_R = 0
    for step, part in zip(steps, micro.parts, strict=True):
        own = slice(first_P, first_P := first_P + part.predictions)
        own_R = slice(first_R, first_R := first_R + part.predictions * step.width)
        # Copies with their own graph: an operator's loss then cannot affect the other runs.
        trainer_P, entropies_P = trainer_R[own_R].detach().clone(), entropy_R[own_R].detach().clone()
        if step.width > 1:
            trainer_P, entropies_P = trainer_P.view(-1, step.width), entropies_P[:: step.width]
        advantages_P = step.columns.advantages_of(part.samples)
        inputs = LossInputs(
            trainer_P.requires_grad_(),
            micro.inference_log_probabilities_P[own],
            micro.advantages_P[own] if advantages_P is None else advantages_P,
            sample_P=micro.sample_P[own],
            samples=len(part.samples),
            entropies_P=entropies_P.requires_grad_(step.loss.uses_entropy),
            old_log_probabilities_P=step.columns.of(OLD, part.samples) if step.has_several_updates else None,
            reference_log_probabilities_P=step.columns.of(REFERENCE, part.samples),
            values_P=_own_values(step, values_P, own),
            given=step.inputs(part.samples),
            **{f"{name}_P": micro.columns_P[name][own] for name in part.batch.of_loss},
        )
        weights_P = _weights(step, inputs, part.samples)
        outputs, gradient = _loss_and_gradients(step, inputs, weights_P)
        gradient, optional = _with_value_loss(step, part.samples, inputs, gradient)
        gradients.append(gradient)
        if outputs is not None:
            columns = _columns(inputs, outputs)
            weighted_P = outputs.loss_P.detach() if weights_P is None else outputs.loss_P.detach() * weights_P
            weighted_P = weighted_P if step.width == 1 else weighted_P.sum(-1)
            predicting_P = micro.predicting_P[own]
            own_metrics = [*optional, *(outputs.metrics_P[name].detach() for name in step.loss.metrics)]
            samples_P = on_device(torch.tensor(part.samples), step.sums_EM.device)[micro.sample_P[own]]
            replayed_P = micro.has_record_T[predicting_P]
            _accumulate(step, columns, weighted_P, own_metrics, micro.environments_P[own], samples_P, replayed_P)
            for name, result_P in zip(
                step.columns.results, (inputs.trainer_log_probabilities_P, weighted_P), strict=False
            ):
                step.columns.put(name, part.samples, result_P)
            if step.export is not None:
                exported = columns | {"token_id": micro.targets_P[own]}
                step.export.add(part, micro.sample_P[own], micro.position_ids_T[predicting_P] + 1, exported)
    if trainer_R.requires_grad:
        _backward(Gradients(trainer_R, entropy_R, values_P), gradients)
    for step in steps:
        step.times.add("forward", began, forwarded)
        step.times.add("backward", forwarded, time.perf_counter())


def put_targets(steps: Sequence[Contribution], micro: MicroBatch) -> tuple[Tensor, Tensor] | None:
    """Puts the contributions' targets into the row.

    If tokens of a contribution have several, returns all targets, and their places among the trained tokens, `[R]` each.
    """
    given, first_P = [], 0
    for step, part in zip(steps, micro.parts, strict=True):
        own = slice(first_P, first_P := first_P + part.predictions)
        given_P = step.columns.of(TARGETS, part.samples)
        width = 1 if given_P is None else step.width
        if given_P is not None and width == 1:
            micro.targets_P[own] = given_P.to(micro.targets_P.dtype)
        given.append((width, own, given_P))
    if all(width == 1 for width, _, _ in given):
        return None
    targets, places = [], []
    for width, own, given_P in given:
        targets.append(
            micro.targets_P[own] if given_P is None or width == 1 else given_P.flatten().to(micro.targets_P.dtype)
        )
        places.append(torch.arange(own.start, own.stop).repeat_interleave(width))
    return torch.cat(targets), on_device(torch.cat(places), micro.targets_P.device)


def next_pass(step: Contribution, ranks: Ranks, values: UpdateValues) -> bool:
    """Ends the current pass of a step, on all ranks, if another one follows. Returns whether it did.

    Raises `InvalidBatch` as `finish` does.
    """
    if step.is_last_pass:
        return False
    _end_pass([step], ranks, values)
    return True


def conclude(step: Contribution, ranks: Ranks) -> StepOutcome:
    """Adds up a trained contribution's results over the ranks. Its gradients wait for an update.

    Raises:
        InvalidBatch: on every rank, when it has a fault on any, or its loss is not finite. The gradients since the run's last
            update must then be dropped.
    """
    assert step.is_last_pass
    refuse_if_any(ranks, step.fault)
    results = step.columns.results
    if step.trained_tokens:
        ranks.add_rows([step.sums_EM, step.sums_SW, *results.values()])
        ranks.maximum(step.highest_E)
        _check_losses([step], read([step]))
    step.is_concluded = True
    # Copies: on a CPU the columns are written anew where its rows are trained again.
    copied = {name: column_T.to("cpu", copy=True).flatten().numpy() for name, column_T in results.items()}
    return StepOutcome(_metrics([step]), copied)


def finish(steps: Sequence[Contribution], ranks: Ranks, values: UpdateValues) -> dict[str, MetricValue]:
    """Ends the last pass of a run's contributions by an update with `values`. The run's progress is then of their step.

    Returns the metrics. Contributions without any trained token count as a step, and leave the weights as they are.

    Raises:
        InvalidBatch: on every rank, when one has a fault on any, or a loss or the gradient is not finite. The run is then as
            before the step, its gradients forgotten, or not `intact`, if the update itself failed.
    """
    last = steps[-1]
    run = last.run
    if trained := [step for step in steps if step.trained_tokens]:
        _end_pass(trained, ranks, values)
    if last.export_directory is not None and ranks.is_first_of_row:
        for step in steps[:-1]:
            last.ended.export.extend(step.ended.export)
        last.ended.export.write(last.export_directory, last.batch.step, ranks.index)
    run.torch.held = None
    run.mismatches = last.largest_mismatches()
    run.progress.step = last.batch.step
    tokens, samples = sum(len(s.batch.token_ids_T) for s in steps), sum(len(s.batch.samples) for s in steps)
    run.progress.total_tokens += tokens
    run.progress.total_samples += samples
    seconds, norms = time.perf_counter() - steps[0].started, [norm for step in trained for norm in step.ended.norms]
    return {
        "learning_rate": values.rate if norms else 0.0,
        "grad_norm": sum(norms) / max(len(norms), 1),
        "grad_kept": sum(min(1.0, values.clip / max(norm, values.clip)) for norm in norms) / max(len(norms), 1),
        **({"updates": len(norms)} if last.has_several_updates else {}),
        **_metrics(steps),
        **effective_sizes(steps),
        "tokens": tokens,
        "samples": samples,
        "tokens_per_second": tokens / seconds,
        "phase/train": seconds,
    }


def _end_pass(steps: Sequence[Contribution], ranks: Ranks, values: UpdateValues) -> None:
    """Adds the current pass's sums over the ranks, takes them over, and begins the next pass.

    `steps` are all contributions of the run to an update, or the one that has measured or will be updated with again.
    """
    try:
        if steps[-1].current.measures:
            _conclude_measurement(steps[-1], ranks)
        else:
            with steps[-1].times.measured("optimizer"):
                _update(steps, ranks, values)
    except InvalidBatch:
        steps[-1].run.torch.optimizer.zero_grad()
        steps[-1].run.torch.restore()
        raise
    for step in steps:
        step.begin_next_pass()


def _conclude_measurement(step: Contribution, ranks: Ranks) -> None:
    """Adds the columns over the ranks after the last measurement: each rank has filled in its rows of all of them."""
    refuse_if_any(ranks, step.fault)
    if step.measures_next:
        return
    ranks.add_rows(list(step.columns.measured.values()))
    try:
        step.columns.conclude(step.run.config.training, step.trained_samples)
    except Exception as error:  # noqa: BLE001 - any error is sent to the other ranks
        step.fault = described(error, f"what step {step.batch.step} computes from its measurement")
    refuse_if_any(ranks, step.fault)
    if broken := [name for name, column_T in step.columns.measured.items() if not bool(column_T.isfinite().all())]:
        raise InvalidBatch(
            f"what step {step.batch.step} has measured before its update is not finite: {', '.join(broken)}"
        )


def forward(
    model: nn.Module,
    replay: RouterReplay | None,
    steps: Sequence[Contribution],
    micro: MicroBatch,
    several: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns log-probabilities, entropies and values of the row's trained tokens, float32 `[P]` each.

    The log-probabilities have a gradient, and so have the entropies if the loss of a step uses them. The values, which have
    one, are None without a run that has a value head. With `several` of `put_targets`, all but the values are `[R]`.
    """
    targets_R, places_R = several or (micro.targets_P, None)
    heads = [step.run.torch.value_head for step in steps]
    replaying = (
        replay.replaying(micro.routed_experts_TLK, micro.has_record_T)
        if replay is not None and micro.routed_experts_TLK is not None
        else nullcontext()
    )
    spans = [(step.run.slot, part.tokens) for step, part in zip(steps, micro.parts, strict=True)]
    with replaying, adapter_spans(model, spans):
        outputs = token_outputs(
            model,
            micro.token_ids_T,
            micro.position_ids_T,
            micro.sample_lengths,
            micro.predicting_P,
            targets_R,
            micro.temperatures_P,
            entropy_gradient=any(step.loss.uses_entropy for step in steps),
            families=micro.families,
            places_R=places_R,
        )
        values_P = row_values(heads, outputs.hidden_PH, [part.predictions for part in micro.parts])
    return outputs.log_probabilities_P, outputs.entropies_P, values_P


def _loss_and_gradients(
    step: Contribution, inputs: LossInputs, weights_P: Tensor | None
) -> tuple[LossOutputs | None, Gradients]:
    """Returns the loss of the run's tokens in a row, and the gradients of the step's loss by the model's outputs for them.

    A loss that raises, or returns invalid outputs, gives the step a fault. The result is then None and a zero gradient.
    """
    try:
        with torch.enable_grad():
            outputs, gradients = step.loss(inputs, step.divisor, weights_P)
        if (names := tuple(sorted(outputs.metrics_P))) != step.loss.metrics:
            raise ValueError(
                f"metrics_P has {', '.join(names)}; expected {', '.join(step.loss.metrics)}, as when it was loaded"
            )
    except BaseException as error:  # an operator's loss may raise anything; a signal does not raise in a trainer
        if is_out_of_memory(error):
            raise  # fewer tokens may fit
        logger.warning("run %s: the loss of step %d failed", step.run.run_id, step.batch.step, exc_info=True)
        step.fault = f"the loss of step {step.batch.step} raised {describe_error(error)}{advice_on(error)}"
        return None, Gradients(torch.zeros_like(inputs.trainer_log_probabilities_P))
    return outputs, gradients


def _own_values(step: Contribution, values_P: Tensor | None, own: slice) -> Tensor | None:
    """Returns a copy of a run's values in a row with a separate graph, or None without a value head."""
    if values_P is None or step.run.torch.value_head is None:
        return None
    return values_P[own].detach().clone().requires_grad_()


def _with_value_loss(
    step: Contribution, samples: Sequence[int], inputs: LossInputs, gradient: Gradients
) -> tuple[Gradients, list[Tensor]]:
    """Adds the value head's part to the gradient. Returns it, and the values `[P]` of `trainer.runs.run.optional_means`."""
    means: list[Tensor] = []
    if inputs.reference_log_probabilities_P is not None:
        difference_P = (inputs.reference_log_probabilities_P - inputs.trainer_log_probabilities_P.detach()).double()
        means.append(difference_P.exp() - 1 - difference_P)
    head, old_P, returns_P = step.run.config.training.value_head, *step.columns.values_of(samples)
    if head is not None and inputs.values_P is not None and old_P is not None and returns_P is not None:
        loss_P, by_values_P = differentiate(
            head, inputs.values_P, old_P, returns_P, step.objective.divisor or step.trained_tokens
        )
        given_P = gradient.values_P
        gradient = gradient._replace(values_P=by_values_P if given_P is None else given_P + by_values_P)
        means += [loss_P, inputs.values_P.detach(), returns_P]
    return gradient, means


def _backward(computed: Gradients, gradients: Sequence[Gradients]) -> None:
    """Carries the gradients of a row's runs, in the order of the row, into the weights, by one backward pass.

    `computed` has the model's outputs for the whole row in place of its gradient. A run with a loss that does not use one of
    these has no gradient by it.
    """
    tensors, grad_tensors = [], []
    for index, values_P in enumerate(computed):
        if values_P is not None and values_P.requires_grad:
            own = [_gradient(gradient, index) for gradient in gradients]
            tensors.append(values_P)
            grad_tensors.append(torch.cat(own))
    torch.autograd.backward(tensors, grad_tensors)


def _gradient(gradient: Gradients, index: int) -> Tensor:
    """Returns the flat gradient of a run by an output of the model, or zeros without one."""
    by_likelihood = gradient.log_probabilities_P
    if (found := gradient[index]) is None:
        of_values = index == Gradients._fields.index("values_P") and by_likelihood.ndim > 1
        found = torch.zeros_like(by_likelihood[:, 0] if of_values else by_likelihood)
    return found.flatten()


def _columns(inputs: LossInputs, outputs: LossOutputs) -> dict[str, Tensor]:
    """Returns the values of the trained tokens by name, `[P]` each, without gradient.

    Of several targets, those of the first.
    """
    columns = {
        "loss": outputs.loss_P.detach(),
        "entropy": inputs.entropies_P.detach(),
        "trainer_log_probability": inputs.trainer_log_probabilities_P.detach(),
        "inference_log_probability": inputs.inference_log_probabilities_P,
        "advantage": inputs.advantages_P,
        "masked": outputs.masked_P,
    }
    return {name: values_P if values_P.ndim == 1 else values_P[:, 0] for name, values_P in columns.items()}


def _accumulate(
    step: Contribution,
    columns: dict[str, Tensor],
    weighted_P: Tensor,
    own_metrics: Sequence[Tensor],
    environments_P: Tensor,
    samples_P: Tensor,
    replayed_P: Tensor,
) -> None:
    """Adds the tokens of a row to the sums of their environments, and their mismatch to those of their samples.

    `weighted_P` is the loss of each token at its weight in the step. `Contribution.loss_scales` makes it that in a mean over
    tokens. The mismatch is the estimator k3 of KL(inference || trainer) from samples of inference: exp(d) - 1 - d with d = log
    p_trainer - log p_inference, unbiased and never negative (Schulman, "Approximating KL Divergence", 2020).
    """
    difference_P = (columns["trainer_log_probability"] - columns["inference_log_probability"]).double()
    ratio_P = difference_P.exp()
    scale, scales_E = step.loss_scales()
    rows_PM = torch.stack(
        [
            weighted_P.double() * scale,
            columns["entropy"].double(),
            ratio_P - 1 - difference_P,
            ratio_P,
            columns["masked"].double(),
            replayed_P.double(),
            *(values_P.double() for values_P in own_metrics),
            weighted_P.double() * scales_E[environments_P],
            torch.ones_like(ratio_P),
        ],
        dim=1,
    )
    step.sums_EM.index_add_(0, environments_P, rows_PM)
    weight_P = difference_P.clamp(max=MOST_LOG_WEIGHT).exp()
    step.sums_SW.index_add_(0, samples_P, torch.stack([ratio_P - 1 - difference_P, weight_P, weight_P**2], dim=1))
    step.highest_E.scatter_reduce_(0, environments_P, ratio_P, "amax")


def _update(steps: Sequence[Contribution], ranks: Ranks, values: UpdateValues) -> None:
    """Adds gradients and sums over the ranks, and updates the weights if both are finite.

    An error of one rank is exchanged between the collective calls, so that all ranks make the same calls.
    """
    last = steps[-1]
    run, number = last.run, last.batch.step
    fault = next((step.fault for step in steps if step.fault is not None), None)
    own_norm = None
    try:
        gradients = run.torch.optimizer.gradients()
        if not last.is_last_pass:
            run.torch.hold()
        if run.torch.shards is not None and run.torch.shards.experts is None:
            own_norm = run.torch.optimizer.gradient_norm()
    except Exception as error:  # noqa: BLE001 - any error is sent to the other ranks
        fault = fault or described(error, f"the gradients of step {number}")
    refuse_if_any(ranks, fault)
    norm = _add_gradients(run, gradients, ranks, own_norm)
    counted = [step for step in steps if not step.is_concluded]
    for step in counted:
        ranks.add_rows([step.sums_EM, step.sums_SW])
        ranks.maximum(step.highest_E)
    fault, updated = None, False
    try:
        _apply(last, counted, norm, values)
        updated = True
    except InvalidBatch as error:
        fault = str(error)
    except Exception as error:  # noqa: BLE001 - as above
        run.torch.intact = False
        fault = described(error, f"the update of step {number}")
    refuse_if_any(ranks, fault, run if updated else None)


def _add_gradients(run: Run, gradients: Sequence[Tensor], ranks: Ranks, own_norm: Tensor | None) -> Tensor | None:
    """Adds the gradients over the ranks, unless the backward pass has done so already.

    `own_norm` is that of this rank's slices, if these are of all weights. Returns the joint norm of slices, or None without
    any.
    """
    if run.torch.shards is None:
        ranks.add(gradients)
        return None
    if own_norm is not None:
        return ranks.norm(own_norm)
    group = run.torch.shards.experts
    assert group is not None
    named = list(zip(run.torch.optimizer.parameters, gradients, strict=True))
    experts = [gradient for name, gradient in named if name in run.torch.shards.rows]
    whole = [gradient for name, gradient in named if name not in run.torch.shards.rows]
    ranks.add(whole)
    if group.copies > 1:
        ranks.add(experts, group.peers)
    norms = ranks.norm(get_total_norm(experts), group.group), get_total_norm(whole)
    return torch.linalg.vector_norm(torch.stack(norms))


def _apply(step: Contribution, counted: Sequence[Contribution], norm: Tensor | None, values: UpdateValues) -> None:
    """Updates from sums and gradients that are the same on all ranks, or from this rank's slices of them and their joint `norm`.

    The host waits for the device here, and nowhere else in a pass. `counted` are the contributions whose sums are not read yet.
    Raises `InvalidBatch` before anything has changed.
    """
    run, number = step.run, step.batch.step
    norm = run.torch.optimizer.gradient_norm() if norm is None else norm
    *losses, length = read(counted, norm)
    _check_losses(counted, losses)
    if not math.isfinite(length):
        raise InvalidBatch(f"the gradient of step {number} is not finite (norm {length}); the weights are unchanged")
    run.torch.optimizer.step(norm, values)
    step.ended.norms.append(length)


def _check_losses(steps: Sequence[Contribution], losses: Sequence[float]) -> None:
    for step, loss in zip(steps, losses, strict=True):
        if not math.isfinite(loss):
            raise InvalidBatch(
                f"the loss of step {step.batch.step} is not finite: training.loss.kind = {step.loss_config.kind!r} returned what "
                "is no number, or the run's weights or log-probabilities are broken"
            )


def refuse_if_any(ranks: Ranks, fault: str | None, updated: Run | None = None) -> None:
    """Raises `InvalidBatch` on every rank if any has a fault. `updated` is the run, if this rank has updated it."""
    if faults := ranks.faults(fault):
        if updated is not None:
            updated.torch.intact = False
        raise InvalidBatch("; ".join(dict.fromkeys(faults)))


def described(error: Exception, what: str) -> str:
    """Returns the message of a fault. Raises `error` if nothing works after it."""
    if is_fatal(error):
        raise error
    logger.warning("%s failed", what, exc_info=error)
    return f"{what} failed: {type(error).__name__}: {error}{advice_on(error)}"


def _metrics(steps: Sequence[Contribution]) -> dict[str, MetricValue]:
    """Returns the metrics of contributions together: the means that all of them have, over their trained tokens."""
    means = [name for name in steps[0].means if all(name in step.means for step in steps)]
    names = sorted({name for step in steps for name in step.environments})
    sums_EM = torch.zeros(len(names), len(means) + 2, dtype=torch.float64)
    highest_E = torch.zeros(len(names), dtype=torch.float64)
    for step in steps:
        chosen = [*map(step.means.index, means), -2, -1]
        for index, name in enumerate(step.environments):
            place = names.index(name)
            sums_EM[place] += step.ended.sums_EM[index, chosen]
            highest_E[place] = torch.maximum(highest_E[place], step.ended.highest_E[index])
    return _means(means, sums_EM, highest_E, names, steps[0].run.config.training.epochs)


def effective_sizes(steps: Sequence[Contribution]) -> dict[str, MetricValue]:
    """Returns the effective sample size of the importance weights p_trainer / p_inference, as a share of the trained tokens.

    It is (sum of w)^2 / (n * sum of w^2) (Kish, "Survey Sampling", 1965): of all tokens as `ess/mean`, and by the staleness of
    their samples as `ess/<lag>`. 1 where all weights are equal; the gradient's noise is that of so many fewer tokens.
    """
    sums: dict[str, list[float]] = {}
    for step in steps:
        for lag, of_lag in step.weights_by_lag().items():
            for name in ("mean", str(lag)):
                sums[name] = [a + b for a, b in zip(sums.get(name, (0.0, 0.0, 0.0)), of_lag, strict=True)]
    return {
        f"ess/{name}": weights * weights / (tokens * squares)
        for name, (tokens, weights, squares) in sorted(sums.items())
        if tokens and squares > 0
    }


def _weights(step: Contribution, inputs: LossInputs, samples: Sequence[int]) -> Tensor | None:
    """Returns the weight of each token in the loss, `[P]`, by its normalisation and as given, or None if all are 1."""
    weights_P, given_P = token_weights(step.loss_config, inputs), step.columns.of(WEIGHTS, samples)
    return weights_P if given_P is None else given_P if weights_P is None else weights_P * given_P


def _means(
    means: Sequence[str], sums_EM: Tensor, highest_E: Tensor, names: list[str], epochs: int
) -> dict[str, MetricValue]:
    """Returns the metrics of the whole step under their plain names, and of each environment under `<name>/<environment>`.

    Those of `WITH_AGGREGATE` are under `<name>/all`, too, beside their environments.

    Every trained token is in the sums once for each epoch. An environment's loss is that of its samples alone.
    """
    metrics: dict[str, MetricValue] = {}
    rows = [("", sums_EM.sum(0).tolist(), highest_E.max() if names else torch.zeros(()))]
    rows += [(f"/{name}", sums_EM[index].tolist(), highest_E[index]) for index, name in enumerate(names)]
    for suffix, (loss, *others, own_loss, count), highest in rows:
        tokens = max(count, 1.0)
        for name, value in zip(means, (own_loss if suffix else loss, *others), strict=True):
            base, slash, statistic = name.partition("/")
            metrics[f"{base}{suffix}{slash}{statistic}"] = value / tokens
        metrics[f"importance_ratio{suffix}/max"] = float(highest)
        metrics[f"tokens/trained{suffix}"] = int(count) // epochs
    return metrics | {f"{name}/{ALL}": metrics[name] for name in WITH_AGGREGATE}
