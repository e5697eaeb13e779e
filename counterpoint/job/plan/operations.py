"""The operations and bytes of a model: of a row that is trained, of a prompt, and of one token that is generated.

A multiplication and an addition are two operations. Counted are products of matrices and attention; norms, activations and the
softmax are left out, as in the sources. `tests/job/plan/test_operations.py` compares with torch's `FlopCounterMode`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from counterpoint.job.plan.dry_run import ModelSizes
from counterpoint.run.trained import TrainingConfig
from counterpoint.trainer.model.kernels.kept import LEAST_TOKENS
from counterpoint.trainer.updates.passes import OLD, REFERENCE, VALUES, columns_to_measure

FLASH_BACKWARD = 2.5
"""Attention's backward over its forward pass, which it computes again: Dao, "FlashAttention-2" (arXiv:2307.08691)."""

ADAMW_BYTES = 28
"""Bytes that AdamW reads and writes for a trained parameter in float32: weight, gradient and two moments are read, all but the
gradient are written."""


@dataclass(frozen=True, slots=True)
class ProductWeights:
    """Parameters in products of matrices."""

    always: int
    """Those that every token uses, with the output layer and without the embeddings."""
    routed: int
    """Those of all routed experts."""
    experts: int
    """Routed experts of a layer; 1 without any."""
    per_token: int
    """Experts that a token uses; 1 without any."""

    @property
    def active(self) -> float:
        """The parameters that one token uses."""
        return self.always + self.routed * self.per_token / self.experts

    def touched(self, tokens: float) -> float:
        """Returns the expected parameters that so many tokens together use, if each chooses its experts evenly at random.

        An expert is not used with the probability (1 - k / E)^tokens.
        """
        unused: float = (1 - self.per_token / self.experts) ** max(1.0, tokens)
        return self.always + self.routed * (1 - unused)


def weights_of(sizes: ModelSizes) -> ProductWeights:
    """Returns a model's parameters in products of matrices. Fused experts are routed; any other is used by every token."""
    experts = next((shape[0] for shapes in sizes.linear_layers.values() for shape in shapes if len(shape) == 3), 1)
    routed = sizes.expert_weights
    named = sum(sizes.parameters.get(kind, 0) for kind in ("attention", "mlp", "router", "experts", "other"))
    always = named - routed + sizes.vocabulary * sizes.hidden
    return ProductWeights(always, routed, experts, sizes.experts_per_token if routed else 1)


def attention_operations(sizes: ModelSizes, tokens: float, context: float) -> float:
    """Returns the operations of attention of so many new tokens, each of which sees `context` tokens on average.

    Queries with keys, and weights with values, in each layer: Kaplan et al., "Scaling Laws for Neural Language Models"
    (arXiv:2001.08361), table 1; Chowdhery et al., "PaLM" (arXiv:2204.02311), appendix B. Grouped queries change nothing.
    """
    return 4 * sizes.layers * sizes.heads * sizes.head_dim * tokens * context


def forward_operations(sizes: ModelSizes, tokens: float) -> float:
    """Returns the operations of the forward pass of a sample: two a parameter and token (Kaplan et al.), and causal attention."""
    return 2 * weights_of(sizes).active * tokens + attention_operations(sizes, tokens, (tokens + 1) / 2)


def training_operations(
    sizes: ModelSizes, training: TrainingConfig, tokens: float, *, checkpointing: float, keeps_attention: bool = True
) -> float:
    """Returns the operations of all passes of a step over a sample of so many tokens.

    `checkpointing` is the share of the layers that are computed again, with `keeps_attention` without attention over a long
    sample. The backward pass takes two operations a parameter and token for the inputs' gradients, and two for those of trained
    weights (Kaplan et al., section 2.1); frozen weights have none, an adapter has its own.
    """
    forward = forward_operations(sizes, tokens)
    attention = attention_operations(sizes, tokens, (tokens + 1) / 2)
    linear = forward - attention
    backward = linear + FLASH_BACKWARD * attention
    if training.lora is None:
        backward += linear
    else:
        adapter = 2 * adapter_weights(sizes, training) * tokens
        forward, backward = forward + adapter, backward + 2 * adapter
    again = forward - attention if keeps_attention and tokens >= LEAST_TOKENS else forward
    passes = forward + backward + checkpointing * again
    measured = set(columns_to_measure(training))
    once = (REFERENCE in measured) + bool({OLD, VALUES} & measured)
    return training.epochs * passes + once * forward


def adapter_weights(sizes: ModelSizes, training: TrainingConfig) -> float:
    """Returns the parameters of an adapter that one token uses; 0 without one."""
    if training.lora is None:
        return 0.0
    found = 0.0
    for name, shapes in sizes.linear_layers.items():
        if name in training.lora.target_modules:
            for shape in shapes:
                share = sizes.experts_per_token if len(shape) == 3 else 1
                found += training.lora.rank * (shape[-1] + shape[-2]) * share
    return found


def trained_parameters(sizes: ModelSizes, training: TrainingConfig) -> float:
    """Returns how many parameters the optimizer updates."""
    if training.lora is None:
        return sizes.total
    return sum(
        training.lora.rank * (shape[-1] + shape[-2]) * prod(shape[:-2])
        for name, shapes in sizes.linear_layers.items()
        if name in training.lora.target_modules
        for shape in shapes
    )
