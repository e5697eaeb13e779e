"""Keeps the forward and backward passes of several ranks together: all make the same collective calls in the same order.

FSDP gathers each layer on all ranks, divided experts get their tokens from all (`counterpoint/trainer/model/exchange.py`), and
ranks that share a row gather its keys and values (`counterpoint/trainer/model/context.py`), so a rank that computes alone would
wait for the others forever. Before each pass the ranks say what they are about to do (`_agree`), and a rank
that has nothing to do makes an idle pass: two made-up tokens with a zero gradient. All passes make the same calls, so a rank
whose pass raises half-way makes the rest of them with zeros (`_play_rest`). The others' results are then wrong, and all ranks
learn so at the next agreement: everyone discards the pass. Only the death of a process ends the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.utils.hooks import RemovableHandle

from counterpoint.trainer.faults import LacksMemory, is_fatal, is_out_of_memory
from counterpoint.trainer.model.adapters.adapted_layer import MultiLora, applied
from counterpoint.trainer.model.context import ContextGroup, Stretch, StretchCall, shared_rows
from counterpoint.trainer.model.exchange import Collective, exchanges
from counterpoint.trainer.model.load import log_probabilities
from counterpoint.trainer.model.router_replay import RouterReplay
from counterpoint.trainer.model.sharding import rest

logger = logging.getLogger(__name__)

_IDLE_TOKENS = 2

MOST_IDLE_FAILURES = 3
"""Idle passes of a rank that fail one after the other until it ends, and all with it: each makes all ranks begin anew."""


_NO_MEMORY = (
    f"a rank lacks memory even for a pass of {_IDLE_TOKENS} made-up tokens, so no run's samples are to blame; the ranks' logs "
    "say which. End what else uses its memory, lower trainer.max_runs or trainer.max_tokens, or use more ranks, and resume"
)


class PassDiscarded(RuntimeError):
    """Another rank has failed in the last pass: what this rank has computed in it is wrong."""


@dataclass(frozen=True, slots=True)
class _Call:
    """One collective call, of any values."""

    gathers: bool
    output: int
    """The number of elements of the output."""
    input: int
    dtype: torch.dtype
    device: torch.device
    group: dist.ProcessGroup

    def play(self) -> None:
        """Makes the call with zeros."""
        output, given = (torch.zeros(size, dtype=self.dtype, device=self.device) for size in (self.output, self.input))
        if self.gathers:
            dist.all_gather_into_tensor(output, given, group=self.group)
        else:
            dist.reduce_scatter_tensor(output, given, group=self.group)


class _Gather(DefaultAllGather):
    def __init__(self, made: list[Collective]) -> None:
        self._made = made

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self._made.append(_call(True, output_tensor, input_tensor, group))
        return super().__call__(output_tensor, input_tensor, group, async_op)


class _Scatter(DefaultReduceScatter):
    def __init__(self, made: list[Collective]) -> None:
        self._made = made

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        self._made.append(_call(False, output_tensor, input_tensor, group))
        return super().__call__(output_tensor, input_tensor, group, op, async_op)


def _call(gathers: bool, output: Tensor, given: Tensor, group: Any) -> _Call:
    return _Call(gathers, output.numel(), given.numel(), given.dtype, given.device, group)


class Passes:
    """The passes of this rank over one model, which is divided or whose rows ranks share.

    Between `begin` and `end` each call of the model is agreed upon.
    """

    def __init__(
        self,
        model: nn.Module,
        agree: Callable[[Tensor], object],
        device: torch.device,
        replay: RouterReplay | None = None,
        context: ContextGroup | None = None,
        place: tuple[int, int] = (0, 1),
    ) -> None:
        """Watches `model`, which has computed once, and has this `replay` of its router.

        `agree` takes the maximum of a CPU tensor over the ranks that make the same passes, in place. The ranks of `context`
        share rows. `place`: which of the rows that are trained at once is this rank's, and how many there are.
        """
        self._model: Any = model
        self._replay = replay
        self._maximum = agree
        self._device = device
        self._context = context
        self._place, self._places = place
        self._kinds: list[tuple[nn.Module, bool]] = [(model, False), (model, True)]
        """What is called, and whether with a backward pass: kinds of passes, of which the first come first."""
        self._made: list[Collective] = []
        """The calls of the pass in progress."""
        self._scripts: dict[tuple[nn.Module, bool], list[Collective]] = {}
        """The calls of a whole pass of each kind."""
        self._script: list[Collective] | None = None
        """The calls of the pass in progress; None before the first one of a round."""
        self._open = self._idling = False
        self.lacked_memory = False
        """Whether a rank lacked memory in the round that was discarded last."""
        self._idle_failures = 0
        """The failures since the last idle pass that succeeded, without those for which others may be to blame."""
        for exchange in exchanges(model):
            exchange.made = self._made
        if context is not None:
            context.made = self._made
        self.shares_experts = bool(exchanges(model))
        """Whether a rank computes tokens of other ranks."""
        self._watched = {model: self._watch(model)}

    def watch(self, others: Sequence[nn.Module]) -> None:
        """Keeps passes without gradient over these models together, too; each has computed once.

        They are the same on all ranks, in the same order. Those of an earlier call are watched no more.
        """
        models = [self._model, *others]
        for dropped in self._watched.keys() - set(models):
            self._watched.pop(dropped).remove()
            self._scripts.pop((dropped, False), None)
        self._watched |= {model: self._watch(model) for model in models if model not in self._watched}
        self._kinds = [*((model, False) for model in models), (self._model, True)]

    def _watch(self, model: nn.Module) -> RemovableHandle:
        # Not `set_custom_all_gather`, which refuses a layer whose experts are divided over other ranks than the rest.
        for group in _groups_of(model):
            group._all_gather_comm, group._reduce_scatter_comm = _Gather(self._made), _Scatter(self._made)
        return model.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)

    def holders(self, own: bool) -> list[int]:
        """Returns the places of the ranks that give True; on every rank."""
        flags = torch.zeros(self._places, dtype=torch.int64)
        flags[self._place] = own
        self._maximum(flags)
        places: list[int] = flags.nonzero()[:, 0].tolist()
        return places

    def begin(self) -> None:
        """Begins a round, in which this rank calls the model as often as it likes, or not at all."""
        for kind in self._kinds:
            if kind not in self._scripts:
                self._idle(kind)
                self._scripts[kind] = list(self._made)
        self._open, self._script = True, None

    def end(self, failed: bool, lacked_memory: bool = False) -> bool:
        """Ends this rank's part of the round: keeps the others company until they are done, too.

        `failed`: this rank has raised; `lacked_memory`: for that reason.

        Returns whether the round is to be discarded, on every rank.
        """
        if failed and self._open:
            self._play_rest()
        while self._open:
            turn, discarded = self._agree(failed=failed, lacked_memory=lacked_memory)
            if discarded or turn is None:
                self._open = False
                return discarded
            try:
                self._idle(turn)
            except Exception as error:  # a lack of memory
                failed, lacked_memory = True, is_out_of_memory(error)
                # Tokens of others may not fit here: `counterpoint/trainer/rows.py` tries fewer, and finds whose.
                self._idle_failures += not (lacked_memory and self.shares_experts)
                if is_fatal(error):
                    raise
                if self._idle_failures >= MOST_IDLE_FAILURES:
                    if lacked_memory:
                        raise LacksMemory(_NO_MEMORY) from error
                    raise
                logger.warning("an idle pass failed", exc_info=True)
            if failed:
                self._play_rest()
        return True

    def check_memory(self) -> None:
        """Makes an idle pass of each kind on all ranks together, between two rounds. Raises `LacksMemory` if one lacks memory."""
        lacks_memory = False
        for kind in self._kinds:
            try:
                self._idle(kind)
            except Exception as error:  # of another rank's zeros, if it is no lack of memory
                if is_fatal(error):
                    raise
                lacks_memory |= is_out_of_memory(error)
                logger.warning("an idle pass failed", exc_info=True)
                self._play_rest()
        if self.holders(lacks_memory):
            raise LacksMemory(_NO_MEMORY)

    def _agree(
        self, kind: tuple[nn.Module, bool] | None = None, failed: bool = False, lacked_memory: bool = False
    ) -> tuple[tuple[nn.Module, bool] | None, bool]:
        """Returns the kind of pass whose turn it is, if a rank is about to make one, and whether any rank has failed."""
        flags = torch.tensor([*(each == kind for each in self._kinds), failed, lacked_memory], dtype=torch.int64)
        self._maximum(flags)
        *asked, discarded, self.lacked_memory = map(bool, flags.tolist())
        return next((each for each, flag in zip(self._kinds, asked, strict=True) if flag), None), discarded

    def _before(self, model: nn.Module, _inputs: Any, keywords: dict[str, Any]) -> None:
        """Waits, before a call of the model, until it is this kind of pass's turn on all ranks."""
        if not self._open or self._idling:
            return
        kind = (model, torch.is_grad_enabled())
        while True:
            turn, discarded = self._agree(kind)
            if discarded:
                self._open = False
                raise PassDiscarded("another rank has failed")
            assert turn is not None
            if turn == kind:
                break
            self._idle(turn)
        self._start(kind, keywords.get("stretch"))

    def _start(self, kind: tuple[nn.Module, bool], stretch: Stretch | None) -> None:
        self._rest()  # alike on all ranks, whatever was computed before
        self._made.clear()
        self._script = self._scripts.get(kind)
        if self._context is not None:
            self._context.stretch = stretch
            if self._script is not None and stretch is None:  # the probe, which each rank computes alone
                self._script = [call for call in self._script if not isinstance(call, StretchCall)]

    def _idle(self, kind: tuple[nn.Module, bool]) -> None:
        """Makes a pass that changes nothing, beside those of other ranks; also just before a pass over a row of this rank."""
        model, gradient = kind
        self._start(kind, None if self._context is None else Stretch(self._context, _IDLE_TOKENS))
        self._idling = True
        try:
            with shared_rows(model, self._context), self._without_row(), torch.set_grad_enabled(gradient):
                tokens_T = torch.zeros(_IDLE_TOKENS, dtype=torch.int64, device=self._device)
                positions_T = torch.arange(_IDLE_TOKENS, device=self._device)
                values_P, _ = log_probabilities(
                    model, tokens_T, positions_T, [_IDLE_TOKENS], positions_T[:1], tokens_T[:1], 1.0
                )
                if gradient:
                    values_P.backward(torch.zeros_like(values_P))
            self._idle_failures = 0
        finally:
            self._idling = False

    @contextmanager
    def _without_row(self) -> Iterator[None]:
        """Takes adapters and recorded routing, which are of the tokens of a row, away inside."""
        adapted = [module for module in self._model.modules() if isinstance(module, MultiLora)]
        routed = nullcontext() if self._replay is None else self._replay.with_record(None)
        with applied(adapted, None), routed:
            yield

    def _play_rest(self) -> None:
        """Makes the calls that are left of a pass that has raised, and forgets what it has left behind."""
        if self._script is not None:
            for call in self._script[len(self._made) :]:
                call.play()
            self._script = None
        self._rest()
        for group in _groups_of(self._model):
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None

    def _rest(self) -> None:
        for model in self._watched:
            rest(model)


def _groups_of(model: nn.Module) -> list[Any]:
    """Returns FSDP's groups of weights that are gathered together; none of a model that is not sharded."""
    if not isinstance(model, FSDPModule):
        return []
    return [group for state in model._get_fsdp_state()._state_ctx.all_states for group in state._fsdp_param_groups]
