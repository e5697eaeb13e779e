"""Predicts the memory of a job's trainer and servers before they are started, by part (`docs/gpu.md`)."""
