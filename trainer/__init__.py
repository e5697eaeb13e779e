"""Floor 2: the trainer: batches in, optimizer steps, weights out."""
