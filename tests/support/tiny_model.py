"""Tiny random Qwen3 models for the tests, with a byte-level tokenizer, and the Hugging Face forward that vLLM is compared with.

torch and transformers are imported when a test asks for a model, not when tests are collected.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from counterpoint.transport.records import Float32Array, Int32Array, Int64Array

VOCABULARY = 260
"""256 bytes and four special tokens."""

END = 257

CHAT_TEMPLATE = (
    "{% for message in messages %}<start>{{ message.role }}\n{{ message.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)


def write_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer whose ids are exactly those of the model's vocabulary."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<start>", "<end>", "<pad>", "<unused>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")
    fast.save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def make_model(directory: Path, *, moe: bool, seed: int) -> Any:
    """Writes a random model and its tokenizer to `directory`, published with `STABLE`, and returns it."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "eos_token_id": END,
        "pad_token_id": 258,
        "bos_token_id": None,
        # Wide enough that other weights give clearly other log-probabilities.
        "initializer_range": 0.2,
    }
    if moe:
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts, intermediate_size=128, tie_word_embeddings=True))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**shape, intermediate_size=128, tie_word_embeddings=True))
    model.eval()
    model.save_pretrained(directory)
    write_tokenizer(directory)
    (directory / "STABLE").touch()
    return model


def write_probe(model: Any, directory: Path, version: int, token_ids: Sequence[int]) -> None:
    """`probe.json` as a trainer publishes it, of the model or adapter in `directory`."""
    values = log_probabilities(model, np.asarray(token_ids, dtype=np.int32))
    content: dict[str, Any] = {"version": version, "token_ids": list(token_ids), "log_probabilities": values.tolist()}
    content["digests"] = published_digests(directory)
    (directory / "probe.json").write_text(json.dumps(content))


def published_digests(directory: Path) -> dict[str, dict[str, str]]:
    """The digests of the weights in `directory`, by precision of a server."""
    from safetensors.torch import load_file

    from counterpoint.inference.digest import DTYPES, digest_of, digests_of, scaled_adapter

    settings = directory / "adapter_config.json"
    if not settings.exists():
        return digests_of(load_file(directory / "model.safetensors"))
    adapter, config = load_file(directory / "adapter_model.safetensors"), json.loads(settings.read_text())
    scale = config["lora_alpha"] / config["r"]
    return {name: digest_of(scaled_adapter(adapter, scale, dtype), dtype) for name, dtype in DTYPES.items()}


def log_probabilities(model: Any, token_ids: Int32Array, temperature: float = 1.0) -> Float32Array:
    """Hugging Face's log-probability of each token after the first, given those before it."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor(token_ids[None].astype(np.int64))).logits[0, :-1].float() / temperature
        chosen = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(token_ids[1:, None].astype(np.int64)))
    result: Float32Array = chosen[:, 0].numpy()
    return result


def misshape(source: Path, directory: Path) -> None:
    """A published copy of a checkpoint in which one tensor has lost a row."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, directory)
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def make_adapter(base: Path, directory: Path, *, seed: int) -> Any:
    """Writes a random LoRA adapter of the model in `base`, as PEFT does, published, and returns the adapted model."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=names, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                # PEFT starts it at zero, which would be no adapter at all.
                parameter.normal_(std=0.2)
    adapted.eval()
    adapted.save_pretrained(directory)
    (directory / "STABLE").touch()
    return adapted


def routing(model: Any, token_ids: Int32Array) -> Int64Array:
    """Hugging Face's choice of experts for each token, `[tokens, layers, top_k]`, sorted along the last axis."""
    import torch

    with torch.no_grad():
        output = model(torch.tensor(token_ids[None].astype(np.int64)), output_router_logits=True)
    top_k = model.config.num_experts_per_tok
    chosen = [logits.topk(top_k, dim=-1).indices.sort(dim=-1).values for logits in output.router_logits]
    result: Int64Array = torch.stack(chosen, dim=1).numpy()
    return result
