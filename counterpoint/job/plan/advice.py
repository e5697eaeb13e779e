"""Finds changes with which a trainer or a server fits, of which each was computed as the plan itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from counterpoint.inference.config import InferenceConfig, LoraServingConfig
from counterpoint.job.plan.choice import fewest_layers
from counterpoint.job.plan.devices import Gpus
from counterpoint.job.plan.dry_run import ModelSizes
from counterpoint.job.plan.inference_memory import server_memory, with_utilization
from counterpoint.job.plan.planned import Planned
from counterpoint.job.plan.trainer_memory import rank_parts
from counterpoint.job.sections import GpuConfig, ServersConfig
from counterpoint.run.trained import LoraConfig, TrainingConfig
from counterpoint.trainer.config import TrainerConfig

STEP = 256
"""`max_tokens` are proposed in multiples of it."""

MOST_TOKENS = 2**22

FEWEST_BATCHED = 2048
"""A server's `max_num_batched_tokens` is not proposed below it."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One way to fit."""

    key: str
    """The key to change."""
    words: str


@dataclass(frozen=True, slots=True)
class _Change:
    """One change of the trainer, or several joined."""

    parts: tuple[tuple[str, str], ...] = ()
    """Key and words of each."""
    trainer: tuple[tuple[str, Any], ...] = ()
    own_gpus: bool = False
    """Whether no server is on the trainer's GPUs."""
    smaller_server: bool = False
    """Whether the server beside it gets what the trainer leaves."""
    adapter: bool = False

    def __add__(self, other: _Change) -> _Change:
        return _Change(
            self.parts + other.parts,
            self.trainer + other.trainer,
            self.own_gpus or other.own_gpus,
            self.smaller_server or other.smaller_server,
            self.adapter or other.adapter,
        )


_RECOMPUTE = _Change(
    (("trainer.activation_checkpointing", "trainer.activation_checkpointing = true"),),
    (("activation_checkpointing", True),),
)
_SMALLER_SERVER = _Change((("inference.extra_args", ""),), smaller_server=True)


def trainer_advice(planned: Planned, directory: Path, sizes: ModelSizes, gpus: Gpus, shared: bool) -> list[Advice]:
    """Returns changes with which a trainer fits that does not, those of one key first.

    Fewer tokens are proposed only down to those with which the trainer is not refused. Joined changes contain none that suffices
    alone. Where nothing suffices, they are tried with fewer tokens.
    """
    fitting = _Fitting(planned, directory, sizes, gpus, shared)
    changes = list(_changes(planned, gpus, shared))
    fewer = fitting.tokens(_Change())
    found = [Advice("trainer.max_tokens", f"trainer.max_tokens = {fewer}")] if fewer else []
    for tokens in (fitting.wanted, None):
        taken: list[_Change] = []
        for change in changes:
            if any(set(each.parts) <= set(change.parts) for each in taken):
                continue
            most = tokens if tokens is not None else fitting.tokens(change)
            if most and (words := fitting.words(change, most)) is not None:
                taken.append(change)
                change = fitting.fewest_layers(change, most)
                words = fitting.words(change, most) or words
                found.append(Advice(change.parts[0][0], words))
        if found:
            break
    return found


def _changes(planned: Planned, gpus: Gpus, shared: bool) -> Iterator[_Change]:
    """Yields what may be tried, single changes before joined ones."""
    trainer = planned.trainer
    free = gpus.count - planned.server_gpus
    apart = "on a GPU of its own ([gpus])" if free == 1 else "on GPUs of its own ([gpus])"
    places = []
    if shared and free >= trainer.ranks:
        places.append(_Change((("gpus.trainer", f"the trainer {apart}"),), own_gpus=True))
    if shared:
        places.append(_SMALLER_SERVER)
    if free > 1 and (not trainer.sharded or free > trainer.ranks):
        update = (("sharding", True), ("processes", free), ("nodes", 1))
        words = f"trainer.sharding = true and trainer.processes = {free}"
        words += f", {apart}" if planned.servers is not None else ""
        places.append(_Change((("trainer.sharding", words),), update, own_gpus=True))
    others = [] if trainer.activation_checkpointing is True else [_RECOMPUTE]
    if any(run.lora is None for run in planned.runs):
        adapter = _Change((planned.adapter,), adapter=True)
        others += [adapter, *(adapter + each for each in others)]
    # The key of joined changes is that of the first: of an adapter, since it changes most.
    joined = (other + place if other.adapter else place + other for place in places for other in others)
    yield from sorted(
        [*places, *others, *joined],
        key=lambda change: (len(change.parts), change.adapter),
    )


