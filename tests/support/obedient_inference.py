"""A fake inference server for whole jobs with a real trainer: it takes any weights, and answers their probe as it wishes.

Its completions are the word of `reverse-text`, read backwards with mistakes, so that rewards differ. A test says how many it
gives: then a job gets no further than the test wants before it kills a process, however slow the test is.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
from aiohttp import web

from counterpoint.inference import wire
from counterpoint.inference.base import Completion, GenerateRequest, Probe
from counterpoint.inference.loads import LoadClaim
from tests.support.fake_inference import FakeInference, make_completion
from tests.support.tiny_model import END

LETTERS = (ord("a") - ord("!"), ord("z") - ord("!") + 1)
"""The ids of lower-case letters in the tests' tokenizer."""

POLL_SECONDS = 0.02


class ObedientInference(FakeInference):
    """For the model and the tokenizer of `tests/support/tiny_model.py`."""

    def __init__(self, permitted: int) -> None:
        """Answers so many model calls; further ones wait until `permitted` is raised."""
        super().__init__()
        self.permitted = permitted
        self._probe: Probe | None = None

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == wire.UPDATE_PATH:
            fields = await request.json()
            self._probe = Probe.read(Path(fields["directory"]) / "probe.json")
            adapter, claim = fields["adapter"], LoadClaim.decode(fields["claim"])
            load = self.loads.next(adapter, fields["version"], claim)
            self.loads.complete(adapter, load, claim)
            if adapter is not None:
                self.adapters[adapter] = fields["version"]
            held = {"dtype": "float32", "layers": self._probe.digests["float32"], "load": load.number}
            return web.json_response({"held": held})
        if request.path == wire.PROBE_PATH:
            assert self._probe is not None, "it has no weights yet"
            weights = self._origin((await request.json())["model"]).encode()
            return web.json_response({"log_probabilities": self._probe.log_probabilities, "weights": weights})
        return await super()._handle(request)

    async def _complete(self, asked: GenerateRequest) -> Completion:
        number = self.completions
        while number > self.permitted:  # noqa: ASYNC110  # set by another thread, which could not set an event
            await asyncio.sleep(POLL_SECONDS)
        end = int(np.flatnonzero(asked.prompt_ids == END)[0])
        backwards: list[int] = asked.prompt_ids[end - self._random.randint(1, 6) : end][::-1].tolist()
        said = [self._random.choice((letter, self._random.randrange(*LETTERS))) for letter in backwards]
        return make_completion(asked, said, -4.0)
