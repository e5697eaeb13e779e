"""One weight update inside the API server, as one transaction: pause keeping requests, load, resume.

The pause freezes the running requests with all they have computed. Prefilling them again with the new weights would cost the
more the longer they are, and would route their earlier tokens anew, while the routing they return is that which generated
these tokens: training would replay a mixture that no weights ever computed. So the caches stay, and a request that begins
after the pause meets no stale prefix because its cache salt names the load (`Updater.cache_salt`). vLLM schedules nothing
while paused this way, so the proof (the probe) comes after the resume; until it has passed, the pool holds back what this
server answers.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest

from inference.checkpoint import read_header, read_manifest, require_same_model

logger = init_logger(__name__)


class UpdateRefused(Exception):
    """The weights were not loaded, and what was served before is served still."""


class Updater:
    """Loads weights, one update at a time, and remembers which versions are loaded."""

    def __init__(self, engine: EngineClient, models: Any) -> None:
        self.version: int | None = None
        """Of the full weights; None while they are those the server was started with."""
        self.adapter_versions: dict[str, int] = {}
        self._engine = engine
        self._models = models
        self._lock = asyncio.Lock()
        self._loads: Counter[str | None] = Counter()

    def cache_salt(self, adapter: str | None) -> str:
        """What keys the prefixes that a request for the base model (None) or an adapter may share: only those computed since
        its newest weights began to load."""
        return f"{adapter or 'base'}@{self._loads[adapter]}"

    async def update(self, version: int, directory: Path, adapter: str | None) -> None:
        """Loads what `directory` holds. Raises `UpdateRefused` if it is not fit to be loaded."""
        if not (directory / "STABLE").is_file():
            raise UpdateRefused(f"{directory} is not a published directory: it has no STABLE marker")
        async with self._lock:
            if adapter is None:
                await self._load_full_weights(version, directory)
                self.version = version
            else:
                await self._load_adapter(adapter, directory)
                self.adapter_versions[adapter] = version

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
        await self._pause(None)
        try:
            await self._engine.start_weight_update()
            await self._engine.update_weights(WeightTransferUpdateRequest(update_info={"directory": str(directory)}))
            await self._engine.finish_weight_update(str(version))
        except Exception:
            # The model is in pieces: the next forward would kill the engine. End in order instead, so that whoever started the
            # server learns of it now.
            logger.exception("Loading %s failed halfway; this server cannot serve any more and stops", directory)
            os.kill(os.getpid(), signal.SIGTERM)
            raise
        await self._engine.resume_generation()

    async def _pause(self, adapter: str | None) -> None:
        await self._engine.pause_generation(mode="keep", clear_cache=False)
        self._loads[adapter] += 1

    async def _load_adapter(self, adapter: str, directory: Path) -> None:
        try:
            await asyncio.to_thread(read_header, directory / "adapter_model.safetensors")
        except (OSError, ValueError) as error:
            raise UpdateRefused(str(error)) from error
        await self._pause(adapter)
        try:
            answer = await self._models.load_lora_adapter(
                LoadLoRAAdapterRequest(lora_name=adapter, lora_path=str(directory), load_inplace=True)
            )
        finally:
            # The engine reads an adapter whole before it replaces the one it has, so a failed load has changed nothing.
            await self._engine.resume_generation()
        if isinstance(answer, ErrorResponse):
            raise UpdateRefused(f"adapter {adapter!r} in {directory}: {answer.error.message}")
        loaded = self._models.lora_requests[adapter]
        # Requests carry what is kept here, and vLLM 0.30 would read the files anew at every engine step for one that says
        # `load_inplace` (LRUCacheWorkerLoRAManager.add_adapter), and fail once the trainer has removed them.
        self._models.lora_requests[adapter] = LoRARequest(loaded.lora_name, loaded.lora_int_id, loaded.lora_path)
