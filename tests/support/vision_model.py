"""Tiny random vision-language models, of which text alone is computed, and adapters of them as PEFT writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.tiny_model import END, VOCABULARY, write_tokenizer

_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "eos_token_id": END,
    "pad_token_id": 258,
    "bos_token_id": None,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
_TOKENS = {"image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}
_EYE = {"depth": 2, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}


def make_vision_model(directory: Path, *, seed: int = 0, dtype: str = "float32") -> Any:
    """Writes a random Qwen2.5-VL and its tokenizer to `directory`, published with `STABLE`, and returns it.

    Its checkpoint names the layers of text `model.layers`, as those of the hub do, and transformers names them
    `model.language_model.layers`.
    """
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(seed)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    eye = _EYE | {"fullatt_block_indexes": [1]}
    config = Qwen2_5_VLConfig(
        text_config=_TEXT | {"rope_parameters": rope}, vision_config=eye, tie_word_embeddings=False, **_TOKENS
    )
    model = Qwen2_5_VLForConditionalGeneration(config).to(getattr(torch, dtype)).eval()
    model.save_pretrained(directory)
    write_tokenizer(directory)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    (directory / "STABLE").touch()
    return model


def make_vision_adapter(base: Path, directory: Path, names: list[str], *, seed: int) -> Any:
    """Writes a random adapter on the layers of these names, as PEFT does, published, and returns the adapted model."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=names))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    adapted.eval()
    adapted.save_pretrained(directory)
    (directory / "STABLE").touch()
    return adapted
