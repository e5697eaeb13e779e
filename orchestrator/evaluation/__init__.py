"""Evaluations: rollouts that measure a policy version, their results, and the best version's weights (docs/evaluation.md)."""
