"""The runs of a trainer: who may come in, who has a slot, who is connected, and their checkpoints."""
