"""Splits the mismatch of a recorded step: computes its tokens again by each version of the weights that sampled them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct, field

from counterpoint.trainer.again.causes import explain, samples_of
from counterpoint.trainer.again.computed import computed, in_float32
from counterpoint.trainer.again.kept import NotKept, find, metrics_line
from counterpoint.trainer.again.learner import RunAgain
from counterpoint.trainer.again.outliers import Codes, TokenGroups
from counterpoint.trainer.again.split import ALL, Computed, Split, divergence, split
from counterpoint.trainer.again.weights import VersionFiles
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.packer import InvalidBatch
from counterpoint.transport.records import Batch

logger = logging.getLogger(__name__)


Count = Annotated[int, Meta(ge=0, lt=2**31)]


class PlayedTurn(Struct):
    """What is read of a turn in a record."""

    server: str = ""
    load: str = ""
    policy_version: Count = 0
    prompt_tokens: Count = 0
    """Its completion follows them in its sample."""
    completion_tokens: Count = 0
    untrained_tokens: Count = 0


class PlayedSampling(Struct):
    """What is read of how a rollout was sampled: what cuts tokens off."""

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


class PlayedRollout(Struct):
    """What is read of a rollout's record."""

    rollout_id: str
    turns: list[PlayedTurn] = []
    sampling_args: PlayedSampling = field(default_factory=PlayedSampling)

    @property
    def truncated(self) -> bool:
        """Whether tokens were cut off. Of `top_k` 0 means none, and -1 does to vLLM."""
        given = self.sampling_args
        return given.top_p < 1 or given.top_k > 0 or given.min_p > 0


def split_step(
    config: TrainerConfig, output_dir: Path, run_id: str, step: int, played: Sequence[PlayedRollout], directory: Path
) -> Split:
    """Splits the mismatch of a recorded step. `directory` is an empty one to work in; `played` is empty if the records are gone.

    Raises `NotKept` or `BeingWritten`, `OSError`, and `ValueError` if the model cannot be loaded.
    """
    nbytes = config.transport.max_batch_bytes
    kept = find(output_dir, run_id, step, nbytes)
    batch = kept.batch(step)
    if not batch.loss_mask_T.any():
        raise NotKept(f"step {step} of run {run_id} has no trained token, so no mismatch")
    groups = groups_of(batch, played)
    kept = find(output_dir, run_id, step, nbytes, at_most=max(0, int(groups.codes["version"].min()) - 1))
    again = RunAgain(config, kept, directory)
    files = VersionFiles(again, directory, step - kept.first)
    found = _computed(again, batch, groups, files)
    recorded = (metrics_line(kept) or {}).get("mismatch_kl")
    now, training = float(divergence(found.now_P, found.inference_P).mean()), again.run.config.training
    result = Split(run_id, step, len(found.now_P), recorded, now, several_updates=training.updates_per_step > 1)
    result.truncated = any(each.truncated for each in played) if played else None
    result.adapter = "" if training.lora is None else f"the adapter of run {run_id}"
    faulty_P = split(result, found)
    if (fault := result.fault) is not None:
        result.untried = files.lacking
        if not files.lacking:
            fault = explain(again, batch, fault, faulty_P, found, files)
        result.put_fault(None if fault.key == ALL and not fault.explanation else fault)
    return result


def _computed(again: RunAgain, batch: Batch, groups: TokenGroups, files: VersionFiles) -> Computed:
    """Trains up to the step before, and computes each token with its version on the way. Raises `NotKept`."""
    first, step, of_sample_P = again.kept.first, batch.step, samples_of(batch)
    inference_P = batch.columns["log_probabilities_T"][batch.loss_mask_T != 0].astype(np.float64)
    now_P, then_P, exact_P = (np.full(len(inference_P), np.nan) for _ in range(3))
    try:
        for version in range(first, step):
            logger.info("computing step %d of run %s with version %d", step, batch.run_id, version)
            sampled_P = groups.codes["version"] == version
            if sampled_P.any():
                # With the newest version as in training, in whole rows.
                samples = None if version == step - 1 else set(of_sample_P[sampled_P].tolist())
                own_P = computed(again, batch, samples)
                with in_float32(again.learner.loaded.model) as changed:
                    exact_P[sampled_P] = (computed(again, batch, samples) if changed else own_P)[sampled_P]
                then_P[sampled_P] = own_P[sampled_P]
            if version == step - 1:
                now_P = own_P if sampled_P.any() else computed(again, batch)
            files.keep(version)
            if version < step - 1:
                again.train(again.kept.batch(version + 1))
    except InvalidBatch as error:
        raise NotKept(f"step {step} of run {batch.run_id} cannot be computed again: {error}") from error
    temperature_P = np.array([sample.temperature for sample in batch.samples])[of_sample_P]
    return Computed(inference_P, now_P, then_P, exact_P, temperature_P, groups)


