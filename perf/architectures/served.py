"""Whether vision-language models are served and trained as text, end to end, on a CPU: a job of twelve steps for each kind.

    PYTHONPATH=. python -m perf.architectures.served [--weights] KIND ...

A tiny random model is served by a real vLLM and trained by two adapters at once, one rewarded for early token ids and one for
late ones: both must be rewarded more at the end. With `--weights`, and where a CPU serves no adapters, all weights are trained,
for early ids. Each version is proven by its digest before it is used, and must give its probe in transformers, or PEFT, too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import tomli_w
import torch
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

from counterpoint.inference.model_facts import EXPERT_COUNTS
from counterpoint.job.evaluation.server import free_port
from counterpoint.models.tiny_tokenizer import END_OF_TURN, write_tokenizer
from counterpoint.trainer.model.text_part import auto_class, read_config
from perf.architectures.tiny import config_of, save

CONTEXT = 512
STEPS = 12
LEAST_LEARNED = 0.03
"""Share of tokens by which the last five steps must be better than the first five."""

TOLERANCE = 2e-3
"""Nats: allowed difference between a probe in float32 and a reload."""

_KEPT = (
    "head_dim", "global_head_dim", "linear_key_head_dim", "linear_value_head_dim", "rope_parameters",
)  # fmt: skip
"""What stays as in the family, since vLLM's kernels and rotary positions have few sizes."""

_AS_ON_THE_HUB: dict[str, dict[str, Any]] = {
    "llama4": {"num_experts_per_tok": 1},
    "qwen3_vl_moe": {"norm_topk_prob": True},
}
"""What vLLM needs, and transformers' own defaults lack."""

_SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": CONTEXT,
}  # fmt: skip


def main() -> int:
    """Runs the command; the exit code is 1 if a kind fails."""
    parser = argparse.ArgumentParser(prog="python -m perf.architectures.served", description=__doc__.partition("\n")[0])
    parser.add_argument("--weights", action="store_true", help="train all weights instead of adapters")
    parser.add_argument("kinds", nargs="+", metavar="KIND", help="model_type")
    options = parser.parse_args()
    failed = False
    for kind in options.kinds:
        with tempfile.TemporaryDirectory() as place:
            try:
                found = check(kind, Path(place), weights=options.weights)
            except Exception as error:  # noqa: BLE001 - of any model's code
                failed, found = True, f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        print(f"{kind}: {found}", flush=True)
    return int(failed)


