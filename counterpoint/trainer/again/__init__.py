"""Recorded steps, trained or computed again from a kept checkpoint: verification, and the split of their mismatch."""
