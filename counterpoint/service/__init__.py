"""The service: a daemon of many driven runs. Its clients ask for contributions, updates, saves and samples one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from counterpoint.public_names import public_names

if TYPE_CHECKING:
    from counterpoint.inference.base import SamplingParameters as SamplingParameters
    from counterpoint.run.items import AdamW as AdamW
    from counterpoint.run.items import Objective as Objective
    from counterpoint.run.items import Sgd as Sgd
    from counterpoint.run.trained import LoraConfig as LoraConfig
    from counterpoint.run.trained import TrainedRun as TrainedRun
    from counterpoint.run.trained import TrainingConfig as TrainingConfig
    from counterpoint.service.beside import LiveJob as LiveJob
    from counterpoint.service.runs import DrivenRun as DrivenRun
    from counterpoint.service.runs import ItemFailed as ItemFailed
    from counterpoint.service.runs import RunLost as RunLost
    from counterpoint.service.samplers import Samplers as Samplers
    from counterpoint.transport.records import Batch as Batch
    from counterpoint.transport.records import SampleInfo as SampleInfo
else:
    __all__, __getattr__, __dir__ = public_names(__name__)