class _Fitting:
    """Computes how a changed trainer fits."""

    def __init__(self, planned: Planned, directory: Path, sizes: ModelSizes, gpus: Gpus, shared: bool) -> None:
        self._planned, self._directory, self._sizes, self._gpus = planned, directory, sizes, gpus
        self._shared = shared
        self.wanted = planned.trainer.max_tokens
        self._fewest = planned.fewest_tokens

    def tokens(self, change: _Change) -> int:
        """Returns the largest `max_tokens` that fits and that the job may have; 0 if there is none."""
        trainer = self._changed(change)
        if trainer is None:
            return 0
        if change.smaller_server:  # what the trainer may have depends on its tokens
            return self._fewest if self.words(change, self._fewest) is not None else 0
        most = min(largest_tokens(lambda tokens: self._total(change, trainer, tokens), self._room(change)), self.wanted)
        return most if most >= self._fewest else 0

    def words(self, change: _Change, tokens: int) -> str | None:
        """Describes the change, if the trainer fits with it."""
        trainer = self._changed(change)
        if trainer is None:
            return None
        total = self._total(change, trainer, tokens)
        if change.smaller_server:
            left = (self._gpus.memory - total) * 100 // self._gpus.memory
            servers = self._servers(change)
            if left <= 0 or not server_memory(self._sizes, servers, self._gpus.memory, left / 100).sequences:
                return None
            extra_args = with_utilization(servers.extra_args, left / 100)
            share = f"inference.extra_args = {json.dumps(extra_args)}"
        elif total > self._room(change):
            return None
        words = [words or share for _, words in change.parts]
        words += [f"trainer.max_tokens = {tokens}"] if tokens != self.wanted else []
        return ", ".join(words)

    def fewest_layers(self, change: _Change, tokens: int) -> _Change:
        """Returns the change with as few layers computed again as suffice, where it keeps only the inputs of all of them."""
        if change.smaller_server or not set(_RECOMPUTE.trainer) <= set(change.trainer):
            return change

        def of(layers: int) -> _Change:
            key, value = _RECOMPUTE.parts[0][0], f"{_RECOMPUTE.parts[0][0]} = {layers}"
            parts = tuple((key, value) if part in _RECOMPUTE.parts else part for part in change.parts)
            others = tuple(each for each in change.trainer if each not in _RECOMPUTE.trainer)
            return replace(change, parts=parts, trainer=(*others, (_RECOMPUTE.trainer[0][0], layers)))

        least = fewest_layers(lambda layers: self.words(of(layers), tokens) is not None, self._sizes.layers)
        return change if least is None else of(least)

    def _changed(self, change: _Change) -> TrainerConfig | None:
        """Returns the changed trainer; None for one that would be refused."""
        try:
            trainer = TrainerConfig.model_validate(self._planned.trainer.model_dump() | dict(change.trainer))
            trainer.check_model(self._directory)
        except ValueError:
            return None
        trained = self._trained(change)
        return None if any(trainer.refuses_value_head(run) is not None for run in trained) else trainer

    def _trained(self, change: _Change) -> list[TrainingConfig]:
        if not change.adapter:
            return self._planned.runs
        return [run.model_copy(update={"lora": run.lora or LoraConfig()}) for run in self._planned.runs]

    def _servers(self, change: _Change) -> InferenceConfig:
        servers = self._planned.servers
        assert servers is not None
        lora = servers.lora or LoraServingConfig() if change.adapter else servers.lora
        return servers.model_copy(update={"lora": lora})

    def _total(self, change: _Change, trainer: TrainerConfig, tokens: int) -> int:
        return sum(rank_parts(self._directory, trainer, self._trained(change), tokens, self._gpus.memory).values())

    def _room(self, change: _Change) -> int:
        if change.own_gpus or not self._shared:
            return self._gpus.memory
        server = server_memory(self._sizes, self._servers(change), self._gpus.memory)
        return self._gpus.memory - server.share * self._planned.servers_a_gpu


