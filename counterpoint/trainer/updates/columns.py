"""Columns over all tokens of a batch: what is measured, given, or returned of each token.

A rank fills in the samples that it has in a row, and the ranks' columns are added, so that every rank may then train any sample.
Columns are float32 `[T]` on the device, 0 where no token is trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from counterpoint.run.trained import TrainingConfig
from counterpoint.trainer.model.without_waiting import on_device
from counterpoint.trainer.updates.advantages import estimate, penalty
from counterpoint.trainer.updates.passes import OLD, REFERENCE, VALUES
from counterpoint.transport.records import REWARDS, Batch


def trained_positions(batch: Batch, samples: Sequence[int]) -> Tensor:
    """Returns the positions in the batch of the trained tokens of `samples`, int64 `[P]`, in the order of a row of these."""
    starts = [int(batch.sample_offsets[sample]) for sample in samples]
    ends = [int(batch.sample_offsets[sample + 1]) for sample in samples]
    found = [start + np.flatnonzero(batch.loss_mask_T[start:end]) for start, end in zip(starts, ends, strict=True)]
    return torch.from_numpy(np.concatenate(found))


class Columns:
    """The measured and the returned columns of one contribution."""

    def __init__(
        self,
        batch: Batch,
        names: Sequence[str],
        device: torch.device,
        results: Sequence[str] = (),
        given: Mapping[str, Tensor] | None = None,
        width: int = 1,
    ) -> None:
        """Begins with zeros: those of `names` are measured, `results` returned. `given` stay as they are.

        The first result has `width` values of each token, `[T, width]`, where these are several.
        """
        self.batch = batch
        self._device = device
        self.names = tuple(names)
        self.measured = {name: torch.zeros(len(batch.token_ids_T), device=device) for name in names}
        self._given = {name: column_T.to(device) for name, column_T in (given or {}).items()}
        self.results = {name: torch.zeros(len(batch.token_ids_T), device=device) for name in results}
        if results and width > 1:
            self.results[results[0]] = torch.zeros(len(batch.token_ids_T), width, device=device)
        self.advantages: Tensor | None = None
        """The advantages in place of the batch's, once `conclude` has computed them; None where the batch's are used."""
        self.returns: Tensor | None = None
        """What the value head learns."""

    def clear(self, measured: Sequence[int] | None = None) -> None:
        """Drops what this rank has measured of these samples, or else, with None, what it has to return."""
        for column_T in self.results.values() if measured is None else ():
            column_T.zero_()
        for name in self.measured if measured else ():
            self.put(name, measured or (), torch.zeros(()))

    def put(self, name: str, samples: Sequence[int], values_P: Tensor) -> None:
        """Fills in the trained tokens of `samples`, in the order of a row of these."""
        positions = on_device(trained_positions(self.batch, samples), self._device)
        (self.measured if name in self.measured else self.results)[name][positions] = values_P.detach().float()

    def of(self, name: str, samples: Sequence[int]) -> Tensor | None:
        """Returns a column's values of the trained tokens of `samples`, `[P]` or `[P, K]`; None if there is no such column."""
        return self._chosen(self.measured.get(name, self._given.get(name)), samples)

    def advantages_of(self, samples: Sequence[int]) -> Tensor | None:
        """Returns the advantages of the trained tokens of `samples`; None where the batch's are used."""
        return self._chosen(self.advantages, samples)

    def values_of(self, samples: Sequence[int]) -> tuple[Tensor | None, Tensor | None]:
        """Returns the estimates before the step and what the value head learns, of the trained tokens of `samples`."""
        return self.of(VALUES, samples), self._chosen(self.returns, samples)

    def _chosen(self, column_T: Tensor | None, samples: Sequence[int]) -> Tensor | None:
        return None if column_T is None else column_T[on_device(trained_positions(self.batch, samples), self._device)]

    def conclude(self, config: TrainingConfig, samples: Sequence[int]) -> None:
        """Computes the advantages that the trainer gives the samples, once the columns are added over the ranks."""
        measured = {name: column_T.cpu() for name, column_T in self.measured.items()}
        coefficient = config.reference.reward_coefficient if config.reference is not None else 0.0
        penalty_T = penalty(coefficient, measured[OLD], measured[REFERENCE]) if coefficient else None
        if config.value_head is not None:
            positions = [trained_positions(self.batch, [sample]) for sample in samples]
            rewards_T = _rewards(self.batch, samples, positions)
            advantages_T, returns_T = estimate(config.value_head, positions, rewards_T, measured[VALUES], penalty_T)
            self.advantages = advantages_T.float().to(self._device)
            self.returns = returns_T.float().to(self._device)
        elif penalty_T is not None:
            given_T = torch.from_numpy(self.batch.advantages_T.astype(np.float64))
            self.advantages = (given_T - penalty_T).float().to(self._device)


def _rewards(batch: Batch, samples: Sequence[int], positions: Sequence[Tensor]) -> Tensor:
    """Returns the rewards of the batch's tokens, `[T]`: those of turns, or else each sample's at its last trained token."""
    if REWARDS in batch.columns:
        return torch.from_numpy(batch.columns[REWARDS].astype(np.float64))
    rewards_T = torch.zeros(len(batch.token_ids_T), dtype=torch.float64)
    for sample, own in zip(samples, positions, strict=True):
        rewards_T[own[-1]] = batch.samples[sample].reward
    return rewards_T
