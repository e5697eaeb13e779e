"""The digest of weights: the trainer publishes it for the weights it writes, and a server computes it from those it uses.

Every element, rounded to the server's precision, is hashed by its bits, and the hashes of a layer are added up modulo 2^64.
A sum does not depend on how an engine fuses, shards, pads (zeros add nothing) or reorders a layer's elements for its
kernels. A change of any element changes the sum, however small the step was. Checkpoints and engines name tensors
differently but number layers alike, so there is one sum for each layer number. The digest does not detect an exchange of
elements within a layer; the probe does. This file needs torch but not vLLM, because the trainer uses it, too.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The precisions a server may compute in."""

Digest = dict[str, str]
"""A sum as 16 hexadecimal digits for each layer number; `""` stands for the weights outside the layers."""

_ELEMENTS = {"cpu": 1 << 15, "cuda": 1 << 22}
"""Elements hashed at once. CPU: few enough that torch uses one thread, since several would wait for one another on a busy machine
at each of ten passes. CUDA: enough to keep a GPU busy, with 100 MB of its memory."""

_SMALL = 1 << 14
"""Elements of a tensor that is hashed together with others of its layer."""

_MODULUS = 1 << 64

_NOT_OF_TEXT = re.compile(
    r"(^|\.)((vision|visual|audio|image|video|sound|mm|multi_modal|multimodal|aligner|connector|projector|resampler|perceiver)"
    r"(_\w+)?|embed_(vision|audio)|high_res_vision_\w+|generation_(aligner|embeddings|head)|mlp1|(patch_)?merger|mtp|vpm|vqmodel"
    r"|qformer|query_tokens|language_projection)(\.|$)"
)
"""Parts of the names, in transformers, in checkpoints and in vLLM, of what a vision-language model computes a text without."""


def hash_sum(tensor: Tensor, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Returns the sum of the hashes of `tensor`'s elements, rounded to `dtype`: int64 `[]`, modulo 2^64.

    It is computed on `device`, by default where the tensor is. Zero, of either sign, is hashed to 0. The hash multiplies and
    shifts as in Steele et al., "Fast splittable pseudorandom number generators", 2014. Two numbers share a hash with a
    probability of about 2^-63 (torch's shift keeps the sign, so the hash is not a bijection as theirs is).
    """
    device = device or tensor.device
    total = torch.zeros((), dtype=torch.int64, device=device)
    for part in tensor.detach().reshape(-1).split(_ELEMENTS.get(device.type, 1 << 20)):
        values = part.to(device).to(dtype).float() + 0.0  # -0.0 becomes 0.0
        bits = values.view(torch.int32).to(torch.int64)
        bits *= -0x40A7B892E31B1A47
        bits ^= bits >> 30
        bits *= -0x6B2FB644ECCEEE15
        bits ^= bits >> 27
        total += bits.sum()
    return total


def layer_of(name: str) -> str:
    """Returns the number of the layer in a tensor's name, by any convention, or `""`."""
    return next((part for part in name.split(".") if part.isdecimal()), "")


def is_of_text(name: str) -> bool:
    """Returns whether a model needs the tensor of this name to compute a text, by any convention.

    The others are never trained, and a server of text holds none of them, so a digest leaves them out.
    """
    return _NOT_OF_TEXT.search(name) is None


def add_up(sums: Iterable[tuple[str, int]]) -> Digest:
    """Returns the digest of tensors, given by name and `hash_sum`; of those of text."""
    total: defaultdict[str, int] = defaultdict(int)
    for name, value in sums:
        if is_of_text(name):
            total[layer_of(name)] += value
    return {layer: f"{value % _MODULUS:016x}" for layer, value in total.items()}


def digest_of(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Digest:
    """Returns the digest of floating-point tensors of text; any others are left out."""
    sums: list[tuple[str, Tensor]] = []
    small: defaultdict[tuple[str, torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for name, tensor in tensors:
        if not (tensor.is_floating_point() and is_of_text(name)):
            continue
        if tensor.numel() <= _SMALL:
            small[layer_of(name), tensor.device, tensor.dtype].append(tensor.detach().reshape(-1))
        else:
            sums.append((name, hash_sum(tensor, dtype)))
    # A sum of sums: those of a layer are hashed together, since an adapter has hundreds of matrices of a few kilobytes.
    sums += [(layer, hash_sum(torch.cat(parts), dtype)) for (layer, _, _), parts in small.items()]
    # Waits for the device once, not for each tensor.
    values = torch.stack([value for _, value in sums]).tolist() if sums else []
    return add_up((name, value) for (name, _), value in zip(sums, values, strict=True))


def digests_of(tensors: Mapping[str, Tensor], precisions: Collection[str] = DTYPES.keys()) -> dict[str, Digest]:
    """Returns the digest in each of `precisions` (of `DTYPES`), by name."""
    found = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    # float32 holds a bfloat16 exactly, so that the two have the same hashes.
    same = {"float32": "bfloat16"} if found == {torch.bfloat16} else {}
    computed = {
        name: digest_of(tensors.items(), DTYPES[name])
        for name in dict.fromkeys(same.get(each, each) for each in precisions)
    }
    return {name: computed[same.get(name, name)] for name in precisions}


def scaled_adapter(tensors: Mapping[str, Tensor], scale: float, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yields an adapter's tensors as an engine holds them: rounded, then each `lora_B` multiplied by `scale`.

    As vLLM 0.32 does in `LoRALayerWeights.optimize`.
    """
    for name, tensor in tensors.items():
        rounded = tensor.detach().to(dtype)
        yield name, rounded * scale if ".lora_B." in name else rounded
