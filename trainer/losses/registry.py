"""The built-in losses by name, each with its formula and source, and how a run's loss is loaded from its configuration.

In the formulas r is the ratio of the trained policy's probability to that of the policy that sampled the token (`ratio_to`), A
its advantage, log p its log-probability, sg stop-gradient, |y| the trained tokens of sample y. What is common to all, such as
correction, KL and entropy, is in `trainer/losses/policy_gradient.py`; docs/algorithms.md has them in one table.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from run.loss import LossConfig
from trainer.losses.contract import Loss, LossInputs, LossOutputs
from trainer.losses.custom import load_custom
from trainer.losses.distillation import distillation
from trainer.losses.objectives import clipped, plain, softened, truncated
from trainer.losses.policy_gradient import policy_gradient
from trainer.losses.sft import sft


def importance_ratio(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """The default: -sg(min(r, ratio_clip)) A log p, and 0 where r is outside [ratio_low, ratio_high]; mean over tokens.

    A truncated importance weight on REINFORCE that, unlike PPO's clipping, keeps the gradient of every token it weighs (CISPO:
    MiniMax, arXiv:2506.13585; truncated importance sampling: Yao et al., "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training", 2025). At a larger distance the correction is noise (IcePop: Ling Team, "Every Step Evolves", 2025).
    """
    return policy_gradient(inputs, config, truncated)


def grpo(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A); mean over samples of the mean over tokens.

    A is standardised within the group (GRPO: Shao et al., arXiv:2402.03300).
    """
    return policy_gradient(inputs, config, clipped)


def dr_grpo(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """As `grpo`; the sum over tokens, over samples times a constant. A is the reward minus the group's mean.

    So neither the length of a sample nor the spread of its group's rewards weighs it (Dr. GRPO: Liu et al., arXiv:2503.20783).
    """
    return policy_gradient(inputs, config, clipped)


def dapo(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """As `grpo` with a higher upper clip; mean over tokens. Overlong completions are penalised, groups of equal rewards replaced.

    The last two are `advantage.overlong` and `schedule.on_filtered = "refill"` (DAPO: Yu et al., arXiv:2503.14476).
    """
    return policy_gradient(inputs, config, clipped)


def gspo(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """As `grpo` with the ratio of the sample, (p(y) / p_old(y))^(1/|y|), on each of its tokens.

    GSPO: Zheng et al., arXiv:2507.18071.
    """
    return policy_gradient(inputs, config, clipped)


def rloo(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """As `grpo` with the ratio of the sample, p(y) / p_old(y), on each of its tokens; mean over samples.

    At r = 1 the gradient is that of -A log p(y). A is the reward minus the mean of the group's others (RLOO: Ahmadian et al.,
    arXiv:2402.14740; with PPO's clipping, as TRL has it).
    """
    return policy_gradient(inputs, config, clipped)


def reinforce(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """-A log p; mean over tokens. Without a `correction` it takes the tokens as sampled by the weights that are trained.

    REINFORCE: Williams, "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning", 1992.
    """
    return policy_gradient(inputs, config, plain)


def reinforce_plus_plus(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """As `grpo`; mean over tokens. A is the reward, standardised over the whole step.

    REINFORCE++: Hu et al., arXiv:2501.03262.
    """
    return policy_gradient(inputs, config, clipped)


def reinforce_plus_plus_baseline(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """As `grpo`; mean over tokens. A is the reward minus its group's mean, over the deviation of that in the whole step.

    REINFORCE++-baseline: Hu et al., arXiv:2501.03262.
    """
    return policy_gradient(inputs, config, clipped)


def ppo(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """As `grpo`, with r to the weights before the step; mean over tokens (PPO: Schulman et al., arXiv:1707.06347).

    For several updates in a step, and for advantages from a value head, which has its own loss.
    """
    return policy_gradient(inputs, config, clipped)


def cispo(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """-sg(min(r, ratio_clip)) A log p; mean over tokens (CISPO: MiniMax, arXiv:2506.13585; 5: ScaleRL, arXiv:2510.13786)."""
    return policy_gradient(inputs, config, truncated)


def aipo(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """-sg(min(r, ratio_clip)) A log p, r to the inference engine; mean over tokens (AIPO: Wu et al., arXiv:2505.24034)."""
    return policy_gradient(inputs, config, truncated)


def sapo(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """-(4 / t) sigmoid(t (r - 1)) A; mean over samples of the mean over tokens.

    t is `soft_positive` where A > 0, else `soft_negative`: a gate in place of the clip (SAPO: Gao et al., arXiv:2511.20347).
    """
    return policy_gradient(inputs, config, softened)


BUILT_IN: dict[str, Callable[[LossInputs, LossConfig], LossOutputs]] = {
    function.__name__: function
    for function in (
        importance_ratio, grpo, dr_grpo, dapo, gspo, rloo, reinforce, reinforce_plus_plus, reinforce_plus_plus_baseline,
        ppo, cispo, aipo, sapo, distillation, sft,
    )
}  # fmt: skip
"""By `training.loss.kind`."""


def load_loss(config: LossConfig, given: Collection[str] = ()) -> Loss:
    """Loads the loss that a run's configuration names.

    A custom loss, `module:function`, is called with `LossInputs` and the configuration's `args` as keywords, and returns
    `LossOutputs`. It is called once here, with a made-up batch, which has the optional inputs that are `given`.

    Raises:
        ValueError: there is no such loss, it does not take these arguments, or it fails with the made-up batch.
    """
    if config.kind not in BUILT_IN:
        return load_custom(config.kind, config.args, given)
    built_in = BUILT_IN[config.kind]
    return Loss(
        lambda inputs: built_in(inputs, config),
        metrics=("reverse_kl",) if config.kind == "distillation" else (),
        uses_entropy=bool(config.entropy_coefficient),
    )
