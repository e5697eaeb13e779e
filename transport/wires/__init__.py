"""The wires between orchestrator and trainer, and the two ends on any of them."""
