"""Configuration of what surrounds a run's loss: the reference policy and the value head (`docs/algorithm.md`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from counterpoint.transport.config import Config


class ReferenceConfig(Config):
    """A policy that stays as it is, to which the trained one is compared.

    Its log-probabilities of the trained tokens are one of the loss's inputs.
    """

    model: Annotated[Path, AfterValidator(Path.absolute)] | None = None
    """Directory of its weights, with the vocabulary of the trained model. Unset: the policy that the run begins with. With an
    adapter that is the model under it, or with `start_from` the model and that adapter; both take no memory for a model."""

    reward_coefficient: float = Field(default=0.0, ge=0)
    """Times log p_old - log p_reference of a trained token, this is subtracted from the token's advantage; with a value head,
    from its reward. 0: the reference is used by the loss alone."""


class ValueHeadConfig(Config):
    """Estimate the value of each trained token by a linear head on the last hidden state, as PPO does.

    Advantages are then computed by generalised advantage estimation (GAE); those of the orchestrator are not used.
    """

    discount: float = Field(default=1.0, gt=0, le=1)
    """GAE's gamma, per trained token."""

    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """GAE's lambda: 1 weighs what was rewarded, 0 the estimates alone."""

    whiten: bool = True
    """Shift and scale the advantages of a step to mean 0 and deviation 1 over its trained tokens."""

    clip: float = Field(default=0.2, gt=0)
    """An estimate further than this from the one before the step has no gradient that leads away further."""

    coefficient: float = Field(default=0.1, gt=0)
    """Weight of the value loss beside the policy's."""
