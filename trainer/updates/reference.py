"""The reference policy of a run: the base under its adapter, or weights of their own, loaded once and never trained.

The base costs a forward pass without adapters over the samples of the runs that ask for it, in a row of their own, so the other
runs of a row pay nothing. A mixture routes by itself here, without the recorded experts: those are the choice of another policy.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from run.config import TrainingConfig
from trainer.model.load import load_model
from trainer.model.packing_proof import prove_packing


class References:
    """The reference models of one rank, each loaded once however many runs use it."""

    def __init__(self, given: str, dtype: str, device: torch.device) -> None:
        """Loads models in `dtype` onto `device`; `given` is the directory of the model that is trained."""
        self._given = given
        self._dtype = dtype
        self._device = device
        self._models: dict[Path, nn.Module] = {}
        self._used: dict[int, Path] = {}
        """By slot."""

    def open(self, slot: int, config: TrainingConfig, vocabulary: int) -> nn.Module | None:
        """Returns the model of a run's reference, in evaluation mode; None if it has none, or it is the base under its adapter.

        Raises:
            ValueError: there is no such model, it cannot be used, or it has another vocabulary.
        """
        self.close(slot)
        if config.reference is None or (config.reference.model is None and config.lora is not None):
            return None
        path = config.reference.model or Path(self._given)
        if path not in self._models:
            model = load_model(path, self._dtype, self._device).requires_grad_(False)
            if (found := int(model.config.vocab_size)) != vocabulary:
                raise ValueError(
                    f"training.reference.model = {str(path)!r} has a vocabulary of {found} tokens; expected {vocabulary}, as "
                    "that of the trained model"
                )
            prove_packing(model)
            self._models[path] = model
        self._used[slot] = path
        return self._models[path]

    @property
    def models(self) -> list[nn.Module]:
        """The models in use, in the same order on every rank."""
        return list(self._models.values())

    def close(self, slot: int) -> None:
        """Releases the reference of the run in a slot, and the memory of a model that no other run uses."""
        path = self._used.pop(slot, None)
        if path is not None and path not in self._used.values():
            del self._models[path]