def groups_of(batch: Batch, played: Sequence[PlayedRollout]) -> TokenGroups:
    """Returns the groups of each trained token. Where no turn or several ones fit, server, load and position are unknown."""
    lengths_S = np.diff(batch.sample_offsets)
    names: dict[str, dict[str, int]] = {}

    def code(key: str, name: str) -> int:
        known = names.setdefault(key, {})
        return known.setdefault(name, len(known)) if name else -1

    of_samples = {
        "version": [sample.policy_version for sample in batch.samples],
        "environment": [code("environment", sample.environment) for sample in batch.samples],
        "temperature": [code("temperature", f"{sample.temperature:g}") for sample in batch.samples],
        "rollout": [code("rollout", sample.rollout_id) for sample in batch.samples],
    }
    codes: dict[str, Codes] = {
        key: np.repeat(np.array(values, np.int32), lengths_S) for key, values in of_samples.items()
    }
    codes |= {key: np.full(len(batch.token_ids_T), -1, np.int32) for key in ("server", "load", "position")}
    for turn, place in _placed(batch, played):
        codes["version"][place] = turn.policy_version
        codes["server"][place] = code("server", turn.server)
        codes["load"][place] = code("load", turn.load and f"{turn.load} of server {turn.server}")
        codes["position"][place] = np.arange(turn.completion_tokens)
    codes |= {"lag": batch.step - codes["version"], "context": _contexts(batch)}
    trained_T = batch.loss_mask_T != 0
    found = {key: code_T[trained_T] for key, code_T in codes.items()}
    return TokenGroups(found, {key: list(known) for key, known in names.items()})


def _placed(batch: Batch, played: Sequence[PlayedRollout]) -> Iterator[tuple[PlayedTurn, slice]]:
    """Yields each turn with the place of its completion in the batch, if just one sample of its rollout has such a one."""
    samples: dict[str, list[int]] = {}
    for index, sample in enumerate(batch.samples):
        samples.setdefault(sample.rollout_id, []).append(index)
    offsets, mask_T = batch.sample_offsets.tolist(), batch.loss_mask_T
    for rollout in played:
        for turn in rollout.turns:
            trained, places = turn.completion_tokens - turn.untrained_tokens, []
            for index in samples.get(rollout.rollout_id, ()):
                start = offsets[index] + turn.prompt_tokens
                end, last = start + turn.completion_tokens, offsets[index + 1]
                # Another turn's prompt follows, or nothing.
                if end <= last and np.count_nonzero(mask_T[start:end]) == trained and not mask_T[end:last][:1].any():
                    places.append(slice(start, end))
            if len(places) == 1:
                yield turn, places[0]


def _contexts(batch: Batch) -> npt.NDArray[np.int64]:
    """Returns a hash of the tokens of its sample up to each token and with it, `[T]`: a polynomial modulo 2^64."""
    lengths_S = np.diff(batch.sample_offsets)
    powers = np.cumprod(np.full(int(lengths_S.max()), 0x9E3779B97F4A7C15, np.uint64))
    powers_T = np.concatenate([powers[:length] for length in lengths_S])
    sums_T = np.cumsum((batch.token_ids_T.astype(np.uint64) + np.uint64(1)) * powers_T)
    before_S = np.concatenate((np.zeros(1, np.uint64), sums_T))[batch.sample_offsets[:-1]]
    return (sums_T - np.repeat(before_S, lengths_S)).view(np.int64)
