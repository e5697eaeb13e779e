"""Weight updates inside the API server, one at a time, each as one transaction.

Full weights: pause keeping requests, load, resume. The pause freezes the running requests with their keys and values. To
prefill them again with the new weights would cost the more the longer they are, and would route their earlier tokens anew,
while the routed experts that are returned are those that generated these tokens: training would replay a mixture that no
weights ever computed. So the caches stay, and a request that begins after the pause uses no stale prefix because its cache
salt names the load (`Updater.cache_salt`). vLLM schedules nothing while paused this way, so the proof (the probe) comes
after the resume; until it has passed, the pool holds back this server's answers. Before that, the digest of the engine's
weights is read back (`held`) and answered to the pool, which compares it with the trainer's. Adapters are loaded without a
pause: see `adapters`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm.engine.protocol import EngineClient
from vllm.logger import init_logger

from counterpoint.inference import delta
from counterpoint.inference.base import HeldWeights
from counterpoint.inference.checkpoint import (
    NotSeen,
    TensorEntry,
    is_delta,
    read_manifest,
    read_through,
    require_published,
    require_same_model,
)
from counterpoint.inference.digest import Digest
from counterpoint.inference.loads import Load, LoadClaim, Loads, NotOwner
from counterpoint.inference.plugin.adapters import Adapters, UpdateRefused
from counterpoint.inference.plugin.staging import stage
from counterpoint.inference.plugin.worker_digest import Held, join_ranks, provable_layers, restrict
from counterpoint.transport.files.own_directory import OwnDirectory

logger = init_logger(__name__)

READ_SECONDS = 0.01
"""CPU time for which the engine's steps wait for one slice of the reading of its weights: about a step."""


