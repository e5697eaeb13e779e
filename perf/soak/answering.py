"""An inference server that only answers: it takes any weights, passes their probe, and gives random completions.

It is the server of `perf.bench.servers` with what a whole job asks besides, so that a job of many steps needs no vLLM.

    python -m perf.soak.answering
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import orjson
import uvloop

from counterpoint.inference import identity, wire
from counterpoint.inference.base import Completion, Probe
from counterpoint.inference.loads import LoadClaim, Loads, Origin
from perf.bench.servers import INSTANCE, Answers, Connection, response, serve

LETTERS = (ord("a") - ord("!"), ord("z") - ord("!") + 1)
"""The ids of lower-case letters, in the tokenizer of the built-in models."""

LONGEST = 6
"""Tokens of a completion at most."""


class WholeJobAnswers(Answers):
    """Answers a job's orchestrator, of whose weights it keeps the newest version's probe alone."""

    def __init__(self) -> None:
        super().__init__(0, 0)
        self._loads = Loads(INSTANCE)
        self._probes: dict[str | None, Probe] = {}
        self._random = np.random.default_rng(0)

    def to(self, path: str, body: bytes) -> Sequence[bytes]:
        """See `Answers.to`."""
        if path == wire.GENERATE_PATH:
            return (self._completion(body),)
        if path == identity.STATUS_PATH:
            adapters = {name: self._loads.described(name) for name in self._probes if name is not None}
            weights = self._loads.described(None)
            return (_json({"instance": INSTANCE, "draining": False, "weights": weights, "adapters": adapters}),)
        if path in (wire.UPDATE_PATH, wire.PROBE_PATH, wire.UNLOAD_PATH):
            return (_json(self._administer(path, orjson.loads(body))),)
        return super().to(path, body)

    def _administer(self, path: str, fields: dict[str, object]) -> dict[str, object]:
        if path == wire.PROBE_PATH:
            name = self._name(str(fields["model"]))
            log_probabilities = self._probes[name].log_probabilities
            return {"log_probabilities": log_probabilities, "weights": self._origin(name).encode()}
        adapter, claim = fields["adapter"], LoadClaim.decode(fields["claim"])
        assert adapter is None or isinstance(adapter, str)
        if path == wire.UNLOAD_PATH:
            self._loads.release(adapter, claim)
            return {}
        version = fields["version"]
        assert isinstance(version, int)
        load = self._loads.next(adapter, version, claim)
        self._loads.complete(adapter, load, claim)
        probe = self._probes[adapter] = Probe.read(Path(str(fields["directory"])) / "probe.json")
        return {"held": {"dtype": "float32", "layers": probe.digests["float32"], "load": load.number}}

    def _completion(self, body: bytes) -> bytes:
        asked = wire.decode_request(body)
        tokens = int(self._random.integers(1, min(LONGEST, asked.sampling.max_tokens) + 1))
        completion = Completion(
            token_ids=self._random.integers(*LETTERS, tokens, dtype=np.int32),
            log_probabilities=np.full(tokens, -4.0, dtype=np.float32),
            finish_reason="length",
            routed_experts=None,
            origin=self._origin(self._name(asked.model)),
            echo=asked.echo,
        )
        return response(wire.encode_completion(completion))

    def _name(self, model: str) -> str | None:
        return model if model in self._probes else None

    def _origin(self, name: str | None) -> Origin:
        return self._loads.origin(name, self._loads.now(name))


def _json(content: object) -> bytes:
    return response(orjson.dumps(content))


if __name__ == "__main__":
    answers = WholeJobAnswers()
    uvloop.run(serve(partial(Connection, answers, 0.0)))
