"""The digests of a divided model: each rank hashes its slices where they are, and the sums are added over the ranks.

A digest is a sum over elements (`inference/digest.py`), so it needs no whole weights. Rank 0 would hash these on one core,
about three seconds for each billion elements, while all other ranks wait.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from counterpoint.inference.digest import Digest, add_up, digests_of, layer_of
from counterpoint.trainer.ranks import Ranks

_HALF = 1 << 32


def digests_over_ranks(model: nn.Module, precisions: Collection[str], ranks: Ranks) -> dict[str, Digest]:
    """Returns `digests_of` the whole weights, alike on every rank; every rank calls it. The model must be at rest."""
    weights = {id(tensor): (name, tensor) for name, tensor in reversed(model.state_dict(keep_vars=True).items())}
    floating = {name: tensor for name, tensor in weights.values() if tensor.is_floating_point()}  # tied ones once
    own = {name: _local(tensor) for name, tensor in floating.items() if _counts(tensor, ranks.index)}
    digests = digests_of(own, precisions)
    places = [(each, layer) for each in precisions for layer in sorted({layer_of(name) for name in floating})]
    sums = [int(digests[precision].get(layer, "0"), 16) for precision, layer in places]
    # As halves, whose sums over the ranks do not overflow.
    halves = torch.tensor([divmod(value, _HALF) for value in sums], dtype=torch.int64, device=ranks.device)
    ranks.add([halves])
    added = {place: high * _HALF + low for place, (high, low) in zip(places, halves.tolist(), strict=True)}
    return {
        precision: add_up((layer, value) for (each, layer), value in added.items() if each == precision)
        for precision in precisions
    }


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _counts(tensor: Tensor, rank: int) -> bool:
    """Whether this rank's part counts: of several ranks with the same part, that of the first does."""
    if not isinstance(tensor, DTensor):
        return rank == 0
    mesh = tensor.device_mesh
    place = mesh.get_coordinate()
    assert place is not None
    whole = [index for index, placement in zip(place, tensor.placements, strict=True) if placement.is_replicate()]
    return not any(whole) and bool((mesh.mesh == 0).any())
