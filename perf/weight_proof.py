"""Measures how well a server's proof distinguishes right weights from wrong ones, with a real vLLM on tiny models.

    python -m perf.weight_proof [--trials 5] [--faulty 5] [--engine KIND DTYPE] [--json]

For each kind of weights, precision and learning rate, a policy takes AdamW steps, from version N-1 to version N, as often as
there are trials, and the trainer's own code publishes both. An engine of vLLM then holds what a server that reports N may
hold: the right weights; those of N-1, because nothing was loaded; those that the policy began with; or what vLLM's CPU build
makes of N without our repairs (experts that are not packed, an output layer that keeps the packed weights of N-1). The
verdict on each is the pool's own, by the digest, by the probe, and by both. Every engine has a process of its own.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from inference.base import HeldWeights, Probe
from inference.plugin import BACKEND
from inference.plugin.digest import DTYPES, digests_of
from models.tiny_models import write_untrained
from run.config import LoraConfig
from trainer.broadcast import own_memory
from trainer.lora.layer import MultiLora
from trainer.lora.multi_lora import adapter_spans, apply_lora_to_model, digest_adapter, export_adapter
from trainer.model.load import load_model, log_probabilities
from trainer.probe import write_probe
from transport.records import Float32Array

RATES = (1e-6, 1e-5, 1e-4)
KINDS = {"full weights": "tiny-dense", "full weights, experts": "tiny-moe", "adapter": "tiny-dense"}
"""The kinds of weights, by the built-in model that they are measured with."""

LORA = LoraConfig(rank=8, alpha=16.0)
TOKENS = 256
"""The tokens of each step."""


def main() -> None:
    """Measures each engine in a process of its own, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trials", type=int, default=5, help="updates for each learning rate")
    parser.add_argument(
        "--faulty", type=int, help="after how many of them faulty servers are measured, too (default: all)"
    )
    parser.add_argument("--json", action="store_true", help="print each verdict as a JSON line instead of the table")
    parser.add_argument("--engine", nargs=2, metavar=("KIND", "DTYPE"), help="measure only this one")
    parser.add_argument("--here", action="store_true", help="measure the engine in this process, as --json prints it")
    arguments = parser.parse_args()
    trials, faulty = arguments.trials, arguments.faulty or arguments.trials
    if arguments.here:
        kind, dtype = arguments.engine
        with tempfile.TemporaryDirectory() as directory:
            for line in measure(kind, dtype, trials, faulty, Path(directory)):
                print(json.dumps(line), flush=True)
        return
    engines = [arguments.engine] if arguments.engine else itertools.product(KINDS, ("float32", "bfloat16"))
    lines = [line for kind, dtype in engines for line in _in_a_process(kind, dtype, trials, faulty)]
    if arguments.json:
        print("\n".join(json.dumps(line) for line in lines))
    else:
        Console(width=180).print(table(lines))


def _in_a_process(kind: str, dtype: str, trials: int, faulty: int) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "perf.weight_proof", "--here", "--engine", kind, dtype]
    command += ["--trials", str(trials), "--faulty", str(faulty)]
    with tempfile.TemporaryFile() as log:
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=log, env=os.environ | _ENVIRONMENT)
        if done.returncode:
            log.seek(0)
            raise RuntimeError(f"the engine of {kind} in {dtype} failed:\n{log.read().decode()[-4000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")]


_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_PLUGINS": "",
}


class Policy:
    """A policy that trains and publishes as the trainer does."""

    def __init__(self, kind: str, dtype: str, directory: Path, seed: int) -> None:
        self.base = directory / "base"
        if not self.base.exists():
            self.base.mkdir()
            untrained = write_untrained(KINDS[kind], self.base, 0)
            # A tied output layer is what vLLM's CPU build forgets.
            untrained.config.tie_word_embeddings = True
            untrained.tie_weights()
            untrained.save_pretrained(self.base)
        self._adapts, self._dtype = kind == "adapter", dtype
        self._model = load_model(self.base, "float32", torch.device("cpu"))
        self._generator = torch.Generator().manual_seed(seed)
        self._version = 0
        self._probed: Tensor | None = None
        if self._adapts:
            for layer in apply_lora_to_model(self._model, 1, LORA).values():
                layer.admit(0, LORA.rank, LORA.alpha, self._generator)

    def parameters(self) -> list[nn.Parameter]:
        """The weights that are trained."""
        if not self._adapts:
            return list(self._model.parameters())
        layers = [module for module in self._model.modules() if isinstance(module, MultiLora)]
        return [parameter for layer in layers for parameter in layer.adapter_parameters(0).values()]

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes a step that makes random tokens likelier or less likely."""
        tokens_T = torch.randint(0, self._model.config.vocab_size, (TOKENS + 1,), generator=self._generator)
        advantage_T = torch.randn(TOKENS, generator=self._generator)
        positions_T = torch.arange(TOKENS)
        with adapter_spans(self._model, [(0, TOKENS)]):
            values_T, _ = log_probabilities(
                self._model, tokens_T[:-1], positions_T, [TOKENS], positions_T, tokens_T[1:], 1.0
            )
        (-(values_T * advantage_T).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    def publish(self, directory: Path) -> Probe:
        """Publishes weights and proof in the trainer's precision."""
        model = copy.deepcopy(self._model).to(DTYPES[self._dtype])
        directory.mkdir()
        if self._adapts:
            digests = digest_adapter(
                export_adapter(apply_lora_to_model(model, 1, LORA), 0, LORA, str(self.base), directory),
                LORA.alpha / LORA.rank,
            )
        else:
            model.save_pretrained(directory)
            digests = digests_of(own_memory(model.state_dict()))
        path = directory / "probe.json"
        self._probed = write_probe(model, self._version, path, 0, digests, self._probed)
        self._version += 1
        return Probe.read(path)


