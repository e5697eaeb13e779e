"""The built-in losses by name, and how a run's loss is loaded from its configuration.

A step's loss is the sum over its tokens divided by the number of trained tokens of the whole step, masked ones included, so
that it depends neither on how the step was packed nor on how many ranks trained it.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from run.config import LossConfig
from trainer.losses.contract import Loss
from trainer.losses.custom import load_custom
from trainer.losses.distillation import distillation
from trainer.losses.importance_ratio import importance_ratio
from trainer.losses.sft import sft


def load_loss(config: LossConfig, given: Collection[str] = ()) -> Loss:
    """Loads the loss that a run's configuration names.

    A custom loss, `module:function`, is called with `LossInputs` and the configuration's `args` as keywords, and returns
    `LossOutputs`. It is called once here, with a made-up batch, which has the optional inputs that are `given`.

    Raises:
        ValueError: there is no such loss, it does not take these arguments, or it fails with the made-up batch.
    """
    if config.kind == "importance_ratio":
        low, high, clip = config.ratio_low, config.ratio_high, config.ratio_clip
        return Loss(partial(importance_ratio, ratio_low=low, ratio_high=high, ratio_clip=clip))
    if config.kind == "distillation":
        low, high, clip = config.ratio_low, config.ratio_high, config.ratio_clip
        function = partial(distillation, ratio_low=low, ratio_high=high, ratio_clip=clip)
        return Loss(partial(function, reward_coefficient=config.reward_coefficient), ("reverse_kl",))
    if config.kind == "sft":
        return Loss(sft)
    return load_custom(config.kind, config.args, given)
