"""The runs of a trainer: their admission, slots, sessions and checkpoints."""
