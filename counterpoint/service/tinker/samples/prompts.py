"""A sampler's answers on the places of a prompt beside the tokens there: the most probable ones, given ones, and draws.

The servers answer by a call for each place, with the tokens before it as prompt: they have its beginning in their cache. For an
adapter the trainer gives the log-probabilities of given tokens, since vLLM has them of the base model alone.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from counterpoint.inference.base import SamplingParameters
from counterpoint.service.samplers import Metered
from counterpoint.service.tinker.datums import MOST_TARGETS
from counterpoint.service.tinker.proto import FLOAT32, INT32, MESSAGES
from counterpoint.service.tinker.refusals import BadRequest
from counterpoint.transport.records import Alternatives, Float32Array, Int32Array, Int64Array, Turn

Score = Callable[[Int32Array, Int32Array | None], Coroutine[Any, Any, Float32Array]]
"""Returns the log-probability of each token of a prompt but the first, `[N - 1]`, or of given ones there, `[N - 1, K]`."""

Seeded = Callable[[SamplingParameters, str], SamplingParameters]
"""Gives the sampling of each name a separate seed."""

MOST_CALLS = 4096
"""Calls to the servers for one prompt."""


class Tensor(msgspec.Struct, frozen=True):
    """A tensor of whole numbers as the SDK sends it in JSON, dense or in compressed rows."""

    data: list[int]
    dtype: str = "int64"
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class Targets:
    """The tokens that a request wants log-probabilities of: some at each place after the first."""

    def __init__(self, given: Tensor, length: int) -> None:
        """`length` is that of the prompt. Raises `BadRequest` for targets that do not fit it."""
        self._given, shape = given, given.shape or []
        if given.dtype != "int64" or len(shape) != 2 or shape[0] != length - 1 or not 1 <= shape[1] <= MOST_TARGETS:
            raise BadRequest(
                f"target_prompt_logprobs has the dtype {given.dtype[:20]} and the shape {shape[:4]}; expected int64 and "
                f"[{length - 1}, K], K up to {MOST_TARGETS}: the prompt has {length} tokens"
            )
        rows, columns = given.sparse_crow_indices, given.sparse_col_indices
        counts = [shape[1]] * shape[0] if rows is None else [after - before for before, after in pairwise(rows)]
        if (
            (rows is None) != (columns is None)
            or (rows is not None and (len(rows) != length or rows[0] != 0))
            or any(not 0 <= count <= shape[1] for count in counts)
            or sum(counts) != len(given.data)
            or (columns is not None and (len(columns) != len(given.data)))
            or any(not 0 <= column < shape[1] for column in columns or ())
            or any(not -1 <= token < 2**31 for token in given.data)
        ):
            raise BadRequest(f"target_prompt_logprobs: {len(given.data)} values do not fit the shape {shape}")
        self.ids: Int64Array = np.array(given.data, np.int64)
        """`[C]`: a token for each cell, or -1 for none."""
        self.places: Int64Array = np.repeat(np.arange(1, length), counts)
        """`[C]`: their places in the prompt."""

    @property
    def calls(self) -> int:
        """The number of calls to the servers that answer it."""
        return int((self.ids >= 0).sum())

    def answer(self, values: Float32Array) -> Any:
        """Returns log-probabilities `[C]` as a tensor of the same layout."""
        found = MESSAGES["Tensor"](dtype=FLOAT32, shape=self._given.shape)
        data = np.where(self.ids >= 0, values, 0).astype(np.float32).tobytes()
        if self._given.sparse_crow_indices is None:
            found.dense = data
        else:
            found.sparse_csr.values = data
            found.sparse_csr.crow_indices = np.array(self._given.sparse_crow_indices, np.int64).tobytes()
            found.sparse_csr.col_indices = np.array(self._given.sparse_col_indices, np.int64).tobytes()
        return found


class PromptPlaces:
    """The places of one prompt, at one sampler."""

    def __init__(
        self, servers: Metered, adapter: Any, prompt: Int32Array, score: Score, affinity: str, seeded: Seeded
    ) -> None:
        """Asks by names that begin with `affinity`. `score` is that of the adapter, if there is one."""
        self._servers = servers
        self._adapter = adapter
        self._prompt = prompt
        self._score = score
        self._affinity = affinity
        self._seeded = seeded

    async def most_probable(self, first: int, count: int) -> list[Alternatives]:
        """Returns the `count` most probable tokens at each place from `first` on, by the model's whole distribution."""
        asked = SamplingParameters(max_tokens=1, alternatives=count)
        turns = await self._calls([(place, asked) for place in range(first, len(self._prompt))])
        return [each.alternatives for each in turns if each.alternatives is not None]

    async def draws(self, count: int, temperature: float) -> tuple[Int32Array, Float32Array]:
        """Returns `count` draws at each place after the first, `[N - 1, count]`, and the model's log-probabilities of them."""
        asked = SamplingParameters(max_tokens=1, temperature=temperature)
        places = [
            (place, self._seeded(asked, f"{place} {each}"))
            for place in range(1, len(self._prompt))
            for each in range(count)
        ]
        turns = await self._calls(places)
        ids = np.array([each.completion_ids[0] for each in turns], np.int32)
        if temperature == 1.0:
            values = np.array([each.log_probabilities[0] for each in turns], np.float32)
        else:
            values = await self.log_probabilities(np.array([place for place, _ in places], np.int64), ids)
        return ids.reshape(-1, count), values.reshape(-1, count)

    async def log_probabilities(self, places_C: npt.NDArray[Any], ids_C: npt.NDArray[Any]) -> Float32Array:
        """Returns the log-probability of each token at its place, or any number for a negative token."""
        if self._adapter and len(ids_C):
            widest = int(np.bincount(places_C).max(initial=1))
            starts = np.searchsorted(places_C, places_C)  # places ascend
            columns = np.arange(len(places_C)) - starts
            targets = np.zeros((len(self._prompt) - 1, widest), np.int32)
            targets[places_C - 1, columns] = np.maximum(ids_C, 0)
            found: Float32Array = (await self._score(self._prompt, targets))[places_C - 1, columns]
            return found
        values, cells = np.zeros(len(ids_C), np.float32), np.flatnonzero(ids_C >= 0).tolist()
        asked = [
            (
                np.append(self._prompt[: places_C[cell]], ids_C[cell]).astype(np.int32),
                int(places_C[cell]),
                f"{self._affinity}.{number}",
            )
            for number, cell in enumerate(cells)
        ]
        self._servers.used.sampled += len(asked)
        values[cells] = [each[0] for each in await self._servers.scores(asked)]
        return values

    async def _calls(self, asked: list[tuple[int, SamplingParameters]]) -> list[Turn]:
        calls = [
            (self._prompt[:place], each, f"{self._affinity}.{number}") for number, (place, each) in enumerate(asked)
        ]
        return await self._servers.turns(self._adapter, calls, within_prompt=True)


def drawn(ids: Int32Array, values: Float32Array) -> Any:
    """Returns draws in the protocol's form."""
    tokens, logprobs = (
        MESSAGES["Tensor"](dense=each.tobytes(), dtype=dtype, shape=each.shape)
        for each, dtype in ((ids, INT32), (values.astype(np.float32), FLOAT32))
    )
    return MESSAGES["PromptAltTokens"](tokens=tokens, logprobs=logprobs)
