"""The wire between orchestrator and trainer, and its two ends."""
