"""All that the trainer reads of a run's configuration: its id, its steps, and how it is trained.

`RunConfig` has these keys among its own; `counterpoint sft` makes one of its rows of data.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from counterpoint.run.loss import LossConfig
from counterpoint.run.teacher import TeacherConfig
from counterpoint.run.updates import ReferenceConfig, ValueHeadConfig
from counterpoint.transport.config import Config, Identifier, Seed

LARGEST_STEP = 2**53
"""Up to here a float holds every number of a step, and so do JSON and msgpack, which hold none of more than 64 bits."""


class LoraConfig(Config):
    """Train a LoRA adapter instead of full weights."""

    rank: int = Field(default=8, ge=1)
    """Rank of the adapter."""

    alpha: float = Field(default=16.0, gt=0)
    """Scale: the adapter's output is multiplied by alpha / rank."""

    target_modules: list[str] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    """Names of the linear layers with an adapter."""

    seed: Seed | None = None
    """Seed of a new adapter. Unset: the trainer's."""

    start_from: Annotated[Path, AfterValidator(Path.absolute)] | None = None
    """Directory of an adapter in PEFT's format, such as another run's `broadcast/step_N`, to begin with: of the same rank, alpha
    and layers, over the same model. The optimizer starts without state. Read at the run's first start only. Unset: a new
    adapter."""


class StartFrom(Config):
    """Another run of the same job, whose state a new run begins with: adapter and optimizer."""

    run: Identifier
    """Its id. It may have ended, as long as the trainer has its checkpoints."""

    step: int | None = Field(default=None, ge=1)
    """One of its durable steps. Unset: its newest when this run gets its slot."""

    schedule: bool = False
    """Continue from its position in the learning-rate schedule, too."""

    optimizer: bool = True
    """Take over the optimizer's state. False: the optimizer starts without."""


Beta = Annotated[float, Field(ge=0, lt=1)]


class TrainingConfig(Config):
    """How the trainer trains this run."""

    weight: float = Field(default=1.0, ge=0.01, le=100)
    """This run's share of a trainer that other runs use, too: tokens trained, relative to their weights."""

    optimizer: Literal["adamw", "sgd"] = "adamw"
    """The optimizer."""

    learning_rate: float = Field(default=1e-5, gt=0, allow_inf_nan=False)
    """Peak learning rate."""

    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW's betas."""

    momentum: Beta = 0.0
    """SGD's momentum."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of matrices: decoupled with AdamW, added to the gradient with SGD."""

    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are clipped to this global norm."""

    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or decreasing to zero at `steps`."""

    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up."""

    lora: LoraConfig | None = None
    """Train an adapter. Unset: all weights."""

    start_from: StartFrom | None = None
    """Begin with the adapter and the optimizer's state of another run of the job, of the same rank, alpha, layers and optimizer.
    Used at the run's first start only. Unset: a new adapter, or that of `lora.start_from`."""

    loss: LossConfig = LossConfig()
    """The loss."""

    updates_per_step: int = Field(default=1, ge=1, le=1024)
    """Updates of the weights in one step, `updates_per_step / epochs` of them on mini-batches of the step's samples in each
    epoch. Still one step for everything else: versions, schedule, checkpoints (docs/algorithm.md)."""

    epochs: int = Field(default=1, ge=1, le=1024)
    """How often each sample of a step is trained; `updates_per_step` is a multiple of it."""

    reference: ReferenceConfig | None = None
    """Compare the policy to one that stays as it is, in the loss or in the reward. Unset: no reference."""

    value_head: ValueHeadConfig | None = None
    """Estimate values, and compute advantages from rewards and values, as PPO does. Unset: the orchestrator's advantages."""

    checkpoint_interval: int = Field(default=10, ge=1)
    """Steps between the trainer's checkpoints. The orchestrator keeps batches until a checkpoint covers them."""

    keep_every: int | None = Field(default=None, ge=1)
    """Keep the checkpoints of each step that is a multiple of it, of trainer and orchestrator, besides the newest ones: a branch
    (docs/operations.md) can go on from it. Nothing removes them. Unset: the newest ones alone."""

    token_export: bool = False
    """Write every trained token with its probabilities to `trainer/tokens/` as JSON Lines, for debugging. It grows with each
    step, and nothing removes a file: delete them by hand."""

    @model_validator(mode="after")
    def _starts_once(self) -> TrainingConfig:
        if self.start_from is not None and (self.lora is None or self.lora.start_from is not None):
            raise ValueError("start_from takes [training.lora], without a start_from of its own: both give the adapter")
        return self

    @model_validator(mode="after")
    def _loss_has_what_it_compares_with(self) -> TrainingConfig:
        if self.loss.kl_coefficient and self.reference is None:
            raise ValueError(
                f"loss.kl_coefficient = {self.loss.kl_coefficient} without a reference policy; add [training.reference]"
            )
        return self

    @model_validator(mode="after")
    def _updates_fit(self) -> TrainingConfig:
        if self.updates_per_step % self.epochs:
            raise ValueError(
                f"updates_per_step = {self.updates_per_step} is not a multiple of epochs = {self.epochs}: every epoch has "
                f"the same mini-batches; set updates_per_step = {self.epochs * max(1, self.updates_per_step // self.epochs)}"
            )
        if self.updates_per_step > 1 and self.loss.kind == "reinforce":
            raise ValueError(
                f'updates_per_step = {self.updates_per_step} with loss.kind = "reinforce": that loss has no ratio, so it takes '
                "the samples as of the weights that are trained, and after the first update they are not; set "
                'updates_per_step = 1, or a kind with a ratio, such as "importance_ratio" or "ppo"'
            )
        return self

    def has_checkpoint(self, step: int) -> bool:
        """Whether the trainer writes a checkpoint of this step."""
        return step % self.checkpoint_interval == 0 or (self.keep_every is not None and step % self.keep_every == 0)

    @property
    def reference_is_start(self) -> bool:
        """Whether the reference policy is the model with the adapter that the run begins with."""
        starts = self.start_from is not None or (self.lora is not None and self.lora.start_from is not None)
        return starts and self.reference is not None and self.reference.model is None

    @property
    def has_penalty(self) -> bool:
        """Whether a term besides the advantage trains: a distance to the reference policy, or the entropy."""
        of_reward = self.reference is not None and self.reference.reward_coefficient > 0
        return of_reward or bool(self.loss.kl_coefficient) or bool(self.loss.entropy_coefficient)


