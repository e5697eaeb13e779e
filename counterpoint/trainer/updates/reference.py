"""The reference policy of a run: the policy that it begins with, or weights of their own, loaded once and never trained.

A run with an adapter begins with the base under it, or with the base and another adapter, of which the layers keep a second copy
(`counterpoint/trainer/runs/manager.py: keep_adapter`). Both cost a forward pass over the samples of the runs that ask for it, in
a row of their own, so the other runs of a row pay nothing. A mixture routes by itself here, without the recorded experts: those
are the choice of another policy.
"""

from __future__ import annotations

from pathlib import Path

from torch import nn

from counterpoint.run.trained import TrainingConfig
from counterpoint.trainer.faults import is_fatal
from counterpoint.trainer.model.load import load_model
from counterpoint.trainer.model.packing_proof import prove_packing
from counterpoint.trainer.model.sharding import rest
from counterpoint.trainer.model.text_part import text_config
from counterpoint.trainer.ranks import Ranks


class References:
    """The reference models of one rank, each loaded once however many runs use it."""

    def __init__(self, given: str, dtype: str, ranks: Ranks, *, sharded: bool) -> None:
        """Loads models in `dtype`; `given` is the directory of the model that is trained.

        `sharded`: each rank stores a slice of every weight, as of the model that is trained.
        """
        self._given = given
        self._dtype = dtype
        self._ranks = ranks
        self._sharded = sharded
        self._models: dict[Path, nn.Module] = {}
        self._used: dict[int, Path] = {}
        """The references in use, by slot."""

    def open(self, slot: int, config: TrainingConfig, vocabulary: int) -> nn.Module | None:
        """Returns the model of a run's reference, in evaluation mode; None if it has none, or it is the model that is trained.

        Every rank calls it, for the same run.

        Raises:
            ValueError: on every rank; there is no such model, it cannot be used, or it has another vocabulary.
        """
        self.close(slot)
        if config.reference is None or (config.reference.model is None and config.lora is not None):
            return None
        path = config.reference.model or Path(self._given)
        if path not in self._models:
            self._models[path] = self._load(path, vocabulary)
        self._used[slot] = path
        return self._models[path]

    def _load(self, path: Path, vocabulary: int) -> nn.Module:
        model, fault = None, None
        try:
            model = load_model(path, self._dtype, self._ranks.device, self._ranks.count if self._sharded else 1)
            if (found := int(text_config(model).vocab_size)) != vocabulary:
                fault = (
                    f"training.reference.model = {str(path)!r} has a vocabulary of {found} tokens; expected {vocabulary}, as "
                    "that of the trained model"
                )
        except ValueError as error:
            fault = str(error)
        except Exception as error:  # a lack of memory
            if is_fatal(error):
                raise
            fault = f"the reference {str(path)!r} cannot be loaded: {type(error).__name__}: {error}"
        # Before the first forward pass: a rank would wait in it for one that has no model.
        if faults := self._ranks.faults(fault):
            raise ValueError("; ".join(dict.fromkeys(faults)))
        assert model is not None
        prove_packing(model.requires_grad_(False))
        rest(model)
        return model

    @property
    def models(self) -> list[nn.Module]:
        """The models in use, in the same order on every rank."""
        return list(self._models.values())

    def close(self, slot: int) -> None:
        """Releases the reference of the run in a slot, and the memory of a model that no other run uses."""
        path = self._used.pop(slot, None)
        if path is not None and path not in self._used.values():
            del self._models[path]