class Updater:
    """Loads weights, one update at a time, and records which are loaded, and whose they are."""

    def __init__(self, engine: EngineClient, models: Any, loads: Loads) -> None:
        self.loads = loads
        self.adapters = Adapters(engine, models, self.loads)
        self.serves_adapters = engine.vllm_config.lora_config is not None
        self._engine = engine
        self._lock = asyncio.Lock()
        self._dtype = str(engine.model_config.dtype).removeprefix("torch.")
        self._expected: dict[str, TensorEntry] | None = None
        """The tensors of the model that the server was started with, once they have been read."""
        self._in_turn: set[str] = set()
        """Processes that were named in a warning."""
        self._provable: frozenset[str] | None = None
        """Layers whose digest proves the loaded weights; None until the first load."""
        self._finding: asyncio.Task[frozenset[str]] | None = None
        """Finds them before the first load asks for them."""

    def find_provable_layers(self) -> None:
        """Begins to find the layers whose digest proves weights, beside what else has yet to start: the first load needs them.

        Call it before the first load, on a server that will load full weights.
        """
        if not self.serves_adapters:
            self._finding = asyncio.create_task(self._find_provable(), name="finding provable layers")

    @property
    def cache_salt(self) -> str:
        """The cache salt of requests for the base model, which share only prefixes with the same one.

        It changes when newer weights begin to load.
        """
        return f"base@{self.loads.now(None).number}"

    async def update(
        self,
        version: int,
        directory: Path,
        adapter: str | None,
        claim: LoadClaim,
        on_begun: Callable[[], None] = lambda: None,
    ) -> HeldWeights:
        """Loads the weights in `directory`, and returns those with which the engine computes afterwards.

        `on_begun` is called, for full weights, once what begins from then on is computed with them.

        Raises `NotSeen` if this server has no such directory, or may not read it, and `UpdateRefused` if they cannot be loaded,
        or the weights in use belong to another than `claim` says.
        """
        try:
            await asyncio.to_thread(require_published, directory)
        except NotSeen:
            raise
        except ValueError as error:
            raise UpdateRefused(str(error)) from error
        if adapter is None and self.serves_adapters:
            raise UpdateRefused(
                "this server serves adapters (lora in [inference]), and full weights would replace the model below them; use a "
                "server without lora, or train an adapter"
            )
        async with self._lock:
            if adapter is not None:
                self.adapters.look(adapter)
            try:
                load = self.loads.next(adapter, version, claim)
            except NotOwner as error:
                raise UpdateRefused(str(error)) from error
            if (other := self.loads.in_turn_with(adapter, claim)) and other not in self._in_turn:
                self._in_turn.add(other)
                logger.warning(
                    "%s and %s replace each other's weights here: the directory of one is a copy of the other's. Give the copy "
                    "servers of its own, or stop it, remove weights_owner from its directory, and start it again",
                    claim.owner,
                    other,
                )
            if adapter is not None:
                return await self.adapters.load(adapter, load, directory, claim)
            held = await self._load_full_weights(load, directory, claim, on_begun)
            assert self._provable is not None
            return HeldWeights(self._dtype, restrict(held, self._provable), load.number)

    async def unload(self, adapter: str | None, claim: LoadClaim) -> bool:
        """Ends the requests of an adapter and removes it; None gives up the full weights. Returns whether one was removed.

        Raises `UpdateRefused` if it belongs to another.
        """
        async with self._lock:
            try:
                self.loads.release(adapter, claim)
            except NotOwner as error:
                raise UpdateRefused(str(error)) from error
            return adapter is not None and await self.adapters.unload(adapter)

    async def _load_full_weights(
        self, load: Load, directory: Path, claim: LoadClaim, on_begun: Callable[[], None]
    ) -> Digest:
        try:
            staged = await asyncio.to_thread(self._prepare, directory)
        except (OSError, ValueError) as error:
            raise UpdateRefused(str(error)) from error
        try:
            if self._provable is None:
                self._provable = await self._found_provable()
            return await self._switch(load, directory if staged is None else staged.path, claim, on_begun)
        finally:
            if staged is not None:
                await asyncio.to_thread(staged.remove)

    async def _switch(self, load: Load, directory: Path, claim: LoadClaim, on_begun: Callable[[], None]) -> Digest:
        """Loads weights that are prepared, while requests are paused; returns their digest, read back from the engine.

        A call to the engine waits for its step and for a core, so that loading and the first slice of reading are one call.
        """
        began = time.monotonic()
        await self._pause()
        self.loads.complete(None, load, claim)  # what begins now waits for the end of the pause
        try:
            loading = ({"directory": str(directory)}, self._dtype, READ_SECONDS)
            call = asyncio.ensure_future(self._engine.collective_rpc("counterpoint_load", args=loading))
            await asyncio.sleep(0)  # It is on its way before any request that comes now.
            on_begun()
            first = await call
        except Exception:
            # The model may be in pieces: the next forward would kill the engine. End in order instead, so that the process that
            # started the server notices now.
            logger.exception("Loading %s failed halfway; this server cannot serve any more and stops", directory)
            os.kill(os.getpid(), signal.SIGTERM)
            raise
        # Named first: an answer to what comes after the resume waits for the engine's next step.
        await asyncio.gather(self._engine.update_weight_version(load.label), self._engine.resume_generation())
        logger.info("Version %s is loaded; requests were paused for %.4f s", load.version, time.monotonic() - began)
        return await self._read_on(first)

    def _prepare(self, directory: Path) -> OwnDirectory | None:
        """Does all that can be done while requests run: compares the checkpoint, and reads it into the page cache.

        Returns the whole weights of what changed. A file that cannot be read is found here, where nothing has changed yet.
        Raises `ValueError` or `OSError`.
        """
        if self._expected is None:
            self._expected = read_manifest(Path(self._engine.model_config.model))
        require_same_model(self._expected, read_manifest(directory), self._tied)
        if is_delta(directory):
            delta.check(directory)
            if (staged := stage(directory)) is not None:
                return staged
        read_through(directory)
        return None

    @property
    def _tied(self) -> bool:
        """Whether the model's output layer is its embedding."""
        return bool(getattr(self._engine.model_config.hf_config, "tie_word_embeddings", False))

    async def _pause(self) -> None:
        """Pauses as `pause_generation(mode="keep", clear_cache=False)` does, without the 20 ms that vLLM 0.32 adds to it.

        They are to let outputs of a paused engine reach their callers first, which nothing here depends on.
        """
        client: Any = self._engine
        await client.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)

    async def _held(self) -> Digest:
        """Reads the engine's weights."""
        return await self._read_on(
            await self._engine.collective_rpc("counterpoint_read", args=(self._dtype, READ_SECONDS))
        )

    async def _read_on(self, answers: list[tuple[Held, bool]]) -> Digest:
        """Returns the digest of weights whose first slice is in `answers`. The engine takes its steps between the others."""
        held = [sums for sums, _ in answers]
        while not all(last for _, last in answers):
            answers = await self._engine.collective_rpc("counterpoint_read_on", args=(READ_SECONDS,))
            held = [{**known, **more} for known, (more, _) in zip(held, answers, strict=True)]
        return join_ranks(held)

    async def _found_provable(self) -> frozenset[str]:
        """Returns what `_find_provable` found, or now finds, if it has failed before."""
        if self._finding is None or (self._finding.done() and self._finding.exception() is not None):
            self._finding = asyncio.create_task(self._find_provable())
        return await asyncio.shield(self._finding)  # a load that is given up leaves it to the next one

    async def _find_provable(self) -> frozenset[str]:
        """Compares the engine's weights with the checkpoint that it was started with.

        Layers in which the engine computes with other numbers (quantised or derived ones) cannot be proven by a digest.
        """
        arguments = (str(self._engine.model_config.model), self._dtype, self._tied)
        written = join_ranks(await self._engine.collective_rpc("counterpoint_written", args=arguments))
        return provable_layers(written, await self._held(), "the model")
