"""Finds what would explain tokens that stand out: other weights, or another temperature, than those recorded.

Each suspicion is computed in float32 for a few of these tokens, and the one under which they agree best is named.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from counterpoint.trainer.again.computed import computed, in_float32
from counterpoint.trainer.again.learner import RunAgain
from counterpoint.trainer.again.split import Computed, Fault, divergence
from counterpoint.trainer.again.weights import VersionFiles
from counterpoint.trainer.lora.adapter_file import load_adapter
from counterpoint.trainer.runs import control_files
from counterpoint.transport.files.atomic import published_steps
from counterpoint.transport.records import Batch

Suspect = TypeVar("Suspect")

logger = logging.getLogger(__name__)

MOST_SAMPLES = 8
"""Samples that are computed for each suspicion."""

MOST_TRIED = 128
"""Suspicions of a kind at most: other versions, layers of older versions, and adapters of other runs. The newest are
tried."""

EXPLAINED = 0.1
"""The share that an explanation may leave of the difference by which these tokens exceed all others."""

_COARSE, _FINE = np.linspace(-1.0, 1.0, 9), 12
"""Logarithms to base 2 of the factors of the temperature that are tried first, and the steps of the search after that."""


def explain(
    again: RunAgain,
    batch: Batch,
    fault: Fault,
    faulty_P: npt.NDArray[np.bool_],
    found: Computed,
    files: VersionFiles,
) -> Fault:
    """Returns the fault with what explains it, if anything does.

    Args:
        again: the run, whose weights are changed.
        batch: of the step.
        fault: the tokens that stand out.
        faulty_P: which these are. Those of the version with the most are looked into.
        found: the step's log-probabilities.
        files: of the weights of each version that is known.
    """
    version_P = found.groups.codes["version"]
    version = int(np.bincount(version_P[faulty_P]).argmax())
    of_sample_P = samples_of(batch)
    chosen_P = faulty_P & (version_P == version)
    samples = np.unique(of_sample_P[chosen_P])[:MOST_SAMPLES].tolist()
    chosen_P &= np.isin(of_sample_P, samples)

    def left(temperature: float = 1.0) -> float:
        """The excess of these tokens by the model's weights as they are, at so many times their temperature."""
        given = tuple(replace(each, temperature=each.temperature * temperature) for each in batch.samples)
        values_P = computed(again, replace(batch, samples=given), samples)
        return float(divergence(values_P, found.inference_P)[chosen_P].mean()) - fault.others

    before = float(divergence(found.exact_P, found.inference_P)[chosen_P].mean()) - fault.others
    best, least = "", EXPLAINED * before
    temperatures = sorted({batch.samples[each].temperature for each in samples})
    with in_float32(again.learner.loaded.model):
        for words, value in _suspicions(again, version, temperatures, left, files):
            if value < least:
                best, least = words, value
    return replace(fault, explanation=best)


def samples_of(batch: Batch) -> npt.NDArray[np.int64]:
    """Returns the index of the sample of each trained token, `[P]`."""
    return np.searchsorted(batch.sample_offsets, np.flatnonzero(batch.loss_mask_T), side="right") - 1


def _suspicions(
    again: RunAgain, version: int, temperatures: list[float], left: Callable[..., float], files: VersionFiles
) -> Iterator[tuple[str, float]]:
    """Yields each suspicion in words, with the excess of the tokens under it."""
    newest = sorted(files.versions, reverse=True)
    layers = files.layers if len(files.layers) > 1 else []
    others = _most("versions", [each for each in newest if each != version])
    older = [(each, layer) for each in newest if each < version for layer in layers]
    for other in others:
        files.put(other)
        yield f"they were sampled by the weights of version {other}, not {version}", left()
    files.put(version)
    power = _least(lambda power: left(2**power))
    times = f"{2**power:.3g} times their temperature"
    if len(temperatures) == 1:
        times = f"temperature {temperatures[0] * 2**power:.3g}, not {temperatures[0]:g}"
    yield f"they were sampled at {times}", left(2**power)
    for other, layer in _most("layers of older versions", older):
        files.put(other, layer)
        where = f"layer {layer}" if layer else "what is outside layers"
        yield f"{where} of the weights that sampled them was that of version {other}, not {version}", left()
        files.put(version, layer)
    if again.run.config.training.lora is not None:
        files.put_none()
        yield "they were sampled by the base model, without the adapter", left()
        yield from _other_adapters(again, left)


def _other_adapters(again: RunAgain, left: Callable[..., float]) -> Iterator[tuple[str, float]]:
    """Yields the suspicion of each adapter that the other runs of the job have published and still have."""
    output_dir, own, slot = again.kept.output_dir, again.run, again.run.slot
    assert own.config.training.lora is not None
    published = []
    for run_id in sorted(control_files.scan(output_dir).keys() - {own.run_id}):
        broadcasts = control_files.run_directory(output_dir, run_id) / "broadcast"
        published += [(version, run_id, broadcasts / f"step_{version}") for version in published_steps(broadcasts)]
    published.sort(key=lambda each: -each[0])
    for version, run_id, place in _most("adapters of other runs", published):
        try:
            load_adapter(
                lambda: again.learner.manager.get_state_dict_for_run(slot),
                own.config.training.lora,
                place,
            )
        except ValueError:  # of another shape: it cannot have sampled in the place of this one unseen
            continue
        yield f"they were sampled by the adapter of run {run_id}, version {version}", left()


def _most(kind: str, suspects: list[Suspect]) -> list[Suspect]:
    """Returns the first of the suspects, as many as are tried, and logs how many these are."""
    tried = suspects[:MOST_TRIED]
    logger.info("trying %d of %d %s, on up to %d samples each", len(tried), len(suspects), kind, MOST_SAMPLES)
    return tried


def _least(function: Callable[[float], float]) -> float:
    """Returns where a function is least: between the neighbours of the best coarse value, by ternary search."""
    values = [function(float(each)) for each in _COARSE]
    best = int(np.argmin(values))
    low, high = float(_COARSE[max(0, best - 1)]), float(_COARSE[min(len(_COARSE) - 1, best + 1)])
    for _ in range(_FINE):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, right) if function(left) < function(right) else (left, high)
    return (low + high) / 2
