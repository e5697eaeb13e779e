"""Floor 1: what both the orchestrator and the trainer know of a run: its configuration."""
