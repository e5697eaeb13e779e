"""The LoRA adapters of one server: loaded in place between two steps of the engine, kept, and unloaded.

An update of one adapter does not pause the engine. The engine reads the adapter whole between two of its steps, before it
replaces the older version, so that the requests of others wait only for that reading. A request in flight under the same
adapter continues with the new weights, on the keys and values of the old; later requests share no prefix with it, because
the cache salt names the load, and changes once the load is complete.

vLLM keeps a bounded number of adapters (`max_cpu_loras`) and reads one that it has dropped from its files again, in the
middle of a step, where a failure would end the engine. So it never gets the files of a broadcast, which the trainer removes,
but a private copy of the newest, under a path that stays the same: no request in flight can bring an older version back.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
from safetensors.torch import load_file
from vllm.engine.protocol import EngineClient
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest

from counterpoint.inference.base import HeldWeights
from counterpoint.inference.checkpoint import (
    ADAPTER_WEIGHTS,
    TensorEntry,
    read_header,
    read_manifest,
    require_fitting_adapter,
)
from counterpoint.inference.digest import DTYPES, Digest, digest_of, scaled_adapter
from counterpoint.inference.loads import Load, LoadClaim, Loads, Origin
from counterpoint.inference.plugin.adapter_files import AdapterFiles
from counterpoint.inference.plugin.adapter_slots import AdapterSlots
from counterpoint.inference.plugin.worker_digest import join_ranks, provable_layers, restrict

logger = init_logger(__name__)

UNLOAD_SECONDS = 20.0
"""How long the aborted requests of an adapter may take to end; after that its weights stay in memory."""


class UpdateRefused(Exception):
    """The weights were not loaded, and the server still serves the former ones."""


class Adapters:
    """The adapters that a server's requests may name. Loads and unloads are called one at a time, by `Updater`."""

    def __init__(self, engine: EngineClient, models: Any, loads: Loads) -> None:
        self._engine = engine
        self._models = models
        self._loads = loads
        self._seen: dict[str, LoRARequest] = {}
        """The last LoRA request of each name. vLLM's own routes replace it when they load another adapter under the name."""
        self._in_use: Counter[str] = Counter()
        """Requests under each adapter, also those that wait for a slot."""
        config = engine.vllm_config.lora_config
        self._slots = AdapterSlots(config.max_loras if config is not None else 1)
        self._max_rank = config.max_lora_rank if config is not None else 0
        self._dtype = str(config.lora_dtype if config is not None else "").removeprefix("torch.")
        self._provable: dict[frozenset[str], frozenset[str]] = {}
        """The layers, by names of an adapter's tensors, whose digest proves the loaded weights."""
        self._base: dict[str, TensorEntry] | None = None
        """The tensors of the model that the server was started with, once they have been read."""
        self._copies: AdapterFiles | None = None

    def described(self) -> dict[str, Any]:
        """Returns the load of each adapter for `status`."""
        for name in list(self._seen):
            self.look(name)
        return {name: self._loads.described(name) for name in self._models.lora_requests}

    def look(self, name: str) -> LoRARequest | None:
        """Returns the adapter's LoRA request; None without one. Notes whether it was changed by another way than `load`."""
        request: LoRARequest | None = self._models.lora_requests.get(name)
        known = self._seen.get(name, request)
        if request is None:
            self._seen.pop(name, None)
        else:
            self._seen[name] = request
        if request is not known:
            self._loads.changed(name)
        return request

    def origin(self, name: str, first: Load) -> Origin:
        """Returns what an answer says that ends now and began with `first`."""
        self.look(name)
        return self._loads.origin(name, first)

    @asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[tuple[LoRARequest, Load] | None]:
        """Yields, while one request under adapter `name` runs, its LoRA request for the engine and the load of its weights.

        Yields None if there is no such adapter. Waits until the adapter has a slot.
        """
        self._in_use[name] += 1
        try:
            async with self._slots.use(name):
                # Looked up now, since it may have been unloaded or replaced while this request waited.
                request = self.look(name)
                yield None if request is None else (request, self._loads.now(name))
        finally:
            self._in_use[name] -= 1
            if not self._in_use[name]:
                del self._in_use[name]

    async def load(self, name: str, load: Load, directory: Path, claim: LoadClaim) -> HeldWeights:
        """Loads the PEFT adapter in `directory` as `name`, in place of an older version, as `load`.

        Returns the digest of the weights with which the engine then computes. Raises `UpdateRefused`.
        """
        if self._models.is_base_model(name):
            raise UpdateRefused(
                f"adapter {name!r}: the base model is served under this name, and would answer; take another"
            )
        known = self.look(name)
        number = known.lora_int_id if known is not None else self._models.lora_id_counter.inc(1)
        try:
            copy, tensors = await asyncio.to_thread(self._copy, directory, number, load.number)
        except (OSError, ValueError) as error:
            raise UpdateRefused(f"adapter {name!r}: {error}") from error
        copies = self._copies
        assert copies is not None
        self._loads.begin(name, load)
        arguments = (name, number, str(copy), self._dtype)
        answers = await self._engine.collective_rpc("counterpoint_add_adapter", args=arguments)
        if errors := [f"rank {rank}: {error}" for rank, (_, error) in enumerate(answers) if error]:
            if any(held is not None for held, _ in answers):
                await self._remove(name, number)  # some ranks have the new weights, others the old ones
            else:
                self._loads.cancel(name)  # a rank reads an adapter whole before it replaces the older version
                await asyncio.to_thread(copies.discard, copy)
            raise UpdateRefused(f"adapter {name!r} in {directory}: {'; '.join(errors)}")
        held = join_ranks(held for held, _ in answers)
        try:
            if tensors not in self._provable:
                self._provable[tensors] = await asyncio.to_thread(self._find_provable, copy, held)
        except Exception as error:
            self._loads.changed(name)
            await asyncio.to_thread(copies.discard, copy)
            raise UpdateRefused(f"adapter {name!r} in {directory}: {error}") from error
        path = await asyncio.to_thread(copies.adopt, copy, number)
        # Without `load_inplace`, for which vLLM 0.32 reads the files anew at every step (LRUCacheWorkerLoRAManager.add_adapter).
        self._models.lora_requests[name] = self._seen[name] = LoRARequest(name, number, str(path))
        # Only now: a request that took the new salt before would have left keys and values of the old weights under it.
        self._loads.complete(name, load, claim)
        return HeldWeights(self._dtype, restrict(held, self._provable[tensors]), load.number)

    def _find_provable(self, copy: Path, held: Digest) -> frozenset[str]:
        """Returns the layers whose digest proves the loaded weights.

        They are found at the first load of an adapter with these tensors, when the slot held no such weights before. Raises
        `ValueError` if a layer of it is in no module.
        """
        settings = orjson.loads((copy / "adapter_config.json").read_bytes())
        scale = settings["lora_alpha"] / settings["r"]
        dtype = DTYPES[self._dtype]
        written = digest_of(scaled_adapter(load_file(copy / ADAPTER_WEIGHTS), scale, dtype), dtype)
        nowhere = sorted(
            layer for layer, value in written.items() if int(value, 16) and not int(held.get(layer, "0"), 16)
        )
        if nowhere:
            raise ValueError(
                f"vLLM takes nothing of its tensors in layer {', '.join(nowhere)}: no module that can have an adapter has their "
                "names; expected those of PEFT for the layers that compute text"
            )
        return provable_layers(written, held, f"the adapter in {copy}")

    def _copy(self, directory: Path, number: int, load: int) -> tuple[Path, frozenset[str]]:
        """Makes a checked private copy. The engine, for which other requests wait, then reads it from the page cache.

        Returns its path and the names of its tensors.
        """
        if self._base is None:
            self._base = read_manifest(Path(self._engine.model_config.model))
        given = read_header(directory / ADAPTER_WEIGHTS)
        require_fitting_adapter(self._base, given, self._max_rank)
        if self._copies is None:
            self._copies = AdapterFiles()
        return self._copies.copy(directory, number, load), frozenset(given)

    async def unload(self, name: str) -> bool:
        """Ends the requests under `name` and removes the adapter completely. Returns whether there was one.

        Raises `TimeoutError` if its requests do not end; new requests cannot name it all the same.
        """
        request = self._models.lora_requests.get(name)
        if request is None:
            self._seen.pop(name, None)
            return False
        await self._remove(name, request.lora_int_id)
        logger.info("Unloaded adapter %s", name)
        return True

    async def _remove(self, name: str, number: int) -> None:
        self._models.lora_requests.pop(name, None)
        self._seen.pop(name, None)
        self._loads.changed(name)
        async with asyncio.timeout(UNLOAD_SECONDS):
            # A request may still be on its way to the engine, and would make it read the files again: none must be left.
            while await self._abort_requests(name) or self._in_use[name]:  # noqa: ASYNC110  (the engine has no such event)
                await asyncio.sleep(0.01)
        await self._engine.remove_lora(number)
        if self._copies is not None:
            await asyncio.to_thread(self._copies.remove, number)

    async def _abort_requests(self, name: str) -> bool:
        """Aborts the engine's requests under `name`, by any route. Returns whether there were any."""
        states = self._engine.output_processor.request_states
        numbers = [number for number, state in states.items() if state.lora_name == name]
        if numbers:
            await self._engine.abort(numbers, internal=True)
        return bool(numbers)
