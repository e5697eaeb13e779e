"""The comparison with TRL's GRPO: the same model, data and settings, and the time that both take to a reward."""
