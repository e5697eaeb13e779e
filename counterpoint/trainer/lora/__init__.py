"""LoRA adapters of many runs beside one frozen model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from counterpoint.public_names import public_names

if TYPE_CHECKING:
    from counterpoint.trainer.lora.multi_lora import MultiLoRALinear as MultiLoRALinear
    from counterpoint.trainer.lora.multi_lora import apply_lora_to_model as apply_lora_to_model
else:
    __all__, __getattr__, __dir__ = public_names(__name__)
