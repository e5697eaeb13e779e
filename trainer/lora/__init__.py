"""LoRA adapters of many runs beside one frozen model."""
