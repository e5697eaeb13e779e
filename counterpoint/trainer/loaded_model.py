"""The model that a rank trains, with everything that is made anew when it is loaded again.

That is the replay of its router, its passes beside those of other ranks, how its samples are put into rows, and what a batch may
hold. A run of full weights changes the model, and adapters are put into it, so the learner loads it anew for a later run of full
weights.
"""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass

from torch import nn

from counterpoint.run.trained import LoraConfig
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.faults import ModelLost, is_fatal
from counterpoint.trainer.lora.multi_lora import apply_lora_to_model
from counterpoint.trainer.lora.targets import prove_layers
from counterpoint.trainer.model.compiled import compile_layers
from counterpoint.trainer.model.compiler import compilations, keep_to_own_cache
from counterpoint.trainer.model.head import compile_head
from counterpoint.trainer.model.load import load_model, trainable_parameters
from counterpoint.trainer.model.packing_proof import can_pack, can_share_prompts, prove_packing, prove_stretches
from counterpoint.trainer.model.passes import Passes
from counterpoint.trainer.model.recompute import checkpoint_layers
from counterpoint.trainer.model.router_replay import RouterReplay
from counterpoint.trainer.model.sharding import differentiate_inputs, local_parameters, rest
from counterpoint.trainer.model.text_part import text_config
from counterpoint.trainer.packer import ModelLimits
from counterpoint.trainer.ranks import Ranks
from counterpoint.trainer.rows import RankRows
from counterpoint.trainer.runs.manager import MultiRunManager

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class LoadedModel:
    """A model on this rank. Made by `load`; all ranks call its methods together."""

    config: TrainerConfig
    ranks: Ranks
    model: nn.Module
    replay: RouterReplay | None
    """None if the configuration switches it off."""
    passes: Passes | None
    """None where no rank depends on another one's passes."""
    rows: RankRows
    limits: ModelLimits
    trained_in_full: bool = False
    """Whether a run has changed its weights."""

    @classmethod
    def load(cls, config: TrainerConfig, ranks: Ranks) -> LoadedModel:
        """Loads this rank's part of the model, and proves what rows rely on.

        Raises:
            ValueError: the model cannot be loaded or trained, or its router cannot be replayed.
        """
        context = ranks.context
        shards = ranks.count if config.sharded else 1
        model = load_model(config.model, config.dtype, ranks.device, shards, ranks.experts)
        prove_packing(model)
        if context is not None:
            prove_stretches(model, context)
        prove_layers(model)
        if compiles := config.compiles(ranks.device.type):
            keep_to_own_cache()
            compilations.watch()
            compile_head(model)
        rest(model)
        replay = RouterReplay(model) if config.router_replay else None
        passes = None
        if config.divided or context is not None:
            agree = ranks.agree if config.divided else ranks.agree_on_row
            passes = Passes(model, agree, ranks.device, replay, context, (ranks.row, ranks.rows))
        rows = RankRows(config.row_tokens if can_pack(model) else 1, passes, ranks)
        if config.activation_checkpointing:
            given = config.activation_checkpointing
            checkpoint_layers(model, replay, None if given is True else given)
        # A compiled layer would be compiled anew for each other row of families.
        shares_prompts = can_share_prompts(model) and context is None and not compiles
        return cls(config, ranks, model, replay, passes, rows, _limits(config, model, replay, shares_prompts))

    def loaded_again(self, manager: MultiRunManager) -> LoadedModel:
        """Returns the model as it was given. First the memory of this one is given back, so it must not be used any more.

        `manager` has its layers with adapters; no slot has one. Raises `ModelLost`: there is none now.
        """
        manager.forget_modules()
        del self.model, self.replay, self.passes, self.rows
        gc.collect()  # modules refer to one another
        try:
            return LoadedModel.load(self.config, self.ranks)
        except Exception as error:
            if is_fatal(error):
                raise
            raise ModelLost(f"{self.config.model} cannot be loaded again: {error}") from error

    @property
    def _compiles(self) -> bool:
        return self.config.compiles(self.ranks.device.type)

    @property
    def is_as_loaded(self) -> bool:
        """Whether no run has changed it, and it has no adapters."""
        return not self.trained_in_full and bool(trainable_parameters(self.model))

    def train_in_full(self) -> dict[str, nn.Parameter]:
        """Prepares the model for a run of full weights; returns this rank's part of them by name."""
        if self._compiles:
            compile_layers(self.model, self.passes, self.ranks.context)
        self.trained_in_full = True
        return local_parameters(self.model) if self.config.divided else trainable_parameters(self.model)

    def add_adapters(self, manager: MultiRunManager, lora: LoraConfig) -> None:
        """Gives a run's target layers room for the adapters of every slot, and registers them with the manager."""
        together = self.config.divided or self.ranks.context is not None
        if (together or self._compiles) and trainable_parameters(self.model):
            differentiate_inputs(self.model)
        n_adapters = 2 * self.config.max_runs  # for the adapters that are kept, too
        manager.forget_modules()  # all anew, in the model's order, since the random numbers of a new adapter are drawn in it
        apply_lora_to_model(self.model, n_adapters, lora, self.config.max_lora_rank, manager)
        if self._compiles and together:
            logger.warning("compile = true: layers with adapters that ranks compute together are not compiled")
        elif self._compiles:
            compile_layers(self.model)


def _limits(config: TrainerConfig, model: nn.Module, replay: RouterReplay | None, shares_prompts: bool) -> ModelLimits:
    return ModelLimits(
        vocabulary=text_config(model).vocab_size,
        max_tokens=config.row_tokens,
        layers=replay.layers if replay else 0,
        experts=replay.experts if replay else 0,
        top_k=replay.top_k if replay else 0,
        shares_prompts=shares_prompts,
    )