def enough_gpus(
    planned: Planned, directory: Path, sizes: ModelSizes, gpus: Gpus, shared: bool, used: int
) -> str | None:
    """Returns the fewest GPUs of this kind with which everything fits that is trained, and how; None if no number is found.

    They are more than there are, and at least the `used` ones. A server gets more of them only if it does not fit on its own.
    """
    for count in (each for each in _COUNTS if each > gpus.count and each >= used):
        more = Gpus(count, gpus.name, gpus.memory)
        for changed, of_server in _with_larger_servers(planned, sizes, more):
            fitting = _Fitting(changed, directory, sizes, more, shared)
            changes = (_Change(), *_changes(changed, more, shared))
            for change in changes:
                if change.adapter or change.smaller_server or changed.server_gpus >= count:
                    continue
                if (words := fitting.words(change, fitting.wanted)) is not None:
                    return ": ".join(
                        filter(None, (f"{count} GPUs of this kind", ", ".join(filter(None, (of_server, words)))))
                    )
    return None


_COUNTS = (*range(2, 17), *(factor * 2**power for power in range(3, 9) for factor in (3, 4)))
"""Numbers of GPUs that are tried."""


def _with_larger_servers(planned: Planned, sizes: ModelSizes, gpus: Gpus) -> Iterator[tuple[Planned, str]]:
    """Yields what is planned with servers that fit, and what to set for it; nothing if they cannot."""
    servers = planned.servers
    if servers is None or server_memory(sizes, servers, gpus.memory).sequences:
        yield planned, ""
        return
    ranks = 2 * servers.tensor_parallel_size
    while ranks * servers.replicas < gpus.count and sizes.heads % ranks == 0:
        larger = servers.model_copy(update={"tensor_parallel_size": ranks})
        if server_memory(sizes, larger, gpus.memory).sequences:
            yield replace(planned, servers=larger), f"inference.tensor_parallel_size = {ranks}"
            return
        ranks *= 2


def server_advice(planned: Planned, servers: ServersConfig, sizes: ModelSizes, gpus: Gpus) -> list[Advice]:
    """Returns single changes with which a server fits that does not.

    More GPUs of a server are proposed apart from the trainer's, and not where `[gpus]` says which each role has.
    """
    offered: list[tuple[str, dict[str, Any]]] = []
    now = server_memory(sizes, servers, gpus.memory)
    if (fits := now.parts.get("KV cache", 0) // now.token) >= planned.longest_completion + STEP:
        offered.append(("max_model_len", {"max_model_len": fits // STEP * STEP}))
    if servers.max_num_batched_tokens > FEWEST_BATCHED:
        offered.append(("max_num_batched_tokens", {"max_num_batched_tokens": FEWEST_BATCHED}))
    ranks, is_placed = 2 * servers.tensor_parallel_size, planned.gpus != GpuConfig()
    while not is_placed and ranks * servers.replicas + planned.trainer.ranks <= gpus.count and sizes.heads % ranks == 0:
        offered.append(("tensor_parallel_size", {"tensor_parallel_size": ranks}))
        ranks *= 2
    found: dict[str, Advice] = {}
    for name, update in offered:
        if name not in found and server_memory(sizes, servers.model_copy(update=update), gpus.memory).sequences:
            apart = ", on GPUs of its own ([gpus])" if name == "tensor_parallel_size" else ""
            found[name] = Advice(f"inference.{name}", f"inference.{name} = {update[name]}{apart}")
    return list(found.values())


def largest_tokens(total: Callable[[int], int], room: int) -> int:
    """Returns the largest multiple of `STEP` tokens, nearly, for which `total` is at most `room`; 0 if there is none.

    `total` grows almost evenly with the tokens, so each guess lies on the line through the last two values.
    """
    fits, before, after = 0, STEP, 16 * STEP
    low, high = total(before), total(after)
    for tokens, needed in ((before, low), (after, high)):
        fits = tokens if needed <= room else fits
    if not fits:
        return 0
    for _ in range(3):
        slope = max((high - low) / (after - before), 1.0)
        guess = min(int(after + (room - high) / slope), MOST_TOKENS) // STEP * STEP
        if guess in (before, after) or guess <= fits:
            break
        before, low, after, high = after, high, guess, total(guess)
        fits = guess if high <= room else fits
    return fits
