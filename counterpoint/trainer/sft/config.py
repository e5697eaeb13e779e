"""Configuration of `counterpoint sft`: a model, conversations, and how it is trained on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from counterpoint.environments.data.config import DataConfig
from counterpoint.run.trained import TrainedRun, TrainingConfig
from counterpoint.trainer.config import TrainerConfig
from counterpoint.transport.config import Config, Identifier, Seed

ENVIRONMENT = "sft"
"""Stands for the data in batches."""

_OF_ROLLOUTS = (
    "environments", "sampling", "schedule", "advantage", "filters", "inference", "opponents", "teacher", "evaluations",
)  # fmt: skip
_WITHOUT_MEANING = {
    "weight": "no other run shares the trainer",
    "start_from": "there is no other run; set model, or lora.start_from",
    "loss": "the loss is the negative log-likelihood",
    "updates_per_step": "a step is one update; set samples_per_step",
    "epochs": "set epochs at the top",
    "reference": "the loss has no reference",
    "value_head": "there is no reward",
}
"""Keys of `[training]`, and why they are refused."""
_FIXED = ("output_dir", "model", "seed", "resume")
_TRAINER_WITHOUT_MEANING = {
    "nodes": 1,
    "max_runs": 1,
    "stay": False,
}


class SftConfig(Config):
    """Supervised fine-tuning of one model on conversations."""

    output_dir: Path
    """The directory of everything that it writes."""

    model: str
    """A local directory, a hub name, or a model that `make-model` builds."""

    run_id: Identifier = "sft"
    """Names the run's directory, `run_<id>/`, whose `broadcast/step_N` hold the weights."""

    seed: Seed = 0
    """Seed of the order of the rows, and of a new adapter."""

    resume: bool = False
    """Continue from the newest checkpoint. False: the directory must not hold one yet."""

    data: DataConfig
    """The rows. Each has `messages`, a list of `{role, content}`, and may have `tools`."""

    epochs: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """How often each row is trained; each epoch has an order of its own."""

    samples_per_step: int = Field(default=32, ge=1)
    """Rows of one step."""

    on_long: Literal["truncate", "drop", "error"] = "truncate"
    """What to do with a conversation of more tokens than `max_length`; "error" looks for one before the training begins."""

    max_length: int | None = Field(default=None, ge=2)
    """Most tokens of a conversation. Unset: those of a row, `trainer.max_tokens` times `trainer.context_parallel`."""

    chat_template_kwargs: dict[str, Any] = {}
    """Further variables for the chat template."""

    training: TrainingConfig = TrainingConfig()
    """Optimizer, learning rate, adapter, checkpoints."""

    trainer: TrainerConfig = TrainerConfig(output_dir=Path(), model="")
    """The trainer's processes."""

    @model_validator(mode="before")
    @classmethod
    def _fill_trainer(cls, given: Any) -> Any:
        """Copies what is set once at the top, and names what belongs to rollouts."""
        if not isinstance(given, dict):
            return given
        if wrong := [name for name in _OF_ROLLOUTS if name in given]:
            raise ValueError(
                f"[{wrong[0]}] is about rollouts, and counterpoint sft makes none; remove it, or use counterpoint run"
            )
        section = given.get("trainer", {})
        if not isinstance(section, dict):
            return given
        for name in _FIXED:
            if name in section and section[name] != given.get(name, section[name]):
                raise ValueError(f"trainer.{name}: {name} is set once, at the top")
        shared = {name: given[name] for name in _FIXED if name in given}
        # The top reports what is missing there.
        return {**given, "trainer": {"output_dir": "", "model": "", **section, **shared}}

    @model_validator(mode="after")
    def _has_a_meaning(self) -> SftConfig:
        for name, why in _WITHOUT_MEANING.items():
            default = TrainingConfig.model_fields[name].get_default(call_default_factory=True)
            if getattr(self.training, name) != default:
                raise ValueError(f"training.{name} has no meaning for counterpoint sft: {why}; remove it")
        for name, only in _TRAINER_WITHOUT_MEANING.items():
            if getattr(self.trainer, name) != only:
                raise ValueError(
                    f"trainer.{name} = {getattr(self.trainer, name)}: counterpoint sft trains one run on one machine; remove it"
                )
        if self.max_length is not None and self.max_length > self.trainer.row_tokens:
            raise ValueError(
                f"max_length = {self.max_length} is more than trainer.max_tokens = {self.trainer.max_tokens} times "
                f"context_parallel = {self.trainer.context_parallel}, the most tokens of a row; lower it, or raise one of these"
            )
        return self

    @property
    def longest(self) -> int:
        """Most tokens of a conversation."""
        return self.max_length or self.trainer.row_tokens

    @property
    def of_trainer(self) -> TrainerConfig:
        """The configuration of each rank of the trainer: of `model`, which may have been resolved since, and without replay."""
        return self.trainer.model_copy(update={"model": self.model, "router_replay": False})

    def run(self, steps: int) -> TrainedRun:
        """Returns the run of `steps` steps, as the trainer reads it."""
        training = self.training.model_dump(exclude_unset=True, exclude={"loss"}) | {"loss": {"kind": "sft"}}
        return TrainedRun.model_validate({"run_id": self.run_id, "steps": steps, "training": training})