class Engine:
    """A vLLM engine in this process, with a name for each state of its weights."""

    def __init__(self, kind: str, dtype: str, base: Path) -> None:
        from vllm import LLM

        adapts = kind == "adapter"
        self._adapts, self._dtype, self._base = adapts, dtype, base
        self._llm = LLM(
            model=str(base), dtype=dtype, enforce_eager=True, max_model_len=256, max_num_seqs=16,
            enable_prefix_caching=False, generation_config="vllm", enable_lora=adapts, max_lora_rank=LORA.rank,
            worker_extension_cls="inference.plugin.worker_digest.WeightReader", disable_log_stats=True,
            weight_transfer_config=None if adapts else {"backend": BACKEND},
        )  # fmt: skip
        self._worker = self._llm.llm_engine.model_executor.driver_worker.worker
        self._adapter: Any = None

    def load(self, directory: Path, *without: str) -> HeldWeights:
        """Loads published weights as our plugin does, but `without` some of its repairs."""
        from vllm.lora.request import LoRARequest

        from inference.plugin import weights
        from inference.plugin.worker_digest import join_ranks

        if self._adapts:
            self._adapter = LoRARequest("a", 1, str(directory))
            answer = self._worker.counterpoint_add_adapter("a", 1, str(directory), self._dtype)
        else:
            kept = {name: getattr(weights, name) for name in without}
            for name in without:
                setattr(weights, name, lambda model: None)
            self._worker.weight_transfer_engine.receive_weights(weights.DirectoryUpdateInfo(str(directory)))
            for name, repair in kept.items():
                setattr(weights, name, repair)
            answer, _ = self._worker.counterpoint_read(self._dtype, float("inf"))
        return HeldWeights(self._dtype, join_ranks([answer]))

    def probe(self, probe: Probe) -> Float32Array:
        """Answers the probe as our route does."""
        from inference.plugin.scoring import scores_of, scoring_prompts

        token_ids = list(probe.token_ids)
        prompts = scoring_prompts(token_ids, 1, one_by_one=self._adapts)
        given = [{"prompt_token_ids": ids} for ids, _ in prompts]
        asked = [sampling for _, sampling in prompts]
        outputs = self._llm.generate(given, asked, use_tqdm=False, lora_request=self._adapter)
        return scores_of(outputs, token_ids, 1)


def measure(kind: str, dtype: str, trials: int, faulty: int, directory: Path) -> Iterator[dict[str, Any]]:
    """Measures one engine; returns a line for each state of the server, learning rate and trial.

    After the first `faulty` trials of a learning rate all states are measured, later only that of a right server.
    """
    from inference.plugin import register

    register()
    engine: Engine | None = None
    for rate in RATES:
        policy = Policy(kind, dtype, directory, seed=1)
        engine = engine or Engine(kind, dtype, policy.base)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=rate, weight_decay=0.0)
        policy.step(optimizer)
        first = before = directory / f"{rate}-0"
        policy.publish(before)
        for trial in range(1, trials + 1):
            policy.step(optimizer)
            after = directory / f"{rate}-{trial}"
            probe = policy.publish(after)
            states: dict[str, tuple[Path, tuple[str, ...]]] = {}
            if trial <= faulty:
                states |= {"still N-1": (before, ()), "what the policy began with": (first, ())}
                if kind != "adapter":
                    states["N, output layer of N-1"] = (after, ("pack_head",))
                if "experts" in kind:
                    states["N, experts not packed"] = (after, ("pack_experts",))
            for state, (loaded, without) in (states | {"N": (after, ())}).items():
                if states or trial == 1:  # otherwise it holds N-1
                    engine.load(before)
                held = engine.load(loaded, *without)
                answer = engine.probe(probe)
                yield {
                    "kind": kind, "dtype": dtype, "rate": rate, "state": state,
                    "by_digest": probe.mismatched_layers(held) is not None,
                    "by_probe": probe.mismatch(answer, None, dtype) is not None,
                    "layers": len(held.layers),
                    "off": float(np.sqrt(np.square(answer - probe.log_probabilities).mean())),
                    "spread": float(np.std(probe.log_probabilities)),
                }  # fmt: skip
            if before != first:
                shutil.rmtree(before)
            before = after


def table(lines: list[dict[str, Any]]) -> Table:
    """Returns how many servers in a state were refused by either proof and, in brackets, by the digest and by the probe alone."""
    columns = [(dtype, rate) for dtype in ("float32", "bfloat16") for rate in RATES]
    result = Table("weights", "the server holds", *(f"{dtype} {rate:g}" for dtype, rate in columns), title="refused")
    for kind, state in dict.fromkeys((line["kind"], line["state"]) for line in lines):
        cells = []
        for column in columns:
            found = [
                line
                for line in lines
                if (line["kind"], line["state"], line["dtype"], line["rate"]) == (kind, state, *column)
            ]
            digest, probe = (sum(line[name] for line in found) for name in ("by_digest", "by_probe"))
            either = sum(line["by_digest"] or line["by_probe"] for line in found)
            cells.append(f"{either} of {len(found)} ({digest}, {probe})" if found else "")
        result.add_row(kind, state, *cells)
    return result


if __name__ == "__main__":
    main()