def _no_file_of_the_trainer(run_id: str) -> str:
    if run_id in ("tokens", "checkpoints") or re.search(r"\.(json|jsonl|log)(\.|$)", run_id):
        raise ValueError(
            f"{run_id!r} is, or may be, the name of a file in trainer/, where the run has a directory; choose another"
        )
    return run_id


class TrainedRun(Config):
    """What the trainer reads of a run."""

    run_id: Annotated[Identifier, AfterValidator(_no_file_of_the_trainer)] = "default"
    """Names the run's directory, `run_<id>/`, and one in the trainer's, so it may be no name of the trainer's own files."""

    steps: int | None = Field(default=None, ge=1, le=LARGEST_STEP)
    """Training steps of the run. Unset: no end."""

    training: TrainingConfig = TrainingConfig()
    """Configuration for the trainer."""

    driven: bool = False
    """Whether a client asks for the run's items one by one (docs/tinker.md); its service sets this. A run with an orchestrator is
    none."""

    share: str | None = None
    """Runs of one name divide the rows of one run among them (docs/tinker.md); the service sets that of a client's key."""

    teacher: TeacherConfig | None = None
    """A served model whose log-probabilities of the policy's tokens the loss `distillation` uses. Unset: none."""

    trainer_timeout_seconds: float = Field(default=600.0, gt=0)
    """How long to wait at the start for a trainer that takes the run. One that goes away later is waited for without a limit of
    its own (see `stall_timeout_seconds`). The trainer of a run that is trained to its end waits as long for its orchestrator."""

    @model_validator(mode="after")
    def _ends_if_its_rate_does(self) -> TrainedRun:
        if self.steps is None and self.training.lr_schedule != "constant":
            raise ValueError(
                f"training.lr_schedule = {self.training.lr_schedule!r} decreases to zero at the last step, and steps is not set; "
                'set steps, or training.lr_schedule = "constant"'
            )
        return self

    @property
    def last_step(self) -> float:
        """The number of its last step; infinite without an end."""
        return math.inf if self.steps is None else self.steps
