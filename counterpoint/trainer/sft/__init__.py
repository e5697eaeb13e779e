"""Supervised fine-tuning on conversations: `counterpoint sft`, by the trainer of runs, without inference (docs/sft.md)."""
