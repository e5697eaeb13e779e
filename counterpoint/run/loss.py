"""Configuration of a run's loss: the keys of `[training.loss]`, and what each kind of loss sets them to.

`counterpoint/trainer/losses/objectives.py` computes the losses. A kind is a preset: it names the objective, and decides which
keys have a meaning and what they are unless set. A key without a meaning for the kind is refused. docs/algorithms.md has all in
one table.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field, model_validator

from counterpoint.transport.config import Config

RatioLevel = Literal["token", "sequence", "sequence_mean", "sequence_mean_token"]
Objective = Literal["clipped", "truncated", "softened", "proximal", "plain", "likelihood"]
"""The functions of `counterpoint/trainer/losses/objectives.py` that give what is maximised."""


@dataclass(frozen=True, slots=True)
class LossKind:
    """A built-in kind of loss."""

    objective: Objective
    keys: dict[str, Any]
    """The keys with a meaning for this kind beside `EVERY`, with their defaults."""
    advantage: str = "group_mean"
    """Default of `advantage.kind`."""
    overlong: bool = False
    """Whether `advantage.overlong` is set unless given."""
    changed: dict[str, Any] = field(default_factory=dict)
    """Other defaults of `EVERY`."""


EVERY: dict[str, Any] = {
    "normalisation": "token",
    "normalisation_length": None,
    "kl_coefficient": 0.0,
    "kl_estimator": "k3",
    "kl_weighted": False,
    "entropy_coefficient": 0.0,
}
"""Keys of every built-in kind, with their defaults."""

_CORRECTION = {
    "correction": "none",
    "correction_level": "token",
    "correction_low": None,
    "correction_high": None,
}
_RATIO = {"ratio_to": "inference", "ratio_level": "token", **_CORRECTION}
_CLIP = {**_RATIO, "clip_low": 0.2, "clip_high": 0.2, "clip_dual": None}
_TRUNCATE = {"ratio_level": "token", "ratio_low": None, "ratio_high": None}
_WITHIN_BOUNDS = {**_TRUNCATE, "ratio_clip": 2.0, "ratio_low": 0.125, "ratio_high": 8.0}
_BY_SAMPLE = {"normalisation": "sequence"}

KINDS: dict[str, LossKind] = {
    # A truncated importance weight on REINFORCE that, unlike PPO's clipping, keeps the gradient of every token it weighs (CISPO;
    # truncated importance sampling: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025).
    # At a larger distance the correction is noise (IcePop: Ling Team, "Every Step Evolves", 2025).
    "importance_ratio": LossKind("truncated", _WITHIN_BOUNDS),
    # Shao et al., arXiv:2402.03300.
    "grpo": LossKind("clipped", _CLIP, "standardised", changed=_BY_SAMPLE),
    # Neither the length of a sample nor the spread of its group's rewards weighs it (Liu et al., arXiv:2503.20783).
    "dr_grpo": LossKind("clipped", _CLIP, changed={"normalisation": "sample"}),
    # A higher upper clip. Overlong completions are penalised (`advantage.overlong`), groups of equal rewards replaced
    # (`schedule.on_filtered = "refill"`): Yu et al., arXiv:2503.14476.
    "dapo": LossKind("clipped", {**_CLIP, "clip_high": 0.28}, "standardised", overlong=True),
    # The ratio of the sample, (p(y) / p_old(y))^(1/|y|), on each of its tokens (Zheng et al., arXiv:2507.18071).
    "gspo": LossKind(
        "clipped",
        {**_CLIP, "ratio_level": "sequence_mean", "clip_low": 3e-4, "clip_high": 4e-4},
        "standardised",
        changed=_BY_SAMPLE,
    ),
    # The ratio of the sample, p(y) / p_old(y), on each of its tokens: at 1 the gradient is that of -A log p(y). A is the reward
    # minus the mean of the group's others (Ahmadian et al., arXiv:2402.14740; with PPO's clipping, as TRL has it).
    "rloo": LossKind("clipped", {**_CLIP, "ratio_level": "sequence"}, "leave_one_out", changed=_BY_SAMPLE),
    # Without a `correction` the tokens are taken as sampled by the weights that are trained (Williams, "Simple Statistical
    # Gradient-Following Algorithms for Connectionist Reinforcement Learning", 1992).
    "reinforce": LossKind("plain", _CORRECTION),
    # A is the reward, standardised over the whole step; or the reward minus its group's mean, over the deviation of that in the
    # whole step (Hu et al., arXiv:2501.03262).
    "reinforce_plus_plus": LossKind("clipped", _CLIP, "batch_standardised"),
    "reinforce_plus_plus_baseline": LossKind("clipped", _CLIP, "group_mean_batch_scaled"),
    # The ratio to the weights before the step: for several updates in a step, and for advantages from a value head, which has its
    # own loss (Schulman et al., arXiv:1707.06347).
    "ppo": LossKind("clipped", {**_CLIP, "ratio_to": "old"}),
    # MiniMax, arXiv:2506.13585; 5: ScaleRL, arXiv:2510.13786.
    "cispo": LossKind("truncated", {**_TRUNCATE, "ratio_clip": 5.0, "ratio_clip_low": None}, "standardised"),
    # Wu et al., arXiv:2505.24034.
    "aipo": LossKind("truncated", {**_TRUNCATE, "ratio_clip": 4.0}),
    # A gate in place of the clip (Gao et al., arXiv:2511.20347).
    "sapo": LossKind(
        "softened", {**_RATIO, "soft_positive": 1.0, "soft_negative": 1.05}, "standardised", changed=_BY_SAMPLE
    ),
    # A quadratic penalty in place of a clip (Richemond et al., arXiv:2405.19107, without their value function; Kimi Team,
    # arXiv:2501.12599).
    "dro": LossKind("proximal", {"proximity": 0.05}),
    # With the teacher's advantage (`counterpoint/trainer/losses/objectives.py`:`distillation`).
    "distillation": LossKind("truncated", {**_WITHIN_BOUNDS, "reward_coefficient": 0.0}),
    # Tokens that `counterpoint sft` takes from data. The mean over a step's trained tokens is the cross entropy that Hugging
    # Face's and TRL's trainers minimise (`ForCausalLMLoss` with `num_items_in_batch`).
    "sft": LossKind("likelihood", {}),
}


class LossConfig(Config):
    """The policy-gradient loss. A key that is not set has the default of `kind` (docs/algorithms.md)."""

    kind: str = "importance_ratio"
    """One of the table in docs/algorithms.md, such as `grpo`, `dapo`, `gspo` or `cispo`, or an import path `module:function`; see
    `counterpoint/trainer/losses/contract.py` for the contract."""

    normalisation: Literal["token", "sequence", "sample"] | None = None
    """What the step's sum over tokens is divided by. `token`: the trained tokens of the step. `sequence`: each token by the
    trained tokens of its sample, and the sum by the samples. `sample`: the samples times `normalisation_length`."""

    normalisation_length: float | None = Field(default=None, gt=0)
    """Tokens of a sample that `sample` divides by. Unset: the longest completion of one turn, `sampling.max_tokens`."""

    ratio_to: Literal["inference", "old"] | None = None
    """What the trained policy's probability is divided by: that of the inference engine, so that staleness and engine mismatch
    count, or that of the weights before the step, so that only the updates within the step do."""

    ratio_level: RatioLevel | None = None
    """`token`: each token has its own ratio. `sequence`: all of a sample have their product. `sequence_mean`: its geometric
    mean. `sequence_mean_token`: that mean, with the gradient of the token's own ratio."""

    clip_low: float | None = Field(default=None, ge=0, le=1)
    """A ratio below 1 - this has no gradient where the advantage is negative."""

    clip_high: float | None = Field(default=None, ge=0)
    """A ratio above 1 + this has no gradient where the advantage is positive."""

    clip_dual: float | None = Field(default=None, gt=1)
    """A ratio above this has no gradient where the advantage is negative. Unset: no such limit."""

    ratio_clip: float | None = Field(default=None, gt=0)
    """The ratio is clipped to this as a weight of the gradient."""

    ratio_clip_low: float | None = Field(default=None, ge=0)
    """The weight of the gradient is at least this. Unset: no lower limit."""

    ratio_low: float | None = Field(default=None, ge=0)
    """Tokens whose ratio is below this are masked."""

    ratio_high: float | None = Field(default=None, gt=0)
    """Tokens whose ratio is above this are masked."""

    soft_positive: float | None = Field(default=None, gt=0)
    """Temperature of the sigmoid around a ratio of 1 where the advantage is positive."""

    soft_negative: float | None = Field(default=None, gt=0)
    """The same where it is not."""

    proximity: float | None = Field(default=None, ge=0)
    """Weight of half the square of the ratio's logarithm in the loss."""

    correction: Literal["none", "truncate", "mask"] | None = None
    """Weigh each token by the probability under the weights before the step over that of the inference engine: truncated to
    [`correction_low`, `correction_high`] (TIS), or masked outside of it (MIS)."""

    correction_level: RatioLevel | None = None
    """The level of the correction, as `ratio_level`."""

    correction_low: float | None = Field(default=None, ge=0)
    """Unset: no lower limit."""

    correction_high: float | None = Field(default=None, gt=0)
    """Unset: 3 where there is a correction without `correction_low`; no upper limit with it."""

    kl_coefficient: float | None = Field(default=None, ge=0)
    """Weight of the KL divergence to the reference policy (`training.reference`) in the loss."""

    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """How it is estimated from the sampled tokens, with d = log p_reference - log p: -d, d^2 / 2, or exp(d) - 1 - d."""

    kl_weighted: bool | None = None
    """Multiply the estimate by the ratio, with its gradient, which makes the gradient that of the divergence."""

    entropy_coefficient: float | None = Field(default=None, allow_inf_nan=False)
    """Weight of the entropy of each trained token's distribution; above zero for more exploration."""

    reward_coefficient: float | None = Field(default=None, ge=0)
    """The weight, with `distillation`, of the task's advantage beside what the teacher says of a token."""

    args: dict[str, Any] = {}
    """Further keyword arguments for a custom loss."""

    @property
    def mixes_tokens(self) -> bool:
        """Whether a token is weighed by the advantages of all tokens of its sample: a ratio of the sample has a gradient."""
        objective = KINDS[self.kind].objective if self.kind in KINDS else None
        return objective in ("clipped", "softened") and self.ratio_level in ("sequence", "sequence_mean")

    @model_validator(mode="after")
    def _is_of_its_kind(self) -> LossConfig:
        """Refuses keys without a meaning for the kind, and puts its defaults into the others."""
        defaults = defaults_of(self.kind)
        for name in sorted(self.model_fields_set - {"kind", "args"}):
            if name not in defaults and getattr(self, name) is not None:
                raise ValueError(_not_used(name, self.kind, defaults))
        if self.args and ":" not in self.kind:
            raise ValueError(f"args = {self.args} is for a loss of your own, not for kind = {self.kind!r}")
        for name, default in defaults.items():
            if getattr(self, name) is None:
                # Not by assignment: a run that inherits these keys and has another kind takes only those that were set.
                self.__dict__[name] = default
        self._check()
        return self

    def _check(self) -> None:
        """Refuses combinations that compute nonsense."""
        if self.correction in ("truncate", "mask"):
            if self.correction_high is None and self.correction_low is None:
                self.__dict__["correction_high"] = 3.0
            if self.ratio_to == "inference":
                raise ValueError(
                    f'correction = "{self.correction}" with ratio_to = "inference": the ratio is to the inference engine '
                    'already, which would count twice; set ratio_to = "old", or correction = "none"'
                )
        elif self.correction_low is not None or self.correction_high is not None:
            raise ValueError('correction_low and correction_high take correction = "truncate" or "mask"')
        for low, high in (
            ("ratio_low", "ratio_high"),
            ("ratio_clip_low", "ratio_clip"),
            ("correction_low", "correction_high"),
        ):
            least, most = getattr(self, low), getattr(self, high)
            if least is not None and most is not None and least >= most:
                raise ValueError(f"{low} = {least} is not below {high} = {most}")
        if self.clip_dual is not None and self.clip_high is not None and self.clip_dual <= 1 + self.clip_high:
            raise ValueError(f"clip_dual = {self.clip_dual} is not above 1 + clip_high = {1 + self.clip_high}")
        if self.kl_coefficient and self.kl_estimator == "k1" and not self.kl_weighted:
            raise ValueError(
                'kl_estimator = "k1" in the loss: the gradient of log p has the expectation 0; set "k2" or "k3", or '
                "kl_weighted = true, or put k1 into the reward (training.reference.reward_coefficient)"
            )
        if self.kl_weighted and not self.kl_coefficient:
            raise ValueError("kl_weighted = true takes a kl_coefficient above 0")
        if self.normalisation_length is not None and self.normalisation != "sample":
            raise ValueError(f'normalisation_length takes normalisation = "sample"; it is "{self.normalisation}"')


def defaults_of(kind: str) -> dict[str, Any]:
    """Returns the keys with a meaning for a kind, with their defaults. Raises `ValueError` for one that does not exist."""
    if ":" in kind:
        return {"normalisation": "token", "normalisation_length": None}
    if kind not in KINDS:
        nearest = difflib.get_close_matches(kind, KINDS, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"training.loss.kind = {kind!r}: expected one of {', '.join(KINDS)} (nearest: {nearest}), or an import path "
            '"module:function"'
        )
    return {**EVERY, **KINDS[kind].keys, **KINDS[kind].changed}


def _not_used(name: str, kind: str, defaults: dict[str, Any]) -> str:
    having = [other for other in KINDS if name in KINDS[other].keys]
    elsewhere = f"; {name} is a key of {', '.join(having)}" if having else ""
    return f"{name} has no meaning for kind = {kind!r}, which takes {', '.join(defaults)}{elsewhere}"
