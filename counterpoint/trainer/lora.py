"""LoRA adapters of many runs beside one frozen model (docs/conformance.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transport.public_names import public_names

if TYPE_CHECKING:
    from trainer.lora.multi_lora import MultiLoRALinear as MultiLoRALinear
    from trainer.lora.multi_lora import apply_lora_to_model as apply_lora_to_model
else:
    __all__, __getattr__, __dir__ = public_names(__name__)