def check(kind: str, place: Path, *, weights: bool) -> str:
    """Makes, serves, trains and reloads a model of a kind; returns what was found. Raises what fails."""
    model = place / "model"
    linear = write_model(kind, model)
    text = read_config(model).get_text_config(decoder=True)
    weights = weights or linear or any(getattr(text, name, None) for name in EXPERT_COUNTS)
    file = place / "job.toml"
    file.write_text(tomli_w.dumps(_job(model, place / "out", weights=weights, half=linear)))
    command = [sys.executable, "-m", "counterpoint.cli.main", "run", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("counterpoint:")]
        raise RuntimeError(lines[-1] if lines else (done.stdout + done.stderr)[-400:])
    learned, apart = [], []
    for run in sorted((place / "out").glob("run_*")):
        rewards = [json.loads(line)["reward/mean"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        learned.append(sum(rewards[-5:]) / 5 - sum(rewards[:5]) / 5)
        apart.append(reloaded(model, run / "broadcast" / f"step_{STEPS}"))
    if min(learned) < LEAST_LEARNED or max(apart) > TOLERANCE:
        raise RuntimeError(f"learned {learned}, reloaded {apart} nats apart")
    what = "all weights" if weights else "two adapters"
    return f"{what}, learned {', '.join(f'{each:.3f}' for each in learned)}, reloaded within {max(apart):.1e} nats"


def write_model(kind: str, directory: Path) -> bool:
    """Writes a tiny model of a kind, with its tokenizer; returns whether it has layers of linear attention."""
    directory.mkdir()
    tokenizer = write_tokenizer(directory, CONTEXT)
    config = config_of(kind)
    text = config.get_text_config(decoder=True)
    full = CONFIG_MAPPING[kind]().get_text_config(decoder=True).to_dict()
    _set(text, {name: full[name] for name in _KEPT if full.get(name) is not None} | _SIZES)
    if "head_dim" not in full:  # a family's rotary positions are for heads of 128
        text.num_attention_heads = 1
    for name, value in _AS_ON_THE_HUB.get(kind, {}).items():
        setattr(text, name, value)
    vocabulary = dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), tokenizer.get_vocab_size())
    for each in (config, text):
        _set(each, vocabulary | {"tie_word_embeddings": False})
        each.eos_token_id, each.bos_token_id = tokenizer.token_to_id(END_OF_TURN), None
    save(config, directory, torch.float32)
    names = IMAGE_PROCESSOR_MAPPING_NAMES.get(kind)
    names = list(names.values()) if isinstance(names, dict) else names
    if names:
        (directory / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": str(names[0])}))
    return "linear_attention" in (getattr(text, "layer_types", None) or ())


def _set(config: PretrainedConfig, values: dict[str, Any]) -> None:
    known = config.to_dict()  # an attribute may differ from layer to layer, and then cannot be asked for
    for name, value in values.items():
        if name in known:
            setattr(config, name, value)


def _job(model: Path, output: Path, *, weights: bool, half: bool) -> dict[str, Any]:
    """Returns a job's file. `half`: the server computes in bfloat16, as linear attention does on a CPU alone."""
    training: dict[str, Any] = {"learning_rate": 3e-3 if weights else 2e-2, "checkpoint_interval": STEPS}
    run = {
        "steps": STEPS, "sampling": {"max_tokens": 16}, "filters": [],
        "schedule": {"group_size": 8, "rollouts_per_step": 32, "max_inflight_rollouts": 64, "max_lead_steps": 1},
        "training": training if weights else training | {"lora": {"rank": 8, "alpha": 16.0}},
    }  # fmt: skip
    sides = {"early": True} if weights else {"early": True, "late": False}
    kind = "perf.architectures.early_ids:Ids"
    trainer = {"device": "cpu", "dtype": "float32", "threads": 1, "max_tokens": 4096, "router_replay": False}
    inference = {
        "port": free_port("127.0.0.1", 0),
        "dtype": "bfloat16" if half else "float32",
        "max_model_len": 256,
        "max_num_batched_tokens": 4096,
    }
    return {
        "output_dir": str(output), "model": str(model), "max_restarts": 0,
        "inference": inference if weights else inference | {"lora": {"max_rank": 8, "max_adapters": 2}},
        "trainer": trainer | {"max_runs": len(sides)},
        "orchestrator": run,
        "runs": [
            {"run_id": name, "environments": [{"name": "ids", "kind": kind, "args": {"early": early}}]}
            for name, early in sides.items()
        ],
    }  # fmt: skip


def reloaded(base: Path, published: Path) -> float:
    """Returns how far stock transformers, with PEFT for an adapter, is from the published probe, in nats at most."""
    probe = json.loads((published / "probe.json").read_bytes())
    adapter = (published / "adapter_config.json").is_file()
    directory = base if adapter else published
    model = auto_class(read_config(directory)).from_pretrained(directory, dtype=torch.float32)
    if adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, published)
    tokens_T = torch.tensor(probe["token_ids"])
    with torch.no_grad():
        logits_TV = model.eval()(input_ids=tokens_T[None], use_cache=False).logits[0].float()
    values_P = logits_TV[:-1].log_softmax(-1).gather(-1, tokens_T[1:, None])[:, 0]
    return float((values_P - torch.tensor(probe["log_probabilities"])).abs().max())


if __name__ == "__main__":
    raise SystemExit(main())
