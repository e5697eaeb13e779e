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
from pathlib import Path
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.engine.protocol import EngineClient
from vllm.logger import init_logger

from inference.base import HeldWeights
from inference.plugin.adapters import Adapters, UpdateRefused
from inference.plugin.checkpoint import read_manifest, require_same_model
from inference.plugin.digest import Digest
from inference.plugin.worker_digest import join_ranks, provable_layers, restrict

logger = init_logger(__name__)


class Updater:
    """Loads weights, one update at a time, and remembers which versions are loaded."""

    def __init__(self, engine: EngineClient, models: Any) -> None:
        self.version: int | None = None
        """The version of the full weights; None while they are those that the server was started with."""
        self.adapters = Adapters(engine, models)
        self._engine = engine
        self._lock = asyncio.Lock()
        self._loads = 0
        self._dtype = str(engine.model_config.dtype).removeprefix("torch.")
        self._provable: frozenset[str] | None = None
        """Layers whose digest proves the loaded weights; None until the first load."""

    @property
    def cache_salt(self) -> str:
        """The cache salt of requests for the base model, which share only prefixes with the same one.

        It changes when newer weights begin to load.
        """
        return f"base@{self._loads}"

    async def update(self, version: int, directory: Path, adapter: str | None) -> HeldWeights:
        """Loads the weights in `directory`, and returns those with which the engine computes afterwards.

        Raises `UpdateRefused` if they cannot be loaded.
        """
        if not (directory / "STABLE").is_file():
            raise UpdateRefused(f"{directory} is not a published directory: it has no STABLE marker")
        async with self._lock:
            if adapter is not None:
                return await self.adapters.load(adapter, version, directory)
            await self._load_full_weights(version, directory)
            self.version = version
            assert self._provable is not None
            return HeldWeights(self._dtype, restrict(await self._held(), self._provable))

    async def unload(self, adapter: str) -> bool:
        """Ends the requests of an adapter and removes it. Returns whether there was one."""
        async with self._lock:
            return await self.adapters.unload(adapter)

    async def _load_full_weights(self, version: int, directory: Path) -> None:
        config = self._engine.model_config
        tied = bool(getattr(config.hf_config, "tie_word_embeddings", False))
        try:
            expected, given = await asyncio.to_thread(
                lambda: (read_manifest(Path(config.model)), read_manifest(directory))
            )
            require_same_model(expected, given, tied)
        except (OSError, ValueError) as error:
            raise UpdateRefused(str(error)) from error
        if self._provable is None:
            self._provable = await self._find_provable(Path(config.model), tied)
        await self._engine.pause_generation(mode="keep", clear_cache=False)
        self._loads += 1
        try:
            await self._engine.start_weight_update()
            await self._engine.update_weights(WeightTransferUpdateRequest(update_info={"directory": str(directory)}))
            await self._engine.finish_weight_update(str(version))
        except Exception:
            # The model is in pieces: the next forward would kill the engine. End in order instead, so that the process that
            # started the server notices now.
            logger.exception("Loading %s failed halfway; this server cannot serve any more and stops", directory)
            os.kill(os.getpid(), signal.SIGTERM)
            raise
        await self._engine.resume_generation()

    async def _held(self) -> Digest:
        return join_ranks(await self._engine.collective_rpc("counterpoint_held", args=(self._dtype,)))

    async def _find_provable(self, model: Path, tied: bool) -> frozenset[str]:
        """Compares the engine's weights with the checkpoint that it was started with.

        Layers in which the engine computes with other numbers (quantised or derived ones) cannot be proven by a digest.
        """
        arguments = (str(model), self._dtype, tied)
        written = join_ranks(await self._engine.collective_rpc("counterpoint_written", args=arguments))
        return provable_layers(written, await self._held(), "the model")
